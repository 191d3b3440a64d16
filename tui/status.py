"""The status line: what the program is doing, and how well the drafting does.

Every number has a place of its own, so nothing moves while they change.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from textual.content import Content
from textual.reactive import reactive
from textual.style import Style
from textual.widget import Widget

from akunu_py.tui.text import displayable
from akunu_py.types import Stats

Phase = Literal["loading", "ready", "reading", "answering", "stopped", "failed"]

_MARKS: dict[Phase, str] = {
    "loading": "○",
    "ready": "●",
    "reading": "◐",
    "answering": "▶",
    "stopped": "■",
    "failed": "×",
}
_STATE_WIDTH = 12  # the longest is "reading 100%"
_WIDE, _MEDIUM = 74, 56


class StatusLine(Widget):
    """One line: state and model on the left, the numbers of the last answer on the right."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
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

    def __init__(self, model: str, id: str) -> None:
        super().__init__(id=id)
        self._model = displayable(model).replace("\n", " ")

    def render(self) -> Content:
        numbers = self._numbers()
        state = self._state()
        room = max(0, self.size.width - state.cell_length - numbers.cell_length)
        name = Content(self._model)
        if self.size.width < _MEDIUM:
            name = Content("")  # no room for a name that says anything
        elif name.cell_length > room - 2:
            name = name.truncate(max(0, room - 2), ellipsis=True)
        unit = self.get_visual_style("status--unit", partial=True)
        gap = " " * max(0, room - name.cell_length)
        return Content.assemble(state, (name.plain, unit), gap, numbers)

    def _state(self) -> Content:
        words = f"reading {self.progress:.0%}" if self.phase == "reading" else self.phase
        style = self.get_visual_style(f"status--{self.phase}", partial=True)
        return Content.assemble((f"{_MARKS[self.phase]} {words:<{_STATE_WIDTH}}  ", style))

    def _numbers(self) -> Content:
        """Speed, acceptance rate and tokens per pass; a dash stands for what is not known yet."""
        number = self.get_visual_style("status--number", partial=True)
        unit = self.get_visual_style("status--unit", partial=True)
        parts: list[str | tuple[str, Style]] = []
        for value, short, middle, long in self._fields():
            wide, medium = self.size.width >= _WIDE, self.size.width >= _MEDIUM
            label = long if wide else middle if medium else short
            parts += ["  " if parts else "", (value, number), (label, unit)]
        return Content.assemble(*parts)

    def _fields(self) -> list[tuple[str, str, str, str]]:
        """(value, its unit when narrow, medium, wide); all values of fixed width."""
        stats = self.stats
        speed = f"{stats.tokens_per_s:6.1f}" if stats and stats.decode_s else f"{'–':>6}"
        rate = f"{stats.acceptance_rate:4.0%}" if stats and stats.drafted else f"{'–':>4}"
        per_pass = f"{stats.tokens_per_pass:5.2f}" if stats and stats.target_passes else f"{'–':>5}"
        return [
            (speed, "/s", " tok/s", " tokens/s"),
            (rate, "", " acc", " accepted"),
            (per_pass, "x", " /pass", " tokens/pass"),
        ]
