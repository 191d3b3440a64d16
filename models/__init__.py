"""Models: the catalog, the store, and the ways into the store (pull, import, GGUF).

Imports nothing, so that `akunu models list` needs neither MLX nor numpy.
"""
