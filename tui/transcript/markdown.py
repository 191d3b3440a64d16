"""An answer as Markdown, in sections: what is out of sight costs next to nothing.

A terminal's layout looks at every widget whenever one changes, and a long answer has hundreds. So
it is cut between blocks of Markdown, and a section that is far from what is seen rests: its blocks
go, and an empty space of the same height stays until the reader comes near. Owns the cutting and
the resting; when is decided by whoever knows what is seen.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from markdown_it import MarkdownIt
from markdown_it.token import Token
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Markdown
from textual.widgets.markdown import MarkdownBlock

_BLOCKS = 30  # in a section: some screens
_COLUMNS = 74  # for the height of a section that was never drawn


def markdown_parser() -> MarkdownIt:
    """A parser that shows HTML as text instead of dropping it."""
    return MarkdownIt("gfm-like", {"html": False})


class MarkdownSection(Vertical):
    """Some blocks of an answer; drawn, unless it rests."""

    def __init__(self, text: str, *, rests: bool = False, listed: bool = False) -> None:
        """listed: where it ends in a list, that goes on in the next section."""
        super().__init__(classes="-listed" if listed else None)
        self.text = text
        self._markdown = None if rests else _markdown(text)
        if rests:
            self.styles.height = _lines(text)

    def compose(self) -> ComposeResult:
        if self._markdown is not None:
            yield self._markdown

    @property
    def rests(self) -> bool:
        return self._markdown is None

    async def append(self, text: str) -> None:
        """More of the answer."""
        self.text += text
        if self._markdown is not None:
            await self._markdown.append(text)

    async def end(self, text: str, *, listed: bool) -> None:
        """Is `text` from now on, which is more of the answer, or less: the rest is another's."""
        self.set_class(listed, "-listed")
        if len(text) > len(self.text):
            await self.append(text[len(self.text) :])
            return
        self.text = text
        if self._markdown is not None:
            first = text.count("\n")
            blocks = self._markdown.query_children(MarkdownBlock)
            if any(start < first < end for start, end in (each.source_range for each in blocks)):
                await self._markdown.update(text)  # cut in the middle of a list
            else:
                over = [each for each in blocks if each.source_range[0] >= first]
                await self._markdown.remove_children(over)

    async def rest(self) -> None:
        """Gives up its blocks and keeps its height."""
        if self._markdown is not None and self.size.height:
            drawn, self._markdown = self._markdown, None
            with self.app.batch_update():
                self.styles.height = self.size.height
                await drawn.remove()

    async def wake(self) -> None:
        """Draws its blocks again."""
        if self._markdown is None:
            self._markdown = _markdown(self.text)
            with self.app.batch_update():
                await self.mount(self._markdown)
                self.styles.height = "auto"


class AnswerMarkdown(Vertical):
    """An answer that may grow. Every section but the last is whole."""

    def __init__(self, text: str) -> None:
        parts = split(text)
        # Of a long one the end is drawn, which is what is seen of a conversation that is opened.
        last = len(parts) - 1
        super().__init__(*(_section(parts, place, rests=place < last - 1) for place in range(last)))
        self._last = MarkdownSection(parts[-1])

    def compose(self) -> ComposeResult:
        yield self._last

    @property
    def sections(self) -> list[MarkdownSection]:
        return list(self.query_children(MarkdownSection))

    async def append(self, text: str) -> None:
        """More of the answer."""
        await self._last.wake()
        parts = split(self._last.text + text)
        if len(parts) == 1:
            await self._last.append(text)
            return
        ended, sections = self._last, [_section(parts, place) for place in range(1, len(parts))]
        self._last = sections[-1]
        with self.app.batch_update():
            await ended.end(parts[0], listed=_is_list_cut(parts, 0))
            await self.mount_all(sections)


def split(text: str) -> list[str]:
    """`text` cut between blocks of Markdown, and between the items of lists, into sections of
    `_BLOCKS` blocks or items; together they are the text. Of what is one block, a table for one,
    nothing is cut."""
    if text.count("\n") < 2 * _BLOCKS:
        return [text]
    lines = re.split(r"(?<=\n)", text)  # as the parser counts them; splitlines knows more ends
    starts = list(_starts(markdown_parser().parse(text)))
    # The last block may still grow and become something else: it is not left alone at once.
    cuts = starts[_BLOCKS::_BLOCKS] if len(starts) > 2 * _BLOCKS else []
    if cuts and len(starts) % _BLOCKS < _BLOCKS // 2:
        cuts.pop()
    places = [0, *cuts, len(lines)]
    return ["".join(lines[start:end]) for start, end in itertools.pairwise(places)]


def _starts(tokens: list[Token]) -> Iterator[int]:
    """The lines on which blocks begin, and the items of lists that are no part of a block."""
    expected = 0
    for token in tokens:
        if token.map is None:
            continue
        if token.type in ("bullet_list_open", "ordered_list_open") and token.level == 0:
            expected = int(token.attrGet("start") or 1)
        elif token.type == "list_item_open" and token.level == 1:
            # A list that is cut counts from the number of its first item as it was written.
            if not token.info or token.info == str(expected):
                yield token.map[0]
            expected += 1
        elif token.level == 0:
            yield token.map[0]


def _section(parts: list[str], place: int, *, rests: bool = False) -> MarkdownSection:
    return MarkdownSection(parts[place], rests=rests, listed=_is_list_cut(parts, place))


def _is_list_cut(parts: list[str], place: int) -> bool:
    """Whether no empty line belongs between a section and the next one."""
    return place + 1 < len(parts) and not parts[place].endswith("\n\n")


def _markdown(text: str) -> Markdown:
    return Markdown(text, parser_factory=markdown_parser, open_links=False)


def _lines(text: str) -> int:
    """About how many lines a text takes that was never drawn."""
    return max(1, sum(1 + len(line) // _COLUMNS for line in text.splitlines()))
