"""Pictures of the chat, and the contrast of everything on them."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from rich.color import Color as RichColor
from rich.color import ColorSystem
from textual.color import Color
from textual.strip import Strip

from akunu_py.engine.events import TextDelta
from akunu_py.settings import Settings
from akunu_py.tui import themes
from akunu_py.tui.app import ChatApp
from akunu_py.tui.workers.chat_client import AnswerFinished, ModelLoaded, PieceArrived
from akunu_py.types import Stats
from tests.support.slow import slow
from tests.support.tui_chat import SPEEDUP, Chat, Compare, chat, has_picture

ANSWER = """A **queue** keeps things in order:

1. what comes first
2. leaves first

```python
def push(queue: list[int], item: int) -> None:
    queue.append(item)  # at the end
```

To take from the left, use `collections.deque`.
"""
STATS = Stats(130, 100, 121, 52, 160, 67, prefill_s=0.2, decode_s=1.9)


async def loading(it: Chat) -> None:
    """The first screen."""


async def streaming(it: Chat) -> None:
    """The answer in pieces of five characters, the last two of every other piece drafted, and what
    was drafted in vain after some of them."""
    await it.post(ModelLoaded("starter", 8192))
    await it.send("What is a queue?\nShow me Python.")
    pieces = []
    for number, start in enumerate(range(0, len(ANSWER), 5)):
        text = ANSWER[start : start + 5]
        drafted = ((3, len(text)),) if number % 2 and len(text) > 3 else ()
        rejected = ((len(text), " wrong"),) if number % 8 == 5 else ()
        passes = (1 + number % 5,)
        delta = TextDelta(text, drafted, rejected, passes, STATS, SPEEDUP)
        pieces.append(PieceArrived(1, delta))
    await it.post(*pieces)


async def finished(it: Chat) -> None:
    await streaming(it)
    await it.rest()
    await it.post(AnswerFinished(1, "length", STATS))


async def drafting(it: Chat) -> None:
    await streaming(it)
    await it.rest()
    await it.press("f2")


async def terminal_colors(it: Chat) -> None:
    it.app.theme = "terminal-dark"
    await finished(it)


async def commands(it: Chat) -> None:
    await it.post(ModelLoaded("starter", 8192))
    await it.press("/")


@pytest.mark.parametrize(
    ("script", "size"),
    [
        (streaming, (24, 8)),
        *((script, (80, 24)) for script in (loading, finished, terminal_colors)),
        *((script, (80, 24)) for script in (drafting, commands)),
    ],
    ids=lambda value: value.__name__ if callable(value) else "x".join(map(str, value)),
)
def test_picture(
    snap_compare: Compare, tmp_path: Path, script: Callable[[Chat], Awaitable[None]],
    size: tuple[int, int],
) -> None:  # fmt: skip
    assert has_picture(snap_compare, script, size, directory=tmp_path)


def contrast(one: Color, other: Color) -> float:
    """The ratio of two colours, from 1 to 21 (WCAG 2.2)."""

    def luminance(color: Color) -> float:
        red, green, blue = (
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
            for part in color.normalized
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def seen_color(color: RichColor | None, it: Chat) -> Color:
    """A color as the terminal shows it: with the themes of 256 colors, one of those."""
    assert color is not None
    if it.app.theme.endswith("-256"):
        color = color.downgrade(ColorSystem.EIGHT_BIT)
    return Color.from_rich_color(RichColor.from_triplet(color.get_truecolor()))


def contrasts(it: Chat) -> dict[tuple[str, str], tuple[float, str]]:
    """For each pair of colours that something is written in: its contrast, and an example."""
    screen = it.app.screen
    # What is behind a dialog is dimmed, and is not what one reads.
    shown = screen.children[0].region if screen.is_modal else screen.region
    return contrasts_in(
        it, [each.crop(shown.x, shown.right) for each in it.strips()][shown.y : shown.bottom]
    )


def contrasts_in(it: Chat, strips: list[Strip]) -> dict[tuple[str, str], tuple[float, str]]:
    found: dict[tuple[str, str], tuple[float, str]] = {}
    for strip in strips:
        for text, style, _ in strip:
            if style is None or not any(letter.isalnum() for letter in text):
                continue
            ink, paper = (seen_color(each, it) for each in (style.color, style.bgcolor))
            if style.reverse:
                ink, paper = paper, ink
            assert not style.dim, text
            found[ink.hex, paper.hex] = contrast(ink, paper), text.strip()
    return found


@pytest.mark.long
async def test_the_highlighted_row_can_be_read_in_all_themes(tmp_path: Path) -> None:
    weak = []
    settings = Settings(reduced_motion=True)
    async with chat(size=(90, 24), store=tmp_path / "c.db", settings=settings) as it:
        await it.talk("Find this row", "It has a second line")
        await it.press("ctrl+o")
        await it.until_shown("this row")
        for theme in set(themes.choices()) - {themes.AUTO, themes.TERMINAL}:
            it.app.show_theme(theme)
            await it.rest()
            lines = it.screen.splitlines()
            row = max(number for number, line in enumerate(lines[:10]) if "this row" in line)
            highlighted = [each.crop(8, 80) for each in it.strips()[row : row + 1]]
            seen = contrasts_in(it, highlighted).values()
            weak += [(theme, *each) for each in seen if each[0] < 3]
    assert not weak


MORE = """
# One

### Two

> quoted, *em*, ~~gone~~, [a link](https://example.org)

| head | b |
|---|--:|
| cell | `1` |

```diff
- old
+ new
@@ 1 @@
```
```json
{"key": [1, true, null, "text"]}
```
"""
KEYS = "f3 tab escape f6 escape f2 f2 f1 escape f4 escape ctrl+s escape ctrl+o escape /"


@pytest.mark.long
@pytest.mark.parametrize("theme", ["dark", *slow("light-256")])
async def test_all_text_can_be_read(
    theme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChatApp, "_theme_name", lambda _app, _setting: theme)
    found: dict[tuple[str, str], tuple[float, str]] = {}
    path, look = tmp_path / "conversations.db", Settings(reduced_motion=True)
    async with chat(size=(100, 70), store=path, directory=tmp_path, settings=look) as it:
        found |= contrasts(it)
        await it.send("Show me all of it, all")
        marks = ((3, 40),), ((60, " wrong"),), ()
        delta = TextDelta(ANSWER + MORE, *marks, STATS, SPEEDUP)
        piece = PieceArrived(1, delta, "I think.")
        await it.post(piece, AnswerFinished(1, "length", STATS))
        for kind in ("notice", "error"):
            await it.app.view.add_notice(f"a {kind}", kind)
        for key in KEYS.split():
            await it.press(key)
            await it.rest()
            found |= contrasts(it)
    assert not {pair: seen for pair, seen in found.items() if seen[0] < 4.5}
    papers = {paper for _, paper in found}
    assert len(papers) >= 4, "page, prompt, slab of code and marks differ"
    assert "#000000" not in papers, "no gray is rounded to black"
