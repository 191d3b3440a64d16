"""A driver for Textual that survives pastes, invalid UTF-8, SIGSTOP and slow lines.

Works around:
    1. `XTermParser` takes an escape character in a bracketed paste for the beginning of a key, and
       drops what follows from the text.
    2. `LinuxDriver` decodes input strictly: a byte that is not UTF-8 ends the input thread.
    3. Its input thread hides every other exception behind a printed traceback.
    4. `XTermParser` takes Alt+Enter (ESC CR) for Enter.
    5. `LinuxDriver` takes every SIGCONT for the end of a suspension that it began itself (Ctrl+Z).
       After a SIGSTOP, which no program can catch, it reads the terminal twice, saves raw mode as
       the mode to restore, and never ends.
    6. If the terminal is closed and no SIGHUP comes (a parent such as make keeps it), `LinuxDriver`
       reads the end of input forever, and its output blocks the app.
    7. It takes Enter, typed before the start, for Ctrl+J.
    8. `LinuxDriver` queues 30 writes for a slow terminal, and does not say when they are written.
    9. Its signal handlers suspend and resume. One that interrupts a write waits forever for the
       queue's lock, which that write holds.
Upstream: 1, 3, 4, 6 to 8: no issue found. 2: https://github.com/Textualize/textual/issues/6456.
    5: https://github.com/Textualize/textual/issues/1582. 9, in part:
    https://github.com/Textualize/textual/issues/6298. All of them with textual 8.2.8.
Remove when: these pass with `LinuxDriver` and `XTermParser`: in tests/reliability/,
    test_fuzz_terminal.py (1 to 3) and test_faults.py (5, 9); tests/tui/test_writing.py (4),
    tests/tui/test_long_chats.py (8) and tests/test_workarounds.py (6, 7).
"""

import asyncio
import os
import re
import selectors
import signal
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable
from typing import IO, Any, cast

from textual._xterm_parser import XTermParser
from textual.app import App
from textual.drivers.linux_driver import LinuxDriver
from textual.message import Message

from akunu_py.text import typeable

_ALT_ENTER, _ALT_ENTER_CODE = "\x1b\r", "\x1b[13;3u"
# Answers to the query of the terminal's background. Late ones are not typed text.
ANSWERS = re.compile(r"\x1b\]11;[^\x07\x1b]*(?:\x07|\x1b\\)|\x1b\[\?[0-9;]*c")
_PING = "\x1b[?2026$p"  # A terminal with synchronized output answers when it has come so far.
_PASTE_START, _PASTE_END = "\x1b[200~", "\x1b[201~"


class PasteParser(XTermParser):
    """Textual's parser, with all of a bracketed paste as text that could have been typed."""

    def __init__(self, debug: bool = False) -> None:
        self._before = ""  # the end of the input so far, if it may begin a mark
        self._pasted: list[str] | None = None  # None outside a paste
        super().__init__(debug)

    def feed(self, data: str) -> Iterable[Message]:
        if not data:
            yield from super().feed("")  # the end
        while data:
            mark = _PASTE_START if self._pasted is None else _PASTE_END
            place = (self._before + data).find(mark)
            end = len(data) if place < 0 else place + len(mark) - len(self._before)
            part, data = data[:end], data[end:]
            self._before = (self._before + part)[1 - len(mark) :] if place < 0 else ""
            if self._pasted is None:
                yield from super().feed(ANSWERS.sub("", part).replace(_ALT_ENTER, _ALT_ENTER_CODE))
                self._pasted = None if place < 0 else []
            else:
                self._pasted.append(part)
                if place >= 0:
                    text = "".join(self._pasted).removesuffix(_PASTE_END)
                    self._pasted = None
                    yield from super().feed(typeable(text) + _PASTE_END)

    def tick(self) -> Iterable[Message]:
        for message in super().tick():
            self._before = ""  # the input was taken for keys
            yield message


class CountingFile:
    """The terminal's file for Textual's writer thread; counts the writes that it has taken."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._written = 0
        self.flushed = 0
        self.on_flush: Callable[[], None] = lambda: None  # called in the writer's thread

    def write(self, text: str) -> None:
        self._file.write(text)
        self._written += 1

    def flush(self) -> None:
        self._file.flush()
        self.flushed = self._written
        self.on_flush()

    def restart(self) -> None:
        self._written = self.flushed = 0


class SteadyDriver(LinuxDriver):
    """Textual's driver for Linux and Macs, without the faults above."""

    typed_ahead = b""  # input that was read before the start
    is_suspended = False
    unanswered_pings = 0
    _writes = 0  # since the start

    def __init__(self, app: App[object], **options: Any) -> None:
        super().__init__(app, **options)
        self.output = CountingFile(cast(IO[str], self._file))
        self._file = cast(Any, self.output)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTSTP, self._sigtstp_application)
        loop.add_signal_handler(signal.SIGCONT, self._sigcont_application)

    @property
    def is_behind(self) -> bool:
        """Whether a write is not flushed, or a ping not answered."""
        return self.output.flushed != self._writes or self.unanswered_pings > 0

    def ping(self) -> None:
        if not self.is_suspended:
            self.unanswered_pings += 1
            self.write(_PING)

    def write(self, data: str) -> None:
        self._writes += 1
        super().write(data)

    def run_input_thread(self) -> None:
        parser = PasteParser(self._debug)
        decode = getincrementaldecoder("utf-8")("replace").decode
        with selectors.SelectSelector() as selector:
            selector.register(self.fileno, selectors.EVENT_READ)
            data = self.typed_ahead + (os.read(self.fileno, 4096) if selector.select(0) else b"")
            if data:
                # The terminal was not in raw mode yet: it made Enter a line feed.
                for message in parser.feed(decode(data.replace(b"\n", b"\r"))):
                    self.process_message(message)
            while not self.exit_event.is_set():
                if selector.select(0.1):
                    if not (data := os.read(self.fileno, 4096)):
                        os.kill(os.getpid(), signal.SIGHUP)
                        return
                    for message in parser.feed(decode(data)):
                        self.process_message(message)
                for message in parser.tick():
                    self.process_message(message)

    def _run_input_thread(self) -> None:
        try:
            self.run_input_thread()
        except Exception as error:  # noqa: BLE001 - ends the app, which reports it
            self._app.call_later(self._app._handle_exception, error)

    def start_application_mode(self) -> None:
        # What was written after the old writer thread's end is never flushed.
        self._writes = 0
        self.output.restart()
        super().start_application_mode()

    def suspend_application_mode(self) -> None:
        super().suspend_application_mode()
        self.is_suspended = True
        self.unanswered_pings = 0  # an editor may read the answers

    def resume_application_mode(self) -> None:
        if not self.is_suspended:
            self.suspend_application_mode()
        self.is_suspended = False
        super().resume_application_mode()
        self._app.call_later(self._app.refresh, layout=True)  # the terminal's page is a new one
