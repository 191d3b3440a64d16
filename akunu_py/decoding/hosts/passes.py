"""Passes of a divided model: rank 0 sends what it runs, the other ranks follow.

Before each pass rank 0 sends an array of integers, what was done to caches since the last one
first: [commands, rows, 4 integers a command, the tokens of the pass]. What is longer than LENGTH
follows in a second array, whose length the first one tells. All else of a session is as for a model
of one machine: what `kv_cache` does to the caches of rank 0 the others do before their next pass.
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


class Do(IntEnum):
    """What is done, with numbers: caches and checkpoints have ids."""

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
    PASS = 11  # cache, rows that it holds or -1, whether logits are wanted: over the tokens
    REST = 12  # no pass for now: wait to be woken, without asking for messages


Command = tuple[int, ...]


def encode(commands: Sequence[Command], tokens: mx.array | None) -> list[mx.array]:
    """The one or two arrays of a message. tokens [rows]: of its pass, perhaps not computed yet."""
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
    """How many integers follow the first array."""
    return max(0, _HEAD + _EACH * first[0] + first[1] - LENGTH)


def decode(message: Sequence[int]) -> tuple[list[Command], list[int]]:
    """The commands, and the tokens of the pass."""
    count, rows = message[:_HEAD]
    behind = _HEAD + _EACH * count
    commands = [tuple(message[at : at + _EACH]) for at in range(_HEAD, behind, _EACH)]
    return commands, list(message[behind : behind + rows])


_NOTES = {"trim": Do.TRIM, "roll_back": Do.ROLL_BACK, "detach": Do.DETACH, "shrink": Do.SHRINK}
_PLACES = {"checkpoint": Do.CHECKPOINT, "restore": Do.RESTORE}


class LedCache(kv_cache.SharedCache):
    """A cache that the other ranks know by its `key`."""

    def __init__(self, own: kv_cache.Cache, stand_ins: kv_cache.Cache, leader: Leader) -> None:
        super().__init__(own, stand_ins)
        self._leader = leader
        self.key = leader.key_for(self, Do.DROP)
        leader.caches[self.key] = self

    def like(self, entries: kv_cache.Cache) -> LedCache:
        own = len(self.own)
        other = LedCache(entries[:own], entries[own:], self._leader)
        self._leader.tell(Do.COMPACT, other.key, self.key)
        return other

    def note(self, done: str, *numbers: int) -> None:
        self._leader.tell(_NOTES[done], self.key, *numbers)

    def note_checkpoint(self, done: str, place: kv_cache.Checkpoint) -> None:
        self._leader.tell(_PLACES[done], self.key, self._leader.checkpoint_key(place), place.length)


class Leader:
    """A model whose other shares follow.

    caches: by the keys that the others know them by. messages: how many were sent.
    """

    def __init__(
        self,
        model: Any,
        stand_ins: list[Any],
        send: Callable[[mx.array], None],
        wake: Callable[[], None],
        check: Callable[[], None],
    ) -> None:
        """stand_ins: of an empty cache; see `division.missing_kinds`. send: an array [n] to all
        others, launched at once. wake: called before a message to those who rest. check: raises
        where one is gone."""
        self._model, self._stand_ins, self._launch = model, stand_ins, send
        self._wake, self._check = wake, check
        self._resting = True
        self._keys = count(1)
        self.caches: weakref.WeakValueDictionary[int, LedCache] = weakref.WeakValueDictionary()
        self._checkpoints: weakref.WeakKeyDictionary[kv_cache.Checkpoint, int] = (
            weakref.WeakKeyDictionary()
        )
        self._commands: deque[Command] = deque()  # which finalizers in any thread add to
        self.messages = 0

    def make_cache(self) -> LedCache:
        cache = LedCache(kv_cache.new_cache(self._model), copy.deepcopy(self._stand_ins), self)
        self.tell(Do.NEW, cache.key)
        return cache

    def __call__(self, tokens: mx.array, cache: LedCache) -> mx.array:
        """tokens [1, rows]. Returns logits [1, rows, vocab], which are under way."""
        logits = self._run(tokens, cache, wanted=True)
        mx.async_eval(logits)  # as the others do, whatever is done with ours
        return logits

    def fill(self, tokens: mx.array, cache: LedCache) -> None:
        """A pass of which nobody wants the logits; `kv_cache.states` are to be evaluated."""
        self._run(tokens, cache, wanted=False)

    def rest(self) -> None:
        """Lets the others sleep until the next message."""
        if not self._resting:
            self.tell(Do.REST)
            with contextlib.suppress(HostLost, RuntimeError):  # who asks next is told
                self._send(None)
            self._resting = True

    @property
    def busy(self) -> bool:
        """Whether the others wait for messages, and this rank perhaps for them."""
        return not self._resting

    def tell(self, do: Do, *numbers: int) -> None:
        """Something for the next message."""
        self._commands.append((do, *numbers))

    def key_for(self, owner: object, end: Do) -> int:
        """A key for something; `end` is told when nobody has it any more."""
        key = next(self._keys)
        weakref.finalize(owner, self._commands.append, (end, key)).atexit = False
        return key

    def checkpoint_key(self, place: kv_cache.Checkpoint) -> int:
        if place not in self._checkpoints:
            self._checkpoints[place] = self.key_for(place, Do.FORGET)
        return self._checkpoints[place]

    def _run(self, tokens: mx.array, cache: LedCache, *, wanted: bool) -> mx.array:
        self.tell(Do.PASS, cache.key, kv_cache.held(cache), int(wanted))
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


class OutOfStep(Exception):
    """This rank's cache is not what rank 0 has."""


@dataclass(slots=True)
class Counts:
    """What a rank has done. cut: rows that were taken away again."""

    passes: int = 0
    rows: int = 0
    cut: int = 0
    caches: int = 0
    checkpoints: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class Mirror:
    """A share of a model, and the caches that it has by rank 0's keys.

    held: rows in each of them by its key, -1 where nothing counts them.
    """

    def __init__(
        self, model: Any, stand_ins: list[Any], receive: Callable[[int], list[int]]
    ) -> None:
        """stand_ins: see `division.missing_kinds`. receive: so many integers of rank 0's."""
        self._model, self._stand_ins, self._receive = model, stand_ins, receive
        self._caches: dict[int, kv_cache.Cache] = {}
        self._checkpoints: dict[int, kv_cache.Checkpoint] = {}
        self._before: Any = None  # the last pass
        self._counts = Counts()

    def follow(self) -> None:
        """Does what rank 0 says until that lets it rest. Raises RuntimeError where the ring is
        broken, OutOfStep."""
        while True:
            message = self._receive(LENGTH)
            if rest := rest_of(message):
                message += self._receive(rest)
            commands, tokens = decode(message)
            for command in commands:
                if command[0] == Do.REST:
                    mx.clear_cache()
                    return
                self._do(command, tokens)

    @property
    def counts(self) -> Counts:
        self._counts.caches, self._counts.checkpoints = len(self._caches), len(self._checkpoints)
        return self._counts

    @property
    def held(self) -> dict[int, int]:
        return {key: kv_cache.held(cache) for key, cache in self._caches.items()}

    def _do(self, command: Command, tokens: list[int]) -> None:
        do, key, *numbers = command
        if do == Do.NEW:
            own = kv_cache.new_cache(self._model)
            self._caches[key] = kv_cache.SharedCache(own, copy.deepcopy(self._stand_ins))
        elif do == Do.COMPACT:
            self._caches[key] = kv_cache.compact(self._caches[numbers[0]])
        elif do == Do.FORGET:
            del self._checkpoints[key]
        elif do == Do.DROP:
            del self._caches[key]
        else:
            self._do_to(self._caches[key], do, numbers, tokens)

    def _do_to(self, cache: Any, do: int, numbers: list[int], tokens: list[int]) -> None:
        if do == Do.PASS:
            self._pass(cache, numbers[0], tokens, wanted=bool(numbers[1]))
        elif do == Do.ROLL_BACK:
            self._counts.cut += numbers[0] - kv_cache.roll_back(cache, self._before, *numbers)
        elif do == Do.TRIM:
            self._counts.cut += numbers[0]
            kv_cache.trim(cache, numbers[0])
        elif do == Do.CHECKPOINT:
            self._checkpoints[numbers[0]] = kv_cache.checkpoint(cache, numbers[1])
        elif do == Do.RESTORE:
            kv_cache.restore(cache, self._checkpoints[numbers[0]])
        elif do == Do.DETACH:
            kv_cache.detached(cache)
        elif do == Do.SHRINK:
            kv_cache.shrink(cache)

    def _pass(
        self, cache: kv_cache.SharedCache, held: int, tokens: list[int], *, wanted: bool
    ) -> None:
        if kv_cache.held(cache) != held:
            raise OutOfStep(f"a cache holds {kv_cache.held(cache)} tokens, that of rank 0 {held}")
        # A state that is held must not be in the way of steps that write in place.
        self._before = kv_cache.pass_state(cache) if wanted and len(tokens) > 1 else None
        logits = self._model(mx.array([tokens]), cache=cache.own)
        cache.write_stand_ins(len(tokens))
        mx.async_eval(logits if wanted else kv_cache.states(cache))
        self._counts.passes += 1
        self._counts.rows += len(tokens)
