"""The drafting view: an answer as plain text with marked drafts, and the panel below it."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import ClassVar

from textual.containers import Vertical
from textual.content import Content
from textual.content import Span as Styled
from textual.reactive import reactive
from textual.style import Style
from textual.widget import Widget

from akunu_py.text import displayable, on_one_line
from akunu_py.tui.open_conversation import ChatTurn
from akunu_py.tui.status import Unmarked
from akunu_py.tui.transcript.code import TAB_SIZE
from akunu_py.types import NotCached, Stats

_BARS = "▁▂▃▄▅▆▇█"
_MAX_BAR = 8  # tokens of the highest bar
_MAX_BARS = 16
_ROOM_FOR_LABELS = 60  # columns
# Why tokens of a cached prefix are prefilled again.
_NOT_CACHED: dict[NotCached, str] = {
    "evicted": "evicted",
    "no checkpoint": "no checkpoint there",
    "slow disk": "faster than loading from disk",
    "damaged file": "the cache file is damaged",
    "other KV width": "saved with other --kv-bits",
    "other weights": "the model has changed",
    "other context": "saved with a larger --context",
}
_PAYS = 1.05  # smallest estimated speedup that is worth mentioning
_MIN_PASSES = 8  # decode steps before a missing draft means something
_LINE_START = re.compile(r"[ \t]*")
_LINE_BREAK = re.compile(r"(?<![ \t])[ \t]*\n\s*")
_EXPLANATION = "akunu guesses ahead, and the model checks several words at once."


class DraftedSection(Widget):
    """A part of an answer as plain text; `marked` shows accepted and rejected drafts."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"drafted--accepted", "drafted--rejected"}

    def __init__(self, turn: ChatTurn, start: int, *, marked: bool) -> None:
        super().__init__()
        self._turn = turn
        self._is_marked = marked
        self.start = start
        self.end: int | None = None  # None: the end of the answer

    def render(self) -> Content:
        accepted = self.get_visual_style("drafted--accepted", partial=True)
        struck = self.get_visual_style("drafted--rejected", partial=True)
        answer, start = self._turn.answer, self.start
        end = len(answer) if self.end is None else self.end
        if not self._is_marked:
            return Content(displayable(answer[start:end]))
        shown = ""
        styles: list[Styled] = []
        for place, rejected in [*self._rejected(end), (end, "")]:
            for first, last in self._accepted(start, place):
                styles.append(Styled(len(shown) + first, len(shown) + last, accepted))
            shown += displayable(answer[start:place])
            if rejected:
                styles.append(Styled(len(shown), len(shown) + len(rejected), struck))
            shown += rejected
            start = place
        return Content(shown, spans=styles).expand_tabs(TAB_SIZE)

    def _rejected(self, end: int) -> Iterator[tuple[int, str]]:
        """Yield (position, text on one line) of each rejected draft.

        A draft before or in the indentation of a line moves behind the indentation, so that the
        line keeps its place.
        """
        answer, rejected = self._turn.answer, self._turn.rejected
        first = bisect_left(rejected, self.start, key=lambda each: each[0])
        last = len(rejected)
        if self.end is not None:  # a draft at the very end belongs to the next section
            last = bisect_right(rejected, end, key=lambda each: each[0])
        for place, draft in rejected[first:last]:
            line = max(self.start, answer.rfind("\n", self.start, place) + 1)
            if (start := _LINE_START.match(answer, line, end)) and place < start.end():
                place, draft = start.end(), draft.lstrip(" \t")
            yield place, on_one_line(_LINE_BREAK.sub("\n", draft))

    def _accepted(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of accepted drafts, relative to `start`."""
        spans = self._turn.spans
        first = bisect_right(spans, start, key=lambda span: span[1])
        for span in spans[first : bisect_left(spans, (end, 0))]:
            yield max(span[0], start) - start, min(span[1], end) - start


class DraftedText(Vertical):
    """An answer as plain text, in sections so that each token rewraps only the last one."""

    SECTION = 1500  # characters

    def __init__(self, turn: ChatTurn, *, marked: bool = True) -> None:
        self._turn = turn
        self._is_marked = marked
        self._last = DraftedSection(turn, 0, marked=marked)
        super().__init__(self._last, *self._cut())

    def sync(self) -> None:
        """Draw new text of the turn."""
        self._last.refresh(layout=True)
        if more := self._cut():
            self.mount_all(more)

    def _cut(self) -> list[DraftedSection]:
        """Split a long last section at newlines; return the new sections."""
        more: list[DraftedSection] = []
        while (end := self._turn.answer.find("\n", self._last.start + self.SECTION)) >= 0:
            self._last.end = end
            self._last = DraftedSection(self._turn, end + 1, marked=self._is_marked)
            more.append(self._last)
        return more


class DraftingPanel(Unmarked, Widget, can_focus=False):
    """A legend of the marks, tokens per step, the estimated speedup and the answer's statistics."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        f"drafted--{name}" for name in ("accepted", "rejected", "bars", "value", "words")
    }

    explains: reactive[bool] = reactive(False)  # the first line explains drafting
    off: reactive[str] = reactive("")  # why nothing is drafted, "" if drafting is on

    def __init__(self, id: str) -> None:
        super().__init__(id=id)
        self._passes: Sequence[int] = ()
        self._speedup: float | None = None
        self._stats: Stats | None = None

    def show(self, turn: ChatTurn | None) -> None:
        """Show the decode steps, speedup and statistics of `turn`."""
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
        """Return the line about the passes: a sparkline, words per step, and the speedup."""
        words = self._style("words")
        stats = self._stats
        parts: list[str | tuple[str, Style]] = [
            (sparkline(self._passes, _MAX_BARS), self._style("bars"))
        ]
        if stats and stats.target_passes:
            parts += [(f" {stats.tokens_per_pass:.1f}", self._style("value"))]
            parts += [(" words a step", words)]
        if self._speedup and not 0.95 <= self._speedup < _PAYS:
            faster = " faster (estimate)" if self._speedup > 1 else " as fast (estimate)"
            parts += [
                (", about " if self.size.width >= _ROOM_FOR_LABELS else ", ", words),
                (f"{self._speedup:.1f}x", self._style("value")),
                (faster, words),
            ]
        elif stats and (why := self._why_not_faster(stats)):
            parts.append((f", no faster: {why}", words))
        elif self._speedup:
            parts.append((", no faster than one by one (estimate)", words))
        return Content.assemble(*parts)

    def _why_not_faster(self, stats: Stats) -> str:
        """Return why drafting did not make the answer faster, "" if it did or is unknown."""
        if self.off and not stats.drafted:
            return self.off
        if (self._speedup or 0.0) >= _PAYS or stats.target_passes < _MIN_PASSES:
            return ""
        if stats.acceptance_rate < 0.5 or not stats.drafted:
            return "new text, little to copy"
        return "checking the guesses took as long"

    def _numbers(self) -> Content:
        """Acceptance rate, time to first token and cached tokens, if known."""
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
            why = _NOT_CACHED.get(stats.not_cached, "unknown reason")
            parts.append(f"{stats.cached_tokens:,} cached tokens")
            parts[-1] += f", {again:,} recomputed: {why}" if again > 0 else ""
        return Content.styled(" · ".join(parts), self._style("words"))

    def _style(self, name: str) -> Style:
        return self.get_visual_style(f"drafted--{name}", partial=True)


def sparkline(passes: Sequence[int], width: int) -> str:
    """Return a bar for each of the last `width` decode steps, padded to `width`."""
    heights = (min(tokens, _MAX_BAR) - 1 for tokens in passes[-width:])
    return "".join(_BARS[max(0, height)] for height in heights).rjust(width, "·")
