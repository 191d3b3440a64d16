"""Whatever is written on the screen can be read: 4.5 to 1 at least, as WCAG 2.2 asks of text."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from rich.color import Color as RichColor
from rich.color import ColorSystem
from rich.style import Style
from textual.color import Color

from akunu_py.settings import Settings
from akunu_py.tui.app import ChatApp
from akunu_py.tui.transcript.turn import AnswerView
from akunu_py.tui.workers.chat_client import AnswerFinished, PieceArrived
from akunu_py.tui.workers.store_thread import StoreThread
from tests.support.slow import slow
from tests.support.tui_chat import GAUGES, STATS, Chat, at_rest, chat

LEAST = 4.5
ANSWER = """# One

## Two

### Three

#### Four

##### Five

Text, **strong**, *em*, ~~gone~~, `code`, [a link](https://example.org).

> quoted

- item

| head | b |
|---|--:|
| cell | `1` |

```python
@decorator
class Point(Base):  # a comment
    \"\"\"Its words.\"\"\"
    CONSTANT: int = 12

    def move(self, x: float = 1.5) -> None:
        import os
        print(f"{x!r} and {len(self)} words", 'x', None, not True)
        raise ValueError("long" * 2, "a very long line that is cut, with a mark, or two, or three")
```

```json
{"key": [1, true, null, "text"]}
```

```html
<p class="x">text &amp; more</p>
```

```sh
for f in $HOME/*.md; do echo "$f" | wc -l; done
```

```diff
- old
+ new
@@ 1 @@
```
"""


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
    found: dict[tuple[str, str], tuple[float, str]] = {}
    screen = it.app.screen
    # What is behind a dialog is dimmed, and is not what one reads.
    shown = screen.children[0].region if screen.is_modal else screen.region
    for strip in screen._compositor.render_strips()[shown.y : shown.bottom]:
        for text, style, _ in strip.crop(shown.x, shown.right):
            if style is None or not any(letter.isalnum() for letter in text):
                continue
            ink, paper = (seen_color(each, it) for each in (style.color, style.bgcolor))
            if style.reverse:
                ink, paper = paper, ink
            assert not style.dim, text
            found[ink.hex, paper.hex] = contrast(ink, paper), text.strip()
    return found


async def answered(it: Chat) -> None:
    await it.send("Show me all of it, all")
    await it.post(PieceArrived(1, ANSWER, ((3, 40),), STATS, "I think.", ((60, " wrong"),)))
    await it.post(AnswerFinished(1, "length", STATS, GAUGES))


def keys(*names: str) -> Callable[[Chat], Awaitable[None]]:
    async def press(it: Chat) -> None:
        await it.press(*names)
        await at_rest(it.pilot)

    press.__name__ = " ".join(names)
    return press


async def notices(it: Chat) -> None:
    await it.app.view.add_notice("a notice")
    await it.app.view.add_notice("an error", "error")
    it.app.view.show_error("It does not work.")
    await at_rest(it.pilot)


async def told(it: Chat) -> None:
    it.app.view.inform("It works.")
    await at_rest(it.pilot)


STEPS = [
    answered,
    keys("f3"),
    keys("tab"),
    keys("escape", "f6"),
    keys("escape", "f2"),
    keys("f2", "f1"),
    keys("escape", "f4"),
    keys("escape", "ctrl+s"),
    keys("escape", "ctrl+o"),
    keys("escape", "ctrl+p"),
    keys("escape", "/"),
    keys("backspace"),
    notices,
    told,
]


@pytest.mark.rotating
@pytest.mark.long
@pytest.mark.parametrize("theme", ["dark", "light-256", *slow("light", "dark-256")])
async def test_all_that_is_written_can_be_read(
    theme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChatApp, "show_theme", lambda app, _setting: setattr(app, "theme", theme))
    store = StoreThread(tmp_path / "conversations.db")
    look = Settings(reduced_motion=True)
    bad: dict[tuple[str, str], tuple[float, str, str]] = {}
    seen = set()
    async with chat(size=(100, 80), store=store, directory=tmp_path, settings=look) as it:
        for step in [keys(), *STEPS]:
            await step(it)
            for pair, (ratio, text) in contrasts(it).items():
                seen.add(pair)
                if ratio < LEAST:
                    bad.setdefault(pair, (round(ratio, 2), text, step.__name__))
    await asyncio.to_thread(store.close, 10)
    assert not bad, "\n".join(f"{pair} {what}" for pair, what in bad.items())
    assert len(seen) > 25
    papers = {paper for _, paper in seen}
    assert len(papers) >= 5, "page, prompt, slab of code, chosen message and marks differ"
    assert "#000000" not in papers, "no gray is rounded to black"


async def test_code_has_four_hues_and_diffs_are_green_and_red() -> None:
    code = (
        "```python\ndef push(queue: list[int]) -> None:  # why\n    queue.append(12) or 'text'\n```"
    )
    async with chat(settings=Settings(theme="dark")) as it:
        await it.send("go")
        await it.answer(f"{code}\n\n```diff\n-old\n+new\n same\n```\n")
        inks = {
            word: style.color
            for strip in it.app.screen._compositor.render_strips()
            for text, style, _ in strip
            for word in text.split()
            if style is not None
        }
        keyword, function, kind, number = (inks[each] for each in ("def", "push", "list", "12"))
        hues = {keyword, function, kind, number, inks["#"], inks["text"]}
        assert len(hues) == 6
        assert (inks["int"], inks["append"], inks["or"]) == (kind, function, keyword)
        added, removed, same = (inks[each] for each in ("+new", "-old", "same"))
        for ink, which in ((added, 1), (removed, 0)):
            assert ink is not None
            assert ink != same
            assert max(range(3), key=ink.get_truecolor().__getitem__) == which


async def test_with_the_terminals_own_colours_what_is_typed_and_code_stand_out() -> None:
    """Sixteen colours, as for TERM=xterm: no shade of grey tells a placeholder from a prompt."""

    def style_of(it: Chat, text: str) -> Style:
        for strip in it.app.screen._compositor.render_strips():
            for part, style, _ in strip:
                if text in part and style is not None:
                    return style
        raise AssertionError(text)

    async with chat(settings=Settings(theme="terminal", reduced_motion=True)) as it:
        placeholder = style_of(it, "sk something")
        await it.send("go")
        await it.answer("words\n\n```python\nx = 1\n```")
        it.box.insert("typed words")
        await it.pilot.pause()
        typed = style_of(it, "typed words")
        assert (placeholder.color, placeholder.italic) != (typed.color, typed.italic)
        lines = it.screen_text().splitlines()
        (row,) = (row for row, line in enumerate(lines) if "x = 1" in line)
        assert lines[row].strip().startswith("│")
        assert lines[row].strip().endswith("│")
        assert lines[row + 1].strip().startswith("╰")


@pytest.mark.long
@pytest.mark.parametrize("background", ["dark", "light"])
async def test_with_the_terminals_own_colours_the_chosen_row_can_be_read(
    background: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever color a word has, it differs from the ground; and Tab fills no answer with color."""
    theme = f"terminal-{background}"
    monkeypatch.setattr(ChatApp, "show_theme", lambda app, _setting: setattr(app, "theme", theme))
    store = StoreThread(tmp_path / "conversations.db")
    async with chat(size=(110, 30), store=store) as it:
        await answered(it)
        await it.press("tab")
        await at_rest(it.pilot)
        region = it.app.query_one(AnswerView).region
        for strip in it.app.screen._compositor.render_strips()[region.y : region.bottom - 1]:
            for _, style, _ in strip.crop(region.x + 1, region.right):
                assert style is None or style.bgcolor is None or style.bgcolor.is_default
        await it.press("escape")
        for keys in (["ctrl+o", *"show"], ["f4"], ["ctrl+p", *"mo"], ["/"]):
            await it.press(*keys)
            await at_rest(it.pilot)
            marked = 0
            for strip in it.app.screen._compositor.render_strips():
                for text, style, _ in strip:
                    if style is not None and text.strip() and style.color is not None:
                        assert style.color != style.bgcolor or style.color.is_default, text
                        marked += bool(style.underline)
            assert marked, keys
            await it.press("escape", "escape")
    await asyncio.to_thread(store.close, 10)


@pytest.mark.long
async def test_on_a_small_screen_nothing_is_left_of_what_is_behind_a_dialog() -> None:
    async with chat(size=(80, 24)) as it:
        await it.send("zqxqz " * 300)
        for key in ("f1", "f4", "ctrl+s", "ctrl+p"):
            assert "zqxqz" in it.screen_text()
            await it.press(key)
            await at_rest(it.pilot)
            assert it.app.screen.is_modal
            assert "qxq" not in it.screen_text(), key
            await it.press("escape")
