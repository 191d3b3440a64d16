import os

# OpenBLAS's threads wait for each other, and for seconds where other tests hold the cores. It reads
# this when it is loaded; the processes we start inherit it.
if "PYTEST_VERSION" in os.environ:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import akunu_py  # noqa: F401  (loads it, before a module that is run as a program imports MLX)
