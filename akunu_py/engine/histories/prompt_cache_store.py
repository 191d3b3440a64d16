"""Prompt caches on disk: `prompt-caches/MODEL/*.safetensors` in the cache directory.

Files are renamed into place and never changed. Only the process that holds `lock` writes and cleans
up. `written.json` lists recent writes. `deleted` has an empty file for each deleted conversation.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from akunu_py import paths
from akunu_py.engine.histories import cache_file
from akunu_py.engine.histories.cache_file import SUFFIX, CacheMetadata, SaveStopped, Stopped
from akunu_py.engine.model.token_ids import common_prefix, shared_prefix
from akunu_py.errors import AkunuError, DamagedCache, StoreError, UsageError
from akunu_py.files import disk_errors, locked, read_json, remove_unfinished, write_atomically
from akunu_py.ngram.cost import PRIOR_PREFILL_RATE, CostCurve
from akunu_py.types import NotCached

if TYPE_CHECKING:  # `akunu cache` never imports MLX
    from akunu_py.engine.engine import Engine
    from akunu_py.engine.histories.history import TokenHistory
    from akunu_py.engine.histories.memory import PromptCaches

MIN_SAVED = 256  # tokens; shorter prefixes are not worth loading
_WORTH = 1.0  # minimum prefill seconds that a file saves
_SHARE = 8  # a history is saved again after growing by 1/8
_LOAD_RATE = 400e6  # bytes per second, before any measurement
_TRUST = 1.1  # growth of a slow disk's assumed rate per prompt
_LOCK, _LEDGER, _FORGOTTEN = "lock", "written.json", "deleted"
_HOUR = 3600.0
_MAX_LEDGER_BYTES = 1 << 20
_RETRY_AFTER = 600.0  # seconds without writes after a disk error
_MAX_FILES = 64  # of a model
_MAX_FORGOTTEN = 2048  # deleted conversations


@dataclass(frozen=True, slots=True)
class DiskLimits:
    """Limits in bytes, and seconds for `age`."""

    size: int = 10_000_000_000  # all files; 0 for none
    hourly: int = 4_000_000_000  # writes per hour
    reserve: int = 5_000_000_000  # free disk space to keep
    age: float = 7 * 24 * _HOUR  # since the last use


@dataclass(frozen=True, slots=True)
class SavedCache:
    """A prompt cache file."""

    path: Path
    metadata: CacheMetadata
    size: int


_Read = tuple["TokenHistory | None", int, NotCached]  # see `PromptCacheStore.read`


class PromptCacheStore:
    """A model's prompt caches on disk, used where they save time. Disk errors are misses."""

    def __init__(self, engine: Engine, limits: DiskLimits, costs: CostCurve) -> None:
        self._engine, self._limits, self._costs = engine, limits, costs
        self._directory = paths.prompt_caches_dir() / paths.model_directory_name(engine.path)
        self._clock = time.time
        # By name, inode and size:
        self._metadata: dict[tuple[str, int, int], CacheMetadata | None] = {}
        self._swept = False
        self._failed_at = -_RETRY_AFTER

    def saved(self) -> list[SavedCache]:
        """Return the files that the engine can continue, by their headers."""
        return [each for each in self._valid() if not self._incompatibility(each.metadata)]

    def _find_unusable(self, prompt: Sequence[int]) -> tuple[int, NotCached]:
        """Return how many tokens of `prompt` an incompatible file has, and the reason."""
        found = [
            (shared_prefix(each.metadata.tokens, prompt), self._incompatibility(each.metadata))
            for each in self._valid()
            if each.metadata.tokenizer == self._engine.tokens.digest
        ]
        return max((each for each in found if each[1]), default=(0, ""))

    def _incompatibility(self, metadata: CacheMetadata) -> NotCached:
        """Return why the engine cannot continue a file, by its header; "" if it can."""
        plan, digest = self._engine.plan, self._engine.tokens.digest
        if (metadata.tokenizer, metadata.weights) != (digest, plan.weights):
            return "other weights"
        if metadata.kv_bits != plan.kv_bits:
            return "other KV width"
        return "" if len(metadata.tokens) < plan.context_length else "other context"

    def _valid(self) -> list[SavedCache]:
        if not self._swept:
            self._swept = True
            with contextlib.suppress(OSError), locked(_root() / _LOCK, wait=False):
                sweep(self._limits, self._clock())
        found = []
        known, self._metadata = self._metadata, {}  # without removed files
        for path, status in _files(self._directory):
            key = path.name, status.st_ino, status.st_size
            metadata = known[key] if key in known else _read_metadata(path)
            self._metadata[key] = metadata
            if metadata is not None:
                found.append(SavedCache(path, metadata, status.st_size))
        return found

    def _may_write(self, nbytes: int) -> bool:
        now, limits = self._clock(), self._limits
        if now < self._failed_at + _RETRY_AFTER or nbytes > limits.size:
            return False
        with contextlib.suppress(OSError):
            existing = next(each for each in self._directory.parents if each.exists())
            room = shutil.disk_usage(existing).free - limits.reserve
            written = sum(size for _, size in _recent_writes(now))
            return nbytes <= room and written + nbytes <= limits.hourly
        return False

    def _save(self, history: TokenHistory, stopped: Stopped) -> bool:
        """Save a history in place of its prefixes; False if `stopped`. The lock must be held."""
        from akunu_py.engine.histories import disk

        path, owner = self._directory / f"{secrets.token_hex(8)}{SUFFIX}", history.owner
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            disk.save(history, self._engine, path, stopped)
            size = path.stat().st_size
            if is_forgotten(owner.conversation, owner.requested_at):  # meanwhile
                remove(path)
        except SaveStopped as end:
            self._record_write(end.written)
            return False
        except (AkunuError, OSError):
            self._failed_at = self._clock()
            return False
        self._record_write(size)
        for each in self.saved():
            shared = common_prefix(each.metadata.tokens, history.tokens)
            if each.path != path and len(each.metadata.tokens) - shared < MIN_SAVED:
                remove(each.path)
        sweep(self._limits, self._clock())
        return True

    def _record_write(self, nbytes: int) -> None:
        now = self._clock()
        with contextlib.suppress(OSError):
            ledger = json.dumps([*_recent_writes(now), (now, nbytes)])
            write_atomically(_root() / _LEDGER, ledger.encode())

    def read(
        self, prompt: Sequence[int], reached: int, caches: PromptCaches, empty: TokenHistory
    ) -> Generator[None, None, _Read]:
        """Load the best prompt cache for `prompt`, in steps, if that saves time.

        Returns its history, the prompt tokens on disk, and why they were not used: "slow disk",
        "no checkpoint", "damaged file", or saved for "other KV width", "other weights" or "other
        context". reached: prompt tokens in memory. caches: where to make room. empty: the history
        in use that the loaded one will replace.
        """
        if len(prompt) < MIN_SAVED:
            return None, 0, ""
        rate = self._costs.load_rate
        if rate and rate < _LOAD_RATE:  # so that a disk that was slow once is tried again
            self._costs.load_rate = min(_LOAD_RATE, rate * _TRUST)
        unusable = self._find_unusable(prompt)
        history, shared, reason = yield from self._read_best(prompt, reached, caches, empty)
        return history, *max((shared, reason), unusable, key=lambda each: each[0])

    def _read_best(
        self, prompt: Sequence[int], reached: int, caches: PromptCaches, empty: TokenHistory
    ) -> Generator[None, None, _Read]:
        """Load the file that saves the most prefill; delete it if it is bad. Returns as `read`."""
        from akunu_py.engine.histories import disk

        saved = max(self.saved(), key=lambda each: each.metadata.reach(prompt), default=None)
        if saved is None:
            return None, 0, ""
        shared = shared_prefix(saved.metadata.tokens, prompt)
        more = saved.metadata.reach(prompt) - reached
        if more < MIN_SAVED:
            return None, shared, "slow disk" if more > 0 else "no checkpoint"
        if self._load_s(saved.size) >= self._prefill_s(more):
            return None, shared, "slow disk"
        caches.reserve(saved.size, empty)
        loading, seconds = disk.load_in_steps(self._engine, saved.path), 0.0
        while True:
            started = time.perf_counter()
            try:
                next(loading)
            except StopIteration as end:
                history: TokenHistory = end.value
                break
            except (DamagedCache, UsageError) as error:  # UsageError: of another model
                with contextlib.suppress(OSError):
                    saved.path.unlink()
                is_damaged = isinstance(error, DamagedCache)
                return None, shared, "damaged file" if is_damaged else "other weights"
            except StoreError:
                return None, shared, "damaged file"
            finally:
                seconds += time.perf_counter() - started  # without other requests' passes
            yield
        with contextlib.suppress(OSError):
            os.utime(saved.path)
        self._costs.load_rate = saved.size / seconds
        return history, shared, ""

    def write(
        self, histories: Sequence[TokenHistory], stopped: Stopped, seconds: float | None
    ) -> bool:
        """Save the history with the most unsaved tokens, if worthwhile; return True if saved."""
        worth = [each for each in histories if self._is_worth_writing(each, seconds)]
        new = [(self._new_tokens(each), each) for each in worth]
        tokens, history = max(new, key=lambda each: each[0], default=(0, None))
        if history is None or not tokens:
            return False
        end = None if seconds is None else time.monotonic() + seconds

        def late() -> bool:
            return stopped() or (end is not None and time.monotonic() > end)

        with contextlib.suppress(OSError), locked(_root() / _LOCK, wait=False):
            return not late() and self._may_write(history.nbytes) and self._save(history, late)
        return False  # another process writes

    def _is_worth_writing(self, history: TokenHistory, seconds: float | None) -> bool:
        load_s = self._load_s(history.nbytes)
        quick = seconds is None or load_s <= seconds  # saving takes about as long as loading
        worth = load_s < self._prefill_s(len(history.tokens))
        owner = history.owner
        wanted = owner.may_store and not is_forgotten(owner.conversation, owner.requested_at)
        return wanted and quick and worth and self._may_write(history.nbytes)

    def _new_tokens(self, history: TokenHistory) -> int:
        """Return the number of unsaved tokens, 0 if too few to save."""
        length = len(history.tokens)
        files = (each.metadata.tokens for each in self.saved())
        kept = max((common_prefix(tokens, history.tokens) for tokens in files), default=0)
        new = length - kept
        few = new < max(MIN_SAVED, kept // _SHARE) or self._prefill_s(new) < _WORTH
        return 0 if few else new

    def _prefill_s(self, tokens: int) -> float:
        return tokens / (self._costs.prefill_rate or PRIOR_PREFILL_RATE)

    def _load_s(self, nbytes: int) -> float:
        return nbytes / (self._costs.load_rate or _LOAD_RATE)


def all_files() -> list[Path]:
    """Return the files of all models, last used first."""
    found = [each for directory in _directories() for each in _files(directory)]
    return [path for path, _ in sorted(found, key=lambda each: -each[1].st_mtime)]


def remove(path: Path) -> int:
    """Delete a file; return the bytes freed. Raises StoreError."""
    with disk_errors(f"cannot delete {path}"), contextlib.suppress(FileNotFoundError):
        size = path.stat().st_size
        path.unlink()
        return size
    return 0


def forget(model: Path | None = None) -> int:
    """Delete all files of `model` or of every model; return the bytes freed. Raises StoreError."""
    directories = [_root() / paths.model_directory_name(model)] if model else _directories()
    with disk_errors("cannot read the prompt caches"):
        return sum(remove(path) for each in directories if each.is_dir() for path in each.iterdir())


def forget_conversation(conversation: str) -> None:
    """Delete a conversation's prompt caches and prevent new ones. Raises StoreError."""
    mark = _forgotten_mark(conversation)  # an empty file, whose time counts
    with disk_errors("cannot delete the prompt caches of the conversation"):
        mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        mark.touch(mode=0o600)
        now = time.time()  # the time of `touch` may be some milliseconds old
        os.utime(mark, (now, now))
    for path in all_files():
        metadata = _read_metadata(path)
        if metadata is not None and metadata.conversation == conversation:
            remove(path)


def sweep(limits: DiskLimits, now: float) -> None:
    """Delete unfinished, old and excess files. The caller must be the only writer."""
    with contextlib.suppress(OSError):
        remove_unfinished(_root() / _LEDGER)
        marks = sorted((_root() / _FORGOTTEN).glob("*"), key=lambda each: each.stat().st_mtime)
        for each in marks[:-_MAX_FORGOTTEN]:
            each.unlink()
    for directory in _directories():
        with contextlib.suppress(OSError):
            for path in directory.glob(f".*{SUFFIX}"):
                path.unlink()
    total, counts = 0, Counter[Path]()
    for path in all_files():
        counts[path.parent] += 1
        with contextlib.suppress(OSError):
            status = path.stat(follow_symlinks=False)
            is_old = status.st_mtime + limits.age < now or counts[path.parent] > _MAX_FILES
            if is_old or total + status.st_size > limits.size:
                path.unlink()
            else:
                total += status.st_size


def _root() -> Path:
    return paths.prompt_caches_dir()


def _directories() -> list[Path]:
    try:
        found = [path for path in _root().iterdir() if path.name != _FORGOTTEN]
        return [path for path in found if path.is_dir() and not path.is_symlink()]
    except OSError:
        return []


def _files(directory: Path) -> list[tuple[Path, os.stat_result]]:
    """Return the finished files with their stat results."""
    found = []
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            if path.suffix == SUFFIX and not path.name.startswith("."):
                with contextlib.suppress(OSError):
                    found.append((path, path.stat(follow_symlinks=False)))
    return found


def _read_metadata(path: Path) -> CacheMetadata | None:
    """Return a file's header, None if it is unusable; deletes damaged files."""
    try:
        return cache_file.read(path)[0]
    except DamagedCache:
        with contextlib.suppress(OSError):
            path.unlink()
    except AkunuError:  # of another version, or it cannot be read
        pass
    return None


def _recent_writes(now: float) -> list[tuple[float, int]]:
    """Return (time, bytes) of the writes in the last hour."""
    try:
        found = [
            (float(at), int(size)) for at, size in read_json(_root() / _LEDGER, _MAX_LEDGER_BYTES)
        ]
    except (OSError, ValueError, TypeError, OverflowError):
        return []
    return [(at, size) for at, size in found if now - _HOUR < at <= now and size >= 0]


def is_forgotten(conversation: str, requested_at: float) -> bool:
    """Return whether the conversation was deleted after the time `requested_at`."""
    try:
        return _forgotten_mark(conversation).stat().st_mtime >= requested_at
    except OSError:
        return False


def _forgotten_mark(conversation: str) -> Path:
    return _root() / _FORGOTTEN / hashlib.sha256(conversation.encode()).hexdigest()
