"""What a rank but the first does: the passes that rank 0 tells it, and what was done to caches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx

from akunu_py.decoding import kvcache
from akunu_py.decoding.hosts.messages import LENGTH, Command, Do, decode, rest_of


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
        self._caches: dict[int, kvcache.Cache] = {}
        self._checkpoints: dict[int, kvcache.Checkpoint] = {}
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
        return {key: kvcache.held(cache) for key, cache in self._caches.items()}

    def _do(self, command: Command, tokens: list[int]) -> None:
        do, key, *numbers = command
        if do == Do.NEW:
            own = kvcache.new_cache(self._model)
            self._caches[key] = kvcache.SharedCache(own, copy.deepcopy(self._stand_ins))
        elif do == Do.COMPACT:
            self._caches[key] = kvcache.compact(self._caches[numbers[0]])
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
            self._counts.cut += numbers[0] - kvcache.roll_back(cache, self._before, *numbers)
        elif do == Do.TRIM:
            self._counts.cut += numbers[0]
            kvcache.trim(cache, numbers[0])
        elif do == Do.CHECKPOINT:
            self._checkpoints[numbers[0]] = kvcache.checkpoint(cache, numbers[1])
        elif do == Do.RESTORE:
            kvcache.restore(cache, self._checkpoints[numbers[0]])
        elif do == Do.DETACH:
            kvcache.detached(cache)
        elif do == Do.SHRINK:
            kvcache.shrink(cache)

    def _pass(
        self, cache: kvcache.SharedCache, held: int, tokens: list[int], *, wanted: bool
    ) -> None:
        if kvcache.held(cache) != held:
            raise OutOfStep(f"a cache holds {kvcache.held(cache)} tokens, that of rank 0 {held}")
        # A state that is held must not be in the way of steps that write in place.
        self._before = kvcache.pass_state(cache) if wanted and len(tokens) > 1 else None
        logits = self._model(mx.array([tokens]), cache=cache.own)
        cache.write_stand_ins(len(tokens))
        mx.async_eval(logits if wanted else kvcache.states(cache))
        self._counts.passes += 1
        self._counts.rows += len(tokens)
