"""One run of training: write conversations, train on them, measure, and save the state."""

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
from akunu_py.training.design import check_memory, make_config, taps_of
from akunu_py.training.synthesis import Synthesizer
from akunu_py.training.trainer import Trainer
from akunu_py.types import Message

_DATA_SHARE = 0.4  # of the time, at most, for writing conversations
_FINAL_SHARE = 0.2  # of the time, during which the learning rate falls
_SAVE_S = 300.0  # between two checkpoints
_CHECK_S, _WAIT_S = 5.0, 2.0  # between two checks for a reason to pause, running and paused

Report = Callable[[str, float | None], None]
"""Called with the progress in words, and the seconds left of this phase; None for an event."""


def home_of(model: str) -> Path:
    """Return the directory of the training data of a model, by its name."""
    return paths.data_dir() / "training" / model


class Training:
    """The training of a drafter for the weights of an engine; its state is on disk."""

    def __init__(
        self,
        engine: Engine,
        seconds: float,
        report: Report,
        why_wait: Callable[[], str] = lambda: "",  # returns why to pause, "" if not
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """seconds: of this run, without pauses. Raises UnsupportedModel, StoreError, DoesNotFit."""
        self._engine, self._seconds, self._report = engine, seconds, report
        self._why_wait, self._clock = why_wait, clock
        self._taps = (*taps_of(engine), len(engine.model.layers))
        if why := engine.no_draft_reason or why_no_taps(engine.model, self._taps):
            raise UnsupportedModel(f"no drafter can be trained for {engine.name}: {why}")
        self._config = make_config(engine)
        check_memory(engine, self._config)
        digest = weights_digest(engine.model)
        self._config[DIGEST_KEY] = digest
        self._home = home_of(engine.name) / digest[:12]
        self.dataset = Dataset(self._home / "conversations")
        self._end = clock() + seconds
        self._checked = float("-inf")

    def run(
        self,
        answer_tokens: int,
        disk_bytes: int,
        temperature: float,
        prompts: Sequence[Sequence[Message]] = (),
    ) -> Trainer:
        """Write conversations and train until the time is over. An interrupt saves the training.

        answer_tokens: of all runs. disk_bytes: limit of the conversations with their states.
        temperature: of half the answers. prompts: to answer first. Raises UsageError for too few
        conversations, StoreError.
        """
        self._write(answer_tokens, disk_bytes, temperature, prompts)
        mx.clear_cache()
        if device.on_cpu():
            mx.disable_compile()  # it starts a C++ compiler for each length of a batch
        checkpoint = self._home / "checkpoint.safetensors"
        trainer = Trainer(self._engine, self.dataset, self._config, checkpoint)
        saved = self._left()
        try:
            while left := self._left():
                trainer.step(min(1.0, left / (_FINAL_SHARE * self._seconds)))
                self._report(f"training: {trainer.steps:,} steps", left)
                if saved - left >= _SAVE_S:
                    saved = left
                    self._save(trainer)
        except KeyboardInterrupt:
            self._save(trainer)
            raise
        self._save(trainer)
        return trainer

    def _write(
        self,
        answer_tokens: int,
        disk_bytes: int,
        temperature: float,
        prompts: Sequence[Sequence[Message]],
    ) -> None:
        """Write conversations until there are enough, or their share of the time is over."""
        dataset, source = self.dataset, None
        before, began = dataset.answer_tokens, self._left()
        end = (1 - _DATA_SHARE) * self._seconds
        while (
            (missing := answer_tokens - dataset.answer_tokens) > 0
            and dataset.nbytes < disk_bytes
            and (left := self._left()) > end
        ):
            if source is None:
                source = Synthesizer(self._engine, self._taps, temperature, dataset, prompts)
            source.step()
            needed = missing * (began - left) / max(1, dataset.answer_tokens - before)
            line = f"answer tokens: {dataset.answer_tokens:,} of {answer_tokens:,}"
            self._report(line, min(needed, left - end) if needed else left - end)

    def _save(self, trainer: Trainer) -> None:
        shares = ", ".join(f"{share:.0%}" for share in trainer.save())
        self._report(f"held-out drafts accepted, by depth: {shares}", None)

    def _left(self) -> float:
        """Wait while there is a reason to pause. Returns the seconds left."""
        blas_threads.adapt()
        started, said = self._clock(), ""
        if started - self._checked >= _CHECK_S:
            while reason := self._why_wait():
                if reason != said:
                    self._report(f"waiting: {reason}", None)
                said = reason
                time.sleep(_WAIT_S)
            self._checked = self._clock()
            self._end += self._checked - started if said else 0.0
        return max(0.0, self._end - self._clock())
