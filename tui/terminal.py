"""The terminal: background color, text widths, clipboard, editor, Textual driver."""

import asyncio
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import time
import tty
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.cells import cell_len, split_graphemes

from akunu_py.text import on_one_line, typeable
from akunu_py.tui.themes import Background
from akunu_py.workarounds.textual_driver import ANSWERS, SteadyDriver

# OSC 11, then primary device attributes: a terminal without OSC 11 answers the second at once.
_QUERY = b"\x1b]11;?\x1b\\\x1b[c"
_COLOR = re.compile(rb"\x1b\]11;rgba?:([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})")
_ATTRIBUTES = re.compile(rb"\x1b\[\?[0-9;]*c")
_ANSWER_TIMEOUT_S = 1.0  # for slow connections; only a terminal without any answer takes so long
_NO_QUERIES = ("", "dumb", "linux", "unknown")  # values of TERM without queries and titles


def background(environ: Mapping[str, str] = os.environ) -> Background | None:
    """Return the terminal's background, None if unknown. Call before the app draws.

    Sends nothing if input is already waiting. What is typed meanwhile goes to `ChatDriver`.
    """
    if environ.get("TERM", "") in _NO_QUERIES:
        return None
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
    except OSError:
        return None
    try:
        answer = _query_terminal(terminal)
        ChatDriver.typed_ahead = re.sub(ANSWERS.pattern.encode(), b"", answer)
        return parse_answer(answer) or _from_environment(environ)
    except (OSError, termios.error):
        return _from_environment(environ)
    finally:
        os.close(terminal)


def parse_answer(answer: bytes) -> Background | None:
    """Parse the reply to `_QUERY`: light for luma > 0.5, else dark; None if no color."""
    found = _COLOR.search(answer)
    if found is None:
        return None
    red, green, blue = (int(part, 16) / (16 ** len(part) - 1) for part in found.groups())
    return "light" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "dark"  # BT.601


def _query_terminal(terminal: int) -> bytes:
    if select.select([terminal], [], [], 0)[0]:
        return b""
    before, answer = termios.tcgetattr(terminal), b""
    # SystemExit runs `finally`, which restores the terminal.
    handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        tty.setcbreak(terminal, termios.TCSADRAIN)
        os.write(terminal, _QUERY)
        end = time.monotonic() + _ANSWER_TIMEOUT_S
        while not _ATTRIBUTES.search(answer):
            left = max(0.0, end - time.monotonic())
            if not select.select([terminal], [], [], left)[0]:
                break
            answer += os.read(terminal, 1024)
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
        signal.signal(signal.SIGTERM, handler)
    return answer


def _from_environment(environ: Mapping[str, str]) -> Background | None:
    """Parse COLORFGBG ("15;0" for example): the last number is the background."""
    last = environ.get("COLORFGBG", "").rpartition(";")[2]
    if not last.isdecimal():
        return None
    return "light" if int(last) in (7, *range(9, 16)) else "dark"


# Characters of the same width in every terminal. Terminals disagree on joined emoji, skin tones,
# variation selectors and Indic vowel signs; one such cluster would shift the rest of its line.
_AGREED = (
    "\x20-\x7e\xa0-\xac\xae-\u05ff\u0606-\u061b\u061d-\u06dc\u06de-\u06ff"
    "\u0e00-\u0e32\u0e34-\u0e7f\u10a0-\u10ff\u1e00-\u1fff"
    "\u2010-\u2027\u202f-\u205e\u2070-\u209c\u20a0-\u20bf\u2100-\u262f\u2638-\u2689\u2690-\u2bff"
    "\u2c60-\u2c7f\u2e80-\u3029\u3030-\u3098\u309b-\u3163\u3165-\u3247\u3250-\u4dbf\u4e00-\ua4cf"
    "\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff01-\uff9f\uffe0-\uffe6\ufffc-\ufffd"
    "\U00020000-\U0002fffd"
)
_DISPUTED = re.compile(f"[^{_AGREED}\\s\x00-\x1f]")
_TOKEN = re.compile(
    r"\x1b\[(?P<row>\d+);(?P<column>\d+)H"
    r"|\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]P_^X][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])"
    r"|(?P<text>[^\x00-\x1f]+)"
    r"|(?P<control>[\x00-\x1f])"
)


def pin_columns(data: str) -> str:
    """Add cursor moves to terminal output around clusters of disputed width.

    Changes only text after a move to a row and column (CUP), as Textual draws. A cluster is drawn
    over spaces, since it may be narrower than its place.
    """
    if not _DISPUTED.search(data):
        return data
    parts: list[str] = []
    place: tuple[int, int] | None = None  # row and column from 1, if known
    for token in _TOKEN.finditer(data):
        if token["row"]:
            place = int(token["row"]), int(token["column"])
        elif token["control"]:
            place = None
        elif token["text"] and place is not None:
            row, column = place
            place = row, column + cell_len(token["text"])
            parts.append(_pin_text(token["text"], row, column))
            continue
        parts.append(token[0])
    return "".join(parts)


def _pin_text(text: str, row: int, column: int) -> str:
    if not _DISPUTED.search(text):
        return text
    parts: list[str] = []
    for cluster, width in _clusters(text):
        after = column + width
        if not _DISPUTED.search(cluster):
            parts.append(cluster)
        elif width:  # skip invisible clusters
            parts.append(f"{' ' * width}\x1b[{row};{column}H{cluster}\x1b[{row};{after}H")
        column = after
    return "".join(parts)


def _clusters(text: str) -> list[tuple[str, int]]:
    """Return grapheme clusters and their widths; two regional indicators are a flag."""
    clusters: list[tuple[str, int]] = []
    is_flag_open = False  # The last cluster is the first half of a flag.
    while text.startswith("\u200d"):
        text = text[2:]  # a leading joiner hides the next character
    for start, end, width in split_graphemes(text)[0]:
        cluster = text[start:end]
        is_half = len(cluster) == 1 and "\U0001f1e6" <= cluster <= "\U0001f1ff"
        if is_half and is_flag_open:
            half, half_width = clusters.pop()
            cluster, width = half + cluster, half_width + width
        is_flag_open = is_half and not is_flag_open
        clusters.append((cluster, width))
    return clusters


_CLIPBOARD_TIMEOUT_S = 2.0


def clipboard_command(
    environ: Mapping[str, str] = os.environ,
    platform: str = sys.platform,
    which: Callable[[str], str | None] = shutil.which,
) -> list[str] | None:
    """Return the command that copies its input to the clipboard, None for OSC 52."""
    is_local = not (environ.get("SSH_CONNECTION") or environ.get("SSH_TTY"))
    has_x11 = is_local and environ.get("DISPLAY")
    candidates = (
        (is_local and platform == "darwin", "pbcopy"),
        (is_local and environ.get("WAYLAND_DISPLAY"), "wl-copy"),
        (has_x11, "xclip -selection clipboard"),
        (has_x11, "xsel --clipboard --input"),
        (environ.get("TMUX"), "tmux load-buffer -w -"),  # -w: also copies to the outer terminal
    )
    commands = (command.split() for applies, command in candidates if applies)
    return next((command for command in commands if which(command[0])), None)


def copy_with(command: Sequence[str], text: str) -> bool:
    """Pass `text` to a clipboard command; return success. Blocks for up to 2 seconds."""
    try:
        done = subprocess.run(
            command,
            input=text.encode(errors="replace"),
            stdout=subprocess.DEVNULL,  # xclip keeps running and would keep a pipe open
            stderr=subprocess.DEVNULL,
            timeout=_CLIPBOARD_TIMEOUT_S,
            env={**os.environ, "LC_CTYPE": "UTF-8"},  # the encoding that pbcopy expects
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def find_editor(environ: Mapping[str, str] = os.environ) -> list[str]:
    return shlex.split(environ.get("VISUAL") or environ.get("EDITOR") or "vi") or ["vi"]


async def edit_text(text: str, command: Sequence[str] | None = None) -> str:
    """Edit `text` in the user's editor; return it unchanged if the editor fails.

    Cancelling terminates the editor. Raises OSError if the editor cannot start.
    """
    with tempfile.TemporaryDirectory(prefix="akunu-") as directory:
        path = Path(directory, "prompt.md")
        path.write_text(text, "utf-8", "replace")
        process = await asyncio.create_subprocess_exec(*(command or find_editor()), str(path))
        try:
            failed = await process.wait()
        finally:
            if process.returncode is None:
                process.terminate()
        return text if failed else typeable(path.read_text("utf-8", "replace"))


# XTWINOPS of xterm. Terminals without it keep the last title.
_PUSH_TITLE, _POP_TITLE = "\x1b[22;2t", "\x1b[23;2t"


def has_title(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the terminal supports titles (OSC 2)."""
    return environ.get("TERM", "") not in _NO_QUERIES


class ChatDriver(SteadyDriver):
    """The chat's driver: aligns wide characters and sets the terminal's title."""

    _title = ""

    def write(self, data: str) -> None:
        if not self.is_suspended:  # another program uses the terminal meanwhile
            super().write(pin_columns(data))

    def start_application_mode(self) -> None:
        super().start_application_mode()
        if has_title():
            self.write(_PUSH_TITLE)
            self.show_title(self._title)

    def stop_application_mode(self) -> None:
        if has_title():
            self.write(_POP_TITLE)
        super().stop_application_mode()

    def show_title(self, title: str) -> None:
        self._title = title
        if title and has_title():
            self.write(f"\x1b]2;{on_one_line(title)}\x07")
            self.flush()
