"""Drafting made visible: marks in the text of an answer, and the panel below it."""

import re
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from operator import itemgetter
from typing import ClassVar, Literal

from textual.content import Content
from textual.reactive import reactive
from textual.style import Style
from textual.widget import Widget

from akunu_py.text import on_one_line
from akunu_py.tui.open_conversation import ChatTurn
from akunu_py.tui.status import Unmarked
from akunu_py.types import NotCached, Stats

_BARS = "▁▂▃▄▅▆▇█"
_MAX_BAR = 8  # tokens of the highest bar
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
PAYS = 1.05  # smallest estimated speedup that is worth mentioning
_MIN_PASSES = 8  # decode steps before a missing draft means something
_LINE_START = re.compile(r"[ \t]*")
_LINE_BREAK = re.compile(r"(?<![ \t])[ \t]*\n\s*")
_WORD = re.compile(r"\s*\S+|\s+")
_BEFORE_WORD = " \n\t*_`[|~>"
_NEAR = 8  # characters of Markdown inside a word
_ACCEPTED = "$text-success on $accepted-background underline"
_REJECTED = "$text-error strike"


# What F2 shows: nothing, the drafts, or also the rejected branches of token trees.
Drafting = Literal["hidden", "drafts", "branches"]

# Marks the texts drawn for a source, which starts at an offset in the answer.
Mark = Callable[[Sequence[Content], str, int], list[Content]]


class DraftMarks:
    """Marks the drafts of an answer in the text that Markdown draws."""

    def __init__(self, turn: ChatTurn, shown: Drafting) -> None:
        self._turn = turn
        self.shown = shown

    def __call__(self, texts: Sequence[Content], source: str, offset: int) -> list[Content]:
        """Return the texts drawn for `source`, at `offset` in the answer, with marks.

        Accepted drafts are colored. Rejected drafts are inserted where they were proposed, but
        after the indentation of a line, so that the line keeps its place.
        """
        if self.shown == "hidden":
            return list(texts)
        turn, marked, place = self._turn, [], 0
        end = offset + len(source)
        last = end if end < len(turn.answer) else inf  # the last text has those at the end
        shown = turn.rejected
        if self.shown == "branches":
            shown = sorted([*shown, *turn.branches], key=itemgetter(0))
        rejected = deque(each for each in shown if offset <= each[0] < last)
        first = bisect_right(turn.spans, offset, key=lambda span: span[1])
        spans = turn.spans[first : bisect_left(turn.spans, (end, 0))]
        for number, text in enumerate(texts, 1):
            places = align(text.plain, source, place)
            place = places[-1] + 1 if places else place
            for span in spans:
                start, stop = (bisect_left(places, each - offset) for each in span)
                text = text.stylize(_ACCEPTED, start, stop)
            parts: list[Content | str | tuple[str, str]] = []
            begin = 0
            while rejected and (number == len(texts) or rejected[0][0] - offset <= place):
                at, draft = rejected.popleft()
                cut = bisect_left(places, at - offset)
                line = _LINE_START.match(text.plain, text.plain.rfind("\n", 0, cut) + 1)
                if line and cut < line.end():
                    cut, draft = line.end(), draft.lstrip(" \t")
                parts.append(text[begin:cut] if begin < cut or not parts else " ")
                parts.append((on_one_line(_LINE_BREAK.sub("\n", draft)), _REJECTED))
                begin = cut
            marked.append(Content.assemble(*parts, text[begin:]) if parts else text)
        return marked


def align(text: str, source: str, place: int) -> list[int]:
    """Return the index in `source` of each character of a text drawn from `source[place:]`.

    A character that Markdown changed has the index of the next one that it did not change.
    """
    places: list[int] = []
    for word in _WORD.finditer(text):
        letters = word[0].lstrip()
        at = first = source.find(letters, place)
        while at > place and source[at - 1] not in _BEFORE_WORD:  # inside an address, for example
            at = source.find(letters, at + 1)
        at = max(at, first)
        spaces = range(len(word[0]) - len(letters))
        places += (min(place + number, max(place, at - 1)) for number in spaces)
        if at >= 0:
            places += range(at, at + len(letters))
            place = at + len(letters)
            continue
        for letter in letters:  # with Markdown's characters inside the word, or another letter
            near = source.find(letter, place, place + _NEAR)
            place = near if near >= 0 else place
            places.append(place)
            place += near >= 0
    return places


class DraftingPanel(Unmarked, Widget, can_focus=False):
    """A legend of the marks, tokens per step, the estimated speedup and statistics."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {f"drafted--{name}" for name in ("value", "words")}

    off: reactive[str] = reactive("")  # why nothing is drafted, "" if drafting is on
    turn: reactive[ChatTurn | None] = reactive[ChatTurn | None](None, always_update=True)
    shown: reactive[Drafting] = reactive[Drafting]("hidden")

    @property
    def next_shown(self) -> Drafting:
        """What F2 shows next."""
        if self.shown == "drafts" and self.turn and self.turn.branches:
            return "branches"
        return "drafts" if self.shown == "hidden" else "hidden"

    def render(self) -> Content:
        lines, width = (self._legend(), self._speed(), self._numbers()), self.size.width
        return Content("\n").join(line.truncate(width, ellipsis=True) for line in lines)

    def _legend(self) -> Content:
        words = self._style("words")
        long = self.size.width >= _ROOM_FOR_LABELS
        wrong = "rejected drafts" if long else "rejected"
        more = "branches" if self.next_shown == "branches" else "back"
        return Content.assemble(
            ("accepted drafts" if long else "accepted", _ACCEPTED),
            ("   the model's own words   " if long else "  ", words),
            (wrong, _REJECTED),
            (f"   F2 {more}" if long else "", words),
        )

    def _speed(self) -> Content:
        words, turn = self._style("words"), self.turn
        stats, speedup = (turn.stats, turn.speedup) if turn else (None, None)
        parts: list[str | tuple[str, Style]] = []
        if stats and stats.target_passes:
            parts = [(f"{stats.tokens_per_pass:.1f}", self._style("value"))]
            parts += [(" words a step", words)]
        if speedup and not 0.95 <= speedup < PAYS:
            faster = " faster (estimate)" if speedup > 1 else " as fast (estimate)"
            about = ", about " if self.size.width >= _ROOM_FOR_LABELS else ", "
            parts += [(about, words), (f"{speedup:.1f}x", self._style("value"))]
            parts += [(faster, words)]
        elif stats and (why := self._why_not_faster(stats, speedup or 0.0)):
            parts.append((f", no faster: {why}", words))
        elif speedup:
            parts.append((", no faster than one by one (estimate)", words))
        return Content.assemble(*parts)

    def _why_not_faster(self, stats: Stats, speedup: float) -> str:
        if self.off and not stats.drafted:
            return self.off
        if speedup >= PAYS or stats.target_passes < _MIN_PASSES:
            return ""
        if stats.acceptance_rate < 0.5 or not stats.drafted:
            return "new text, little to copy"
        return "checking the drafts took as long"

    def _numbers(self) -> Content:
        stats = self.turn.stats if self.turn else None
        if stats is None:
            return Content("")
        parts = []
        if stats.drafted:
            parts.append(f"{stats.acceptance_rate:.0%} of {stats.drafted:,} drafts accepted")
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
