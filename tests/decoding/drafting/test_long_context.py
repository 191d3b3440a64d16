"""A draft of a neural drafter reads the same number of tokens after a long history as after a short
one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, SupportsIndex

import mlx.core as mx
import pytest

from akunu_py.decoding.drafting.early_exit import ExitDrafter, FirstLayers
from akunu_py.decoding.drafting.neural import ModelDrafter, MtpDrafter
from akunu_py.decoding.generate.decode import Decoding
from akunu_py.decoding.model.drafters import DraftModel
from akunu_py.decoding.target import Target
from akunu_py.models.load.fit import Activations, CacheGrowth, MemoryNeeds
from akunu_py.models.load.mlx_loader import open_model
from akunu_py.models.mtp import load_head
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.cost import CostCurve
from akunu_py.types import NeuralDrafter
from tests.support.targets import Timeless, read, some
from tests.support.tiny import VOCABULARY, tiny_llama
from tests.support.tiny_mtp import write_checkpoint

FREE = {1: 1.0, 33: 1.01}  # a curve with which everything pays
NEEDS = MemoryNeeds(1, CacheGrowth(1), Activations(1, 1, 1, 1), 1 << 20)
PASSES = 12
ALLOWED = 300  # tokens to read for a draft and for learning from its pass

Make = Callable[[Path], tuple[Any, Callable[[Target], NeuralDrafter]]]


def draft_model(directory: Path) -> tuple[Any, Callable[[Target], NeuralDrafter]]:
    made = DraftModel("draft", Path(), tiny_llama(1), VOCABULARY, NEEDS, 1e-6)
    return tiny_llama(), lambda target: ModelDrafter(made, target)


def mtp_head(directory: Path) -> tuple[Any, Callable[[Target], NeuralDrafter]]:
    write_checkpoint(directory, "mimo")
    opened = open_model(directory)
    head = load_head(directory, opened.model, opened.config)
    assert head is not None
    mx.eval(opened.model.parameters(), head.parameters())
    return opened.model, lambda target: MtpDrafter(head, target, 1e-6)


def first_layers(directory: Path) -> tuple[Any, Callable[[Target], NeuralDrafter]]:
    model = tiny_llama()
    return model, lambda target: ExitDrafter(FirstLayers(model, 1), target, 1e-6, 0.5)


class Counted(list[int]):
    """A list that counts the elements read from it."""

    reads = 0

    def __iter__(self) -> Iterator[int]:
        Counted.reads += len(self)
        return super().__iter__()

    def __getitem__(self, at: SupportsIndex | slice) -> Any:
        found = super().__getitem__(at)
        Counted.reads += len(found) if isinstance(found, list) else 1
        return found


def count_reads(target: Target, drafter: AutoDrafter) -> None:
    """Count the tokens read from the histories of the n-grams and of the draft model."""
    tokens = Counted(drafter.index.tokens)
    drafter.index.tokens = drafter.tracker.tokens = drafter.tracker.edits.tokens = tokens
    for history in target.history.drafter_histories.values():
        history.tokens = Counted(history.tokens)
    for planned in drafter.neural_drafters:
        if isinstance(planned.neural_drafter, MtpDrafter):
            planned.neural_drafter._seen = Counted(planned.neural_drafter._seen)
    Counted.reads = 0


@pytest.mark.rotating
@pytest.mark.long
@pytest.mark.parametrize("make", [draft_model, mtp_head, first_layers])
def test_a_draft_reads_few_tokens_of_a_long_history(make: Make, tmp_path: Path) -> None:
    model, create = make(tmp_path)
    target = Timeless(model)
    prompt = some(3000, 1)
    target.reuse_prefix(prompt)
    drafter = AutoDrafter(CostCurve(FREE), neural_drafters=[create(target)], ngrams=False)
    read(target)
    drafter.extend(prompt)
    decoding = Decoding(target, drafter, 1000, ())
    drafted = sum(
        (piece := decoding.step()).accepted + len(piece.rejected) for _ in range(3)
    )  # the first draft of an answer may compare the whole prompt
    count_reads(target, drafter)
    for _ in range(PASSES):
        piece = decoding.step()
        drafted += piece.accepted + len(piece.rejected)
    assert drafted >= PASSES
    assert Counted.reads <= PASSES * ALLOWED
