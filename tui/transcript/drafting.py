"""The drafting view: an answer as plain text with its drafts marked, and the panel below it.

Tokens are accepted drafts, rejected drafts, or the model's own. Everything shown goes through
`text.displayable`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import ClassVar

from textual.containers import Vertical
from textual.content import Content
from textual.content import Span as Styled
from textual.reactive import reactive
from textual.style import Style
from textual.widget import Widget

from akunu_py.text import displayable, on_one_line
from akunu_py.tui.open_conversation import ChatTurn
from akunu_py.types import NotCached, Stats

_BARS = "▁▂▃▄▅▆▇█"
_MAX_BAR = 8  # tokens in a pass; more look the same
_MAX_BARS = 16
_ROOM_FOR_LABELS = 60  # columns
# Why tokens of a cached prefix are prefilled again.
_NOT_CACHED: dict[NotCached, str] = {
    "evicted": "no memory",
    "no checkpoint": "no way back",
    "slow disk": "faster than from disk",
    "damaged file": "its file was damaged",
    "other KV width": "saved with other --kv-bits",
    "other weights": "the model is another one",
    "other context": "saved with a larger --context",
}
_EXPLANATION = "akunu guesses ahead, and the model checks several words at once."


class DraftedSection(Widget):
    """A part of an answer as plain text: `answer[start:end]`, up to its end for None.

    Rejected drafts stand where they were proposed, before the bonus token. marked: False shows the
    text alone.
    """

    COMPONENT_CLASSES: ClassVar[set[str]] = {"drafted--accepted", "drafted--rejected"}

    def __init__(self, turn: ChatTurn, start: int, *, marked: bool) -> None:
        super().__init__()
        self._turn = turn
        self._is_marked = marked
        self.start = start
        self.end: int | None = None

    def render(self) -> Content:
        accepted = self.get_visual_style("drafted--accepted", partial=True)
        struck = self.get_visual_style("drafted--rejected", partial=True)
        answer, start = self._turn.answer, self.start
        end = len(answer) if self.end is None else self.end
        if not self._is_marked:
            return Content(displayable(answer[start:end]))
        parts: list[str] = []
        styles: list[Styled] = []
        length = 0
        for place, rejected in self._rejected(end):
            length += self._append(parts, styles, length, (start, place), accepted)
            text = on_one_line(rejected)
            styles.append(Styled(length, length + len(text), struck))
            parts.append(text)
            length += len(text)
            start = place
        self._append(parts, styles, length, (start, end), accepted)
        return Content("".join(parts), spans=styles)

    def _rejected(self, end: int) -> Sequence[tuple[int, str]]:
        rejected = self._turn.rejected
        first = bisect_left(rejected, self.start, key=lambda each: each[0])
        last = len(rejected)
        if self.end is not None:  # what was proposed at the very end belongs to the next section
            last = bisect_right(rejected, end, key=lambda each: each[0])
        return rejected[first:last]

    def _append(
        self,
        parts: list[str],
        styles: list[Styled],
        length: int,
        part: tuple[int, int],
        accepted: Style,
    ) -> int:
        """Appends a part of the answer after `length` characters; returns its own length."""
        start, end = part
        parts.append(displayable(self._turn.answer[start:end]))
        spans = self._turn.spans
        first = bisect_right(spans, start, key=lambda span: span[1])
        last = bisect_left(spans, (end, 0))
        for span in spans[first:last]:
            marked = max(span[0], start) - start, min(span[1], end) - start
            styles.append(Styled(length + marked[0], length + marked[1], accepted))
        return end - start


class DraftedText(Vertical):
    """An answer as plain text in which drafts are marked; `marked=False` shows the text alone.

    Cut into sections at newlines, so that a long answer is not wrapped again for every token.
    """

    SECTION = 1500  # characters

    def __init__(self, turn: ChatTurn, *, marked: bool = True) -> None:
        self._turn = turn
        self._is_marked = marked
        self._last = DraftedSection(turn, 0, marked=marked)
        super().__init__(self._last, *self._cut())

    def sync(self) -> None:
        """Draws what was added to the turn."""
        self._last.refresh(layout=True)
        if more := self._cut():
            self.mount_all(more)

    def _cut(self) -> list[DraftedSection]:
        """Ends the last section where it is long enough; returns those that follow it."""
        more: list[DraftedSection] = []
        while (end := self._turn.answer.find("\n", self._last.start + self.SECTION)) >= 0:
            self._last.end = end
            self._last = DraftedSection(self._turn, end + 1, marked=self._is_marked)
            more.append(self._last)
        return more


class DraftingPanel(Widget, can_focus=False):
    """What the marks mean, how many words the last steps yielded, the estimated speedup, and the
    numbers of the answer. explains: the first line says what drafting is."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "drafted--accepted",
        "drafted--rejected",
        "drafted--bars",
        "drafted--value",
        "drafted--words",
    }

    explains: reactive[bool] = reactive(False)

    def __init__(self, id: str) -> None:
        super().__init__(id=id)
        self._passes: Sequence[int] = ()
        self._speedup: float | None = None
        self._stats: Stats | None = None

    def show(self, turn: ChatTurn | None) -> None:
        """Shows the passes of `turn`, and how much faster than plain decoding they were."""
        self._passes = turn.passes[-_MAX_BARS:] if turn else ()
        self._speedup = turn.speedup if turn else None
        self._stats = turn.stats if turn else None
        self.refresh()

    def render(self) -> Content:
        lines = [self._legend(), self._speed(), self._numbers()]
        if self.explains:
            lines = [Content(_EXPLANATION), *lines[:2]]
        width = self.size.width
        return Content("\n").join(line.truncate(width, ellipsis=True) for line in lines)

    def _legend(self) -> Content:
        words = self._style("words")
        long = self.size.width >= _ROOM_FOR_LABELS
        wrong = "guessed wrong, discarded" if long else "guessed wrong"
        return Content.assemble(
            ("guessed right", self._style("accepted")),
            ("   the model's own words   " if long else "  ", words),
            (wrong, self._style("rejected")),
            ("   F2 back" if long else "", words),
        )

    def _speed(self) -> Content:
        words = self._style("words")
        stats = self._stats
        parts: list[str | tuple[str, Style]] = [
            (sparkline(self._passes, _MAX_BARS), self._style("bars"))
        ]
        if stats and stats.target_passes:
            parts += [
                (f" {stats.tokens_per_pass:.1f}", self._style("value")),
                (" words a step", words),
            ]
        if self._speedup and not 0.95 <= self._speedup < 1.05:
            faster = " faster (estimate)" if self._speedup > 1 else " as fast (estimate)"
            parts += [
                (", about " if self.size.width >= _ROOM_FOR_LABELS else ", ", words),
                (f"{self._speedup:.1f}x", self._style("value")),
                (faster, words),
            ]
        elif self._speedup:
            parts.append((", no faster than one by one (estimate)", words))
        return Content.assemble(*parts)

    def _numbers(self) -> Content:
        """Acceptance, TTFT and cached tokens, in plain words, as far as they are known."""
        stats = self._stats
        if stats is None:
            return Content("")
        parts = []
        if stats.drafted:
            parts.append(f"{stats.acceptance_rate:.0%} of {stats.drafted:,} guesses right")
        if stats.prefill_s:
            parts.append(f"first word after {stats.prefill_s:.1f} s")
        if stats.known_tokens or stats.cached_tokens:
            again = stats.known_tokens - stats.cached_tokens
            why = _NOT_CACHED.get(stats.not_cached, "unknown why")
            parts.append(
                f"{stats.cached_tokens:,} tokens read before"
                + (f", {again:,} again: {why}" if again > 0 else "")
            )
        return Content.styled(" · ".join(parts), self._style("words"))

    def _style(self, name: str) -> Style:
        return self.get_visual_style(f"drafted--{name}", partial=True)


def sparkline(passes: Sequence[int], width: int) -> str:
    """The last `width` passes, a bar each: the higher, the more tokens; filled up to `width`."""
    heights = (min(tokens, _MAX_BAR) - 1 for tokens in passes[-width:])
    return "".join(_BARS[max(0, height)] for height in heights).rjust(width, "·")
