"""Models: the catalogue of known ones, the store of those that are here, and what brings them in.

    catalogue  known models, from catalogue.toml
    store      list, find, check, remove          (manifest: the file that describes one)
    install    makes a model visible only when it is complete
    pull       catalogue or hub -> store          (starter: fetches from the package index,
               hub, hub_cache, hub_files: from the Hugging Face hub; progress: how far it is)
    fit        does it fit into memory            (usage: what was measured)
    recommend  which one suits a machine          cleanup: what can go
    directory     checks a model that others made    (local_import: brings one in)
    gguf*      a GGUF file -> a directory that mlx-lm loads

Refuses pickle, remote code and names that would leave the store. Nothing is imported here, so that
`akunu models list` needs neither MLX nor numpy.
"""
