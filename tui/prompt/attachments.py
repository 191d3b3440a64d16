"""Text that a prompt attaches: files named by `@path`, and long pasted texts.

`join_files` builds the content for the model; `split_files` parses it to show names instead.
"""

import codecs
import contextlib
import errno
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from akunu_py.errors import UsageError
from akunu_py.files import open_regular
from akunu_py.text import fence_for, human_size, typeable
from akunu_py.tui.prompt.file_index import list_files

_SNIFF_BYTES = 1024  # bytes checked to detect binary files
# At the start or after a space or bracket: me@example.com is not a mention. Quotes allow spaces.
MENTION = re.compile(r'(?<![^\s(\[])@(?:"([^"\n]+)"|([^\s"@][^\s"]*))')
_MAX_FILES_IN_LISTING = 500
_TRAILING = ".,;:!?)]}'"

# About 4.5 in English prose, fewer in code, at most 8 in human text. The session counts exactly.
_MAX_BYTES_PER_TOKEN = 8
BYTES_PER_TOKEN = 4

_HEADS = ("Attached file", "Pasted text")
_HEAD = re.compile(
    rf"^({'|'.join(_HEADS)}): (.+) \((\d+) bytes\)\n(`{{3,}})[^\n`]*\n", re.MULTILINE
)
PASTE_LABEL = re.compile(r"\[pasted [\d,]+ (?:lines|characters)(?: #\d+)?\]")
_COURTESY = re.compile(r"\A(?:(?:hi|hello|hey|please|(?:can|could) you)\b[ ,.!]+)+", re.IGNORECASE)
_IMAGES = (".png", ".jpg", ".jpeg", ".gif", ".webp", ".heic", ".tiff", ".bmp")
_BOM = "\ufeff"


@dataclass(frozen=True, slots=True)
class Attachment:
    """A snapshot of an attached file, or a pasted text."""

    name: str  # as written in the prompt; the label of a pasted text
    size: int  # bytes
    text: str = ""
    is_paste: bool = False


def mentions(prompt: str) -> list[str]:
    """Return the unique paths mentioned with an @, whether or not they exist."""
    return list(dict.fromkeys(quoted or bare for quoted, bare in MENTION.findall(prompt)))


def attach(prompt: str, directory: Path, context_length: int) -> list[Attachment]:
    """Read the existing files that `prompt` mentions.

    Raises UsageError for unsuitable files. context_length: in tokens, 0 if unknown.
    """
    files: dict[Path, Attachment] = {}
    for name in mentions(prompt):
        found = find_file(name, directory)
        if found is None or (path := found[1].resolve()) in files:
            continue
        used = sum(file.size for file in files.values())
        max_bytes = max(0, context_length * _MAX_BYTES_PER_TOKEN - used) if context_length else None
        files[path] = read_attachment(found[0], path, max_bytes)
    return list(files.values())


def looks_like_a_file(name: str) -> bool:
    """Return whether a name has a suffix or a slash."""
    return re.search(r"/|[^.]\.\w{1,8}$", name.rstrip(_TRAILING)) is not None


def estimate_tokens(names: Sequence[str], directory: Path) -> dict[str, int]:
    """Return the estimated tokens of each existing file or directory listing. Blocks."""
    tokens: dict[str, int] = {}
    for name in names:
        if found := find_file(name, directory):
            path, tokens[name] = found[1], 0
            with contextlib.suppress(OSError):
                size = len(_listing(path)) if path.is_dir() else path.stat().st_size
                tokens[name] = max(1, size // BYTES_PER_TOKEN)
    return tokens


def missing_files(prompt: str, directory: Path) -> list[str]:
    """Return mentions with a suffix or slash that are not existing files."""
    names = filter(looks_like_a_file, mentions(prompt))
    return [name for name in names if find_file(name, directory) is None]


def is_text(path: Path) -> bool:
    """Return whether a file starts with UTF-8 text, or is a directory or unreadable."""
    try:
        with open_regular(path) as file:
            head = file.read(_SNIFF_BYTES)
            codecs.getincrementaldecoder("utf-8")().decode(head)  # accepts an incomplete character
            return b"\0" not in head
    except OSError as error:  # EINVAL: a device or pipe; `read_attachment` reports other errors
        return error.errno != errno.EINVAL
    except UnicodeDecodeError:
        return False


def find_file(name: str, directory: Path) -> tuple[str, Path] | None:
    """Return a mentioned file or directory, and its name without trailing punctuation."""
    for candidate in filter(None, (name, name.rstrip(_TRAILING))):
        # The name may be too long, have a NUL or an unknown home directory.
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            path = directory / Path(candidate).expanduser()
            if path.exists():
                return candidate, path
    return None


def read_attachment(name: str, path: Path, max_bytes: int | None = None) -> Attachment:
    """Read up to `max_bytes` (None: all) or list a directory. Raises UsageError."""
    try:
        if path.is_dir():
            text = _listing(path)
            return Attachment(f"{name.rstrip('/')}/", len(text.encode()), text)
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if b"\0" in os.pread(file.fileno(), _SNIFF_BYTES, 0):
                raise _binary_error(name, size)
            if max_bytes is not None and size > max_bytes:
                raise UsageError(
                    f"{name} does not fit the model's context: {human_size(size)}, about "
                    f"{round(size / BYTES_PER_TOKEN):,} tokens; attach a part of it"
                )
            data = file.read(size)  # a growing file must not fill memory
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise UsageError(f"{name} is a device or a pipe; attach a text file") from error
        raise UsageError(f"cannot read {name}: {error.strerror}") from error
    if b"\0" in data:
        raise _binary_error(name, len(data))
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is not UTF-8 text (byte {error.start}); convert it: iconv -t utf-8"
        ) from error
    return Attachment(name, len(data), typeable(text.removeprefix(_BOM)))


def _listing(directory: Path) -> str:
    """List the files below a directory with their sizes, one per line. Raises OSError."""
    names = list_files(directory, _MAX_FILES_IN_LISTING + 1)
    lines = []
    for name in sorted(names)[:_MAX_FILES_IN_LISTING]:
        with contextlib.suppress(OSError):
            lines.append(f"{name}  {human_size((directory / name).stat().st_size)}")
    if len(names) > _MAX_FILES_IN_LISTING:
        lines.append("... and more")
    return typeable("\n".join(lines or ["(no files)"]) + "\n")


def _binary_error(name: str, size: int) -> UsageError:
    if is_image(name):
        return UsageError(f"{name} is an image; this model reads text only")
    return UsageError(f"{name} is a binary file ({human_size(size)}); attach a text file")


def is_image(name: str) -> bool:
    """Return whether a file name, perhaps quoted, is that of an image."""
    return Path(name.strip("'\" \n")).suffix.lower() in _IMAGES


def join_files(prompt: str, files: Sequence[Attachment]) -> str:
    """Return the prompt, then each file in a fence longer than any fence in the file."""
    parts = [prompt]
    for file in files:
        fence = fence_for(file.text)
        suffix = "" if file.is_paste else Path(file.name).suffix.removeprefix(".")
        language = suffix if suffix.isalnum() else ""
        head = f"{_HEADS[file.is_paste]}: {file.name} ({file.size} bytes)"
        body = file.text if file.text.endswith("\n") else f"{file.text}\n"
        parts.append(f"{head}\n{fence}{language}\n{body}{fence}")
    return "\n\n".join(parts)


def pasted_texts(files: Sequence[Attachment]) -> dict[str, str]:
    """Return the pasted texts among `files` by label."""
    # `join_files` ends each text with a newline.
    return {
        file.name: file.text.removesuffix("\n" * (len(file.text.encode()) > file.size))
        for file in files
        if file.is_paste
    }


def expand_pastes(prompt: str, texts: Mapping[str, str]) -> str:
    """Return a prompt with pasted texts in place of their labels."""
    return PASTE_LABEL.sub(lambda label: texts.get(label[0], label[0]), prompt)


def full_prompt(content: str) -> str:
    """Return the prompt of a message, without files, with pasted texts in place."""
    prompt, files = split_files(content)
    return expand_pastes(prompt, pasted_texts(files))


def title_text(content: str) -> str:
    """Return the sentence that names a chat: of a prompt, else of a pasted text."""
    text = PASTE_LABEL.sub("", split_files(content)[0]).strip() or full_prompt(content)
    line = next(filter(None, map(str.strip, text.splitlines())), "")
    asked = _COURTESY.sub("", line)
    sentence = re.split(r"(?<=\w\w[.!?]) ", asked)[0].strip(" #*`>_:;,.")
    return sentence if asked == line else sentence[:1].upper() + sentence[1:] or line


def split_files(content: str) -> tuple[str, list[Attachment]]:
    """Return the prompt and files of `join_files`. A file's last newline may differ."""
    files: list[Attachment] = []
    prompt_end: int | None = None
    end = 0
    for head in _HEAD.finditer(content):
        if head.start() < end:
            continue  # inside a file
        kind, name, size, fence = head.groups()
        closing = re.compile(rf"^{fence}$", re.MULTILINE).search(content, head.end())
        if closing is None or not content[: head.start()].endswith("\n\n"):
            continue
        if prompt_end is None:
            prompt_end = head.start() - 2
        text = content[head.end() : closing.start()]
        files.append(Attachment(name, int(size), text, is_paste=kind == _HEADS[True]))
        end = closing.end()
    if prompt_end is None or content[end:].strip():
        return content, []  # typed by the user, not built by `join_files`
    return content[:prompt_end], files
