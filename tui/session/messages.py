"""What the session thread tells the app.

Values only. `turn` is the number of the request that a message is about; the app ignores messages
about those that it has given up on.
"""

from __future__ import annotations

from dataclasses import dataclass

from textual.message import Message

from akunu_py.tui.conversation import Rejected, Span
from akunu_py.types import FinishReason, Stats


@dataclass(frozen=True, slots=True)
class Gauges:
    """What was measured besides the counts of one answer.

    memory: bytes that the model, its cache and the work on them take. speedup: times faster than
    plain decoding, by what the planner reckons that passes cost; None before it knows.
    """

    memory: int = 0
    speedup: float | None = None


@dataclass
class Loaded(Message):
    """The model is ready. no_draft: why it cannot draft, None where it can. note: what the person
    should know of how it fits into memory, "" for nothing."""

    model: str
    weights: str
    context_length: int
    no_draft: str | None = None
    note: str = ""
    gauges: Gauges = Gauges()


@dataclass
class Prefilling(Message):
    """`done` of `total` prompt tokens were read."""

    turn: int
    done: int
    total: int


@dataclass
class PieceArrived(Message):
    """More of the answer, over one or more passes.

    drafted: ranges into `text`. rejected: what was drafted and not accepted, each with the place
    in `text` where it was proposed. thinking: what the model thought before its answer. passes:
    how many tokens each pass yielded. stats: of the answer so far.
    """

    turn: int
    text: str
    drafted: tuple[Span, ...]
    stats: Stats
    thinking: str = ""
    rejected: tuple[Rejected, ...] = ()
    passes: tuple[int, ...] = ()
    gauges: Gauges = Gauges()


@dataclass
class Finished(Message):
    """The answer ended."""

    turn: int
    reason: FinishReason
    stats: Stats
    gauges: Gauges = Gauges()


@dataclass
class Failed(Message):
    """Something went wrong; `turn` is None where the model could not be loaded."""

    turn: int | None
    error: str
