"""Pictures of the chat, and the contrast of everything on them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from rich.color import Color as RichColor
from rich.color import ColorSystem
from rich.style import Style
from textual.color import Color
from textual.pilot import Pilot
from textual.theme import BUILTIN_THEMES, Theme

from akunu_py.chats.tree import ChatMessage, ConversationTree
from akunu_py.settings import Settings
from akunu_py.tui import themes
from akunu_py.tui.app import ChatApp, ChatConfig
from akunu_py.tui.prompt.attachments import Attachment, join_files
from akunu_py.tui.prompt.box import PromptBox
from akunu_py.tui.prompt.suggestions import SuggestionPopup
from akunu_py.tui.transcript.turn import AnswerView
from akunu_py.tui.workers.chat_client import (
    AnswerFailed,
    AnswerFinished,
    ModelLoaded,
    PieceArrived,
    PrefillUpdate,
)
from akunu_py.types import GenerateOptions, Stats
from tests.support.slow import slow
from tests.support.tui_chat import GAUGES, Chat, at_rest, chat, until
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


async def sent(pilot: Pilot[None], prompt: str = "What is a queue?\nShow me Python.") -> None:
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


async def prefilling(pilot: Pilot[None]) -> None:
    await sent(pilot)
    pilot.app.post_message(PrefillUpdate(1, 400, 1000))
    await at_rest(pilot)


async def streaming(pilot: Pilot[None]) -> None:
    await sent(pilot)
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


async def light(pilot: Pilot[None]) -> None:
    pilot.app.theme = "light"
    await finished(pilot)


async def terminal_colors(pilot: Pilot[None]) -> None:
    pilot.app.theme = "terminal-dark"
    await finished(pilot)


async def long_code(pilot: Pilot[None]) -> None:
    await sent(pilot)
    await streamed(pilot, LONG_CODE)


async def thinking(pilot: Pilot[None]) -> None:
    await sent(pilot)
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


async def files(pilot: Pilot[None]) -> None:
    await loaded(pilot)
    await pilot.press(*"see @")
    await until(pilot, lambda: pilot.app.query_one(SuggestionPopup).is_open)
    await at_rest(pilot)


async def commands(pilot: Pilot[None]) -> None:
    await loaded(pilot)
    await pilot.press("/")
    await at_rest(pilot)


async def error(pilot: Pilot[None]) -> None:
    await sent(pilot)
    text = "the prompt has 9000 tokens, but the context of starter holds 8192; shorten the prompt"
    pilot.app.post_message(AnswerFailed(1, text))
    await at_rest(pilot)


async def hostile_drafting(pilot: Pilot[None]) -> None:
    await sent(pilot, "[red]Say[/red] something odd.")
    await streamed(pilot, HOSTILE)
    await pilot.press("f2")
    await at_rest(pilot)


@pytest.mark.parametrize(
    ("script", "size"),
    [
        (streaming, (24, 8)),
        (long_code, (120, 36)),
        *(
            (script, (80, 24))
            for script in (
                loading,
                prefilling,
                finished,
                stopped,
                light,
                terminal_colors,
                drafting,
                hostile_drafting,
                long_code,
                thinking_open,
                branches,
                editing,
                earlier_prompts,
                attached,
                error,
                files,
                commands,
            )
        ),
    ],
    ids=lambda value: value.__name__ if callable(value) else "x".join(map(str, value)),
)
def test_picture(
    snap_compare: Compare, tmp_path: Path, script: Script, size: tuple[int, int]
) -> None:
    (tmp_path / "src").mkdir()
    for name in ("notes.md", "src/prompt.py"):
        (tmp_path / name).touch()
    settings = Settings(theme="dark", reduced_motion=True)
    app = ChatApp(ChatConfig("starter", GenerateOptions(), settings, directory=tmp_path))
    assert snap_compare(app, terminal_size=size, run_before=script)


LEAST = 4.5
EVERYTHING = """# One

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
    for strip in it.strips()[shown.y : shown.bottom]:
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
    await it.post(PieceArrived(1, EVERYTHING, ((3, 40),), STATS, "I think.", ((60, " wrong"),)))
    await it.post(AnswerFinished(1, "length", STATS, GAUGES))


def keys(*names: str) -> Callable[[Chat], Awaitable[None]]:
    async def press(it: Chat) -> None:
        await it.press(*names)
        await it.rest()

    press.__name__ = " ".join(names)
    return press


async def notices(it: Chat) -> None:
    await it.app.view.add_notice("a notice")
    await it.app.view.add_notice("an error", "error")
    it.app.view.show_error("It does not work.")
    await it.rest()


async def confirmed(it: Chat) -> None:
    it.app.view.inform("It works.")
    await it.rest()


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
    confirmed,
]


@pytest.mark.long
@pytest.mark.parametrize("theme", ["dark", "light-256", *slow("light", "dark-256")])
async def test_all_text_can_be_read(
    theme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChatApp, "show_theme", lambda app, _setting: setattr(app, "theme", theme))
    look = Settings(reduced_motion=True)
    bad: dict[tuple[str, str], tuple[float, str, str]] = {}
    seen = set()
    path = tmp_path / "conversations.db"
    async with chat(size=(100, 80), store=path, directory=tmp_path, settings=look) as it:
        for step in [keys(), *STEPS]:
            await step(it)
            for pair, (ratio, text) in contrasts(it).items():
                seen.add(pair)
                if ratio < LEAST:
                    bad.setdefault(pair, (round(ratio, 2), text, step.__name__))
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
        inks = {word: style.color for text, style in it.styled() for word in text.split()}
        keyword, function, kind, number = (inks[each] for each in ("def", "push", "list", "12"))
        hues = {keyword, function, kind, number, inks["#"], inks["text"]}
        assert len(hues) == 6
        assert (inks["int"], inks["append"], inks["or"]) == (kind, function, keyword)
        added, removed, same = (inks[each] for each in ("+new", "-old", "same"))
        for ink, which in ((added, 1), (removed, 0)):
            assert ink is not None
            assert ink != same
            assert max(range(3), key=ink.get_truecolor().__getitem__) == which


async def test_typed_text_and_code_stand_out_in_sixteen_colors() -> None:
    """Sixteen colours, as for TERM=xterm: no shade of grey tells a placeholder from a prompt."""

    def style_of(it: Chat, text: str) -> Style:
        return next(style for part, style in it.styled() if text in part)

    async with chat(settings=Settings(theme="terminal", reduced_motion=True)) as it:
        placeholder = style_of(it, "sk something")
        await it.send("go")
        await it.answer("words\n\n```python\nx = 1\n```")
        it.box.insert("typed words")
        await it.pilot.pause()
        typed = style_of(it, "typed words")
        assert (placeholder.color, placeholder.italic) != (typed.color, typed.italic)
        lines = it.screen.splitlines()
        (row,) = (row for row, line in enumerate(lines) if "x = 1" in line)
        assert lines[row].strip().startswith("│")
        assert lines[row].strip().endswith("│")
        assert lines[row + 1].strip().startswith("╰")


@pytest.mark.long
@pytest.mark.parametrize("background", ["dark", "light"])
async def test_the_chosen_row_can_be_read_in_sixteen_colors(
    background: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever color a word has, it differs from the ground; and Tab fills no answer with color."""
    theme = f"terminal-{background}"
    monkeypatch.setattr(ChatApp, "show_theme", lambda app, _setting: setattr(app, "theme", theme))
    async with chat(size=(110, 30), store=tmp_path / "conversations.db") as it:
        await answered(it)
        await it.press("tab")
        await it.rest()
        region = it.app.query_one(AnswerView).region
        for strip in it.strips()[region.y : region.bottom - 1]:
            for _, style, _ in strip.crop(region.x + 1, region.right):
                assert style is None or style.bgcolor is None or style.bgcolor.is_default
        await it.press("escape")
        for keys in (["ctrl+o", *"show"], ["f4"], ["ctrl+p", *"mo"], ["/"]):
            await it.press(*keys)
            await it.rest()
            marked = 0
            for text, style in it.styled():
                if text.strip() and style.color is not None:
                    assert style.color != style.bgcolor or style.color.is_default, text
                    marked += bool(style.underline)
            assert marked, keys
            await it.press("escape", "escape")


@pytest.mark.long
async def test_on_a_small_screen_a_dialog_covers_the_chat() -> None:
    async with chat(size=(80, 24)) as it:
        await it.send("zqxqz " * 300)
        for key in ("f1", "f4", "ctrl+s", "ctrl+p"):
            assert "zqxqz" in it.screen
            await it.press(key)
            await it.rest()
            assert it.app.screen.is_modal
            assert "qxq" not in it.screen, key
            await it.press("escape")


@pytest.mark.parametrize("theme", [themes.DARK, themes.LIGHT], ids=lambda theme: theme.name)
def test_every_color_can_be_read_on_every_ground(theme: Theme) -> None:
    grounds = [theme.background, theme.surface, theme.panel]
    inks = [theme.foreground, theme.primary, theme.success, theme.warning, theme.error]
    cursor = (theme.variables[f"block-cursor-{each}"] for each in ("foreground", "background"))
    pairs = [*((ink, ground) for ink in inks for ground in grounds), tuple(cursor)]
    ratios = {pair: contrast(*(Color.parse(str(each)) for each in pair)) for pair in pairs}
    assert not {pair: ratio for pair, ratio in ratios.items() if ratio < LEAST}
    for setting in themes.choices():
        ours = {themes.DARK.name, themes.LIGHT.name, themes.TERMINAL_DARK.name}
        assert themes.theme_name(setting, "dark", "truecolor") in ours | set(BUILTIN_THEMES)
