"""Load OpenBLAS before MLX's CPU backend.

Works around: MLX's Linux wheel links netlib's reference BLAS, where a product with 5 rows costs 5
    times one row. Symbols of a library that was loaded globally before take precedence, so MLX uses
    OpenBLAS when it is loaded first. Without OpenBLAS everything works, only slower, and
    `akunu info` says why. OpenBLAS's wheel in turn needs libgfortran.so.5 from the system.
Upstream: no issue found; seen with mlx 0.32.4 and cmeel-openblas 0.3.29.
Remove when: the mlx-cpu wheel links OpenBLAS. `_provide_gfortran` alone: when cmeel-openblas brings
    its Fortran runtime.
"""

import contextlib
import ctypes
import ctypes.util
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx

_loaded: list[ctypes.CDLL] = []  # at most one: the library behind MLX


@functools.cache
def load_openblas() -> str:
    """Load OpenBLAS once; call before `mlx.core` is imported.

    Returns the name of the BLAS behind MLX's CPU backend, with the reason if it is not OpenBLAS.
    """
    if sys.platform == "darwin":
        return "Accelerate"
    if "mlx.core" in sys.modules:
        return "MLX's own (slow): mlx was imported before akunu_py"
    reason = "OpenBLAS not found; pip install cmeel-openblas"
    for path in _candidates():
        try:
            library = _open(path)
        except OSError as error:
            reason = str(error)
        else:
            _loaded.append(library)
            library.openblas_get_config.restype = ctypes.c_char_p
            return str(library.openblas_get_config().decode().strip())
    return f"MLX's own (slow): {reason}"


def threads() -> int:
    """Return the number of threads of OpenBLAS, 0 if it is not loaded."""
    return int(_loaded[0].openblas_get_num_threads()) if _loaded else 0


def set_threads(count: int) -> None:
    """Set the number of threads of the next matrix products."""
    if _loaded and count != threads():
        _loaded[0].openblas_set_num_threads(count)


def _candidates() -> Iterator[str]:
    """Yield the library of the wheel, then the system's."""
    yield from map(str, _site_libraries("cmeel.prefix/lib*/libopenblas.so"))
    with contextlib.suppress(OSError):  # find_library runs programs that write temporary files
        if system := ctypes.util.find_library("openblas"):
            yield system


def _open(path: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        if "libgfortran" not in str(error):
            raise
    _provide_gfortran()
    return ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)


def _provide_gfortran() -> None:
    """Load the Fortran runtime of MLX's wheel under the name that OpenBLAS needs.

    A fresh machine lacks libgfortran.so.5. MLX's wheel carries the library under a mangled SONAME,
    and the loader matches by SONAME. A copy in memory with the plain name satisfies it.
    """
    for helper in _site_libraries("mlx_cpu.libs/libquadmath-*"):
        ctypes.CDLL(str(helper))
    for library in _site_libraries("mlx_cpu.libs/libgfortran-*.so*"):
        mangled = library.name.encode() + b"\0"
        image = library.read_bytes()
        if image.count(mangled) != 1:
            continue
        plain = b"libgfortran.so.5".ljust(len(mangled), b"\0")
        descriptor = os.memfd_create("libgfortran.so.5")
        try:
            with os.fdopen(descriptor, "wb", closefd=False) as file:
                file.write(image.replace(mangled, plain))
            ctypes.CDLL(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)
        return


def _site_libraries(pattern: str) -> list[Path]:
    """Return the files that match `pattern` in the site-packages directory of MLX."""
    directories = {Path(package).parent for package in mlx.__path__}
    return sorted(path for directory in directories for path in directory.glob(pattern))
