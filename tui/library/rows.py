"""How conversations look in a list: title and time, and a line of what was said."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from textual.content import Content
from textual.style import Style

from akunu_py.chats.store import SearchResult
from akunu_py.chats.tree import ChatMessage, Tree
from akunu_py.text import collapse, displayable

UNTITLED = "Untitled"


def row_of(
    found: SearchResult, width: int, now: float, mark: str, styles: Sequence[Style]
) -> Content:
    """Two lines of `width` columns: the title and when, below what was found or said last.

    mark: one character before the title. styles: of the mark, of what is less important, and of
    what matches.
    """
    marked, muted, match = styles
    time = moment(found.info.updated, now)
    room = max(1, width - len(time) - 4)
    title = Content(collapse(found.info.title) or UNTITLED).truncate(room, ellipsis=True)
    gap = " " * (room - title.cell_length + 2)
    below = _snippet(found, match).truncate(max(1, width - 2), ellipsis=True)
    return Content.assemble(
        (f"{mark} ", marked),
        title.stylize("bold"),
        gap,
        (time, muted),
        "\n  ",
        below.stylize_before(muted),
    )


def _snippet(found: SearchResult, match: Style) -> Content:
    if found.hit.message is None:
        return Content(collapse(found.info.preview))
    content = Content(displayable(found.hit.snippet).replace("\n", " "))
    for start, end in found.hit.marks:
        content = content.stylize(match, start, end)
    return content


def moment(then: float, now: float) -> str:
    """When something was, in the words that are shortest: "14:05", "yesterday", "Mon", "3 Nov"."""
    day, today = datetime.fromtimestamp(then), datetime.fromtimestamp(now)
    days = (today.date() - day.date()) // timedelta(days=1)
    if days <= 0:
        return f"{day:%H:%M}"
    if days == 1:
        return "yesterday"
    if days < 7:
        return f"{day:%a}"
    year = "" if day.year == today.year else f" {day.year}"
    return f"{day.day} {day:%b}{year}"


def peek(tree: Tree, message: str | None, most: int, styles: Sequence[Style]) -> Content:
    """The end of a conversation, or what is around one message of it, as plain text.

    most: messages. styles: of the names of who said it, and of what the person said.
    """
    if message is not None and message in tree:
        tree.choose(message)
    path = [each for each in tree.path() if each.text.strip()]
    first = len(path) - most
    for place, each in enumerate(path):
        if each.id == message:
            first = min(first, place)
    shown = path[max(0, first) :][:most]
    return Content("\n\n").join(_said(each, *styles) for each in shown)


def _said(message: ChatMessage, name: Style, prompt: Style) -> Content:
    text = Content(displayable(message.text.strip()))
    if message.role == "user":
        return text.stylize(prompt)
    who = message.model or message.role
    return Content.assemble((collapse(who), name), "\n", text)
