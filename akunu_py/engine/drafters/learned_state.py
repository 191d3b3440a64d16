"""Learned state of a model on this machine, kept between runs: costs, weights, answer cache.

All are in the cache directory and may be deleted at any time. The answer cache is one file plus a
journal of later answers. Damaged files are set aside with one warning.
"""

import contextlib
import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from akunu_py import paths
from akunu_py.engine.histories.prompt_cache_store import DiskLimits
from akunu_py.files import (
    disk_errors,
    locked,
    parse_json,
    read_bounded,
    remove_unfinished,
    write_atomically,
)
from akunu_py.ngram.acceptance_model import SharedWeights
from akunu_py.ngram.answer_cache import AnswerCache
from akunu_py.ngram.cost import CostCurve
from akunu_py.ngram.neural_plan import LearnedDrafter

_ANSWERS_PREFIX = "memory-"
JOURNAL_BYTES = 120_000  # more are moved to the answer file; replaying them takes 30 ms
_MAX_FILE_BYTES = 1 << 25  # an answer cache takes 15 MB
# Do not follow links, and do not block on pipes and devices.
_OPEN_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_T = TypeVar("_T")
_LearnedCosts = tuple[CostCurve, dict[str, LearnedDrafter], SharedWeights]


class UnsavedState:
    """What the requests of one model learn and share. It never touches the disk."""

    disk_limits: DiskLimits | None = None  # of prompt caches; None: none on disk

    def __init__(
        self,
        curve: CostCurve | None = None,
        answer_cache: AnswerCache | None = None,
        neural_drafters: dict[str, LearnedDrafter] | None = None,
    ) -> None:
        """answer_cache: to draft from; it gets no answers."""
        self.curve = CostCurve() if curve is None else curve
        self.neural_drafters = {} if neural_drafters is None else neural_drafters
        self.weights = SharedWeights()
        self.answer_cache = answer_cache

    def save_costs(self) -> None:
        """Save the costs for the next run."""

    def add_answer(self, tokens: Sequence[int]) -> None:
        """Add the tokens of an answer to the answer cache."""

    def flush(self) -> None:
        """Wait until everything is on disk."""

    def close(self) -> None:
        """Save the costs; nothing can be saved afterwards."""


class LearnedState(UnsavedState):
    """The learned state of one model on disk."""

    _last_write: Future[None] | None = None

    def __init__(
        self,
        model: Path,
        tokenizer: str,
        layout: str,
        *,
        answer_cache: bool,
        disk_limits: DiskLimits | None = None,
        warnings: list[str] | None = None,
    ) -> None:
        """tokenizer: its digest. layout: device and weights format. warnings: list to append to."""
        self.directory = directory_of(model)
        self._curve_file = self.directory / f"curve-{_digest(layout)}.json"
        self._answer_file = self.directory / f"{_ANSWERS_PREFIX}{_digest(tokenizer)}"
        self._journal = self.directory / f"{_ANSWERS_PREFIX}{_digest(tokenizer)}.journal"
        self.warnings = [] if warnings is None else warnings  # one line each, each once
        # Writes in order. Moving a journal takes 80 ms, which no pass should wait for.
        self._writer = ThreadPoolExecutor(1, "learned state")
        self.curve, self.neural_drafters, self.weights = self._load_costs()
        self.answer_cache = self._load_answers() if answer_cache else None
        self.disk_limits = disk_limits

    def save_costs(self) -> None:
        """Save the costs for the next run, in another thread. Ignores disk errors."""
        neural_drafters = {key: each.to_dict() for key, each in self.neural_drafters.items()}
        others = {"networks": neural_drafters, "acceptance": self.weights.to_list()}
        content = json.dumps(self.curve.to_dict() | others)
        self._last_write = self._writer.submit(self._write_costs, content.encode())

    def add_answer(self, tokens: Sequence[int]) -> None:
        """Add an answer to the answer cache, if enabled. Another thread saves it; see `flush`."""
        if self.answer_cache is not None and tokens:
            self.answer_cache.learn(tokens)
            self._last_write = self._writer.submit(self._store_answer, list(tokens))

    def flush(self) -> None:
        if self._last_write is not None:
            self._last_write.result()

    def close(self) -> None:
        """Save the costs and end the thread that writes; nothing can be saved afterwards."""
        self.save_costs()
        self._writer.shutdown()

    def _write_costs(self, content: bytes) -> None:
        with contextlib.suppress(OSError), locked(self.directory / "lock"):
            _write(self._curve_file, content)

    def _store_answer(self, tokens: Sequence[int]) -> None:
        try:
            with locked(self.directory / "lock"):
                _append(self._journal, tokens)
                if self._journal.stat().st_size > JOURNAL_BYTES:
                    # Reload: another process may have added answers.
                    _write(self._answer_file, self._load_answers().dump())
                    self._journal.unlink()
        except OSError as error:
            self._warn(f"cannot store the answer: {error.strerror or error}")

    def _load_costs(self) -> _LearnedCosts:
        def parse(data: bytes) -> _LearnedCosts:
            content = parse_json(data)  # earlier versions had only costs
            saved = content.get("networks", {})
            neural_drafters = {key: LearnedDrafter.from_dict(each) for key, each in saved.items()}
            weights = SharedWeights.from_list(content.get("acceptance", []))
            return CostCurve.from_dict(content), neural_drafters, weights

        nothing = CostCurve(), dict[str, LearnedDrafter](), SharedWeights()
        return self._read(self._curve_file, parse, nothing, "learned costs")

    def _load_answers(self) -> AnswerCache:
        cache = self._read(self._answer_file, AnswerCache.load, AnswerCache(), "answer cache")

        def replay(data: bytes) -> None:
            for tokens in _answers(data):
                cache.learn(tokens)

        self._read(self._journal, replay, None, "answer cache")
        return cache

    def _read(self, path: Path, parse: Callable[[bytes], _T], default: _T, name: str) -> _T:
        """Parse the file; return `default` if it is missing, unreadable or damaged."""
        try:
            return parse(read_bounded(path, _MAX_FILE_BYTES))
        except FileNotFoundError:
            pass
        except OSError as error:
            self._warn(f"the {name} cannot be read: {error}")
        except (ValueError, ArithmeticError, AttributeError, TypeError) as error:
            aside = path.with_name(path.name + ".damaged")
            with contextlib.suppress(OSError):
                path.replace(aside)
            self._warn(f"{path} is damaged and was set aside as {aside.name}: {error}")
        return default

    def _warn(self, warning: str) -> None:
        if warning not in self.warnings:
            self.warnings.append(warning)


def delete_answer_cache(model: Path) -> int:
    """Delete the answer cache of `model`; return the bytes freed. Raises StoreError."""
    if not (directory := directory_of(model)).exists():
        return 0
    with disk_errors(f"cannot delete the answers in {directory}"), locked(directory / "lock"):
        freed = answer_cache_bytes(model)
        for path in _answer_files(directory):
            path.unlink()
    return freed


def answer_cache_bytes(model: Path) -> int:
    """Return the size of `model`'s answer cache on disk in bytes."""
    return sum(path.stat().st_size for path in _answer_files(directory_of(model)))


def _answer_files(directory: Path) -> list[Path]:
    """Return all files with answers, also unfinished ones."""
    return [*directory.glob(f"{_ANSWERS_PREFIX}*"), *directory.glob(f".{_ANSWERS_PREFIX}*")]


def directory_of(model: Path) -> Path:
    """Return the directory of a model's learned state."""
    return paths.cache_dir() / "learned" / paths.model_directory_name(model)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _append(path: Path, tokens: Sequence[int]) -> None:
    """Append an answer as a line of JSON. The line before it may be cut off."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _OPEN_FLAGS, 0o600)
    with os.fdopen(descriptor, "ab") as file:
        file.write(f"\n{json.dumps(tokens)}".encode())


def _answers(journal: bytes) -> Iterator[list[int]]:
    """Yield the answers of a journal, without lines that a killed process or full disk cut off."""
    for line in journal.splitlines():
        try:
            tokens = array("I", parse_json(line))
        except (ValueError, TypeError, OverflowError):
            continue
        yield tokens.tolist()


def _write(path: Path, data: bytes) -> None:
    remove_unfinished(path)
    write_atomically(path, data)
