"""Models: the catalogue of known ones, the store of those that are here, and what brings them in.

    catalogue  known models, from catalogue.toml
    store      list, find, check, remove          (manifest: the file that describes one)
    install    makes a model visible only when it is complete
    pull       catalogue -> store                 (starter: fetches from the package index)
    gguf*      a GGUF file -> a folder that mlx-lm loads

Refuses pickle, remote code and names that would leave the store. Nothing is imported here, so that
`akunu models list` needs neither MLX nor numpy.
"""
