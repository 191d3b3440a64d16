"""Text for a terminal: control characters replaced one for one, sizes, lines."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from akunu_py.errors import UsageError

if TYPE_CHECKING:
    from pydantic import ValidationError

_REPLACEMENT = "\ufffd"


def _replacements() -> dict[int, str]:
    table = {code: chr(0x2400 + code) for code in range(0x20)}  # ESC becomes ␛
    table |= {0x7F: "\u2421"}
    table |= dict.fromkeys(range(0x80, 0xA0), _REPLACEMENT)
    table |= dict.fromkeys(range(0xD800, 0xE000), _REPLACEMENT)  # lone surrogates
    # These change the direction of the surrounding text.
    table |= dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)), _REPLACEMENT)
    # Python's splitlines breaks a line at these and a Markdown parser does not.
    table |= dict.fromkeys((0x0B, 0x0C, 0x85, 0x2028, 0x2029), "\n")
    table |= {0x0D: " "}
    del table[0x09], table[0x0A]
    return table


_DISPLAYED = _replacements()
_PROMPT_TEXT = {code: "\n" if shown == "\n" else "" for code, shown in _DISPLAYED.items()}


def displayable(text: str) -> str:
    """Make control characters visible, except for newline and tab; keeps the length."""
    return text.translate(_DISPLAYED)


def typeable(text: str) -> str:
    """Remove control characters and use `\\n` for newlines, as for a prompt."""
    return text.replace("\r\n", "\n").replace("\r", "\n").translate(_PROMPT_TEXT)


def for_output(text: str) -> str:
    """Make control characters visible if stdout is a terminal."""
    return displayable(text) if sys.stdout.isatty() else text


def fence_for(text: str) -> str:
    """Return a fence that no line of `text` can close."""
    return "`" * (1 + max(map(len, re.findall("`{3,}", text)), default=2))


def on_one_line(text: str) -> str:
    """Return `displayable` text without newlines and tabs, of the same length."""
    return displayable(text).replace("\n", "⏎").replace("\t", " ")


def collapse(text: str) -> str:
    """Return `displayable` text with each run of whitespace as one space."""
    return " ".join(displayable(text).split())


def say(line: str, *, error: bool = False) -> None:
    """Print one line on stdout or stderr, even if the text has newlines."""
    print(on_one_line(line), file=sys.stderr if error else sys.stdout)


def table(rows: Sequence[Sequence[str]], right: Collection[int] = (), gap: str = "  ") -> list[str]:
    """Return the lines of a table without newlines. right: columns aligned right."""
    lines = [[on_one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        gap.join(
            (cell.rjust if column in right else cell.ljust)(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def confirm(question: str, command: str) -> bool:
    """Ask a question on the terminal. Only "y" and "yes" confirm.

    Raises UsageError without a terminal. command: the command that needs no confirmation.
    """
    if not sys.stdin.isatty():
        raise UsageError(f"cannot ask for confirmation; run: {command}")
    with contextlib.suppress(EOFError):  # Ctrl-D
        return input(f"{on_one_line(question)} [y/N] ").strip().lower() in ("y", "yes")
    return False


def print_warnings(warnings: Iterable[str]) -> None:
    """Print each warning or error as a line on stderr, if it is open."""
    with contextlib.suppress(OSError):
        for warning in warnings:
            say(f"akunu: {warning}", error=True)


def escape_unencodable() -> None:
    """Write characters that stdout cannot encode as JSON escapes."""
    codecs.register_error("akunu-escape", _escape)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="akunu-escape")


def _escape(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def parse_size(text: str, thousand: int = 1000) -> int:
    """Return the bytes of a size such as "500 MB" or "2GB". Raises ValueError.

    thousand: 1024 for a machine's memory, where a GB is 2**30 bytes.
    """
    found = re.fullmatch(
        r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(?:([kMGT])B?|B)", text.strip(), re.IGNORECASE
    )
    if found is None:
        raise ValueError(f"expected a size such as 500MB or 2GB, got {text[:40]!r}")
    return int(float(found[1]) * thousand ** " kmgt".index((found[2] or " ").lower()))


def human_size(size: float) -> str:
    """Return bytes in the largest decimal unit of at least 1."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def human_duration(seconds: float) -> str:
    """Return a duration in seconds, minutes or hours."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def first_problem(error: ValidationError, root: str = "") -> str:
    """Return the first problem that pydantic found, after its place. root: name of the value."""
    first = error.errors(include_url=False)[0]
    # Members of a union in the place mean nothing to users.
    parts = [root, *(str(part) for part in first["loc"] if part not in ("int", "str"))]
    place = on_one_line(".".join(filter(None, parts)))[:100]
    return f"{place}: {first['msg']}" if place else first["msg"]


def did_you_mean(
    name: str, known: Iterable[str], shown: Mapping[str, str] | None = None, cutoff: float = 0.6
) -> str:
    """Return " (did you mean ...?)", as `shown`, if a `known` name is close, otherwise ""."""
    import difflib

    close = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=cutoff)
    return f" (did you mean {(shown or {}).get(close[0], close[0])!r}?)" if close else ""
