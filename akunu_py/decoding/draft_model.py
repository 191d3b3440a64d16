"""A smaller model that drafts for another one: loading it, and whether the two share their tokens.

Speculative decoding as Leviathan et al. (2023) have it. `networks.model` makes it draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from akunu_py.decoding import device, footprint, kvcache
from akunu_py.errors import UsageError
from akunu_py.files import read_bounded
from akunu_py.models.load.fit import Needs
from akunu_py.models.load.mlx_loader import load_model, load_tokenizer
from akunu_py.models.load.model_files import MAX_TOKENIZER_BYTES
from akunu_py.types import WeightMode

_FEWEST = 0.9  # of the target's tokens that it must know


@dataclass(frozen=True, slots=True)
class DraftModel:
    """vocabulary: the width of its logits. needs: its memory. share: of the target's weights, in
    bytes, which is about what a pass of it takes of one of the target."""

    name: str
    path: Path
    model: Any
    config: dict[str, Any]
    vocabulary: int
    needs: Needs
    share: float

    @classmethod
    def open(cls, name: str, path: Path, weights: WeightMode, target: Needs) -> DraftModel:
        """The model in the directory `path`; no weights are read yet.

        Raises what `load_model` does, and UsageError where its cache cannot be rolled back."""
        model, config, vocabulary = load_model(path)
        if why := kvcache.why_no_rollback(kvcache.new_cache(model)):
            raise UsageError(f"{name} cannot draft: {why}; take another --draft-model")
        needs = footprint.needs(model, config, target.context, weights, None)
        share = needs.weights / max(1, target.weights)
        return cls(name, path, model, config, vocabulary, needs, share)

    def read_weights(self, weights: WeightMode) -> None:
        """Reads them, in the format that suits the device."""
        device.lay_out_weights(self.model, weights)

    def check_tokens(self, name: str, path: Path, tokenizer: Any, own: Any = None) -> None:
        """Raises UsageError where its tokens mean other texts than those of the target `name`, in
        `path`. own: its tokenizer, if that is loaded."""
        ours, theirs = self.path / "tokenizer.json", path / "tokenizer.json"
        both = ours.exists() and theirs.exists()
        if both and _content(ours) == _content(theirs):
            return
        own = own or load_tokenizer(self.path, self.config, self.vocabulary)
        why = difference(tokenizer.get_vocab(), own.get_vocab())
        if why:
            raise UsageError(
                f"{self.name} cannot draft for {name}: {why}; take a smaller model of the same "
                "family as --draft-model"
            )


def _content(file: Path) -> bytes:
    return read_bounded(file, MAX_TOKENIZER_BYTES)


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
