"""Models: the catalog of known models, the store of installed models, and the ways into the store.

    catalog/   known models, from catalog.toml, and recommendations for a machine
    manifest   the file that describes a model of the store
    store/     store: list, find, check, install and remove; local_import: a directory or GGUF file
               -> the store; hub_cache: the hub's own cache; disk: locks and space; cleanup:
               leftovers; progress
    pull/      a name -> the store: from the Hugging Face hub (download, in a worker process) or
               the Python package index; there: for another host
    load/      mlx_loader: opens models with mlx-lm; model_files, mlx_directory: checks before
               that; fit: memory estimates; safetensors
    gguf/      a GGUF file -> a directory that mlx-lm loads
    mtp/       heads for multi-token prediction, which mlx-lm drops

Imports nothing, so that `akunu models list` needs neither MLX nor numpy.
"""
