"""`akunu chat` in a pseudo-terminal of 80 x 24, with a simulated user who types.

`terminal.Terminal` drives any program by tmux; this one measures when a letter arrives.
"""

import contextlib
import os
import pty
import random
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence

from akunu_py.errors import AkunuError

SCREEN = (24, 80)  # lines, columns
# One letter per key: rare in answers, one column wide, and few enough for one line of the box.
LETTERS = "".join(map(chr, range(0x13A0, 0x13A0 + 64)))  # Cherokee
_GAPS_S = (0.08, 0.18)  # between an echo and the next key, as by a fast typist
_LOST_S = 3.0  # timeout for a letter
_TIMEOUT_S = 120.0
_CLEAR, _QUIT, _ENTER = b"\x15", b"\x11", b"\r"  # Ctrl+U, Ctrl+Q, Enter
_ATTRIBUTES_QUERY, _ATTRIBUTES = b"\x1b[c", b"\x1b[?62;22c"  # the terminal identifies itself
READY, _ANSWERING = "● ready", "◐ answering"
# A whole status: in several colors, up to the next sequence that is no color.
_STATUS = re.compile(
    f"({READY}|{_ANSWERING}|■ stopped|× failed)".encode()
    + rb"([^\x1b]|\x1b\[[\d;]*m)*(?=\x1b\[[\d;?]*[A-Za-ln-z])"
)
_EMPTY = "Ask something"  # what an empty box shows
_SEQUENCE = re.compile(rb"\x1b(\[[0-9;?<>=$]*[@-~]|[\]P_][^\x1b\x07]*(\x07|\x1b\\)|[^\[\]P_])")

Keys = list[float | None]
"""Seconds from each key to its letter, None without a letter."""


class ChatTerminal:
    """A pseudo-terminal of 80 x 24 with `akunu chat` and a simulated user."""

    def __init__(self, words: Sequence[str], variables: Mapping[str, str]) -> None:
        """variables: of the environment."""
        terminal = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "PYTHONUTF8": "1"}
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, SCREEN)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "akunu_py", "chat", *words], stdin=slave, stdout=slave,
            stderr=slave, env={**variables, **terminal}, start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self._output = bytearray()  # since the last `write`
        self._searched = 0  # bytes of it, for statuses
        self._status, self._has_new_status = "", False
        self._gaps = random.Random(0)

    def wait_for(self, text: str, start: int = 0) -> None:
        """Wait for `text` in the output since the last `write`. Raises AkunuError on timeout.

        start: bytes of that output to ignore.
        """
        self._wait(lambda: self._output.find(text.encode(), start) >= 0, f"no {text!r} was shown")

    def write(self, keys: bytes) -> None:
        self._output.clear()
        self._searched = 0
        os.write(self._master, keys)

    def send(self, prompt: str) -> None:
        """Paste and send a prompt, and wait for the beginning of the answer."""
        self.write(b"\x1b[200~%b\x1b[201~" % prompt.encode())
        self.wait_for(prompt.split()[-1])
        self._has_new_status = False
        self.write(_ENTER)
        self._wait(lambda: self._has_new_status, "an answer did not begin")

    def wait_for_end(self) -> None:
        """Wait for the end of the answer. Raises AkunuError if it fails or stops."""
        self._wait(lambda: not self._status.startswith(_ANSWERING), "an answer did not end")
        if not self._status.startswith(READY):
            raise AkunuError(f"an answer in the chat {self._status[2:]}; {self._last_text()}")

    def type_keys(self, count: int, into: Keys, *, while_answering: bool) -> int:
        """Type up to `count` letters, clear them, and return their number.

        while_answering: stop early at the end of the answer.
        """
        typed = 0
        for letter in LETTERS[:count]:
            end = time.perf_counter() + self._gaps.uniform(*_GAPS_S)
            while self._read(end):  # a full terminal buffer would stop the program
                pass
            if while_answering and not self._status.startswith(_ANSWERING):
                break
            into.append(self._type(letter.encode()))
            typed += 1
        if typed:
            before = len(self._output)
            os.write(self._master, _CLEAR)
            self.wait_for(_EMPTY, start=before)
        return typed

    def quit(self) -> None:
        """Quit the chat, which saves everything. Raises AkunuError for a bad exit."""
        self.write(_QUIT)
        end = time.perf_counter() + _TIMEOUT_S
        while self._process.poll() is None and time.perf_counter() < end:
            self._read(time.perf_counter() + 0.05)
        if self._process.poll() != 0:
            raise AkunuError(f"the chat ended with {self._process.poll()}, expected 0")

    def close(self) -> None:
        """Terminate the program if it still runs."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(3.0)
        self._process.kill()
        self._process.wait()
        os.close(self._master)

    def _type(self, key: bytes) -> float | None:
        before, started = len(self._output), time.perf_counter()
        os.write(self._master, key)
        while self._output.find(key, before) < 0:
            if not self._read(started + _LOST_S):
                return None
        return time.perf_counter() - started

    def _wait(self, condition: Callable[[], bool], failure: str) -> None:
        end = time.perf_counter() + _TIMEOUT_S
        while not condition():
            if not self._read(end):
                raise AkunuError(f"{failure} in the chat; {self._last_text()}")

    def _last_text(self) -> str:
        return f"the end of its output: {_visible_text(self._output)[-300:]}"

    def _read(self, end: float) -> bool:
        """Read once before `end`. Returns False on timeout or at the end of the output."""
        left = end - time.perf_counter()
        if left <= 0 or not select.select([self._master], [], [], left)[0]:
            return False
        try:
            read = os.read(self._master, 1 << 16)
        except OSError:  # Linux raises this when the program has exited
            read = b""
        self._output += read
        for found in _STATUS.finditer(self._output, self._searched):
            self._searched = found.end()
            status = _visible_text(found[0])
            if not self._status.startswith(status):  # a part of it may be drawn again, too
                self._status, self._has_new_status = status, True
        if _ATTRIBUTES_QUERY in read:
            os.write(self._master, _ATTRIBUTES)
        return bool(read)


def _visible_text(shown: bytes | bytearray) -> str:
    """Return terminal output without escape sequences."""
    return " ".join(_SEQUENCE.sub(b" ", shown).decode(errors="replace").split())
