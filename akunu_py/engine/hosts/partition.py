"""Split a model over ranks by layers' width (mlx-lm's `shard`) or by layers (its `pipeline`)."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args

import mlx.core as mx

from akunu_py.engine import kv_cache
from akunu_py.engine.model import device
from akunu_py.errors import UnsupportedModel, one_line
from akunu_py.models.load.mlx_loader import open_directory
from akunu_py.text import human_size
from akunu_py.types import WeightMode

SplitMode = Literal["shard", "pipeline"]


def choose_split(path: Path, name: str, size: int) -> SplitMode:
    """Return how to split a model over `size` ranks. Raises UnsupportedModel with the reasons."""
    reasons = []
    mode: SplitMode
    for mode in get_args(SplitMode):
        model = open_directory(path).model
        if not (reason := _try_split(model, mode, size)):
            return mode
        reasons.append(reason)
    raise UnsupportedModel(
        f"{name} cannot be divided among {size} hosts: {'; '.join(reasons)}; use another number of "
        "hosts, or another model"
    )


def split(model: Any, mode: SplitMode, group: Any) -> None:
    """Keep only this rank's partition in `model`, which is lazily loaded."""
    getattr(model if mode == "shard" else model.model, mode)(group)


def _try_split(model: Any, mode: SplitMode, size: int) -> str:
    """Return why `model` cannot be split in this mode, "" if it can. Splits it if possible."""
    if not hasattr(model if mode == "shard" else getattr(model, "model", None), mode):
        return f"mlx-lm does not {mode} this architecture"
    before, reason = _head_counts(model), ""
    try:
        split(model, mode, SimpleNamespace(rank=lambda: 0, size=lambda: size))
    except Exception as error:  # noqa: BLE001 - model classes raise whatever Python raises
        reason = f"{mode}: {one_line(error)}"
    after = _head_counts(model)
    for key, count in before.items() if mode == "shard" else ():
        if count % size and (reason or after.get(key) == count // size):
            kind = "key-value" if "kv" in key[-1] or "key_value" in key[-1] else "attention"
            return f"its {count} {kind} heads do not divide by {size}"
    return reason


def _head_counts(model: Any) -> dict[tuple[str, str], int]:
    """Return counts of heads by (module, name)."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if "heads" in name and isinstance(value, int)
    }


CONNECT_S = 30  # time limit for connecting all ranks, in seconds


def connect(backend: str, required: Sequence[int]) -> Any:
    """Return the group of all ranks once all are connected. required: ids of processes.

    MLX may wait forever while it holds the GIL, so a shell kills this process if one of them
    ends or after `CONNECT_S` seconds.
    """
    watched = " ".join(str(pid) for pid in required)
    script = (
        f"left={CONNECT_S}; while [ $left -gt 0 ]; do left=$((left-1)); sleep 1; "
        f"for pid in {watched}; do "
        "case $(ps -o stat= -p $pid) in ''|Z*) left=0;; esac; done; done; "
        "echo 'akunu: the hosts could not be connected' >&2; kill -KILL $PPID"
    )
    guard = subprocess.Popen(["/bin/sh", "-c", script], stdin=subprocess.DEVNULL)
    try:
        return mx.distributed.init(strict=True, backend=backend)
    finally:
        guard.kill()
        guard.wait()


def keep_partition(
    model: Any, mode: SplitMode, group: Any, weights: WeightMode
) -> tuple[list[Any], str, int]:
    """Keep this rank's partition in lazily loaded `model`, in the format `weights`.

    Returns stand-ins for cache kinds that only other ranks have (see `SharedCache`), a description,
    and the item size (see `device.convert_weights`).
    """
    whole = {_kind_of_entry(entry): entry for entry in kv_cache.leaves(kv_cache.new_cache(model))}
    itemsize = device.convert_weights(model, weights)
    split(model, mode, group)
    own = {_kind_of_entry(entry) for entry in kv_cache.leaves(kv_cache.new_cache(model))}
    stand_ins = [entry for kind, entry in whole.items() if kind not in own]
    part = f"1/{group.size()} of each layer"
    if mode == "pipeline":
        part = f"layers {model.model.start_idx + 1} to {model.model.end_idx}"
    return stand_ins, f"{part}, {human_size(device.weight_bytes(model))}", itemsize


def _kind_of_entry(entry: Any) -> tuple[object, ...]:
    return type(entry), getattr(entry, "max_size", 0), getattr(entry, "chunk_size", 0)
