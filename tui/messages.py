"""What the session thread tells the app.

Values only. `turn` is the number of the turn that a message is about; the app ignores messages
about turns that it has given up on.
"""

from __future__ import annotations

from dataclasses import dataclass

from textual.message import Message

from akunu_py.tui.conversation import Span
from akunu_py.types import FinishReason, Stats


@dataclass
class Loaded(Message):
    """The model is ready. `no_draft`: why it cannot draft, None where it can."""

    model: str
    weights: str
    context_length: int
    no_draft: str | None = None


@dataclass
class Prefilling(Message):
    """`done` of `total` prompt tokens were read."""

    turn: int
    done: int
    total: int


@dataclass
class PieceArrived(Message):
    """More of the answer. `drafted`: ranges into `text`; `stats`: of the answer so far."""

    turn: int
    text: str
    drafted: tuple[Span, ...]
    stats: Stats


@dataclass
class Finished(Message):
    """The answer ended."""

    turn: int
    reason: FinishReason
    stats: Stats


@dataclass
class Failed(Message):
    """Something went wrong; `turn` is None where the model could not be loaded."""

    turn: int | None
    error: str
