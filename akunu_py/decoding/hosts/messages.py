"""What rank 0 tells the others: an array of integers before each pass, what was done to caches
since the last one first.

A message is [commands, rows, 4 integers a command, the tokens of the pass]. What is longer than
LENGTH follows in a second array, whose length the first one tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import mlx.core as mx

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
