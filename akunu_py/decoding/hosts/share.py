"""Loading one rank's share of a model."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from akunu_py.decoding import device, kvcache
from akunu_py.decoding.hosts import division
from akunu_py.decoding.hosts.mirror import Mirror
from akunu_py.decoding.plan import make_plan, needs
from akunu_py.models.mlx_loader import open_model
from akunu_py.models.store import StoredModel
from akunu_py.types import LoadOptions, WeightMode

CONNECT_S = 30  # seconds that ranks which are all told to connect may take


@dataclass(frozen=True)
class Share:
    """What a rank but the first has of a model, before its weights are read.

    holds: in words. context: tokens that there is memory for here.
    """

    model: Any
    group: Any
    stand_ins: list[Any]
    holds: str
    context: int

    def read(self) -> Mirror:
        """Reads the weights."""
        mx.eval(self.model.parameters())
        return Mirror(self.model, self.stand_ins, self._receive)

    def _receive(self, length: int) -> list[int]:
        nothing = mx.zeros(length, mx.int32)
        return [int(each) for each in mx.distributed.all_sum(nothing, group=self.group).tolist()]


def connect(backend: str, others: Sequence[int]) -> Any:
    """The group of all ranks, once they are all there. others: processes without which that cannot
    be.

    MLX waits for them, in part for ever, and lets no other thread of Python run meanwhile. So it is
    a shell that ends this process where one of them ends, or connecting takes too long.
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


def take(
    model: Any, way: division.Division, group: Any, weights: WeightMode
) -> tuple[list[Any], str, int]:
    """Leave in `model`, lazily loaded, this rank's share of its weights in that format.

    Returns stand-ins for its cache, what it holds in words, and bytes; see
    `device.convert_weights`.
    """
    whole = kvcache.new_cache(model)
    itemsize = device.convert_weights(model, weights)
    division.divide(model, way, group)
    stand_ins = division.missing_kinds(model, whole)
    return stand_ins, division.describe(model, way, group.size()), itemsize


def load_share(found: StoredModel, group: Any, given: Mapping[str, Any]) -> Share:
    """Open the share of a rank. given: division, weights, context, force and memory of rank 0.

    Raises DoesNotFit, and what `open_model` raises.
    """
    opened = open_model(found.path)
    model, weights = opened.model, given["weights"]
    stand_ins, holds, itemsize = take(model, given["division"], group, weights)
    options = LoadOptions(weights, None, given["context"], given["force"], memory=given["memory"])
    own = needs(opened, itemsize=itemsize)
    plan = make_plan(found.name, opened, own, options, divided=True)
    device.wire_memory(model)
    return Share(model, group, stand_ins, holds, plan.context_length)
