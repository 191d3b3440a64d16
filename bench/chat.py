"""The chat on a terminal of our own: how soon a key is answered, and what drawing costs.

Owns a pseudo-terminal with `akunu chat` in it, the keys that are typed, and what was measured.
Answered is a key when the terminal is sent the letter. Refuses to look into the chat: it reads
what a terminal would.
"""

from __future__ import annotations

import contextlib
import math
import os
import pty
import random
import re
import select
import signal
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from akunu_py.bench.statistics import half_range, median
from akunu_py.errors import AkunuError
from akunu_py.types import Stats

SCREEN = (24, 80)  # lines, columns
IDLE, DECODING, LONG = "idle", "decoding", "decoding, long chat"
# Letters that no answer is likely to have, a column wide, a new one for each key. There are fewer
# than fit into a line of the box, which is cleared in between.
LETTERS = "".join(map(chr, range(0x13A0, 0x13A0 + 64)))  # Cherokee
_GAPS_S = (0.08, 0.18)  # between an echo and the next key: a fast typist's
_LOST_S = 3.0  # nobody waits so long for a letter
_PATIENCE_S = 120.0
_OVERLAP = 64  # bytes; more than the longest text that is looked for
_CLEAR, _QUIT, _ENTER, _CHATS = b"\x15", b"\x11", b"\r", b"\x0f"  # Ctrl+U, Ctrl+Q, Enter, Ctrl+O
_ASKED, _ATTRIBUTES = b"\x1b[c", b"\x1b[?62;22c"  # what kind of terminal we are
_READY, _ENDED = "● ready", "● ready|■ stopped|× failed"
_BEGUN = f"▶ answering|{_ENDED}"
_EMPTY = "Ask something"  # what an empty box says
_SEQUENCE = re.compile(rb"\x1b(\[[0-9;?<>=$]*[@-~]|[\]P_][^\x1b\x07]*(\x07|\x1b\\)|[^\[\]P_])")


@dataclass
class Keys:
    """Seconds from a key to its letter on the terminal. lost: keys with no letter after 3 s."""

    seconds: list[float] = field(default_factory=list)
    lost: int = 0

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def p95(self) -> float:
        """95 in 100 are as fast (nearest rank), 0 for none."""
        rank = math.ceil(0.95 * len(self.seconds)) - 1
        return sorted(self.seconds)[rank] if self.seconds else 0.0


@dataclass
class Measured:
    """All figures, as far as they go: keys by what went on, and the answers of both sides, told
    as (text, statistics). history: tokens of the long chat that the model had before it."""

    keys: dict[str, Keys] = field(default_factory=lambda: {IDLE: Keys(), DECODING: Keys()})
    alone: list[tuple[str, Stats]] = field(default_factory=list)
    chat: list[tuple[str, Stats]] = field(default_factory=list)
    history: int = 0

    @property
    def ratio(self) -> float:
        """Tokens/s in the chat over those without it, of the medians; 0 where one is missing."""
        alone = median(speeds(self.alone))
        return median(speeds(self.chat)) / alone if alone else 0.0

    @property
    def identical(self) -> bool:
        """Whether everybody said the same."""
        return len({text for text, _ in (*self.alone, *self.chat)}) == 1

    @property
    def spread(self) -> float:
        """Half the way from the least to the greatest ratio of neighbours."""
        both = zip(speeds(self.chat), speeds(self.alone), strict=False)
        return half_range([chat / alone for chat, alone in both if alone])


def speeds(answers: Sequence[tuple[str, Stats]]) -> list[float]:
    """Tokens/s of each answer."""
    return [stats.tokens_per_s for _, stats in answers]


class ChatTerminal:
    """A terminal of 80 x 24 with a program in it, and whoever sits before it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, SCREEN)
        self._process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
        )
        os.close(slave)
        self._shown = bytearray()  # since the last `write`
        self._gaps = random.Random(0)

    def wait_for(self, pattern: str, seconds: float = _PATIENCE_S, start: int = 0) -> str:
        """What of `pattern` was sent to the terminal since the last `write`, as soon as it was.
        start: how many bytes since then do not count.

        Raises AkunuError where it does not come.
        """
        wanted = re.compile(pattern.encode())
        end = time.perf_counter() + seconds
        while not (found := wanted.search(self._shown, start)):
            start = max(start, len(self._shown) - _OVERLAP)  # to search takes time from the chat
            if not self._read(end):
                last = _words(bytes(self._shown))[-300:]
                raise AkunuError(
                    f"the chat did not come to show {pattern!r} within {seconds:.0f} s; the end of "
                    f"what it showed: {last}"
                )
        return found[0].decode()

    def write(self, keys: bytes) -> None:
        self._shown.clear()
        os.write(self._master, keys)

    def ask(self, prompt: str) -> None:
        """Pastes a prompt, sends it, and waits until the answer has begun."""
        self.write(b"\x1b[200~%b\x1b[201~" % prompt.encode())
        self.wait_for(re.escape(prompt.split()[-1]))
        self.write(_ENTER)
        self.wait_for(_BEGUN)

    def wait_for_end(self) -> None:
        """Raises AkunuError where the answer does not come to its end."""
        if (end := self.wait_for(_ENDED)) != _READY:
            shown = _words(bytes(self._shown))[-300:]
            raise AkunuError(f"an answer in the chat {end[2:]}; the end of what it showed: {shown}")

    def type_keys(self, count: int, into: Keys, *, while_answering: bool) -> int:
        """Types up to `count` letters and clears them; fewer where an answer ends before. Gives
        how many."""
        ended = re.compile(_ENDED.encode())
        typed = start = 0
        for letter in LETTERS[:count]:
            self._linger(self._gaps.uniform(*_GAPS_S))
            if while_answering and ended.search(self._shown, start):
                break
            start = max(0, len(self._shown) - _OVERLAP)
            self._type(letter, into)
            typed += 1
        if typed:
            before = len(self._shown)
            os.write(self._master, _CLEAR)  # the end of an answer is still to be found
            self.wait_for(_EMPTY, start=before)
        return typed

    def open_chat(self, title: str, end: str) -> None:
        """Opens the earlier chat of that title; `end` is what its last line has."""
        self.write(_CHATS)
        self.wait_for(re.escape(title))
        self._linger(1.0)
        self.write(_ENTER)
        self.wait_for(re.escape(end))
        self._linger(1.0)

    def quit(self) -> None:
        """Leaves the chat, so that all is kept. Raises AkunuError where it does not end well."""
        self.write(_QUIT)
        end = time.perf_counter() + _PATIENCE_S
        while self._process.poll() is None and time.perf_counter() < end:
            self._read(time.perf_counter() + 0.05)
        if self._process.poll() != 0:
            raise AkunuError(f"the chat ended with {self._process.poll()}, expected 0")

    def close(self) -> None:
        """Ends what is left."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(3.0)
            self._process.kill()
            self._process.wait()
        os.close(self._master)

    def _type(self, letter: str, into: Keys) -> None:
        key, before = letter.encode(), len(self._shown)
        started = time.perf_counter()
        os.write(self._master, key)
        while self._shown.find(key, before) < 0:
            if not self._read(started + _LOST_S):
                into.lost += 1
                return
        into.seconds.append(time.perf_counter() - started)

    def _linger(self, seconds: float) -> None:
        """Reads what comes meanwhile: a terminal that does not read stops the program."""
        end = time.perf_counter() + seconds
        while self._read(end):
            pass

    def _read(self, end: float) -> bool:
        """Reads once what comes before `end`; False where nothing did."""
        left = end - time.perf_counter()
        if left <= 0 or not select.select([self._master], [], [], left)[0]:
            return False
        try:
            read = os.read(self._master, 1 << 16)
        except OSError:  # how Linux says that the program has gone
            read = b""
        self._shown += read
        if _ASKED in read:
            os.write(self._master, _ATTRIBUTES)
        return bool(read)


def _words(shown: bytes) -> str:
    """What was sent to a terminal, without what only moves and colours."""
    return " ".join(_SEQUENCE.sub(b" ", shown).decode(errors="replace").split())


@contextlib.contextmanager
def chat_terminal(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[ChatTerminal]:
    """A chat whose model is loaded; it is ended whatever happens."""
    terminal = ChatTerminal(command, environment)
    try:
        terminal.wait_for(_READY)
        yield terminal
    finally:
        terminal.close()


def type_while_answering(
    terminal: ChatTerminal, prompt: str, count: int, into: Keys, most_answers: int = 6
) -> None:
    """Asks, and types while the answer comes; asks again until `count` keys were typed."""
    for _ in range(most_answers):
        terminal.ask(prompt)
        count -= terminal.type_keys(count, into, while_answering=True)
        terminal.wait_for_end()
        if count <= 0:
            return
