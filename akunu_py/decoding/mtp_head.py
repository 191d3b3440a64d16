"""The MTP head of a model beside it in memory. `networks.mtp` makes it draft."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from akunu_py.decoding import device, footprint, kvcache
from akunu_py.errors import ModelError
from akunu_py.models.load.fit import MIN_CONTEXT, Growth, Needs
from akunu_py.models.mtp import Head, Trunk, load_head
from akunu_py.types import WeightMode


@dataclass(frozen=True, slots=True)
class MtpHead:
    """needs: its memory. share: of the target's weights, in bytes, with the lm_head that both
    compute with: about what a pass of it takes of one of the target."""

    head: Head
    needs: Needs
    share: float

    def read_weights(self, weights: WeightMode) -> None:
        """Reads them, in the format that suits the device."""
        device.lay_out_weights(self.head, weights)


def open_head(
    path: Path, model: Any, config: dict[str, Any], weights: WeightMode, target: Needs, limit: int
) -> tuple[MtpHead | None, str]:
    """The head of the model in `path`, and why there is none where there is none; no weights are
    read yet.

    target: what the model needs; limit: bytes that there are. A head that leaves too few of them
    for the least context is not used."""
    try:
        head = load_head(path, model, config)
    except ModelError as error:
        return None, str(error)
    if head is None:
        return None, "its files have no MTP head (docs/models.md says which do)"
    needs = _needs(head, target, weights)
    if target.beside(needs).at(min(MIN_CONTEXT, target.context)).total > limit:
        return None, "there is no memory for its MTP head"
    lm_head = tree_flatten(Trunk(model).lm_head.parameters())
    read = needs.weights + sum(value.nbytes for _, value in lm_head)
    return MtpHead(head, needs, read / max(1, target.weights)), ""


def _needs(head: Head, target: Needs, weights: WeightMode) -> Needs:
    plain = device.plain_format(head, weights)
    cache, rows = head.make_cache(), mx.zeros((1, 2, head.width), head.hidden_norm.weight.dtype)
    head(rows, rows, cache)  # which is not computed
    wide = plain == mx.float32
    per_token = sum(footprint.bytes_per_row(entry, wide) for entry in kvcache.leaves(cache))
    return replace(target, weights=device.weight_bytes(head, plain), cache=Growth(per_token))
