"""The settings screen, driven by its keys; and the themes and the motion that it sets.

To accept new pictures: pytest tests/tui/test_settings.py --snapshot-update, then look at them.
"""

from __future__ import annotations

import os
import pty
import termios
import threading
from pathlib import Path

import pytest
from textual.color import Color
from textual.pilot import Pilot
from textual.theme import BUILTIN_THEMES, Theme
from textual.widgets import Input, Select, Static, TextArea

from akunu_py.settings import Settings, load_settings, save_settings, settings_file
from akunu_py.tui import terminal, themes
from akunu_py.tui.screens.settings_form import SettingsScreen
from tests.support.tui_chat import at_rest, chat, until
from tests.support.tui_host import Compare, Host, sizes_and_themes

pytestmark = pytest.mark.usefixtures("own_directories")

PERSONAS = {"coder": "You write Python.\nShort answers.", "poet": "You rhyme."}


def form(settings: Settings | None = None) -> tuple[Host, SettingsScreen]:
    shown = SettingsScreen(settings or load_settings(), lambda name: host.show_theme(name))
    host = Host(shown)
    return host, shown


def said(shown: SettingsScreen) -> str:
    line, frame = shown.query_one("#say", Static), shown.query_one("#dialog")
    assert frame.region.shrink((1, 1, 1, 1)).contains_region(line.region), "it is in sight"
    return str(line.render())


@pytest.mark.long
async def test_what_is_saved_is_in_the_file_and_in_the_result() -> None:
    host, shown = form(save_settings({"draft_model": "small"}))
    async with host.run_test(size=(80, 24)) as pilot:
        assert shown.query_one("#draft-model", Select).value == "small"
        shown.query_one("#draft-model", Select).value = ""
        shown.query_one("#temperature", Input).value = "0,25"
        shown.query_one("#system", TextArea).text = "Be brief.\x1b"
        shown.query_one("#theme", Select).value = "light"
        await pilot.press(*["tab"] * 8, *["backspace"] * 4, *"off")
        await pilot.press(*["tab", "space"] * 3, "ctrl+s")
        await until(pilot, lambda: host.results)
    expected = Settings(
        answer_cache=False,
        temperature=0.25,
        system_prompt="Be brief.",
        theme="light",
        server="off",
        model_titles=False,
        reduced_motion=True,
    )
    assert host.results == [expected]
    assert load_settings() == expected
    assert host.themes[-1] == "light"
    assert "model =" not in settings_file().read_text(), "only what was changed is written"


@pytest.mark.long
async def test_escape_saves_nothing_and_undoes_the_theme() -> None:
    host, shown = form()
    async with host.run_test() as pilot:
        shown.query_one("#theme", Select).value = "nord"
        await pilot.pause()
        await pilot.press("escape")
    assert host.results == [None]
    assert host.themes[-2:] == ["nord", "auto"]
    assert not settings_file().exists()


@pytest.mark.long
async def test_a_new_persona_has_a_prompt_of_its_own() -> None:
    host, _ = form(save_settings({"system_prompt": "plain"}))
    async with host.run_test(size=(80, 24)) as pilot:
        await pilot.press("ctrl+n", *"poet", "enter", *"Rhyme", "ctrl+s")
        await until(pilot, lambda: host.results)
    (saved,) = host.results
    assert isinstance(saved, Settings)
    assert (saved.personas, saved.persona, saved.system) == ({"poet": "Rhyme"}, "poet", "Rhyme")
    assert saved.system_prompt == "plain"


@pytest.mark.long
@pytest.mark.parametrize("leave", [["tab"], ["enter"], []])
async def test_a_new_persona_is_named_by_enter_tab_or_saving(leave: list[str]) -> None:
    host, _ = form(save_settings({"system_prompt": "plain"}))
    async with host.run_test(size=(80, 24)) as pilot:
        await pilot.press("ctrl+n", *"poet", *leave, *("Rhyme" if leave else ""), "ctrl+s")
        await until(pilot, lambda: host.results)
    (saved,) = host.results
    assert isinstance(saved, Settings)
    assert (saved.personas, saved.persona) == ({"poet": "Rhyme" if leave else ""}, "poet")
    assert saved.system_prompt == "plain"


@pytest.mark.long
@pytest.mark.parametrize("size", [(80, 24), (100, 30), (160, 50)])
async def test_a_list_of_choices_shows_several_rows(size: tuple[int, int]) -> None:
    host, shown = form()
    async with host.run_test(size=size) as pilot:
        shown.query_one("#theme").focus()
        await pilot.press("enter")
        await pilot.pause()
        assert shown.query_one("#theme SelectOverlay").size.height >= 6


async def test_a_theme_chosen_by_a_command_is_saved() -> None:
    async with chat() as it:
        await it.act("use_theme('nord')")
        assert it.app.theme == "nord"
    assert load_settings().theme == "nord"


async def test_the_gallery_previews_a_theme_that_stays_with_enter_only() -> None:
    async with chat(size=(100, 30), settings=Settings(theme="light")) as it:
        await it.act("use_theme")
        await it.pilot.pause()
        assert "def greet" in it.screen_text()
        await it.press(*"gruvbox")
        assert it.app.theme == "gruvbox"
        await it.press("escape")
        assert it.app.theme == "light"
        await it.act("use_theme")
        await it.press(*"gruvbox", "enter")
        assert (it.app.theme, it.app.settings.current.theme) == ("gruvbox", "gruvbox")
    assert load_settings().theme == "gruvbox"


@pytest.mark.long
async def test_each_persona_keeps_its_text_when_another_is_chosen() -> None:
    host, shown = form(save_settings({"personas": PERSONAS, "persona": "coder"}))
    async with host.run_test() as pilot:
        shown.query_one("#system", TextArea).text = "You write Rust."
        shown.query_one("#persona", Select).value = "poet"
        await pilot.pause()
        assert shown.query_one("#system", TextArea).text == "You rhyme."
        await pilot.press("ctrl+s")
        await until(pilot, lambda: host.results)
    assert load_settings().personas == {"coder": "You write Rust.", "poet": "You rhyme."}
    assert load_settings().persona == "poet"


@pytest.mark.long
async def test_a_persona_can_be_deleted_and_the_plain_prompt_cannot() -> None:
    host, shown = form(save_settings({"personas": PERSONAS, "persona": "coder"}))
    async with host.run_test() as pilot:
        await pilot.press("ctrl+d")
        assert shown.query_one("#persona", Select).value == ""
        await pilot.press("ctrl+d")
        assert "cannot be deleted" in said(shown)
        await pilot.press("ctrl+s")
        await until(pilot, lambda: host.results)
    assert load_settings() == Settings(personas={"poet": "You rhyme."})


@pytest.mark.long
async def test_a_name_that_is_taken_or_empty_is_refused() -> None:
    host, shown = form(save_settings({"personas": PERSONAS}))
    async with host.run_test() as pilot:
        await pilot.press("ctrl+n", "enter")
        assert "Enter a name" in said(shown)
        await pilot.press(*"poet", "enter")
        assert "Persona 'poet' already exists" in said(shown)
        await pilot.press("escape")
        assert host.results == [], "the first Esc leaves the name, not the form"
        await pilot.press("escape")
    assert host.results == [None]


@pytest.mark.parametrize(
    ("field", "typed", "says"),
    [
        ("temperature", "9", "0 to 5"),
        ("temperature", "", "a number"),
        ("temperature", "1.2.3", "a num"),
        ("server", "localhost:8012", "http://HOST:PORT"),
        ("server", "", "http://HOST:PORT"),
    ],
)
async def test_what_is_wrong_is_refused_in_words(field: str, typed: str, says: str) -> None:
    host, shown = form()
    async with host.run_test(size=(80, 24)) as pilot:
        assert not shown.query_one("#form").show_vertical_scrollbar
        shown.query_one(f"#{field}", Input).value = typed
        await pilot.press("ctrl+s")
        await until(pilot, lambda: says in said(shown))
    assert not settings_file().exists()


async def test_a_file_that_cannot_be_written_keeps_the_form_open() -> None:
    settings_file().parent.parent.mkdir()
    settings_file().parent.write_text("in the way")
    host, shown = form(Settings())
    async with host.run_test(size=(100, 30)) as pilot:
        shown.query_one("#temperature", Input).value = "1"
        await pilot.press("ctrl+s")
        await until(pilot, lambda: "settings.toml" in said(shown))
        assert host.results == []


@pytest.mark.parametrize(
    ("setting", "background", "colours", "expected"),
    [
        ("auto", None, "truecolor", "dark"),
        ("auto", "light", "256", "light-256"),
        ("dark", None, "256", "dark-256"),
        ("auto", "light", "standard", "terminal-light"),
        ("auto", None, None, "terminal-dark"),
        ("terminal", "dark", "truecolor", "terminal-dark"),
        ("light", "dark", "standard", "terminal-dark"),
        ("light", None, "standard", "terminal-light"),
        ("nord", None, "standard", "terminal-dark"),
        ("nord", "light", "256", "nord"),
        ("there is none", "light", "256", "light-256"),
    ],
)
def test_the_theme_follows_the_terminal(
    setting: str, background: themes.Background | None, colours: str | None, expected: str
) -> None:
    assert themes.theme_name(setting, background, colours) == expected


def test_every_choice_is_a_theme() -> None:
    ours = {themes.DARK.name, themes.LIGHT.name, themes.TERMINAL_DARK.name}
    for setting in themes.choices():
        assert themes.theme_name(setting, "dark", "truecolor") in ours | set(BUILTIN_THEMES)


@pytest.mark.parametrize("theme", [themes.DARK, themes.LIGHT], ids=lambda theme: theme.name)
def test_text_can_be_read_on_every_ground(theme: Theme) -> None:
    """Contrast as WCAG 2.2 has it, at least 4.5 for text."""
    grounds = [theme.background, theme.surface, theme.panel]
    inks = [theme.foreground, theme.primary, theme.success, theme.warning, theme.error]
    pairs = [(ink, ground) for ink in inks for ground in grounds]
    pairs.append((theme.variables["block-cursor-foreground"],
                  theme.variables["block-cursor-background"]))  # fmt: skip
    low = {
        (ink, ground): ratio
        for ink, ground in pairs
        if (ratio := contrast(Color.parse(str(ink)), Color.parse(str(ground)))) < 4.5
    }
    assert not low


def contrast(one: Color, other: Color) -> float:
    def luminance(color: Color) -> float:
        parts = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
                 for part in color.normalized)  # fmt: skip
        return sum(
            weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True)
        )

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"\x1b]11;rgb:ffff/ffff/ffff\x1b\\\x1b[?62;c", "light"),
        (b"\x1b]11;rgb:1c1c/1c1c/1c1c\x07\x1b[?1;2c", "dark"),
        (b"\x1b]11;rgb:f/f/f\x07", "light"),
        (b"\x1b]11;rgba:0000/0000/0000/ffff\x1b\\", "dark"),
        (b"\x1b[?1;2c", None),
        (b"", None),
    ],
)
def test_what_the_terminal_answers(answer: bytes, expected: str | None) -> None:
    assert terminal.parse_answer(answer) == expected


def test_a_terminal_is_asked_and_left_as_it_was() -> None:
    ours, theirs = pty.openpty()
    asked: list[bytes] = []

    def answer() -> None:
        asked.append(os.read(ours, 100))
        os.write(ours, b"\x1b]11;rgb:eeee/eeee/eeee\x1b\\")
        os.write(ours, b"\x1b[?62;22c")

    other = threading.Thread(target=answer)
    before = termios.tcgetattr(theirs)
    other.start()
    found = terminal.parse_answer(terminal._query_terminal(theirs))
    other.join(5)
    assert found == "light"
    assert asked == [b"\x1b]11;?\x1b\\\x1b[c"]
    assert termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)


def test_the_environment_tells_where_the_terminal_does_not() -> None:
    for value, expected in (
        ("15;0", "dark"),
        ("0;15", "light"),
        ("0;default;7", "light"),
        ("", None),
    ):
        assert terminal._from_environment({"COLORFGBG": value}) == expected


@pytest.mark.long
async def test_reduced_motion_stops_what_glides_and_blinks() -> None:
    host, shown = form()
    async with host.run_test() as pilot:
        box = shown.query_one("#system", TextArea)
        levels, blinks = [], []
        for reduced in (True, False):
            themes.set_motion(host, reduced=reduced)
            await pilot.pause()
            levels.append(host.animation_level)
            blinks.append(box.cursor_blink)
        assert (levels, blinks) == (["none", "full"], [False, True])


@pytest.mark.parametrize("directory", ["/a", "/home/someone/with/a/long/name"])
async def test_no_line_of_the_hint_ends_in_a_separator(
    monkeypatch: pytest.MonkeyPatch, directory: str
) -> None:
    path = Path(directory, ".config/akunu/settings.toml")
    monkeypatch.setattr("akunu_py.tui.screens.settings_form.settings_file", lambda: path)
    host, shown = form()
    async with host.run_test(size=(80, 24)):
        hint = shown.query_one("#say", Static)
        lines = [hint.render_line(row).text.strip() for row in range(hint.size.height)]
        assert lines == ["Ctrl+N new persona · Ctrl+D delete persona", str(path)]


@pytest.mark.long
@sizes_and_themes("light", "terminal-dark")
def test_picture(
    snap_compare: Compare, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], theme: str
) -> None:
    path = Path("/home/me/.config/akunu/settings.toml")
    monkeypatch.setattr("akunu_py.tui.screens.settings_form.settings_file", lambda: path)
    host, _ = form(Settings(personas=PERSONAS, persona="coder"))
    host.theme = theme

    async def shown(pilot: Pilot[None]) -> None:
        await pilot.press("tab")
        await at_rest(pilot)

    assert snap_compare(host, terminal_size=size, run_before=shown)
