"""Prompt caches on disk: `prompt-caches/MODEL/*.safetensors` in the cache directory.

Files are renamed into place and never changed. Only the process that holds `lock` writes and cleans
up. `written.json` lists recent writes, `forgotten` deleted conversations.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from akunu_py import paths
from akunu_py.decoding.prompt_cache import cache_file
from akunu_py.decoding.prompt_cache.cache_file import SUFFIX, CacheMetadata, SaveStopped, Stopped
from akunu_py.decoding.token_ids import common_prefix
from akunu_py.errors import AkunuError, DamagedCache, StoreError, UsageError
from akunu_py.files import read_bounded, read_json, write_atomically
from akunu_py.types import NotCached

if TYPE_CHECKING:
    from akunu_py.decoding.model.engine import Engine
    from akunu_py.decoding.prompt_cache.history import TokenHistory

LEAST = 256  # tokens; shorter prefixes are not worth loading
_LOCK, _WRITTEN = "lock", "written.json"
_HOUR = 3600.0
_MOST_OF_LEDGER = 1 << 20  # bytes
_PAUSE = 600.0  # seconds without writes after a disk error
_MOST_FILES = 64  # of a model
_OPEN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


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
    about: CacheMetadata
    size: int
    used: float


class PromptCacheStore:
    """The prompt caches of one model on disk. Disk errors count as cache misses."""

    def __init__(
        self, model: Path, limits: DiskLimits | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.directory = paths.prompt_caches_dir() / paths.model_directory_name(model)
        self.limits = limits or DiskLimits()
        self._clock = clock
        self._known: dict[
            tuple[str, int, int], CacheMetadata | None
        ] = {}  # by name, inode and size
        self._swept = False
        self._refused = -_PAUSE

    def saved(self, engine: Engine) -> list[SavedCache]:
        """Return the files that `engine` can continue, by their headers."""
        return [each for each in self._all() if not why_not(each.about, engine)]

    def of_no_use(self, prompt: Sequence[int], engine: Engine) -> tuple[int, NotCached]:
        """Return the tokens of `prompt` in an incompatible file, and why it is."""
        there = [each.about for each in self._all() if each.about.tokenizer == engine.tokens.digest]
        found = [(each.shared(prompt), why_not(each, engine)) for each in there]
        return max((each for each in found if each[1]), default=(0, ""))

    def _all(self) -> list[SavedCache]:
        if not self._swept:
            self._swept = True
            with self._alone() as alone:
                if alone:
                    sweep(self.limits, self._clock())
        found = []
        for path, status in _files(self.directory):
            key = path.name, status.st_ino, status.st_size
            if key not in self._known:
                self._known[key] = _about(path)
            about = self._known[key]
            if about is not None:
                found.append(SavedCache(path, about, status.st_size, status.st_mtime))
        return found

    def find(self, prompt: Sequence[int], engine: Engine) -> tuple[int, SavedCache] | None:
        """Return the file that saves the most prefill of `prompt`, and those tokens."""
        found = [(each.about.reach(prompt), each) for each in self.saved(engine)]
        return max(found, key=lambda each: each[0], default=None)

    def load(self, saved: SavedCache, engine: Engine) -> TokenHistory | NotCached:
        """Load a file's history, or return why it cannot be used; bad files are deleted."""
        from akunu_py.decoding.prompt_cache import disk

        try:
            history = disk.load(engine, saved.path)
        except (DamagedCache, UsageError) as error:  # or of a model that was here before
            with contextlib.suppress(OSError):
                saved.path.unlink()
            return "damaged file" if isinstance(error, DamagedCache) else "other weights"
        except StoreError:
            return "damaged file"
        with contextlib.suppress(OSError):
            os.utime(saved.path)
        return history

    def may_write(self, nbytes: int) -> bool:
        """Return whether the limits allow writing `nbytes` bytes now."""
        now, limits = self._clock(), self.limits
        if now < self._refused + _PAUSE or nbytes > limits.size:
            return False
        with contextlib.suppress(OSError):
            there = next(each for each in self.directory.parents if each.exists())
            room = shutil.disk_usage(there).free - limits.reserve
            written = sum(size for _, size in _written(now))
            return nbytes <= room and written + nbytes <= limits.hourly
        return False

    def save(self, history: TokenHistory, engine: Engine, stopped: Stopped) -> bool:
        """Save a history in place of its prefixes; False if not allowed or `stopped`."""
        from akunu_py.decoding.prompt_cache import disk

        with self._alone() as alone:
            if not alone or not self.may_write(history.nbytes):
                return False
            path = self.directory / f"{secrets.token_hex(8)}{SUFFIX}"
            try:
                self.directory.mkdir(mode=0o700, exist_ok=True)
                disk.save(history, engine, path, stopped)
                size = path.stat().st_size
                if is_forgotten(history.conversation, history.asked):  # meanwhile
                    remove(path)
            except SaveStopped as end:
                self._note(end.written)
                return False
            except (AkunuError, OSError):
                self._refused = self._clock()
                return False
            self._note(size)
            for each in self.saved(engine):
                shared = common_prefix(each.about.tokens, history.tokens)
                if each.path != path and len(each.about.tokens) - shared < LEAST:
                    remove(each.path)
            sweep(self.limits, self._clock())
            return True

    def _note(self, nbytes: int) -> None:
        now = self._clock()
        with contextlib.suppress(OSError):
            ledger = json.dumps([*_written(now), (now, nbytes)])
            write_atomically(_root() / _WRITTEN, ledger.encode())

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Yield whether this is the only process that writes."""
        lock = None
        try:
            _root().mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(_root() / _LOCK, os.O_RDWR | os.O_CREAT | _OPEN, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except OSError:
            alone = False
        try:
            yield alone
        finally:
            if lock is not None:
                os.close(lock)


def why_not(about: CacheMetadata, engine: Engine) -> NotCached:
    """Return why `engine` cannot continue a file, by its header; "" if it can."""
    if (about.tokenizer, about.weights) != (engine.tokens.digest, engine.plan.weights):
        return "other weights"
    if about.kv_bits != engine.plan.kv_bits:
        return "other KV width"
    return "" if len(about.tokens) < engine.plan.context_length else "other context"


def all_files() -> list[Path]:
    """Return the files of all models, last used first."""
    found = [each for directory in _directories() for each in _files(directory)]
    return [path for path, _ in sorted(found, key=lambda each: -each[1].st_mtime)]


def remove(path: Path) -> int:
    """Delete a file; return the bytes freed. Raises StoreError."""
    with cache_file.disk_errors(f"cannot delete {path}"), contextlib.suppress(FileNotFoundError):
        size = path.stat().st_size
        path.unlink()
        return size
    return 0


def forget(model: Path | None = None) -> int:
    """Delete all files of `model` or of every model; return the bytes freed. Raises StoreError."""
    wanted = [_root() / paths.model_directory_name(model)] if model else _directories()
    with cache_file.disk_errors("cannot read the prompt caches"):
        return sum(remove(path) for each in wanted if each.is_dir() for path in each.iterdir())


def forget_conversation(conversation: str) -> None:
    """Delete a conversation's prompt caches and prevent new ones. Raises StoreError."""
    with cache_file.disk_errors("cannot delete what was read of the conversation"):
        note_forgotten(conversation)
    for path in all_files():
        about = _about(path)
        if about is not None and about.conversation == conversation:
            remove(path)


def sweep(limits: DiskLimits, now: float) -> None:
    """Delete unfinished, old and excess files. The caller must be the only writer."""
    kept: list[tuple[float, int, Path]] = []
    for directory in _directories():
        with contextlib.suppress(OSError):
            for path in directory.glob(f".*{SUFFIX}"):
                path.unlink()
        files = sorted(_files(directory), key=lambda each: -each[1].st_mtime)
        kept += [(status.st_mtime, status.st_size, path) for path, status in files[:_MOST_FILES]]
        kept += [(0.0, status.st_size, path) for path, status in files[_MOST_FILES:]]
    total = 0
    for used, size, path in sorted(kept, reverse=True):
        if used + limits.age < now or total + size > limits.size:
            with contextlib.suppress(OSError):
                path.unlink()
        else:
            total += size


def _root() -> Path:
    return paths.prompt_caches_dir()


def _directories() -> list[Path]:
    try:
        return [path for path in _root().iterdir() if path.is_dir() and not path.is_symlink()]
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


def _about(path: Path) -> CacheMetadata | None:
    """Return a file's header, None if it is unusable; deletes damaged files."""
    try:
        return cache_file.read(path).about
    except DamagedCache:
        with contextlib.suppress(OSError):
            path.unlink()
    except AkunuError:  # of another version, or it cannot be read
        pass
    return None


def _written(now: float) -> list[tuple[float, int]]:
    """Return (time, bytes) of the writes in the last hour."""
    try:
        found = [
            (float(at), int(size)) for at, size in read_json(_root() / _WRITTEN, _MOST_OF_LEDGER)
        ]
    except (OSError, ValueError, TypeError, OverflowError):
        return []
    return [(at, size) for at, size in found if now - _HOUR < at <= now and size >= 0]


_MOST_FORGOTTEN = 1 << 17  # bytes; half of the lines go then
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def note_forgotten(conversation: str) -> None:
    """Record a deleted conversation. Raises OSError."""
    path = paths.prompt_caches_dir() / "forgotten"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lines = _forgotten_lines()
    if sum(map(len, lines)) > _MOST_FORGOTTEN:
        write_atomically(path, b"\n".join(lines[len(lines) // 2 :]) + b"\n")
    file = os.open(path, _APPEND, 0o600)
    try:
        os.write(file, f"{time.time()} {conversation}\n".encode())  # atomic, even if others append
    finally:
        os.close(file)


def is_forgotten(conversation: str, asked: float) -> bool:
    """Return whether the conversation was deleted after the time `asked`."""
    if not conversation:
        return False
    for line in _forgotten_lines():
        at, _, which = line.partition(b" ")
        try:
            if which == conversation.encode() and float(at) >= asked:
                return True
        except ValueError:  # damaged
            continue
    return False


def _forgotten_lines() -> list[bytes]:
    try:
        return read_bounded(
            paths.prompt_caches_dir() / "forgotten", 2 * _MOST_FORGOTTEN
        ).splitlines()
    except OSError:
        return []
