"""The status line: what the program is doing, and how well the drafting does.

Every number has a place of its own, so nothing moves while they change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from textual.content import Content
from textual.reactive import reactive
from textual.style import Style
from textual.widget import Widget

from akunu_py.tui.session_thread import Gauges
from akunu_py.types import Stats

Phase = Literal["fetching", "loading", "ready", "reading", "answering", "stopped", "failed"]

_MARKS: dict[Phase, str] = {
    "fetching": "↓",
    "loading": "○",
    "ready": "●",
    "reading": "◐",
    "answering": "▶",
    "stopped": "■",
    "failed": "×",
}
_STATE_WIDTH = 9  # the longest is "answering"
_GAP = 2  # columns between two numbers, at least
_UNKNOWN = "–"


@dataclass(frozen=True, slots=True)
class Field:
    """A number of fixed width, and its unit for narrow, usual and wide lines.

    rank: fields with high ranks are left out first.
    """

    value: str
    units: tuple[str, str, str]
    rank: int


class StatusLine(Widget):
    """One line: the state on the left, the numbers of the last answer on the right."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "status--fetching",
        "status--loading",
        "status--ready",
        "status--reading",
        "status--answering",
        "status--stopped",
        "status--failed",
        "status--number",
        "status--unit",
    }

    phase: reactive[Phase] = reactive[Phase]("loading")
    progress: reactive[float] = reactive(0.0)
    stats: reactive[Stats | None] = reactive[Stats | None](None)
    gauges: reactive[Gauges] = reactive(Gauges())

    def render(self) -> Content:
        state = self._state()
        room = self.size.width - state.cell_length
        numbers = self._numbers(room)
        gap = " " * max(0, room - numbers.cell_length)
        return Content.assemble(state, gap, numbers)

    def _state(self) -> Content:
        words: str = self.phase
        if words == "reading":
            words = f"read {self.progress:4.0%}"
        elif words == "fetching":  # 100% would not fit; another phase follows anyway
            words = f"fetch {min(self.progress, 0.99):3.0%}"
        style = self.get_visual_style(f"status--{self.phase}", partial=True)
        return Content.assemble((f"{_MARKS[self.phase]} {words:<{_STATE_WIDTH}}", style))

    def _numbers(self, room: int) -> Content:
        """As many numbers as there is room for, with units as long as there is room for."""
        number = self.get_visual_style("status--number", partial=True)
        unit = self.get_visual_style("status--unit", partial=True)
        fields = fields_of(self.stats, self.gauges)
        shown, length = _fitting(fields, room)
        parts: list[str | tuple[str, Style]] = []
        for field in shown:
            parts += ["  " if parts else "", (field.value, number), (field.units[length], unit)]
        return Content.assemble(*parts)


def fields_of(stats: Stats | None, gauges: Gauges) -> list[Field]:
    """What is known of an answer; a dash stands for what is not known yet."""
    known = stats or Stats()
    return [
        Field(
            _fixed(f"{known.tokens_per_s:.1f}"[:5].rstrip("."), 5, bool(known.decode_s)),
            ("/s", " tok/s", " tokens/s"),
            0,
        ),
        Field(
            _fixed(_seconds(known.prefill_s), 5, bool(known.prefill_s)),
            (" first", " first", " to first token"),
            3,
        ),
        Field(
            _fixed(f"{known.acceptance_rate:.0%}", 4, bool(known.drafted)),
            ("", " acc", " accepted"),
            1,
        ),
        Field(
            _fixed(f"{known.tokens_per_pass:.2f}"[:4], 4, bool(known.target_passes)),
            ("x", "/pass", " tokens/pass"),
            2,
        ),
        Field(
            _fixed(f"{known.cached_tokens}", 5, bool(known.generated_tokens)),
            (" cached", " cached", " tokens cached"),
            4,
        ),
        Field(
            _fixed(f"{gauges.memory / 1e9:.1f}", 4, bool(gauges.memory)),
            ("GB", "GB", " GB memory"),
            5,
        ),
    ]


def _fitting(fields: list[Field], room: int) -> tuple[list[Field], int]:
    """The fields that fit into `room` columns, and which of their units."""
    for highest in range(len(fields) - 1, 0, -1):
        shown = [field for field in fields if field.rank <= highest]
        for length in (2, 1) if highest > 2 else (2, 1, 0):
            width = sum(len(field.value) + len(field.units[length]) for field in shown)
            if width + _GAP * (len(shown) - 1) <= room:
                return shown, length
    return fields[:1], 0


def _fixed(value: str, width: int, known: bool) -> str:
    return f"{value if known else _UNKNOWN:>{width}}"


def _seconds(seconds: float) -> str:
    """Five characters at most, the unit among them."""
    return f"{seconds:.2f}s" if seconds < 9.995 else f"{seconds:.1f}s" if seconds < 100 else "99+s"
