"""An answer as Markdown sections; `view` mounts only sections near the viewport.

Layout visits every widget for each change. Unmounted sections keep an empty space of their height.
"""

import asyncio
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from markdown_it.token import Token
from textual.app import ComposeResult
from textual.await_complete import AwaitComplete
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Markdown, Static
from textual.widgets.markdown import MarkdownBlock

from akunu_py.tui.transcript.blocks import BulletList, NumberedList, Paragraph, Quote, TableBlock
from akunu_py.tui.transcript.code import CodeBlock
from akunu_py.tui.transcript.drafting import Mark
from akunu_py.tui.transcript.markdown_parser import markdown_parser, parse

_BLOCKS = 30  # blocks in a section: several screens
_COLUMNS = 74  # assumed width, to estimate the height of an undrawn section


class AnswerText(Markdown):
    """Markdown with custom blocks. Unlike in Textual, `append` works at any time."""

    @dataclass
    class DrawingFailed(Message):
        """Posted when (part of) the text could not be drawn."""

        error: Exception

    BLOCKS = {  # noqa: RUF012 - declared so there
        **Markdown.BLOCKS,
        "paragraph_open": Paragraph,
        "blockquote_open": Quote,
        "bullet_list_open": BulletList,
        "ordered_list_open": NumberedList,
        "fence": CodeBlock,
        "code_block": CodeBlock,
    }

    def __init__(self, text: str, mark: Mark | None = None, offset: int = 0) -> None:
        super().__init__(text, parser_factory=markdown_parser, open_links=False)
        self._mark, self._offset = mark, offset  # offset: of `text` in the answer
        self._first_line = 0  # of the lines that are parsed again
        self._change = asyncio.Lock()

    def update(self, markdown: str) -> AwaitComplete:
        async def update() -> None:
            async with self._change:
                with self.app.batch_update():
                    await self.query_children(MarkdownBlock).remove()
                    self._markdown, self._last_parsed_line = "", 0
                    await self._append_or_report(markdown)

        return AwaitComplete(update())

    def append(self, markdown: str) -> AwaitComplete:
        async def append() -> None:
            async with self._change:
                await self._append_or_report(markdown)

        if self._initial_markdown is not None:
            self._initial_markdown += markdown
            return AwaitComplete()
        return AwaitComplete(append())

    async def _append_or_report(self, markdown: str) -> None:
        try:
            self._first_line = self._last_parsed_line
            await super().append(markdown)
        except Exception as error:  # noqa: BLE001 - a bug must not hide the answer
            self.post_message(self.DrawingFailed(error))

    def _parse_markdown(self, tokens: Iterable[Token]) -> Iterable[MarkdownBlock]:
        lines = self._markdown.splitlines(keepends=True)
        for block in super()._parse_markdown(tokens):
            if self._mark is not None:
                self._mark_block(self._mark, block, lines)
            yield block

    def _mark_block(self, mark: Mark, block: MarkdownBlock, lines: list[str]) -> None:
        for each in block._blocks:
            self._mark_block(mark, each, lines)
        first, end = (self._first_line + line for line in block.source_range)
        while end < len(lines) and lines[end] == "\n":
            end += 1
        where = "".join(lines[first:end]), self._offset + sum(map(len, lines[:first]))
        if isinstance(block, CodeBlock | TableBlock):
            block.mark(mark, *where)
        elif block._inline_token is not None:
            block.set_content(mark([block._content], *where)[0])

    def unhandled_token(self, token: Token) -> MarkdownBlock | None:
        return TableBlock(self, token) if token.type == "table" else None


class MarkdownSection(Vertical):
    """Some blocks of an answer; `in_list`: the next section continues the same list."""

    def __init__(
        self, text: str, mark: Mark | None, offset: int, *, unmounted: bool, in_list: bool
    ) -> None:
        super().__init__(classes="-listed" if in_list else None)
        self.text = text
        self._mark, self.start = mark, offset  # start: of the section in the answer
        self._markdown = None if unmounted else AnswerText(text, mark, offset)
        if unmounted:  # an estimate
            self.styles.height = sum(1 + len(line) // _COLUMNS for line in text.splitlines()) or 1

    def compose(self) -> ComposeResult:
        if self._markdown is not None:
            yield self._markdown

    @property
    def is_unmounted(self) -> bool:
        return self._markdown is None

    async def append(self, text: str) -> None:
        self.text += text
        if self._markdown is not None:
            await self._markdown.append(text)
            self.follow_code(grows=True)

    def follow_code(self, *, grows: bool) -> None:
        """Show the end of a code line that grows at the end of the section."""
        last: Widget = self
        while last.children:
            last = last.children[-1]
        for block in self.query(CodeBlock):
            block.follow_end(grows and block is last)

    async def finish(self, text: str, *, in_list: bool) -> None:
        """Set the final text, longer or shorter; the next section has the rest."""
        self.set_class(in_list, "-listed")
        if len(text) > len(self.text):
            await self.append(text[len(self.text) :])
            return
        self.text = text
        if self._markdown is not None:
            first = text.count("\n")
            blocks = self._markdown.query_children(MarkdownBlock)
            if any(start < first < end for start, end in (each.source_range for each in blocks)):
                await self._markdown.update(text)  # split inside a list
            else:
                beyond = [each for each in blocks if each.source_range[0] >= first]
                await self._markdown.remove_children(beyond)

    async def redraw(self) -> None:
        if self._markdown is not None:
            await self._markdown.update(self.text)

    async def unmount(self) -> None:
        """Remove the blocks and keep the height."""
        if self._markdown is not None and self.size.height:
            drawn, self._markdown = self._markdown, None
            with self.app.batch_update():
                self.styles.height = self.size.height
                await drawn.remove()

    async def restore(self) -> None:
        if self._markdown is None:
            self._markdown = AnswerText(self.text, self._mark, self.start)
            with self.app.batch_update():
                await self.mount(self._markdown)
                self.styles.height = "auto"


class AnswerMarkdown(Vertical):
    """An answer whose last section may grow. A drawing bug turns it into plain text."""

    def __init__(self, text: str, mark: Mark | None = None, offset: int = 0) -> None:
        self._source = text
        self._plain: Static | None = None
        self._mark = mark
        *sections, self._last = self._sections(split_sections(text), 0, offset)
        super().__init__(*sections)

    def compose(self) -> ComposeResult:
        yield self._last

    @property
    def sections(self) -> list[MarkdownSection]:
        return list(self.query_children(MarkdownSection))

    def _sections(self, parts: list[str], first: int, offset: int) -> list[MarkdownSection]:
        """Return sections from part `first` on, which starts at `offset` in the answer."""
        sections = []
        for place, part in enumerate(parts[first:], first):
            cut = _is_list_cut(parts, place)
            # A newly opened conversation shows its end, so only the last sections are mounted.
            far = not first and place < len(parts) - 2
            sections.append(MarkdownSection(part, self._mark, offset, unmounted=far, in_list=cut))
            offset += len(part)
        return sections

    async def redraw(self) -> None:
        """Draw all mounted sections again, because their marks changed."""
        for section in self.sections:
            await section.redraw()

    def end(self) -> None:
        """Show the start of the last code line, because it does not grow any more."""
        self._last.follow_code(grows=False)

    async def append(self, text: str) -> None:
        self._source += text
        if self._plain is not None:
            self._plain.update(Content(self._source))
            return
        try:
            await self._append(text)
        except Exception as error:  # noqa: BLE001 - a bug must not hide the answer
            self.post_message(AnswerText.DrawingFailed(error))

    async def on_answer_text_drawing_failed(self, event: AnswerText.DrawingFailed) -> None:
        if self._plain is not None or not self.is_attached:
            event.stop()  # The app has reported the first error.
            return
        self._plain = Static(Content(self._source), classes="plain")
        await self.mount(self._plain)
        await self.query_children(MarkdownSection).remove()

    async def _append(self, text: str) -> None:
        await self._last.restore()
        parts = split_sections(self._last.text + text)
        if len(parts) == 1:
            await self._last.append(text)
            return
        ended, sections = self._last, self._sections(parts, 1, self._last.start + len(parts[0]))
        self._last = sections[-1]
        with self.app.batch_update():
            await ended.finish(parts[0], in_list=_is_list_cut(parts, 0))
            ended.follow_code(grows=False)
            await self.mount_all(sections)
        if self._plain is not None:  # drawing failed meanwhile
            await self.query_children(MarkdownSection).remove()


def split_sections(text: str) -> list[str]:
    """Split Markdown into sections (`_BLOCKS` blocks or items) that concatenate to it."""
    if text.count("\n") < 2 * _BLOCKS:
        return [text]
    lines = re.split(r"(?<=\n)", text)  # as the parser counts lines; splitlines splits more
    starts = list(_starts(parse(text)))
    # The last block may still change its type, so it does not start a section immediately.
    cuts = starts[_BLOCKS::_BLOCKS] if len(starts) > 2 * _BLOCKS else []
    if cuts and len(starts) % _BLOCKS < _BLOCKS // 2:
        cuts.pop()
    places = [0, *cuts, len(lines)]
    return ["".join(lines[start:end]) for start, end in itertools.pairwise(places)]


def _starts(tokens: list[Token]) -> Iterator[int]:
    """Yield the first lines of top-level blocks and of the items of top-level lists."""
    expected = 0
    for token in tokens:
        if token.map is None:
            continue
        if token.type in ("bullet_list_open", "ordered_list_open") and token.level == 0:
            expected = int(token.attrGet("start") or 1)
        elif token.type == "list_item_open" and token.level == 1:
            # A split list restarts at its first written number, so that must be correct.
            if not token.info or token.info == str(expected):
                yield token.map[0]
            expected += 1
        elif token.level == 0:
            yield token.map[0]


def _is_list_cut(parts: list[str], place: int) -> bool:
    """Return whether a section ends inside a list, without an empty line after it."""
    return place + 1 < len(parts) and not parts[place].endswith("\n\n")
