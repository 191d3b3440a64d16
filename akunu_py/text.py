"""Text for a terminal: control characters made visible, sizes, and how lines are printed.

What cannot be shown is replaced character for character, so that ranges into the text stay true.
"""

from __future__ import annotations

import codecs
import contextlib
import difflib
import io
import json
import re
import sys
from collections.abc import Iterable

_REPLACEMENT = "\ufffd"


def _shown() -> dict[int, str]:
    """What stands for each character that a terminal might obey."""
    table = {code: chr(0x2400 + code) for code in range(0x20)}  # ESC becomes ␛
    table |= {0x7F: "\u2421"}
    table |= dict.fromkeys(range(0x80, 0xA0), _REPLACEMENT)
    table |= dict.fromkeys(range(0xD800, 0xE000), _REPLACEMENT)  # halves that no encoder takes
    # What turns the direction of the text around it, so that it reads as another one.
    table |= dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)), _REPLACEMENT)
    # Python's splitlines breaks a line at these and a Markdown parser does not; the two would
    # count lines differently, so they become what both agree on.
    table |= dict.fromkeys((0x0B, 0x0C, 0x85, 0x2028, 0x2029), "\n")
    table |= {0x0D: " "}
    del table[0x09], table[0x0A]
    return table


_SHOWN = _shown()
_TYPED = {code: "\n" if shown == "\n" else "" for code, shown in _SHOWN.items()}


def displayable(text: str) -> str:
    """`text` with control characters made visible, as long as before; newline and tab stay."""
    return text.translate(_SHOWN)


def typeable(text: str) -> str:
    """`text` as it goes into a prompt: newlines made `\\n`, control characters left out."""
    return text.replace("\r\n", "\n").replace("\r", "\n").translate(_TYPED)


def for_output(text: str) -> str:
    """`text` for stdout: a terminal shows control characters, a file or a pipe gets them."""
    return displayable(text) if sys.stdout.isatty() else text


def on_one_line(text: str) -> str:
    """`displayable` text without newlines and tabs, as long as before."""
    return displayable(text).replace("\n", "⏎").replace("\t", " ")


def collapse(text: str) -> str:
    """`displayable` text in which each run of whitespace is one space."""
    return " ".join(displayable(text).split())


def say(line: str, *, error: bool = False) -> None:
    """Prints a line on stdout, or on stderr; whatever is in it stays on that line."""
    print(on_one_line(line), file=sys.stderr if error else sys.stdout)


def rewrite_line(line: str) -> None:
    """Shows `line` on stderr, a terminal, in the place of the one before; empty, it clears that."""
    print(f"\r\x1b[K{on_one_line(line)}", end="", file=sys.stderr, flush=True)


def print_warnings(warnings: Iterable[str]) -> None:
    """Prints each warning or error to stderr, on one line, if anybody reads that."""
    with contextlib.suppress(OSError):
        for warning in warnings:
            say(f"akunu: {warning}", error=True)


def escape_what_cannot_be_encoded() -> None:
    """What stdout's encoding lacks is written as JSON escapes it, and is no error."""
    codecs.register_error("akunu-escape", _escape)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="akunu-escape")


def _escape(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def parse_size(text: str) -> int:
    """Bytes of a text such as "500 MB" or "2GB". Raises ValueError for anything else."""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([kMGT]?)B", text.strip(), re.IGNORECASE)
    if found is None:
        raise ValueError(f"expected a size such as 500MB or 2GB, got {text[:40]!r}")
    return int(float(found[1]) * 1000 ** " kmgt".index(found[2].lower() or " "))


def is_size(text: str) -> bool:
    """Whether `parse_size` takes it."""
    try:
        parse_size(text)
    except ValueError:
        return False
    return True


def human_size(size: float) -> str:
    """Bytes in the largest decimal unit that keeps a digit before the point, as disks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def human_duration(seconds: float) -> str:
    """In the largest unit of which there are a few."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean ...?)" if one of the `known` names is close, otherwise ""."""
    close = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""
