"""Pictures of the chat in its main states, at fixed sizes, fed with its own messages.

To accept new pictures: pytest tests/test_tui_snapshots.py --snapshot-update, then look at them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

import pytest
from textual.pilot import Pilot

from akunu_py.tui.app import ChatApp
from akunu_py.tui.messages import Failed, Finished, Loaded, PieceArrived, Prefilling
from akunu_py.tui.prompt import PromptBox
from akunu_py.types import GenerateOptions, Stats

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
STATS = Stats(30, 0, 121, 52, 160, 67, prefill_s=0.2, decode_s=1.9)

Script = Callable[["Pilot[None]"], Awaitable[None]]


class Compare(Protocol):
    def __call__(
        self, app: ChatApp, *, terminal_size: tuple[int, int], run_before: Script
    ) -> bool: ...


async def loaded(pilot: Pilot[None]) -> None:
    pilot.app.query_one(PromptBox).cursor_blink = False
    pilot.app.post_message(Loaded("starter", "float32", 8192))
    await pilot.pause()


async def asked(pilot: Pilot[None], prompt: str = "What is a queue?\nShow me Python.") -> None:
    await loaded(pilot)
    pilot.app.query_one(PromptBox).insert(prompt)
    await pilot.press("enter")
    await pilot.pause()


async def streamed(pilot: Pilot[None], answer: str = ANSWER) -> None:
    """The answer in pieces of five characters, the last two of every other piece drafted."""
    for number, start in enumerate(range(0, len(answer), 5)):
        text = answer[start : start + 5]
        drafted = ((3, len(text)),) if number % 2 and len(text) > 3 else ()
        pilot.app.post_message(PieceArrived(1, text, drafted, STATS))
    await settled(pilot)


async def settled(pilot: Pilot[None]) -> None:
    """Drawing Markdown takes a few rounds of the event loop."""
    for _ in range(5):
        await pilot.pause(0.05)


async def loading(pilot: Pilot[None]) -> None:
    pilot.app.query_one(PromptBox).cursor_blink = False


async def reading(pilot: Pilot[None]) -> None:
    await asked(pilot)
    pilot.app.post_message(Prefilling(1, 400, 1000))
    await settled(pilot)


async def streaming(pilot: Pilot[None]) -> None:
    await asked(pilot)
    await streamed(pilot)


async def finished(pilot: Pilot[None]) -> None:
    await streaming(pilot)
    pilot.app.post_message(Finished(1, "length", STATS))
    await settled(pilot)


async def stopped(pilot: Pilot[None]) -> None:
    await streaming(pilot)
    await pilot.press("escape")
    await settled(pilot)


async def drafting(pilot: Pilot[None]) -> None:
    await streaming(pilot)
    await pilot.press("f2")
    await settled(pilot)


async def drafting_and_back(pilot: Pilot[None]) -> None:
    """Toggled before and after the answer came: the same picture as without."""
    await asked(pilot)
    await pilot.press("f2")
    await streamed(pilot)
    await pilot.press("ctrl+t")
    await settled(pilot)


async def light(pilot: Pilot[None]) -> None:
    pilot.app.theme = "textual-light"
    await drafting(pilot)


async def error(pilot: Pilot[None]) -> None:
    await asked(pilot)
    text = "the prompt has 9000 tokens, but the context of starter holds 8192; shorten the prompt"
    pilot.app.post_message(Failed(1, text))
    await settled(pilot)


async def hostile(pilot: Pilot[None]) -> None:
    await asked(pilot, "[red]Say[/red] something odd.")
    await streamed(pilot, HOSTILE)


async def hostile_drafting(pilot: Pilot[None]) -> None:
    await hostile(pilot)
    await pilot.press("f2")
    await settled(pilot)


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
        (light, (80, 24)),
        (error, (80, 24)),
        (hostile, (80, 24)),
        (hostile_drafting, (80, 24)),
        (loading, (40, 10)),
    ],
    ids=lambda value: value.__name__ if callable(value) else "x".join(map(str, value)),
)
def test_picture(snap_compare: Compare, script: Script, size: tuple[int, int]) -> None:
    app = ChatApp("starter", GenerateOptions())
    assert snap_compare(app, terminal_size=size, run_before=script)
