"""A conversation as a file to read or to show: Markdown, JSON or a picture.

Owns the Markdown and the writing of files; `exchange` owns the JSON and `picture` the SVG. Markdown
and the picture hold the active branch, JSON holds everything. Refuses to overwrite a file.
"""

from __future__ import annotations

import os
import re
import unicodedata
from datetime import datetime
from pathlib import Path
from typing import Literal

from markdown_it import MarkdownIt

from akunu_py.chats.json import as_json
from akunu_py.chats.transcript_format import ending_of, spoken, who
from akunu_py.chats.tree import Tree
from akunu_py.errors import ConversationError
from akunu_py.text import collapse, displayable

ExportFormat = Literal["markdown", "json", "svg"]

FORMATS: tuple[ExportFormat, ...] = ("markdown", "json", "svg")
SUFFIXES: dict[ExportFormat, str] = {"markdown": ".md", "json": ".json", "svg": ".svg"}
UNTITLED = "Untitled"

_LAST = "akunu-end-of-message"


def render(tree: Tree, form: ExportFormat) -> str:
    """A conversation in one of the formats. Raises ConversationError where it is too long."""
    if form == "json":
        return as_json([tree])
    if form == "svg":
        from akunu_py.chats.svg import as_svg

        return as_svg(tree)
    return as_markdown(tree)


def as_markdown(tree: Tree) -> str:
    """The active branch as Markdown: each message under a heading with who said it."""
    said = spoken(tree)
    parts = [f"# {_line(tree.title) or UNTITLED}"]
    if said:
        parts.append(f"*{when(said[0].created)}, exported from akunu*")
    for message in said:
        parts.append(f"## {_line(who(message))}")
        if message.thinking.strip():
            thought = standing_alone(message.thinking)
            parts += ["<details><summary>Thinking</summary>", thought, "</details>"]
        parts.append(standing_alone(message.text))
        if ending := ending_of(message):
            parts.append(f"*{ending}*")
    return "\n\n".join(parts) + "\n"


def when(created: float) -> str:
    """A time as people write it, in their own time zone: "21 November 2026, 14:05"."""
    moment = datetime.fromtimestamp(created)
    return f"{moment.day} {moment:%B %Y, %H:%M}"


def standing_alone(text: str) -> str:
    """Markdown that ends where it ends: an answer that was stopped within a block of code or of
    HTML must not swallow what follows."""
    text = displayable(text).strip("\n")
    if _ends(text):
        return text
    fences = re.findall(r"^[ >]*(`{3,}|~{3,})", text, re.MULTILINE)
    for fence in reversed(fences):
        if _ends(closed := f"{text}\n{fence}"):
            return closed
    longest = max((len(run) for run in re.findall("`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _ends(text: str) -> bool:
    """Whether a paragraph after `text` is one of its own."""
    tokens = MarkdownIt("commonmark").parse(f"{text}\n\n{_LAST}\n")
    return len(tokens) >= 3 and tokens[-3].level == 0 and tokens[-2].content == _LAST


def _line(text: str) -> str:
    """`text` in one line, where nothing in it is Markdown."""
    return re.sub(r"([\\`*_\[\]<>#|&~])", r"\\\1", collapse(text))


def file_name(title: str, form: ExportFormat) -> str:
    """A name for a file: the words of the title, in small letters, joined by hyphens."""
    plain = unicodedata.normalize("NFKC", title).lower()
    words = re.findall(r"[^\W_]+", plain)
    name = ""
    for word in words:
        if len(f"{name}-{word}".encode()) > 60:
            break
        name = f"{name}-{word}" if name else word
    return (name or "conversation") + SUFFIXES[form]


def write_new(path: Path, text: str, *, numbered: bool = False) -> Path:
    """Writes a file that was not there; gives its path.

    numbered: takes another name, ending in -2 and so on, where there is one.
    Raises ConversationError.
    """
    number, wanted = 1, path
    while True:
        try:
            with wanted.open("x", encoding="utf-8", newline="\n") as file:
                file.write(text)
            return wanted
        except FileExistsError as error:
            if not numbered:
                raise ConversationError(
                    f"{path} exists; name another file, or remove it"
                ) from error
            number += 1
            wanted = path.with_name(f"{path.stem}-{number}{path.suffix}")
        except OSError as error:
            _forget(wanted)
            raise ConversationError(
                f"cannot write {wanted}: {error.strerror or error}; name another file"
            ) from error


def _forget(path: Path) -> None:
    """Removes what came of a file that could not be written."""
    try:
        os.unlink(path)
    except OSError:
        return
