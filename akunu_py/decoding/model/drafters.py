"""The models that draft beside a target: a smaller model, or its own MTP head.

They are opened and loaded here; `networks` makes them draft. Speculative decoding as Leviathan et
al. (2023) have it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from akunu_py.decoding import device, kv_cache
from akunu_py.decoding import load_plan as plan
from akunu_py.decoding.model.tokens import TokenCodec
from akunu_py.errors import ModelError, UsageError
from akunu_py.files import read_bounded
from akunu_py.models.load.fit import MIN_CONTEXT, Growth, Needs
from akunu_py.models.load.mlx_loader import OpenModel, open_model
from akunu_py.models.load.model_files import MAX_TOKENIZER_BYTES, ModelFiles
from akunu_py.models.mtp import Head, Trunk, load_head
from akunu_py.types import WeightMode

_FEWEST = 0.9  # of the target's tokens that a draft model must know


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A smaller model that drafts for another one."""

    name: str
    path: Path
    model: Any
    vocabulary: int  # width of its logits
    needs: Needs
    share: float  # of the target's weights, in bytes: about what a pass takes of one of the target


@dataclass(frozen=True, slots=True)
class MtpHead:
    """The MTP head of a model."""

    head: Head
    needs: Needs
    share: float  # see `DraftModel`; with the lm_head that both compute with


def open_draft_model(name: str, path: Path, weights: WeightMode, target: Needs) -> DraftModel:
    """Open the draft model in the directory `path`; its weights are not read yet.

    Raises what `open_model` does, and UsageError if its cache cannot be rolled back.
    """
    opened = open_model(path)
    if why := kv_cache.why_no_rollback(kv_cache.new_cache(opened.model)):
        raise UsageError(f"{name} cannot draft: {why}; take another --draft-model")
    needs = plan.needs(opened, itemsize=device.convert_weights(opened.model, weights))
    share = needs.weights / max(1, target.weights)
    return DraftModel(name, path, opened.model, opened.vocabulary, needs, share)


def open_head(
    opened: OpenModel, weights: WeightMode, target: Needs, limit: int
) -> tuple[MtpHead | None, str]:
    """Open the model's MTP head; without one, return None and why. Its weights are not read yet.

    target: needs of the model. limit: bytes that there are; a head that leaves too few of them for
    the least context is not used.
    """
    try:
        head = load_head(opened.files.path, opened.model, opened.config)
    except ModelError as error:
        return None, str(error)
    if head is None:
        return None, "its files have no MTP head (docs/models.md says which do)"
    lm_head = tree_flatten(Trunk(opened.model).lm_head.parameters())
    needs = _head_needs(head, target, weights)
    if target.beside(needs).at(min(MIN_CONTEXT, target.context)).total > limit:
        return None, "there is no memory for its MTP head"
    read = needs.weights + sum(value.nbytes for _, value in lm_head)
    return MtpHead(head, needs, read / max(1, target.weights)), ""


def _head_needs(head: Head, target: Needs, weights: WeightMode) -> Needs:
    device.convert_weights(head, weights)
    cache, rows = head.make_cache(), mx.zeros((1, 2, head.width), head.hidden_norm.weight.dtype)
    head(rows, rows, cache)  # which is not computed
    per_token = sum(plan.bytes_per_row(entry) for entry in kv_cache.leaves(cache))
    return replace(target, weights=device.weight_bytes(head), cache=Growth(per_token))


def check_draft_model(small: DraftModel, target: TokenCodec) -> None:
    """Raise UsageError if the tokens of a draft model mean other texts than those of its target."""
    ours, theirs = small.path / "tokenizer.json", target.path / "tokenizer.json"
    both = ours.exists() and theirs.exists()
    if not both or _content(ours) != _content(theirs):
        files = ModelFiles.read(small.path)
        check_tokens(TokenCodec.load(small.name, files, small.vocabulary), target)


def _content(file: Path) -> bytes:
    return read_bounded(file, MAX_TOKENIZER_BYTES)


def check_tokens(small: TokenCodec, target: TokenCodec) -> None:
    """Raise UsageError if two models that should have the same tokens have not."""
    if why := difference(target.tokenizer.get_vocab(), small.tokenizer.get_vocab()):
        raise UsageError(
            f"{small.name} cannot draft for {target.name}: {why}; take a smaller model of the same "
            "family as --draft-model"
        )


def difference(target: dict[str, int], draft: dict[str, int]) -> str:
    """Where two vocabularies differ that should be one, "" where they do not. Tokens that only one
    of them has, as families add some from size to size, are none while they are few."""
    theirs = {token: text for text, token in target.items()}
    ours = {token: text for text, token in draft.items()}
    differing = [token for token in theirs.keys() & ours.keys() if theirs[token] != ours[token]]
    if differing:
        first = min(differing)
        return (
            f"their tokens differ, {len(differing):,} of them; the first is {first}: "
            f"{theirs[first]!r:.40} and {ours[first]!r:.40}"
        )
    known = len(theirs.keys() & ours.keys())
    if known < _FEWEST * len(theirs):
        return f"it knows {known:,} of its {len(theirs):,} tokens only"
    return ""
