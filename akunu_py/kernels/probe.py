"""Probes of the kernels on this machine: a kernel is used only where it is equal and faster.

The results are kept in the cache directory, for this GPU, macOS and MLX. `akunu info` shows them.
"""

import contextlib
import platform
import re
import time
import timeit
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Annotated
from zlib import adler32

import mlx.core as mx
import mlx.nn as nn
from pydantic import Field, PositiveFloat, TypeAdapter

from akunu_py import paths
from akunu_py.errors import one_line
from akunu_py.files import read_bounded, write_atomically
from akunu_py.kernels import row_kernels
from akunu_py.kernels.row_kernels import ROWS, MatrixShape, Order, mlx_product, orders_of

_TIMED = (2, 4, 5, 6, 8, 12, 16)  # rows; those between follow both neighbors
_FASTER = 0.97  # of MLX's time; timings vary by less
_CALLS, _CALL_BYTES = 8, 1 << 27  # products in a timing, at most, and bytes of their weights
_REPEATS = 3  # the fastest counts
_MAX_SECONDS = 1.0  # of all probes in a load; the next load probes the rest
_STALLING = 17  # GPU generation: on an M5, such kernels have stalled for minutes
_MAX_FILE = 1 << 20
_NOT_COMPILED = ("Unable to build", "Unable to load")  # in MLX's errors
_Rows = Annotated[int, Field(ge=min(ROWS), le=max(ROWS))]


@dataclass(frozen=True, slots=True)
class Probe:
    """What was found for one matrix shape."""

    order: Order | None = None  # of MLX's kernel for one row
    equal: tuple[_Rows, ...] = ()  # numbers of rows that have the bits of each row alone
    # row count: (MLX's seconds, akunu's)
    times: dict[_Rows, tuple[PositiveFloat, PositiveFloat]] = field(default_factory=dict)
    error: str = ""
    again: bool = False  # whether the next load probes again: memory was short, for example

    def rows(self, *, exact: bool) -> list[int]:
        """Return the numbers of rows to use the kernel for. exact: even if it is slower."""
        faster = {rows for rows, (theirs, ours) in self.times.items() if ours < _FASTER * theirs}
        below = {rows: max(each for each in _TIMED if each <= rows) for rows in self.equal}
        above = {rows: min(each for each in _TIMED if each >= rows) for rows in self.equal}
        return [each for each in self.equal if exact or {below[each], above[each]} <= faster]


_PROBES = TypeAdapter(dict[str, dict[str, Probe]])  # by machine, and by matrix shape


def why_off() -> str:
    """Return why no kernel is ever used on this machine, "" if it may be."""
    if not mx.metal.is_available() or mx.default_device() != mx.gpu:
        return "no Apple GPU"
    info = mx.device_info()
    found = re.search(r"_g(\d+)", str(info.get("architecture")))
    name = info.get("device_name")
    if found is None:
        return f"not tested on {name}"
    return f"such kernels have stalled on {name}" if int(found[1]) >= _STALLING else ""


def use_kernels(model: nn.Module, *, exact: bool = False) -> bool:
    """Let the layers of `model` use the kernels; return whether any does.

    exact: also where MLX is faster. Evaluate the weights before.
    """
    if why_off():
        return False
    known, used = _load(), False
    deadline = time.monotonic() + _MAX_SECONDS
    for shape, layers in layers_by_shape(model).items():
        found = known.get(str(shape), Probe(again=True))
        if found.again and time.monotonic() < deadline:
            found = known[str(shape)] = probe(layers, shape)
            _save(known)
        rows = found.rows(exact=exact)
        if found.order is not None and rows:
            used = True
            for layer in layers:
                row_kernels.install(layer, shape.kind, found.order, rows)
    return used


def layers_by_shape(model: nn.Module) -> dict[MatrixShape, list[nn.Module]]:
    """Return the layers that the kernels support."""
    found = defaultdict[MatrixShape, list[nn.Module]](list)
    for _, module in model.named_modules():
        if (shape := row_kernels.shape_of(module)) is not None:
            found[shape].append(module)
    return found


def probe(layers: Sequence[nn.Module], shape: MatrixShape) -> Probe:
    """Compare a kernel with MLX on the weights of layers of one shape.

    Layers take turns in timings, so that no cache of the chip holds the weights.
    """
    x = mx.random.normal((max(ROWS), shape.inputs), shape.kind, key=mx.random.key(0))
    try:
        alone = mx.concatenate([mlx_product(layers[0], row[None]) for row in x])

        def equals(order: Order, rows: int) -> bool:
            return same_bits(row_kernels.multiply(layers[0], x[:rows], order), alone[:rows])

        order = next((each for each in orders_of(shape) if equals(each, min(ROWS))), None)
        if order is None:
            return Probe(error="its bits differ from those of one row")
        equal = tuple(rows for rows in ROWS if equals(order, rows))
        ours = partial(row_kernels.multiply, order=order)
        times = {
            rows: (_seconds(mlx_product, layers, x[:rows]), _seconds(ours, layers, x[:rows]))
            for rows in _TIMED
        }
    except (RuntimeError, ValueError) as error:  # of MLX: the kernel does not compile or run
        lasting = isinstance(error, ValueError) or any(each in str(error) for each in _NOT_COMPILED)
        return Probe(error=one_line(error, 120), again=not lasting)
    return Probe(order, equal, times)


def same_bits(one: mx.array, other: mx.array) -> bool:
    """Return whether two arrays of the same type have the same bits."""
    return bool(mx.array_equal(one.view(mx.uint8), other.view(mx.uint8)).item())


def _seconds(
    compute: Callable[[nn.Module, mx.array], mx.array], layers: Sequence[nn.Module], x: mx.array
) -> float:
    """Return the seconds of a product; the first one, which compiles, does not count."""
    calls = max(1, min(_CALLS, _CALL_BYTES // layers[0]["weight"].nbytes))

    def compute_all() -> None:
        mx.eval([compute(layers[call % len(layers)], x) for call in range(calls)])

    return min(timeit.repeat(compute_all, number=1, repeat=1 + _REPEATS)[1:]) / calls


def describe() -> str:
    """Return one line about the kernels on this machine."""
    if why := why_off():
        return f"off ({why})"
    known = _load().values()
    used = [each for each in known if each.rows(exact=False)]
    if not used:
        errors = {each.error or "it is slower than MLX's" for each in known}
        return f"off ({'; '.join(sorted(errors)) or 'no supported model was loaded yet'})"
    times = [pair for each in used for pair in each.times.values()]
    rates = [theirs / ours for theirs, ours in times if ours < _FASTER * theirs]
    speed = f"{min(rates):.1f} to {max(rates):.1f} times as fast as MLX's"
    return f"used for {len(used)} of {len(known)} matrix shapes, {speed}"


def _machine() -> str:
    parts = (row_kernels.HEADER, row_kernels.QUANTIZED_SOURCE, row_kernels.DENSE_SOURCE)
    source = adler32("".join(parts).encode())
    chip = mx.device_info().get("architecture")
    return f"{chip}, macOS {platform.mac_ver()[0]}, mlx {version('mlx')}, {source}"


def _load() -> dict[str, Probe]:
    """Return the saved results by shape; none if they are of another machine, or damaged."""
    with contextlib.suppress(OSError, ValueError, LookupError):
        return _PROBES.validate_json(read_bounded(paths.kernels_file(), _MAX_FILE))[_machine()]
    return {}


def _save(known: dict[str, Probe]) -> None:
    file = paths.kernels_file()
    with contextlib.suppress(OSError):  # on a full disk the next load probes again
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(file, _PROBES.dump_json({_machine(): known}))
