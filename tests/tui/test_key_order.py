"""Keys take effect in the order in which they are typed, however fast they arrive."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from textual.widgets import Input

from akunu_py import paths
from akunu_py.tui.screens.earlier_prompts import HistoryScreen
from akunu_py.tui.workers.chat_client import PieceArrived
from akunu_py.workarounds.textual_driver import PasteParser
from tests.support.terminal import Terminal, needs_tmux
from tests.support.terminal import terminal as terminal  # a fixture
from tests.support.tui_chat import STATS, Chat, chat, until

KEYS = {
    "backspace": "\x7f", "delete": "\x1b[3~", "left": "\x1b[D", "right": "\x1b[C",
    "start": "\x01", "end": "\x05", "cut line": "\x15", "cut word": "\x17",
    "new line": "\n", "send": "\r",
}  # fmt: skip
SEEN = (
    [*"abc", "backspace", "d"],
    [*"abc", "cut line", *"def"],
    [*"abc", "backspace", "send"],
    [*"b c", "start", "a", "send", "d"],
)


@dataclass
class ReferenceEditor:
    """What the prompt box does with each key, on two strings around the cursor."""

    before: str = ""
    after: str = ""
    sent: list[str] = field(default_factory=list)

    def press(self, key: str) -> None:
        line_before = self.before.rpartition("\n")[2]
        rest = self.after.partition("\n")[0]
        match key:
            case "backspace":
                self.before = self.before[:-1]
            case "delete":
                self.after = self.after[1:]
            case "left" if self.before:
                self.before, self.after = self.before[:-1], self.before[-1] + self.after
            case "right":
                self.before, self.after = self.before + self.after[:1], self.after[1:]
            case "start":
                line, place = line_before + rest, len(line_before)
                indent = len(line) - len(line.lstrip()) if line.strip() else 0
                target = 0 if 0 < place <= indent else indent
                whole, first = self.before + self.after, len(self.before) - place + target
                self.before, self.after = whole[:first], whole[first:]
            case "end":
                self.before, self.after = self.before + rest, self.after.removeprefix(rest)
            case "cut line":
                self.before = self.before[: -len(line_before) or -1]
            case "cut word":
                cut = re.sub(r"\w*\s*$", "", line_before)
                self.before = self.before[: -len(line_before) or -1] + cut
            case "new line":
                self.before += "\n"
            case "send":
                if text := (self.before + self.after).strip():
                    self.sent.append(text)
                    self.before = self.after = ""
            case "left":
                pass
            case _:
                self.before += key


async def burst(it: Chat, keys: Sequence[str], *, answering: bool = False) -> None:
    """Receive all of `keys` at once, as from a terminal; return when they have taken effect."""
    parser = PasteParser()
    data = "".join(KEYS.get(key, key) for key in keys)
    for message in [*parser.feed(data), *parser.tick()]:
        it.app.post_message(message)
        if answering:
            it.app.post_message(PieceArrived(1, "- *word*\n", ((0, 2),), STATS))
    await it.pilot.pause()
    await until(it.pilot, lambda: not it.app.has_pending_input)
    await it.pilot.pause()


@pytest.mark.long
@pytest.mark.parametrize("answering", [False, True])
async def test_a_burst_edits_as_a_reference_editor_does(answering: bool) -> None:
    random_keys = random.Random(37)
    choice = [*KEYS, *KEYS, *"abc d" * 5]
    bursts = [random_keys.choices(choice, k=random_keys.randrange(2, 40)) for _ in range(12)]
    async with chat() as it:
        await it.send("first")
        for keys in [*SEEN, *bursts]:
            editor = ReferenceEditor()
            for key in keys:
                editor.press(key)
            await burst(it, keys, answering=answering)
            sent = [turn.prompt.text for turn in it.app.conversation.turns[1:]]
            assert (it.text(), sent) == (editor.before + editor.after, editor.sent), " ".join(
                map(repr, keys)
            )
            for _ in sent:
                await it.app.answering.unqueue_last()
            it.box.clear()


@needs_tmux
@pytest.mark.usefixtures("starter")
def test_bursts_in_a_real_terminal_while_an_answer_streams(
    terminal: Terminal, tmp_path: Path
) -> None:
    (tmp_path / "akunu").mkdir()
    (tmp_path / "akunu" / "models").symlink_to(paths.models_dir())
    kinds = ("CONFIG", "STATE", "CACHE", "DATA")
    environment = " ".join(f"XDG_{kind}_HOME={tmp_path}" for kind in kinds)
    command = f"{environment} {sys.executable} -m akunu_py chat --server off; echo code=$?"
    terminal.type(command, "Enter")
    terminal.wait_for("● ready", seconds=150)
    terminal.type("-H", *hexadecimal("Write a long story.\r"))
    terminal.wait_for("answering")
    for number in range(5):
        terminal.type("-H", *hexadecimal(f"x{number}\x15abc\x7fd{number}\r"))
    terminal.type("-H", *hexadecimal("abc\x15d\x1b[De\x1b[C!"))
    screen = terminal.wait_for(r"│ ed! ")
    assert "│ ed! " in screen
    terminal.type("C-u", "Escape", "C-c", "C-q")
    terminal.wait_for("code=0\n")


def hexadecimal(text: str) -> list[str]:
    return [f"{byte:02x}" for byte in text.encode()]


@pytest.mark.long
async def test_keys_behind_one_that_moves_the_focus_reach_the_new_widget() -> None:
    async with chat() as it:
        await burst(it, [*"one", "send", *"two", "send", "\x12", *"on"])
        assert isinstance(it.app.screen, HistoryScreen)
        assert (it.app.screen.query_one(Input).value, it.text()) == ("on", "")
        await burst(it, ["\x1b[B", "send", *" more"])
        assert it.text() == "one more"
        it.box.clear()
        await burst(it, ["\x1bOP", "\x1b[27u", *"hello", "\x1b[27u", "send"])
        # The second Esc takes the queued prompt back.
        assert [turn.prompt.text for turn in it.app.conversation.turns] == ["one", "two\n\nhello"]
