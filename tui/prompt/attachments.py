"""Text files in a prompt: `@path` names one, and what it holds goes to the model.

Owns how files are named in a prompt, which are refused, and the form in which they are sent. That
form can be read back (`split`), so a conversation that was kept shows names and not contents.
Refuses what is no regular file, no text, or surely more than the model's context.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from akunu_py.errors import UsageError
from akunu_py.text import human_size, typeable

# At the start or after a space or bracket: me@example.com names no file. Quotes hold spaces.
_MENTION = re.compile(r'(?<![^\s(\[])@(?:"([^"\n]+)"|([^\s"@][^\s"]*))')
_MOST = 32  # files in one prompt
_TRAILING = ".,;:!?)]}'"

# English prose has about 4.5 characters a token, code fewer; nothing that people write has more
# than 8. The session counts exactly; here only what cannot fit is refused, before it is read.
_MOST_PER_TOKEN = 8
_USUAL_PER_TOKEN = 4

_HEAD = re.compile(r"^Attached file: (.+) \((\d+) bytes\)\n(`{3,})[^\n`]*\n", re.MULTILINE)
_BOM = "\ufeff"


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file as it was when it was attached. name: as the prompt says it. size: bytes."""

    name: str
    size: int
    text: str = ""


def mentions(prompt: str) -> list[str]:
    """The paths that `prompt` names with an @, each once, whether or not they exist."""
    found = [quoted or bare for quoted, bare in _MENTION.findall(prompt)]
    return list(dict.fromkeys(found))


def attach(prompt: str, folder: Path, context_length: int) -> list[Attachment]:
    """The files that `prompt` names and that exist, read; a name that is no file stays a word.

    context_length: tokens that the model can hold, 0 where that is not known yet. Raises
    UsageError for a file that is refused.
    """
    files: dict[Path, Attachment] = {}
    for name in mentions(prompt):
        found = find(name, folder)
        if found is None or (path := found[1].resolve()) in files:
            continue
        if len(files) == _MOST:
            raise UsageError(f"expected at most {_MOST} files in a prompt, found more; name fewer")
        room = context_length * _MOST_PER_TOKEN if context_length else None
        if room is not None:
            room = max(0, room - sum(file.size for file in files.values()))
        files[path] = read(found[0], path, room)
    return list(files.values())


def find(name: str, folder: Path) -> tuple[str, Path] | None:
    """The file or folder that `name`, said in `folder`, means, and its name without what ends a
    sentence; None where there is none."""
    for candidate in (name, name.rstrip(_TRAILING)):
        if not candidate:
            continue
        try:
            path = folder / Path(candidate).expanduser()
            if path.exists():
                return candidate, path
        except (OSError, RuntimeError, ValueError):
            continue  # too long, no such home, a NUL: no name of a file
    return None


def read(name: str, path: Path, room: int | None = None) -> Attachment:
    """The text of a file. room: bytes that may fit, None for any. Raises UsageError."""
    try:
        # Not to wait for a pipe that nobody writes to; regular files know no waiting.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            size = _checked_size(name, os.fstat(descriptor), room)
            data = _read_all(descriptor, size)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror}") from error
    if b"\0" in data:
        raise UsageError(f"{name} is a binary file ({human_size(len(data))}); name a text file")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is not UTF-8 text (byte {error.start}); convert it: iconv -t utf-8"
        ) from error
    return Attachment(name, len(data), typeable(text.removeprefix(_BOM)))


def _checked_size(name: str, status: os.stat_result, room: int | None) -> int:
    if stat.S_ISDIR(status.st_mode):
        raise UsageError(f"{name} is a folder; name a text file in it")
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{name} is a device or a pipe; name a text file")
    if room is not None and status.st_size > room:
        raise UsageError(
            f"{name} does not fit the model's context: {human_size(status.st_size)}, about "
            f"{about_tokens(status.st_size)}; attach a part of it"
        )
    return status.st_size


def _read_all(descriptor: int, size: int) -> bytes:
    """What the file held when its size was taken: one that grows must not fill the memory."""
    with open(descriptor, "rb", closefd=False) as file:
        return file.read(size)


def join(prompt: str, files: Sequence[Attachment]) -> str:
    """What the model reads: the prompt, then each file in a fence longer than any in it."""
    parts = [prompt]
    for file in files:
        longest = max(map(len, re.findall("`{3,}", file.text)), default=2)
        fence = "`" * (longest + 1)
        suffix = Path(file.name).suffix.removeprefix(".")
        language = suffix if suffix.isalnum() else ""
        head = f"Attached file: {file.name} ({file.size} bytes)"
        body = file.text if file.text.endswith("\n") else f"{file.text}\n"
        parts.append(f"{head}\n{fence}{language}\n{body}{fence}")
    return "\n\n".join(parts)


def split(content: str) -> tuple[str, list[Attachment]]:
    """`join` undone, but for a last line's end: the prompt, and the files with their text."""
    files: list[Attachment] = []
    heads = iter(_HEAD.finditer(content))
    prompt_end: int | None = None
    end = 0
    for head in heads:
        if head.start() < end:
            continue  # inside a file
        closing = re.compile(rf"^{head[3]}$", re.MULTILINE).search(content, head.end())
        if closing is None or not content[: head.start()].endswith("\n\n"):
            continue
        if prompt_end is None:
            prompt_end = head.start() - 2
        files.append(Attachment(head[1], int(head[2]), content[head.end() : closing.start()]))
        end = closing.end()
    if prompt_end is None or content[end:].strip():
        return content, []  # typed by somebody, not made by `join`
    return content[:prompt_end], files


def about_tokens(size: int) -> str:
    """An estimate in words; only the model's tokenizer knows."""
    return f"{max(1, round(size / _USUAL_PER_TOKEN)):,} tokens"
