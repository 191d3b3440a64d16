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
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count
from typing import Any

import mlx.core as mx

from akunu_py.engine import kv_cache
from akunu_py.errors import HostLost

MESSAGE_LENGTH = 256  # integers, so that a plain and a drafted pass are one message each
_HEADER = 2  # integers
_WIDTH = 4  # integers of a command


class HostCommand(IntEnum):
    """Commands. Operations of `kv_cache` have the names of their functions."""

    NEW = 1  # cache
    DROP = 2  # cache
    TRIM = 3  # cache, rows
    ROLL_BACK = 4  # cache, rows written, rows kept: of its last pass
    CHECKPOINT = 5  # cache, checkpoint
    RESTORE = 6  # cache, checkpoint
    FORGET = 7  # checkpoint
    COMPACT = 8  # new cache, cache
    DETACH = 9  # cache
    SHRINK = 10  # cache
    PASS = 11  # cache, its rows or -1, whether logits are needed
    IDLE = 12  # stop receiving until woken


Command = tuple[int, ...]


def encode(commands: Sequence[Command], tokens: mx.array) -> list[mx.array]:
    """Return the one or two arrays of a message. tokens [rows] may not be computed yet."""
    head = [len(commands), tokens.size]
    for command in commands:
        head += [*command, *[0] * (_WIDTH - len(command))]
    whole = mx.concatenate([mx.array(head, mx.int32), tokens.astype(mx.int32)])
    if whole.size > MESSAGE_LENGTH:
        return mx.split(whole, [MESSAGE_LENGTH])
    return [mx.pad(whole, (0, MESSAGE_LENGTH - whole.size))]


def remaining_length(first: Sequence[int]) -> int:
    """Return the number of integers after the first array."""
    return max(0, _HEADER + _WIDTH * first[0] + first[1] - MESSAGE_LENGTH)


def decode(message: Sequence[int]) -> tuple[list[Command], list[int]]:
    """Return the commands and the pass's tokens."""
    count, rows = message[:_HEADER]
    end = _HEADER + _WIDTH * count
    commands = [tuple(message[at : at + _WIDTH]) for at in range(_HEADER, end, _WIDTH)]
    return commands, list(message[end : end + rows])


class ReplicatedCache(kv_cache.SharedCache):
    """A cache that workers replicate under its `key`."""

    def __init__(
        self, own: kv_cache.Cache, stand_ins: kv_cache.Cache, coordinator: Coordinator
    ) -> None:
        super().__init__(own, stand_ins)
        self._coordinator = coordinator
        self.key = coordinator.key_for(self, HostCommand.DROP)
        coordinator.caches[self.key] = self

    def like(self, entries: kv_cache.Cache) -> ReplicatedCache:
        own = len(self.own)
        other = ReplicatedCache(entries[:own], entries[own:], self._coordinator)
        self._coordinator.queue(HostCommand.COMPACT, other.key, self.key)
        return other

    def note(self, operation: str, *arguments: int | kv_cache.Checkpoint) -> None:
        key_of = self._coordinator.key_of_checkpoint
        numbers = (each if isinstance(each, int) else key_of(each) for each in arguments)
        self._coordinator.queue(HostCommand[operation.upper()], self.key, *numbers)


@dataclass(eq=False)
class Coordinator:
    """A model whose other partitions run on workers."""

    partition: Any  # the part of the model that rank 0 runs
    stand_ins: list[Any]  # see `keep_partition`
    send_array: Callable[[mx.array], None]
    wake: Callable[[], None]
    check: Callable[[], None]  # raises HostLost if a host is gone

    def __post_init__(self) -> None:
        self.busy = False  # the workers wait for messages
        self._keys = count(1)
        # By key:
        self.caches = weakref.WeakValueDictionary[int, ReplicatedCache]()
        self.checkpoints = weakref.WeakKeyDictionary[kv_cache.Checkpoint, int]()
        self._commands: deque[Command] = deque()  # finalizers in any thread append

    def make_cache(self) -> ReplicatedCache:
        cache = ReplicatedCache(
            kv_cache.new_cache(self.partition), copy.deepcopy(self.stand_ins), self
        )
        self.queue(HostCommand.NEW, cache.key)
        return cache

    def __call__(self, tokens: mx.array, cache: ReplicatedCache) -> mx.array:
        """tokens [1, rows]. Returns logits [1, rows, vocab], launched."""
        logits = self._run(tokens, cache, need_logits=True)
        mx.async_eval(logits)  # the workers evaluate theirs in every case
        return logits

    def prefill(self, tokens: mx.array, cache: ReplicatedCache) -> None:
        """Run a pass without logits; evaluate `kv_cache.states` afterwards."""
        self._run(tokens, cache, need_logits=False)

    def pause_workers(self) -> None:
        """Put the workers to sleep until the next message."""
        if self.busy:
            self.queue(HostCommand.IDLE)
            with contextlib.suppress(HostLost, RuntimeError):  # raised again by the next pass
                self._send(mx.array([], mx.int32))
            self.busy = False

    def queue(self, command: HostCommand, *numbers: int) -> None:
        """Add a command to the next message."""
        self._commands.append((command, *numbers))

    def key_for(self, owner: object, on_collect: HostCommand) -> int:
        """Return a new key for `owner`, whose collection queues the command `on_collect`."""
        key = next(self._keys)
        weakref.finalize(owner, self._commands.append, (on_collect, key)).atexit = False
        return key

    def key_of_checkpoint(self, checkpoint: kv_cache.Checkpoint) -> int:
        if checkpoint not in self.checkpoints:
            self.checkpoints[checkpoint] = self.key_for(checkpoint, HostCommand.FORGET)
        return self.checkpoints[checkpoint]

    def _run(self, tokens: mx.array, cache: ReplicatedCache, *, need_logits: bool) -> mx.array:
        self.queue(HostCommand.PASS, cache.key, kv_cache.row_count(cache), int(need_logits))
        self._send(tokens[0])
        logits: mx.array = self.partition(tokens, cache=cache.own)
        cache.write_stand_ins(tokens.shape[1])
        return logits

    def _send(self, tokens: mx.array) -> None:
        self.check()
        if not self.busy:
            self.wake()
            self.busy = True
        commands = [self._commands.popleft() for _ in range(len(self._commands))]
        for part in encode(commands, tokens):
            self.send_array(part)


@dataclass
class PartitionRunner:
    """A worker's partition and its caches by rank 0's keys."""

    model: Any
    stand_ins: list[Any]  # see `keep_partition`
    receive: Callable[[int], list[int]]  # returns integers from rank 0
    caches: dict[int, kv_cache.Cache] = field(default_factory=dict)
    checkpoints: dict[int, kv_cache.Checkpoint] = field(default_factory=dict)
    _last_pass: Any = None  # state to roll back to

    def run_until_idle(self) -> None:
        """Run commands until IDLE. Raises RuntimeError if rank 0 is gone or its cache differs."""
        while True:
            message = self.receive(MESSAGE_LENGTH)
            if missing := remaining_length(message):
                message += self.receive(missing)
            commands, tokens = decode(message)
            for command in commands:
                if command[0] == HostCommand.IDLE:
                    mx.clear_cache()
                    return
                self._execute(command, tokens)

    def _execute(self, command: Command, tokens: list[int]) -> None:
        kind, key, *numbers = command
        cache: Any = self.caches.get(key)  # None for a new one
        if kind == HostCommand.NEW:
            own = kv_cache.new_cache(self.model)
            self.caches[key] = kv_cache.SharedCache(own, copy.deepcopy(self.stand_ins))
        elif kind == HostCommand.COMPACT:
            self.caches[key] = kv_cache.compact(self.caches[numbers[0]])
        elif kind == HostCommand.FORGET:
            del self.checkpoints[key]
        elif kind == HostCommand.DROP:
            del self.caches[key]
        elif kind == HostCommand.PASS:
            self._run_pass(cache, numbers[0], tokens, need_logits=bool(numbers[1]))
        elif kind == HostCommand.ROLL_BACK:
            kv_cache.roll_back(cache, self._last_pass, *numbers)
        elif kind == HostCommand.TRIM:
            kv_cache.trim(cache, numbers[0])
        elif kind == HostCommand.CHECKPOINT:
            rows = kv_cache.row_count(cache)
            self.checkpoints[numbers[0]] = kv_cache.checkpoint(cache, rows)
        elif kind == HostCommand.RESTORE:
            kv_cache.restore(cache, self.checkpoints[numbers[0]])
        elif kind == HostCommand.DETACH:
            kv_cache.detach(cache)
        elif kind == HostCommand.SHRINK:
            kv_cache.shrink(cache)

    def _run_pass(
        self, cache: kv_cache.SharedCache, held: int, tokens: list[int], *, need_logits: bool
    ) -> None:
        if kv_cache.row_count(cache) != held:
            raise RuntimeError(
                f"a cache holds {kv_cache.row_count(cache)} tokens, that of rank 0 {held}"
            )
        # Holding the state would prevent in-place writes of plain steps.
        self._last_pass = kv_cache.pass_state(cache) if need_logits and len(tokens) > 1 else None
        logits = self.model(mx.array([tokens]), cache=cache.own)
        cache.write_stand_ins(len(tokens))
        mx.async_eval(logits if need_logits else kv_cache.state_arrays(cache))
