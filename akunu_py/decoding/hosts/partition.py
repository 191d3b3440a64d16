"""Split a model over ranks by layers' width (mlx-lm's `shard`) or by layers (its `pipeline`)."""

from __future__ import annotations

import copy
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from mlx.utils import tree_flatten

from akunu_py.decoding import device, kv_cache
from akunu_py.decoding.hosts.passes import PartitionRunner
from akunu_py.decoding.load_plan import make_plan, needs
from akunu_py.errors import UnsupportedModel, one_line
from akunu_py.models.load.mlx_loader import open_model
from akunu_py.models.store.model_store import StoredModel
from akunu_py.text import human_size
from akunu_py.types import LoadOptions, WeightMode

Division = Literal["shard", "pipeline"]


@dataclass(frozen=True)
class PlannedRank:
    """A rank of a group that does not exist yet."""

    at: int
    of: int

    def rank(self) -> int:
        return self.at

    def size(self) -> int:
        return self.of


def choose(path: Path, name: str, size: int) -> Division:
    """Return how to split the model in `path` over `size` ranks, without reading weights.

    Raises UnsupportedModel with the reasons if it cannot be split.
    """
    reasons = []
    ways: tuple[Division, Division] = ("shard", "pipeline")
    for way in ways:
        model = open_model(path).model
        if not (why := _why_not(model, way, size)):
            return way
        reasons.append(why)
    raise UnsupportedModel(
        f"{name} cannot be divided among {size} hosts: {'; '.join(reasons)}; use another number of "
        "hosts, or another model"
    )


def divide(model: Any, way: Division, group: Any) -> None:
    """Keep only this rank's partition in `model`, which is lazily loaded."""
    if way == "shard":
        model.shard(group)
    else:
        model.model.pipeline(group)


def missing_kinds(model: Any, whole: list[Any]) -> list[Any]:
    """Return a new cache entry for each kind that only other ranks have.

    All ranks must agree on what can be rolled back.
    """
    own = {_kind(entry) for entry in kv_cache.leaves(kv_cache.new_cache(model))}
    others = {_kind(entry): entry for entry in kv_cache.leaves(whole)}
    return [copy.deepcopy(entry) for kind, entry in others.items() if kind not in own]


def describe(model: Any, way: Division, size: int) -> str:
    """Describe this rank's partition."""
    nbytes = human_size(sum(part.nbytes for _, part in tree_flatten(model.parameters())))
    if way == "shard":
        return f"1/{size} of each layer, {nbytes}"
    inner = model.model
    return f"layers {inner.start_idx + 1} to {inner.end_idx}, {nbytes}"


def _kind(entry: Any) -> tuple[object, ...]:
    return type(entry), getattr(entry, "max_size", 0), getattr(entry, "chunk_size", 0)


def _why_not(model: Any, way: Division, size: int) -> str:
    """Return why `model` cannot be split that way, "" if it can. Splits it in that case."""
    if way == "shard" and not hasattr(model, "shard"):
        return "mlx-lm does not shard this architecture"
    if way == "pipeline" and not hasattr(getattr(model, "model", None), "pipeline"):
        return "mlx-lm does not pipeline it"
    before = _heads(model)
    try:
        divide(model, way, PlannedRank(0, size))
    except Exception as error:  # noqa: BLE001 - model classes raise whatever Python raises
        after = {key: 0 for key, count in before.items() if way == "shard" and count % size}
        why = f"{way}: {one_line(error)}"
    else:
        after, why = _heads(model), ""
    if way == "shard":
        for key, left in after.items():
            count = before.get(key, left)
            if left == 0 or (count % size and left == count // size):
                kind = "key-value" if "kv" in key[-1] or "key_value" in key[-1] else "attention"
                return f"its {count} {kind} heads do not divide by {size}"
    return why


def _heads(model: Any) -> dict[tuple[str, str], int]:
    """Return counts of heads by (module, name)."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if "heads" in name and isinstance(value, int)
    }


CONNECT_S = 30  # time limit for connecting all ranks, in seconds


@dataclass(frozen=True)
class Partition:
    """A worker's partition before its weights are read."""

    model: Any
    group: Any
    stand_ins: list[Any]
    holds: str  # description
    context: int  # tokens that fit in this rank's memory

    def read(self) -> PartitionRunner:
        """Read the weights."""
        mx.eval(self.model.parameters())
        return PartitionRunner(self.model, self.stand_ins, self._receive)

    def _receive(self, length: int) -> list[int]:
        nothing = mx.zeros(length, mx.int32)
        return [int(each) for each in mx.distributed.all_sum(nothing, group=self.group).tolist()]


def connect(backend: str, others: Sequence[int]) -> Any:
    """Return the group of all ranks once all are connected. others: required processes.

    MLX may wait forever while it holds the GIL, so a shell kills this process if one of `others`
    ends or after `CONNECT_S` seconds.
    """
    watched = " ".join(str(pid) for pid in others)
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


def take(model: Any, way: Division, group: Any, weights: WeightMode) -> tuple[list[Any], str, int]:
    """Keep this rank's partition in lazily loaded `model`, in the format `weights`.

    Returns stand-ins for its cache, a description, and the item size; see `device.convert_weights`.
    """
    whole = kv_cache.new_cache(model)
    itemsize = device.convert_weights(model, weights)
    divide(model, way, group)
    stand_ins = missing_kinds(model, whole)
    return stand_ins, describe(model, way, group.size()), itemsize


def load_partition(found: StoredModel, group: Any, given: Mapping[str, Any]) -> Partition:
    """Open a worker's partition. given: rank 0's division, weights, context, force, memory.

    Raises DoesNotFit, and the errors of `open_model`.
    """
    opened = open_model(found.path)
    model, weights = opened.model, given["weights"]
    stand_ins, holds, itemsize = take(model, given["division"], group, weights)
    options = LoadOptions(
        weights, None, given["context"], given["force"], memory_limit=given["memory"]
    )
    own = needs(opened, itemsize=itemsize)
    plan = make_plan(found.name, opened, own, options, divided=True)
    device.wire_memory(model)
    return Partition(model, group, stand_ins, holds, plan.context_length)
