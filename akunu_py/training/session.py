"""One run of training: write conversations, train on them, measure, and save the state."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx

from akunu_py import paths
from akunu_py.engine.engine import Engine
from akunu_py.engine.model import blas_threads, device
from akunu_py.engine.model.drafters import weights_digest
from akunu_py.engine.model.output_rows import why_no_taps
from akunu_py.errors import UnsupportedModel
from akunu_py.models.drafters.drafter_config import DIGEST_KEY
from akunu_py.training.dataset import Dataset
from akunu_py.training.design import taps_of
from akunu_py.training.synthesis import Synthesizer
from akunu_py.training.trainer import Trainer
from akunu_py.types import Message

FACTS = "akunu_training"  # key of config.json
_DATA_SHARE = 0.4  # of the time, at most, for writing conversations
_FINAL_SHARE = 0.2  # of the time, during which the learning rate falls
_SAVE_S = 300.0  # between two checkpoints
_CHECK_S, _WAIT_S = 5.0, 2.0  # between two checks for a reason to pause, running and paused

Report = Callable[[str, int, int], None]
"""Called with the phase, what is done, and what is planned; with 0 and 0 for a line of text."""


def home_of(model: str) -> Path:
    """Return the directory of the training data of a model, by its name."""
    return paths.data_dir() / "training" / model


class Training:
    """The training of a drafter for the weights of an engine; its state is on disk."""

    trainer: Trainer | None = None  # once it has been saved

    def __init__(
        self,
        engine: Engine,
        seconds: float,
        report: Report,
        why_wait: Callable[[], str] = lambda: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """seconds: of this run, without pauses. why_wait: returns why to pause, "" if not.

        Raises UnsupportedModel, StoreError.
        """
        self._engine, self._seconds, self._report = engine, seconds, report
        self._why_wait, self._clock = why_wait, clock
        self._digest = weights_digest(engine.model)
        self._taps = (*taps_of(engine), len(engine.model.layers))
        if why := engine.no_draft_reason or why_no_taps(engine.model, self._taps):
            raise UnsupportedModel(f"no drafter can be trained for {engine.name}: {why}")
        self._home = home_of(engine.name) / self._digest[:12]
        self.dataset = Dataset(self._home / "conversations")
        self._end = clock() + seconds
        self._checked = float("-inf")

    def run(
        self,
        answer_tokens: int,
        disk_bytes: int,
        temperature: float,
        prompts: Sequence[Sequence[Message]] = (),
    ) -> None:
        """Write conversations and train until the time is over. An interrupt saves the training.

        answer_tokens: of all runs. disk_bytes: limit of the conversations with their states.
        temperature: of half the answers. prompts: to answer first. Raises UsageError for too few
        conversations, StoreError, DoesNotFit.
        """
        dataset, source = self.dataset, None
        while (
            dataset.answer_tokens < answer_tokens
            and dataset.nbytes < disk_bytes
            and self._left() > (1 - _DATA_SHARE) * self._seconds
        ):
            if source is None:
                seed = len(dataset.conversations)
                source = Synthesizer(self._engine, self._taps, temperature, seed, prompts)
            source.step(dataset)
            self._report("answer tokens", dataset.answer_tokens, answer_tokens)
        source = None
        mx.clear_cache()
        if device.on_cpu():
            mx.disable_compile()  # it starts a C++ compiler for each length of a batch
        trainer = Trainer(self._engine, dataset, self._home / "checkpoint.safetensors")
        start = saved = self._left()
        try:
            while left := self._left():
                trainer.step(min(1.0, left / (_FINAL_SHARE * self._seconds)))
                self._report("training, seconds", int(start - left), max(1, int(start)))
                if saved - left >= _SAVE_S:
                    saved = left
                    self._save(trainer)
        except KeyboardInterrupt:
            self._save(trainer)
            raise
        self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        shares = ", ".join(f"{share:.0%}" for share in trainer.save())
        self._report(f"held-back drafts accepted, by depth: {shares}", 0, 0)
        self.trainer = trainer

    def _left(self) -> float:
        """Wait while there is a reason to pause. Returns the seconds left."""
        blas_threads.adapt()
        started, said = self._clock(), ""
        if started - self._checked >= _CHECK_S:
            while reason := self._why_wait():
                if reason != said:
                    self._report(f"waiting: {reason}", 0, 0)
                said = reason
                time.sleep(_WAIT_S)
            self._checked = self._clock()
            self._end += self._checked - started if said else 0.0
        return max(0.0, self._end - self._clock())

    @property
    def drafter_bytes(self) -> int:
        assert self.trainer is not None
        return sum(value.nbytes for value in self.trainer.weights().values())

    def write_drafter(self, directory: Path) -> None:
        """Write the drafter in the published format. Raises StoreError."""
        assert self.trainer is not None
        facts = {
            "answer_tokens": self.dataset.answer_tokens,
            "trained_tokens": self.trainer.tokens,
            "accepted": self.trainer.curve[-1][-1],
        }
        self.trainer.write_drafter(directory, {DIGEST_KEY: self._digest, FACTS: facts})
