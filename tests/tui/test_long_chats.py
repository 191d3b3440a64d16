"""Long answers and chats, and slow terminals, cost little."""

import asyncio
import contextlib
import fcntl
import os
import struct
import sys
import termios
from collections.abc import Callable

import pytest

from akunu_py.engine.events import TextDelta
from akunu_py.settings import Settings
from akunu_py.tui.app import ChatApp, ChatConfig
from akunu_py.tui.prompt.box import PromptBox
from akunu_py.tui.status import StatusLine
from akunu_py.tui.transcript.markdown import AnswerMarkdown, MarkdownSection, split_sections
from akunu_py.tui.transcript.view import Transcript
from akunu_py.tui.workers.chat_client import ModelLoaded, PieceArrived
from akunu_py.types import GenerateOptions
from akunu_py.workarounds import textual_app
from akunu_py.workarounds.textual_driver import SteadyDriver
from tests.support.tui_chat import STATS, Chat, broken_store, chat, silent_client, tree_of


def paragraphs(count: int) -> str:
    return "".join(f"Word {number}.\n\n" for number in range(count))


def is_quiet(it: Chat) -> bool:
    """Nothing is about to be mounted or unmounted."""
    view = it.transcript
    return not (view._update_pending or view._adjusting or view._mounting.locked())


@pytest.mark.parametrize(
    ("text", "sections"),
    [
        (paragraphs(40), 1),
        (paragraphs(300), 9),
        ("- item\n" * 300, 9),
        ("".join(f"{number}. item\n" for number in range(5, 305)), 9),
        ("1. item\n" * 300, 1),  # cut, the rest would count from 1 again
        ("> " + "quoted\n>\n> " * 300, 1),
        ("```\n" + "code\n\n- code\n" * 300 + "```\n", 1),
        ("| a |\n|---|\n" + "| b |\n" * 300, 1),
        ("- item\n\n  ```\n  - code\n  ```\n" * 100, 3),
    ],
    ids=["short", "paragraphs", "list", "numbers", "ones", "quote", "code", "table", "nested"],
)
def test_answers_are_cut_between_blocks(text: str, sections: int) -> None:
    parts = split_sections(text)
    assert "".join(parts) == text
    assert len(parts) == sections


@pytest.mark.long
async def test_a_long_answer_is_drawn_where_it_is_seen(it: Chat) -> None:
    await it.send("go")
    text = paragraphs(240)
    for start in range(0, len(text), 700):
        it.app.post_message(PieceArrived(1, TextDelta(text[start : start + 700], stats=STATS)))
        await it.pilot.pause()
    await it.finish()
    sections = list(it.app.query(MarkdownSection))
    assert "".join(section.text for section in sections) == text
    await it.until(lambda: sum(each.is_unmounted for each in sections) > 4)
    await it.until(lambda: is_quiet(it))
    assert not sections[-1].is_unmounted
    assert len(it.app.query("*")) < 200
    assert "Word 239." in it.screen
    heights = [section.size.height for section in sections]
    assert sum(heights) == 2 * 240
    with it.app.batch_update():  # while the terminal is behind
        await it.press("tab", "home")
        await it.until(lambda: is_quiet(it))
    await it.until(lambda: "Word 0." in it.screen)
    await it.until(lambda: is_quiet(it) and sections[-1].is_unmounted)
    assert [section.size.height for section in sections] == heights
    await it.press("f7")
    assert it.app.clipboard == text.strip()


@pytest.mark.long
async def test_reading_back_does_not_jump(it: Chat) -> None:
    """Every step up shows what stood above, whatever is mounted meanwhile."""
    await it.app.library.show(tree_of(*((f"prompt {n}", f"# {n}\n\n{n}a\n") for n in range(12))))
    await it.press("tab")
    transcript = it.app.query_one(Transcript)
    transcript.release_anchor()
    before = seen(it)
    for _ in range(40):
        transcript.scroll_relative(y=-5, animate=False)
        await it.pilot.pause()
        await it.until(lambda: is_quiet(it))
        now = seen(it)
        if transcript.scroll_y == 0:
            assert "prompt 0" in now[0]
            return
        assert now[5:] == before[: len(now) - 5]
        before = now
    raise AssertionError("the beginning was not reached")


def seen(it: Chat) -> list[str]:
    """The lines of the transcript."""
    return [line[:70] for line in it.screen.splitlines()[1 : it.transcript.size.height]]


ANSWER = """\
8. one
9. ```python
   a = [1,

   2]
   ```
   - two

   of [two](http://two)
10. #ten

* three **of** a long line, which is as long as it must be so that it is `wrapped` where words end
  - four

    five
    1. six
* > seven
  > * eight

> quoted
> - more
>   ```
>   code

| a | b |
|---|---|
| 1 | 2 |

- - nine

and `more`
of it
"""


@pytest.mark.long
async def test_an_answer_looks_the_same_wherever_it_was_when_it_was_first_seen() -> None:
    """One that grows behind the screen is drawn from its middle when it comes back."""
    looks = []
    async with chat(size=(80, 60)) as it:
        for cut, step in (
            (len(ANSWER), 1),
            (0, 17),
            (1, 61),
            *((cut, 200) for cut in range(40, 430, 195)),
        ):
            view = AnswerMarkdown(ANSWER[:cut])
            view.styles.height = "auto"
            mounted = it.app.screen.mount(view, before=0)
            if cut % 2:
                await mounted  # else more comes before it is mounted
            for start in range(cut, len(ANSWER), step):
                await view.append(ANSWER[start : start + step])
            await mounted
            await it.pilot.pause()
            looks.append(it.screen)
            await view.remove()
    assert "* three" not in looks[0]
    assert all(word in looks[0] for word in ("10. #ten", "▪ eight", "▪ nine", "and more of it"))
    for look in looks[1:]:
        assert look == looks[0]


PING, PONG = b"\x1b[?2026$p", b"\x1b[?2026;2$y"
MOST_WRITES = 16  # while a terminal takes nothing: the frames of the first moments


class SlowTerminal:
    """A pseudo-terminal that is read only when the test reads it."""

    def __init__(self) -> None:
        self._master, self._slave = os.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        os.set_blocking(self._master, False)
        self.stream = os.fdopen(self._slave, "w+b", buffering=0)
        self.output = b""

    def read(self) -> bytes:
        """What was written since the last call."""
        new = b""
        with contextlib.suppress(BlockingIOError):
            while True:
                new += os.read(self._master, 1 << 16)
        self.output += new
        return new

    def fill(self) -> None:
        """Write until the terminal takes no more."""
        os.set_blocking(self._slave, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(self._slave, b" " * 1024)
        os.set_blocking(self._slave, True)

    def type(self, data: bytes) -> None:
        os.write(self._master, data)

    async def wait_for(self, found: Callable[[], object], *, answer: bool = False) -> None:
        """Read the output until `found`; `answer`: reply to pings."""
        for _ in range(12_000):
            new = self.read()
            if answer and new.count(PING):
                self.type(PONG * new.count(PING))
            if found():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(self.output[-2000:])


@pytest.fixture
def slow_terminal(monkeypatch: pytest.MonkeyPatch) -> SlowTerminal:
    terminal = SlowTerminal()
    text = os.fdopen(os.dup(terminal.stream.fileno()), "w", encoding="utf-8")
    monkeypatch.setattr(textual_app, "_ANSWER_TIMEOUT_S", 60.0)  # on a busy machine, too
    monkeypatch.setattr(sys, "__stdin__", terminal.stream)
    monkeypatch.setattr(sys, "__stderr__", text)
    for name, value in (("COLUMNS", "80"), ("LINES", "24"), ("TERM", "xterm-256color")):
        monkeypatch.setenv(name, value)
    return terminal


@pytest.mark.long
@pytest.mark.parametrize("pings", [False, True], ids=["full", "slow"])
async def test_frames_are_dropped_while_a_terminal_is_slow(
    slow_terminal: SlowTerminal, pings: bool
) -> None:
    """100 pieces of an answer arrive while the terminal takes nothing, or answers no ping; then
    Esc, and the terminal goes on."""
    threads, settings = (silent_client(), broken_store()), Settings(theme="dark")
    app = ChatApp(ChatConfig("starter", GenerateOptions(), *threads, settings))
    running = asyncio.create_task(app.run_async(mouse=False))
    await slow_terminal.wait_for(lambda: b"Ask something" in slow_terminal.output)
    driver = app._driver
    assert isinstance(driver, SteadyDriver)
    if pings:
        slow_terminal.type(PONG)
        app.post_message(ModelLoaded("starter", 8192))
        await slow_terminal.wait_for(lambda: PING in slow_terminal.output, answer=True)
        await slow_terminal.wait_for(lambda: not driver.unanswered_pings, answer=True)
    app.post_message(ModelLoaded("starter", 8192))
    app.query_one(PromptBox).insert("go")
    slow_terminal.type(b"\r")
    await slow_terminal.wait_for(lambda: app.answering.active, answer=pings)
    await slow_terminal.wait_for(lambda: not driver.is_behind, answer=pings)
    if pings:
        driver.unanswered_pings += 9  # an editor reads the answers
        with app.suspend():
            driver.ping()
            assert driver.unanswered_pings == 0
        await slow_terminal.wait_for(lambda: not driver.is_behind, answer=True)
    else:
        slow_terminal.fill()
    before = driver._writes
    for number in range(100):
        app.post_message(PieceArrived(1, TextDelta(f"word{number}\n\n", stats=STATS)))
        await asyncio.sleep(0.005)
        if pings:
            slow_terminal.read()
    slow_terminal.type(b"\x1b")
    while app.query_one(StatusLine).phase != "stopped":
        await asyncio.sleep(0.01)
        if pings:
            slow_terminal.read()
    assert driver._writes - before <= MOST_WRITES
    slow_terminal.type(PONG * driver.unanswered_pings)
    await slow_terminal.wait_for(
        lambda: b"stopped" in slow_terminal.output and b"word99" in slow_terminal.output,
        answer=pings,
    )
    app.exit()
    await slow_terminal.wait_for(running.done, answer=pings)
