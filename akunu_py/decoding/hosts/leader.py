"""Rank 0's model: it runs its share of each pass, having told the others what they run.

All else of a session is as for a model of one machine. What `kvcache` does to the model's caches
the others do too, before their next pass.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

import mlx.core as mx

from akunu_py.decoding import kvcache
from akunu_py.decoding.hosts.messages import Command, Do, encode
from akunu_py.errors import HostLost

_NOTES = {"trim": Do.TRIM, "roll_back": Do.ROLL_BACK, "detach": Do.DETACH, "shrink": Do.SHRINK}
_PLACES = {"checkpoint": Do.CHECKPOINT, "restore": Do.RESTORE}


class LedCache(kvcache.SharedCache):
    """A cache that the other ranks know by its `key`."""

    def __init__(self, own: kvcache.Cache, stand_ins: kvcache.Cache, leader: Leader) -> None:
        super().__init__(own, stand_ins)
        self._leader = leader
        self.key = leader.key_for(self, Do.DROP)
        leader.caches[self.key] = self

    def like(self, entries: kvcache.Cache) -> LedCache:
        own = len(self.own)
        other = LedCache(entries[:own], entries[own:], self._leader)
        self._leader.tell(Do.COMPACT, other.key, self.key)
        return other

    def note(self, done: str, *numbers: int) -> None:
        self._leader.tell(_NOTES[done], self.key, *numbers)

    def note_checkpoint(self, done: str, place: kvcache.Checkpoint) -> None:
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
        self._checkpoints: weakref.WeakKeyDictionary[kvcache.Checkpoint, int] = (
            weakref.WeakKeyDictionary()
        )
        self._commands: deque[Command] = deque()  # which finalizers in any thread add to
        self.messages = 0

    def make_cache(self) -> LedCache:
        cache = LedCache(kvcache.new_cache(self._model), copy.deepcopy(self._stand_ins), self)
        self.tell(Do.NEW, cache.key)
        return cache

    def __call__(self, tokens: mx.array, cache: LedCache) -> mx.array:
        """tokens [1, rows]. Returns logits [1, rows, vocab], which are under way."""
        logits = self._run(tokens, cache, wanted=True)
        mx.async_eval(logits)  # as the others do, whatever is done with ours
        return logits

    def fill(self, tokens: mx.array, cache: LedCache) -> None:
        """A pass of which nobody wants the logits; `kvcache.states` are to be evaluated."""
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

    def checkpoint_key(self, place: kvcache.Checkpoint) -> int:
        if place not in self._checkpoints:
            self._checkpoints[place] = self.key_for(place, Do.FORGET)
        return self._checkpoints[place]

    def _run(self, tokens: mx.array, cache: LedCache, *, wanted: bool) -> mx.array:
        self.tell(Do.PASS, cache.key, kvcache.held(cache), int(wanted))
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
