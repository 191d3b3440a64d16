"""Pictures of the chat in its main states, at fixed sizes, fed with its own messages.

To accept new pictures: pytest tests/tui/test_snapshots.py --snapshot-update, then look at them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from textual.pilot import Pilot

from akunu_py.chats.tree import ChatMessage, ConversationTree
from akunu_py.settings import Settings
from akunu_py.tui.app import ChatApp, ChatConfig
from akunu_py.tui.prompt.attachments import Attachment, join_files
from akunu_py.tui.prompt.box import PromptBox
from akunu_py.tui.workers.chat_client import (
    AnswerFailed,
    AnswerFinished,
    ModelLoaded,
    PieceArrived,
    PrefillUpdate,
)
from akunu_py.types import GenerateOptions, Stats
from tests.support.tui_chat import GAUGES, at_rest
from tests.support.tui_host import Compare

ANSWER = """A **queue** keeps things in order:

1. what comes first
2. leaves first

```python
def push(queue: list[int], item: int) -> None:
    queue.append(item)  # at the end
```

To take from the left, use `collections.deque`.
"""
HOSTILE = "[bold]not bold[/] and [/] and \x1b[31mnot red\x1b[0m, <b>not HTML</b>, \x07no bell.\n"
LONG_CODE = "```python\n" + "".join(
    f"row_{n} = [{', '.join(map(str, range(n % 7 * 5)))}]  # the {n}th\n" for n in range(40)
)
STATS = Stats(130, 100, 121, 52, 160, 67, prefill_s=0.2, decode_s=1.9)

Script = Callable[["Pilot[None]"], Awaitable[None]]


async def loaded(pilot: Pilot[None]) -> None:
    pilot.app.query_one(PromptBox).cursor_blink = False
    pilot.app.post_message(ModelLoaded("starter", 8192, gauges=GAUGES))
    await pilot.pause()


async def asked(pilot: Pilot[None], prompt: str = "What is a queue?\nShow me Python.") -> None:
    await loaded(pilot)
    pilot.app.query_one(PromptBox).insert(prompt)
    await pilot.press("enter")
    await pilot.pause()


async def streamed(pilot: Pilot[None], answer: str = ANSWER) -> None:
    """The answer in pieces of five characters, the last two of every other piece drafted, and what
    was drafted in vain after some of them."""
    for number, start in enumerate(range(0, len(answer), 5)):
        text = answer[start : start + 5]
        drafted = ((3, len(text)),) if number % 2 and len(text) > 3 else ()
        rejected = ((len(text), " wrong"),) if number % 8 == 5 else ()
        passes = (1 + number % 5,)
        piece = PieceArrived(1, text, drafted, STATS, "", rejected, passes, GAUGES)
        pilot.app.post_message(piece)
    await at_rest(pilot)


async def loading(pilot: Pilot[None]) -> None:
    pilot.app.query_one(PromptBox).cursor_blink = False


async def reading(pilot: Pilot[None]) -> None:
    await asked(pilot)
    pilot.app.post_message(PrefillUpdate(1, 400, 1000))
    await at_rest(pilot)


async def streaming(pilot: Pilot[None]) -> None:
    await asked(pilot)
    await streamed(pilot)


async def finished(pilot: Pilot[None]) -> None:
    await streaming(pilot)
    pilot.app.post_message(AnswerFinished(1, "length", STATS, GAUGES))
    await at_rest(pilot)


async def stopped(pilot: Pilot[None]) -> None:
    await streaming(pilot)
    await pilot.press("escape")
    await at_rest(pilot)


async def drafting(pilot: Pilot[None]) -> None:
    await streaming(pilot)
    await pilot.press("f2")
    await at_rest(pilot)


async def drafting_and_back(pilot: Pilot[None]) -> None:
    """Toggled before and after the answer came: the same picture as without."""
    await asked(pilot)
    await pilot.press("f2")
    await streamed(pilot)
    await pilot.press("ctrl+t")
    await at_rest(pilot)


async def light(pilot: Pilot[None]) -> None:
    pilot.app.theme = "light"
    await finished(pilot)


async def light_drafting(pilot: Pilot[None]) -> None:
    pilot.app.theme = "light"
    await drafting(pilot)


async def long_code(pilot: Pilot[None]) -> None:
    await asked(pilot)
    await streamed(pilot, LONG_CODE)


async def thinking(pilot: Pilot[None]) -> None:
    await asked(pilot)
    thought = "The person wants a queue.\nPython has lists and deques."
    pilot.app.post_message(PieceArrived(1, "", (), STATS, thinking=thought, gauges=GAUGES))
    await at_rest(pilot)


async def thinking_open(pilot: Pilot[None]) -> None:
    await thinking(pilot)
    await streamed(pilot)
    await pilot.press("f3")
    await at_rest(pilot)


async def branches(pilot: Pilot[None]) -> None:
    """Answered again, the first answer chosen."""
    await finished(pilot)
    await pilot.press("ctrl+g")
    pilot.app.post_message(PieceArrived(2, "Another answer.", (), STATS, gauges=GAUGES))
    pilot.app.post_message(AnswerFinished(2, "stop", STATS, GAUGES))
    await at_rest(pilot)
    await pilot.press("tab", "left")
    await at_rest(pilot)


async def editing(pilot: Pilot[None]) -> None:
    await finished(pilot)
    await pilot.press("f6")
    await at_rest(pilot)


async def earlier_prompts(pilot: Pilot[None]) -> None:
    await finished(pilot)
    pilot.app.query_one(PromptBox).extend_history(["What is a stack?", "[b]bold[/b] words " * 20])
    await pilot.press("ctrl+r")
    await pilot.pause()
    pilot.app.screen.query_one("Input").cursor_blink = False  # type: ignore[attr-defined]
    await at_rest(pilot)


async def attached(pilot: Pilot[None]) -> None:
    """A file, and a prompt that is too long to be shown whole."""
    text = join_files(
        "What is in @notes.md?\n" + "line\n" * 30, [Attachment("notes.md", 2100, "x\n")]
    )
    tree = ConversationTree()
    tree.add(ChatMessage("user", text))
    await loaded(pilot)
    assert isinstance(pilot.app, ChatApp)
    await pilot.app.library.show(tree)
    await at_rest(pilot)


async def error(pilot: Pilot[None]) -> None:
    await asked(pilot)
    text = "the prompt has 9000 tokens, but the context of starter holds 8192; shorten the prompt"
    pilot.app.post_message(AnswerFailed(1, text))
    await at_rest(pilot)


async def hostile(pilot: Pilot[None]) -> None:
    await asked(pilot, "[red]Say[/red] something odd.")
    await streamed(pilot, HOSTILE)


async def hostile_drafting(pilot: Pilot[None]) -> None:
    await hostile(pilot)
    await pilot.press("f2")
    await at_rest(pilot)


@pytest.mark.parametrize(
    ("script", "size"),
    [
        (loading, (80, 24)),
        (reading, (80, 24)),
        (streaming, (80, 24)),
        (streaming, (120, 36)),
        (streaming, (40, 10)),
        (finished, (80, 24)),
        (stopped, (80, 24)),
        (drafting, (80, 24)),
        (drafting, (40, 10)),
        (drafting_and_back, (80, 24)),
        (drafting, (120, 36)),
        (light, (80, 24)),
        (light_drafting, (80, 24)),
        (long_code, (80, 24)),
        (long_code, (120, 36)),
        (thinking, (80, 24)),
        (thinking_open, (80, 24)),
        (branches, (80, 24)),
        (editing, (80, 24)),
        (earlier_prompts, (80, 24)),
        (earlier_prompts, (40, 10)),
        (attached, (80, 24)),
        (streaming, (20, 5)),
        (error, (80, 24)),
        (hostile, (80, 24)),
        (hostile_drafting, (80, 24)),
        (loading, (40, 10)),
        (loading, (120, 36)),
    ],
    ids=lambda value: value.__name__ if callable(value) else "x".join(map(str, value)),
)
def test_picture(snap_compare: Compare, script: Script, size: tuple[int, int]) -> None:
    settings = Settings(theme="dark", reduced_motion=True)
    app = ChatApp(ChatConfig("starter", GenerateOptions(), settings))
    assert snap_compare(app, terminal_size=size, run_before=script)
