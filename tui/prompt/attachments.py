"""Files that `@path` attaches to a prompt with their text.

`split` reads the sent form back, so that a saved conversation shows names instead of texts. A file
that is no text, not regular, or too long for the model's context is a UsageError.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from akunu_py.errors import UsageError
from akunu_py.text import human_size, typeable
from akunu_py.tui.prompt.file_index import list_files

_SNIFFED = 1024  # bytes of a file that tell whether it is text


# At the start or after a space or bracket: me@example.com names no file. Quotes hold spaces.
_MENTION = re.compile(r'(?<![^\s(\[])@(?:"([^"\n]+)"|([^\s"@][^\s"]*))')
_MAX_FILES = 32  # files in one prompt
_MAX_FILES_IN_LISTING = 500
_TRAILING = ".,;:!?)]}'"

# English prose has about 4.5 characters a token, code fewer; nothing that people write has more
# than 8. The session counts exactly; here only what cannot fit is refused, before it is read.
_MAX_PER_TOKEN = 8
_USUAL_PER_TOKEN = 4

_HEAD = re.compile(r"^Attached file: (.+) \((\d+) bytes\)\n(`{3,})[^\n`]*\n", re.MULTILINE)
_BOM = "\ufeff"


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file as it was when it was attached. name: as the prompt has it. size: bytes."""

    name: str
    size: int
    text: str = ""


def mentions(prompt: str) -> list[str]:
    """The paths that `prompt` names with an @, each once, whether or not they exist."""
    found = [quoted or bare for quoted, bare in _MENTION.findall(prompt)]
    return list(dict.fromkeys(found))


def attach(prompt: str, directory: Path, context_length: int) -> list[Attachment]:
    """The files that `prompt` names and that exist, read; a name that is no file stays a word.

    context_length: tokens that the model can hold, 0 where that is not known yet. Raises
    UsageError for a file that is refused.
    """
    files: dict[Path, Attachment] = {}
    for name in mentions(prompt):
        found = find(name, directory)
        if found is None or (path := found[1].resolve()) in files:
            continue
        if len(files) == _MAX_FILES:
            raise UsageError(
                f"expected at most {_MAX_FILES} files in a prompt, found more; name fewer"
            )
        room = context_length * _MAX_PER_TOKEN if context_length else None
        if room is not None:
            room = max(0, room - sum(file.size for file in files.values()))
        files[path] = read(found[0], path, room)
    return list(files.values())


def mention_spans(line: str) -> list[tuple[int, int, str]]:
    """Where in a line something is named with an @, the @ and quotes included, and its name."""
    return [(found.start(), found.end(), found[1] or found[2]) for found in _MENTION.finditer(line)]


def looks_like_a_file(name: str) -> bool:
    """Whether a name has a suffix or a slash, so that it is hardly a word."""
    return re.search(r"/|[^.]\.\w{1,8}$", name.rstrip(_TRAILING)) is not None


def tokens_of(path: Path) -> int:
    """About how many tokens a file, or the listing of a directory, will be."""
    try:
        if path.is_dir():
            return max(1, len(_listing(path)) // _USUAL_PER_TOKEN)
        return max(1, path.stat().st_size // _USUAL_PER_TOKEN)
    except OSError:
        return 0


def missing(prompt: str, directory: Path) -> list[str]:
    """What `prompt` names with an @ like a file, with a suffix or a slash, that is none."""
    return [
        name
        for name in mentions(prompt)
        if looks_like_a_file(name) and find(name, directory) is None
    ]


def is_text(path: Path) -> bool:
    """Whether a file begins like text, as far as one can tell; a directory counts."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return True  # reading it will say what is wrong
    try:
        kind = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(kind):
            return stat.S_ISDIR(kind)
        return not _is_binary(os.read(descriptor, _SNIFFED))
    except OSError:
        return True
    finally:
        os.close(descriptor)


def _is_binary(head: bytes) -> bool:
    """Whether these first bytes of a file are no UTF-8 text."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # which may end within a character
    except UnicodeDecodeError:
        return True
    return b"\0" in head


def find(name: str, directory: Path) -> tuple[str, Path] | None:
    """The file or directory that `name` means in `directory`, and its name without the
    punctuation of the sentence; None where there is none."""
    for candidate in (name, name.rstrip(_TRAILING)):
        if not candidate:
            continue
        try:
            path = directory / Path(candidate).expanduser()
            if path.exists():
                return candidate, path
        except (OSError, RuntimeError, ValueError):
            continue  # too long, no such home, a NUL: no name of a file
    return None


def read(name: str, path: Path, room: int | None = None) -> Attachment:
    """The text of a file, or what a directory holds. room: bytes that may fit, None for any. Raises
    UsageError."""
    try:
        if path.is_dir():
            text = _listing(path)
            return Attachment(f"{name.rstrip('/')}/", len(text.encode()), text)
        # O_NONBLOCK: does not wait for a pipe that nobody writes to.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode) and b"\0" in os.pread(descriptor, _SNIFFED, 0):
                raise _binary(name, status.st_size)
            size = _checked_size(name, status, room)
            data = _read_all(descriptor, size)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror}") from error
    if b"\0" in data:
        raise _binary(name, len(data))
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is not UTF-8 text (byte {error.start}); convert it: iconv -t utf-8"
        ) from error
    return Attachment(name, len(data), typeable(text.removeprefix(_BOM)))


def _listing(directory: Path) -> str:
    """The files below a directory, with their sizes, a line each. Raises OSError."""
    names = list_files(directory, _MAX_FILES_IN_LISTING + 1)
    lines = []
    for name in sorted(names)[:_MAX_FILES_IN_LISTING]:
        with contextlib.suppress(OSError):
            lines.append(f"{name}  {human_size((directory / name).stat().st_size)}")
    if len(names) > _MAX_FILES_IN_LISTING:
        lines.append("... and more")
    return typeable("\n".join(lines or ["(no files)"]) + "\n")


def _binary(name: str, size: int) -> UsageError:
    return UsageError(f"{name} is a binary file ({human_size(size)}); name a text file")


def _checked_size(name: str, status: os.stat_result, room: int | None) -> int:
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{name} is a device or a pipe; name a text file")
    if room is not None and status.st_size > room:
        raise UsageError(
            f"{name} does not fit the model's context: {human_size(status.st_size)}, about "
            f"{about_tokens(status.st_size)}; attach a part of it"
        )
    return status.st_size


def _read_all(descriptor: int, size: int) -> bytes:
    """`size` bytes, what the file had when it was checked: one that grows must not fill memory."""
    with open(descriptor, "rb", closefd=False) as file:
        return file.read(size)


def join(prompt: str, files: Sequence[Attachment]) -> str:
    """The content for the model: the prompt, then each file in a fence longer than any in it."""
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
    """The inverse of `join`, but for a last newline: the prompt, and the files with their text."""
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
    """An estimate in words; only the model's tokenizer could count."""
    return f"{max(1, round(size / _USUAL_PER_TOKEN)):,} tokens"
