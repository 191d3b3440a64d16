"""Passes of a distributed model: rank 0 broadcasts them, the workers repeat them.

Before each pass rank 0 sends integers: [commands, rows, 4 integers per command, the pass's tokens].
A message longer than LENGTH continues in a second array. Commands repeat the cache operations of
rank 0.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from itertools import count
from typing import Any

import mlx.core as mx

from akunu_py.decoding import kv_cache
from akunu_py.errors import HostLost

LENGTH = 256  # integers, so that a plain and a drafted pass are one message each
_HEAD = 2
_EACH = 4


class HostCommand(IntEnum):
    """Commands. Caches and checkpoints have ids."""

    NEW = 1  # cache
    DROP = 2  # cache
    TRIM = 3  # cache, rows
    ROLL_BACK = 4  # cache, rows written, rows kept: of its last pass
    CHECKPOINT = 5  # cache, checkpoint, length
    RESTORE = 6  # cache, checkpoint
    FORGET = 7  # checkpoint
    COMPACT = 8  # new cache, cache
    DETACH = 9  # cache
    SHRINK = 10  # cache
    PASS = 11  # cache, its rows or -1, whether logits are needed
    REST = 12  # stop receiving until woken


Command = tuple[int, ...]


def encode(commands: Sequence[Command], tokens: mx.array | None) -> list[mx.array]:
    """Return the one or two arrays of a message. tokens [rows] may not be computed yet."""
    rows = 0 if tokens is None else tokens.shape[0]
    head = [len(commands), rows]
    for command in commands:
        head += [*command, *[0] * (_EACH - len(command))]
    parts = [mx.array(head, mx.int32)]
    if tokens is not None:
        parts.append(tokens.astype(mx.int32))
    length = len(head) + rows
    if length < LENGTH:
        parts.append(mx.zeros(LENGTH - length, mx.int32))
    whole = mx.concatenate(parts)
    return [whole] if length <= LENGTH else [whole[:LENGTH], whole[LENGTH:]]


def rest_of(first: Sequence[int]) -> int:
    """Return how many integers follow the first array."""
    return max(0, _HEAD + _EACH * first[0] + first[1] - LENGTH)


def decode(message: Sequence[int]) -> tuple[list[Command], list[int]]:
    """Return the commands and the pass's tokens."""
    count, rows = message[:_HEAD]
    behind = _HEAD + _EACH * count
    commands = [tuple(message[at : at + _EACH]) for at in range(_HEAD, behind, _EACH)]
    return commands, list(message[behind : behind + rows])


_NOTES = {
    "trim": HostCommand.TRIM,
    "roll_back": HostCommand.ROLL_BACK,
    "detach": HostCommand.DETACH,
    "shrink": HostCommand.SHRINK,
}
_PLACES = {"checkpoint": HostCommand.CHECKPOINT, "restore": HostCommand.RESTORE}


class ReplicatedCache(kv_cache.SharedCache):
    """A cache that workers mirror under its `key`."""

    def __init__(self, own: kv_cache.Cache, stand_ins: kv_cache.Cache, leader: Coordinator) -> None:
        super().__init__(own, stand_ins)
        self._leader = leader
        self.key = leader.key_for(self, HostCommand.DROP)
        leader.caches[self.key] = self

    def like(self, entries: kv_cache.Cache) -> ReplicatedCache:
        own = len(self.own)
        other = ReplicatedCache(entries[:own], entries[own:], self._leader)
        self._leader.tell(HostCommand.COMPACT, other.key, self.key)
        return other

    def note(self, done: str, *numbers: int) -> None:
        self._leader.tell(_NOTES[done], self.key, *numbers)

    def note_checkpoint(self, done: str, place: kv_cache.Checkpoint) -> None:
        self._leader.tell(_PLACES[done], self.key, self._leader.checkpoint_key(place), place.length)


class Coordinator:
    """A model whose other partitions run on workers."""

    def __init__(
        self,
        model: Any,
        stand_ins: list[Any],
        send: Callable[[mx.array], None],
        wake: Callable[[], None],
        check: Callable[[], None],
    ) -> None:
        """stand_ins: see `missing_kinds`. check: raises HostLost if a host is gone."""
        self._model, self._stand_ins, self._launch = model, stand_ins, send
        self._wake, self._check = wake, check
        self._resting = True
        self._keys = count(1)
        # By key:
        self.caches: weakref.WeakValueDictionary[int, ReplicatedCache] = (
            weakref.WeakValueDictionary()
        )
        self._checkpoints: weakref.WeakKeyDictionary[kv_cache.Checkpoint, int] = (
            weakref.WeakKeyDictionary()
        )
        self._commands: deque[Command] = deque()  # finalizers in any thread append
        self.messages = 0  # sent

    def make_cache(self) -> ReplicatedCache:
        cache = ReplicatedCache(
            kv_cache.new_cache(self._model), copy.deepcopy(self._stand_ins), self
        )
        self.tell(HostCommand.NEW, cache.key)
        return cache

    def __call__(self, tokens: mx.array, cache: ReplicatedCache) -> mx.array:
        """tokens [1, rows]. Returns logits [1, rows, vocab], launched."""
        logits = self._run(tokens, cache, wanted=True)
        mx.async_eval(logits)  # the workers evaluate theirs in every case
        return logits

    def fill(self, tokens: mx.array, cache: ReplicatedCache) -> None:
        """Run a pass without logits; evaluate `kv_cache.states` afterwards."""
        self._run(tokens, cache, wanted=False)

    def rest(self) -> None:
        """Let the workers sleep until the next message."""
        if not self._resting:
            self.tell(HostCommand.REST)
            with contextlib.suppress(HostLost, RuntimeError):  # raised again by the next pass
                self._send(None)
            self._resting = True

    @property
    def busy(self) -> bool:
        """Whether the workers wait for messages."""
        return not self._resting

    def tell(self, do: HostCommand, *numbers: int) -> None:
        """Add a command to the next message."""
        self._commands.append((do, *numbers))

    def key_for(self, owner: object, end: HostCommand) -> int:
        """Return a new key for `owner`; the command `end` is sent when `owner` is collected."""
        key = next(self._keys)
        weakref.finalize(owner, self._commands.append, (end, key)).atexit = False
        return key

    def checkpoint_key(self, place: kv_cache.Checkpoint) -> int:
        if place not in self._checkpoints:
            self._checkpoints[place] = self.key_for(place, HostCommand.FORGET)
        return self._checkpoints[place]

    def _run(self, tokens: mx.array, cache: ReplicatedCache, *, wanted: bool) -> mx.array:
        self.tell(HostCommand.PASS, cache.key, kv_cache.row_count(cache), int(wanted))
        self._send(tokens[0])
        logits: mx.array = self._model(tokens, cache=cache.own)
        cache.write_stand_ins(tokens.shape[1])
        return logits

    def _send(self, tokens: mx.array | None) -> None:
        self._check()
        if self._resting:
            self._wake()
            self._resting = False
        commands = [self._commands.popleft() for _ in range(len(self._commands))]
        for part in encode(commands, tokens):
            self._launch(part)
            self.messages += 1


class CacheMismatch(Exception):
    """This rank's cache differs from rank 0's."""


@dataclass(slots=True)
class PassCounts:
    """Counters of a worker."""

    passes: int = 0
    rows: int = 0
    cut: int = 0  # rows rolled back
    caches: int = 0
    checkpoints: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class PartitionRunner:
    """A worker's partition and its caches by rank 0's keys."""

    def __init__(
        self, model: Any, stand_ins: list[Any], receive: Callable[[int], list[int]]
    ) -> None:
        """stand_ins: see `division.missing_kinds`. receive: returns integers from rank 0."""
        self._model, self._stand_ins, self._receive = model, stand_ins, receive
        self._caches: dict[int, kv_cache.Cache] = {}
        self._checkpoints: dict[int, kv_cache.Checkpoint] = {}
        self._before: Any = None  # the last pass
        self._counts = PassCounts()

    def follow(self) -> None:
        """Run commands until REST. Raises RuntimeError if the connection breaks, CacheMismatch."""
        while True:
            message = self._receive(LENGTH)
            if rest := rest_of(message):
                message += self._receive(rest)
            commands, tokens = decode(message)
            for command in commands:
                if command[0] == HostCommand.REST:
                    mx.clear_cache()
                    return
                self._do(command, tokens)

    @property
    def counts(self) -> PassCounts:
        self._counts.caches, self._counts.checkpoints = len(self._caches), len(self._checkpoints)
        return self._counts

    @property
    def held(self) -> dict[int, int]:
        return {key: kv_cache.row_count(cache) for key, cache in self._caches.items()}

    def _do(self, command: Command, tokens: list[int]) -> None:
        do, key, *numbers = command
        if do == HostCommand.NEW:
            own = kv_cache.new_cache(self._model)
            self._caches[key] = kv_cache.SharedCache(own, copy.deepcopy(self._stand_ins))
        elif do == HostCommand.COMPACT:
            self._caches[key] = kv_cache.compact(self._caches[numbers[0]])
        elif do == HostCommand.FORGET:
            del self._checkpoints[key]
        elif do == HostCommand.DROP:
            del self._caches[key]
        else:
            self._do_to(self._caches[key], do, numbers, tokens)

    def _do_to(self, cache: Any, do: int, numbers: list[int], tokens: list[int]) -> None:
        if do == HostCommand.PASS:
            self._pass(cache, numbers[0], tokens, wanted=bool(numbers[1]))
        elif do == HostCommand.ROLL_BACK:
            self._counts.cut += numbers[0] - kv_cache.roll_back(cache, self._before, *numbers)
        elif do == HostCommand.TRIM:
            self._counts.cut += numbers[0]
            kv_cache.trim(cache, numbers[0])
        elif do == HostCommand.CHECKPOINT:
            self._checkpoints[numbers[0]] = kv_cache.checkpoint(cache, numbers[1])
        elif do == HostCommand.RESTORE:
            kv_cache.restore(cache, self._checkpoints[numbers[0]])
        elif do == HostCommand.DETACH:
            kv_cache.detach(cache)
        elif do == HostCommand.SHRINK:
            kv_cache.shrink(cache)

    def _pass(
        self, cache: kv_cache.SharedCache, held: int, tokens: list[int], *, wanted: bool
    ) -> None:
        if kv_cache.row_count(cache) != held:
            raise CacheMismatch(
                f"a cache holds {kv_cache.row_count(cache)} tokens, that of rank 0 {held}"
            )
        # Holding the state would prevent in-place writes of plain steps.
        self._before = kv_cache.pass_state(cache) if wanted and len(tokens) > 1 else None
        logits = self._model(mx.array([tokens]), cache=cache.own)
        cache.write_stand_ins(len(tokens))
        mx.async_eval(logits if wanted else kv_cache.state_arrays(cache))
        self._counts.passes += 1
        self._counts.rows += len(tokens)
