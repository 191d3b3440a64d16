"""Export of conversations: Markdown of the active branch, or JSON of all branches."""

import contextlib
import functools
import os
import re
import unicodedata
from datetime import datetime
from pathlib import Path
from typing import Literal

from markdown_it import MarkdownIt

from akunu_py.chats.json import as_json
from akunu_py.chats.tree import ConversationTree, Role
from akunu_py.errors import ConversationError, UsageError
from akunu_py.text import collapse, displayable, fence_for
from akunu_py.types import FinishReason

ExportFormat = Literal["markdown", "json"]

_SUFFIXES: dict[ExportFormat, str] = {"markdown": ".md", "json": ".json"}
UNTITLED = "Untitled"
_AUTHORS: dict[Role, str] = {"user": "You", "system": "System"}
# Why an answer is incomplete. None: it failed, or the process was killed.
_ENDINGS: dict[FinishReason | None, str] = {
    "length": "reached the token limit",
    "context": "reached the context limit",
    "cancelled": "stopped",
    "repetition": "repeated itself",
    None: "not finished",
}
_END_MARK = "akunu-end-of-message"
_MAY_STAY_OPEN = re.compile("```|~~~|<")  # a code or HTML block
_MAX_FENCES = 8  # fences tried, last ones first


def render(tree: ConversationTree, form: ExportFormat) -> str:
    return as_json([tree]) if form == "json" else as_markdown(tree)


def export(tree: ConversationTree, directory: Path, file: str = "") -> Path:
    """Write a conversation to a new file and return its path.

    file: relative to `directory`, its suffix selects the format; "": Markdown, named by the title.
    """
    form = format_of(Path(file))
    path = directory / os.path.expanduser(file or file_name(tree.title, form))
    return write_new(path, render(tree, form), numbered=not file)


def as_markdown(tree: ConversationTree) -> str:
    """Render the active branch as Markdown: each message under a heading with its author."""
    messages = [
        each
        for each in tree.active_branch()
        if each.text.strip() or each.thinking.strip() or each.rounds
    ]
    parts = [f"# {_line(tree.title) or UNTITLED}"]
    if messages:
        parts.append(f"*{_date(messages[0].created)}exported from akunu*")
    for message in messages:
        author = _AUTHORS.get(message.role) or message.model or "Assistant"
        parts.append(f"## {_line(author)}")
        for each in message.rounds:
            parts += [*_thinking(each.thinking), self_contained(each.text)]
            for use in each.uses:
                title = f"Tool: {collapse(use.call.name)} ({use.outcome})".replace("<", "&lt;")
                arguments = _fenced(use.call.arguments, "json")
                parts += _details(title, arguments, _fenced(use.shown_result))
        parts += [*_thinking(message.thinking), self_contained(message.text)]
        if message.role == "assistant" and message.finish_reason in _ENDINGS:
            parts.append(f"*{_ENDINGS[message.finish_reason]}*")
    return "\n\n".join(filter(None, parts)) + "\n"


def _thinking(text: str) -> list[str]:
    return _details("Thinking", self_contained(text)) if text.strip() else []


def _details(title: str, *parts: str) -> list[str]:
    return [f"<details><summary>{title}</summary>", *parts, "</details>"]


def _fenced(text: str, language: str = "text") -> str:
    """Return a code block that `text` cannot close."""
    fence = fence_for(text)
    return f"{fence}{language}\n{displayable(text)}\n{fence}"


def self_contained(text: str) -> str:
    """Close an unfinished code or HTML block, so that it does not include the next message."""
    text = displayable(text).strip("\n")
    if _is_closed(text):
        return text
    fences = re.findall(r"^[ >]*(`{3,}|~{3,})", text, re.MULTILINE)
    for fence in list(dict.fromkeys(reversed(fences)))[:_MAX_FENCES]:
        if _is_closed(closed := f"{text}\n{fence}"):
            return closed
    return _fenced(text)


def _is_closed(text: str) -> bool:
    """Return whether a paragraph appended to `text` is a block of its own."""
    if not _MAY_STAY_OPEN.search(text):  # parsing takes 2 ms a message
        return True
    tokens = _block_parser().parse(f"{text}\n\n{_END_MARK}\n")
    return len(tokens) >= 3 and tokens[-3].level == 0 and tokens[-2].content == _END_MARK


@functools.cache
def _block_parser() -> MarkdownIt:
    return MarkdownIt("commonmark").disable("inline")  # slow to create


def _date(created: float) -> str:
    """Return local time as "21 November 2026, 14:05, " ("" if unknown)."""
    moment = datetime.fromtimestamp(created)
    return f"{moment.day} {moment:%B %Y, %H:%M}, " if created else ""


def _line(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>#|&~])", r"\\\1", collapse(text))


def format_of(path: Path, default: ExportFormat = "markdown") -> ExportFormat:
    """Return the export format for a file's suffix. Raises UsageError for unknown suffixes."""
    suffix = path.suffix.lower()
    if suffix in ("", ".json"):
        return "json" if suffix else default
    if suffix in (".md", ".markdown", ".txt"):
        return "markdown"
    raise UsageError(f"unknown file type {suffix}; use {' or '.join(_SUFFIXES.values())}")


def file_name(title: str, form: ExportFormat) -> str:
    """Return a file name: the words of the title in lower case, joined by hyphens."""
    name = ""
    letters = unicodedata.normalize("NFKC", title).lower()
    kept = (each if unicodedata.category(each)[0] in "LMN" else " " for each in letters)
    for word in re.findall(r"\w\S*", "".join(kept)):
        if len(f"{name}-{word}".encode()) > 60:
            break
        name = f"{name}-{word}" if name else word
    return (name or "conversation") + _SUFFIXES[form]


def write_new(path: Path, text: str, *, numbered: bool = False) -> Path:
    """Write a new file and return its path; `numbered` appends -2 and so on if it exists."""
    number, target = 1, path
    while True:
        try:
            # "x" does not follow symbolic links.
            with target.open("x", encoding="utf-8", newline="\n") as file:
                file.write(text)
            return target
        except FileExistsError as error:
            if not numbered:
                message = f"{path} exists; name another file, or remove it"
                raise ConversationError(message) from error
            number += 1
            target = path.with_name(f"{path.stem}-{number}{path.suffix}")
        except OSError as error:
            with contextlib.suppress(OSError):  # a partial file may exist
                target.unlink()
            raise ConversationError(
                f"cannot write {target}: {error.strerror or error}; name another file"
            ) from error
