import akunu_py  # noqa: F401  (loads OpenBLAS, before a module that is run as a program imports MLX)
