"""The settings screen, the options of a chat, themes and motion."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, Select, Static, TextArea

from akunu_py.chats.options import ChatOptions
from akunu_py.settings import Settings, load_settings, save_settings, settings_file
from akunu_py.tui import terminal, themes
from akunu_py.tui.screens.chat_options import ChatOptionsScreen
from akunu_py.tui.screens.settings_form import SettingsScreen
from akunu_py.types import NO_TOKEN_LIMIT, GenerateOptions, SamplingOptions
from tests.support.tui_chat import Chat, at_rest, chat, until
from tests.support.tui_host import Compare, Host

pytestmark = pytest.mark.usefixtures("own_directories")

PERSONAS = {"coder": "You write Python.\nShort answers.", "poet": "You rhyme."}


def form(settings: Settings | None = None) -> tuple[Host, SettingsScreen]:
    shown = SettingsScreen(settings or load_settings(), lambda name: host.show_theme(name))
    host = Host(shown)
    return host, shown


def hint_text(shown: SettingsScreen) -> str:
    line, frame = shown.query_one("#say", Static), shown.query_one("#dialog")
    assert frame.region.shrink((1, 1, 1, 1)).contains_region(line.region), "it is in sight"
    return str(line.render())


@pytest.mark.long
async def test_saved_settings_are_in_the_file_and_in_the_result() -> None:
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


@pytest.mark.parametrize("leave", [["tab"], ["enter"], []])
async def test_a_new_persona_is_named_by_enter_tab_or_saving(leave: list[str]) -> None:
    host, _ = form(save_settings({"system_prompt": "plain"}))
    async with host.run_test(size=(80, 24)) as pilot:
        await pilot.press("ctrl+n", *"poet", *leave, *("Rhyme" if leave else ""), "ctrl+s")
        await until(pilot, lambda: host.results)
    (saved,) = host.results
    assert isinstance(saved, Settings)
    text = "Rhyme" if leave else ""
    assert (saved.personas, saved.persona, saved.system) == ({"poet": text}, "poet", text)
    assert saved.system_prompt == "plain"


@pytest.mark.long
async def test_the_gallery_previews_a_theme_and_enter_saves_it() -> None:
    async with chat(size=(100, 30), settings=Settings(theme="light")) as it:
        await it.act("use_theme")
        await it.until_shown("def greet")
        await it.press(*"gruvbox")
        assert it.app.theme == "gruvbox"
        await it.press("escape")
        assert it.app.theme == "light"
        await it.act("use_theme")
        await it.press(*"gruvbox", "enter")
        assert (it.app.theme, it.app.settings.current.theme) == ("gruvbox", "gruvbox")
        assert load_settings().theme == "gruvbox"
        await it.act("use_theme('nord')")
        assert it.app.theme == load_settings().theme == "nord"


@pytest.mark.long
async def test_personas_keep_their_texts_and_can_be_deleted() -> None:
    """The plain prompt cannot."""
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
    host, shown = form()
    async with host.run_test() as pilot:
        await pilot.press("ctrl+d")
        assert shown.query_one("#persona", Select).value == ""
        await pilot.press("ctrl+d")
        assert "cannot be deleted" in hint_text(shown)
        await pilot.press("ctrl+s")
        await until(pilot, lambda: host.results)
    assert load_settings() == Settings(personas={"coder": "You write Rust."})


async def test_invalid_values_are_refused_in_words() -> None:
    host, shown = form()
    async with host.run_test(size=(80, 24)) as pilot:
        for field, typed, says in (
            ("temperature", "9", "0 to 5"),
            ("temperature", "1.2.3", "a num"),
            ("server", "localhost:8012", "http://HOST:PORT"),
            ("server", "", "http://HOST:PORT"),
        ):
            before = shown.query_one(f"#{field}", Input).value
            shown.query_one(f"#{field}", Input).value = typed
            await pilot.press("ctrl+s")
            await until(pilot, lambda says=says: says in hint_text(shown))  # type: ignore[misc]
            assert host.results == []
            shown.query_one(f"#{field}", Input).value = before
    assert not settings_file().exists()


async def test_a_file_that_cannot_be_written_keeps_the_form_open() -> None:
    settings_file().parent.parent.mkdir()
    settings_file().parent.write_text("in the way")
    host, shown = form(Settings())
    async with host.run_test(size=(100, 30)) as pilot:
        shown.query_one("#temperature", Input).value = "1"
        await pilot.press("ctrl+s")
        await until(pilot, lambda: "settings.toml" in hint_text(shown))
        assert host.results == []


@pytest.mark.parametrize(
    ("setting", "background", "colours", "expected"),
    [
        ("auto", None, "truecolor", "dark"),
        ("auto", "light", "256", "light-256"),
        ("dark", None, "256", "dark-256"),
        ("auto", None, None, "terminal-dark"),
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


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"\x1b]11;rgb:ffff/ffff/ffff\x1b\\\x1b[?62;c", "light"),
        (b"\x1b]11;rgb:1c1c/1c1c/1c1c\x07\x1b[?1;2c", "dark"),
        (b"\x1b]11;rgb:f/f/f\x07", "light"),
        (b"\x1b]11;rgba:0000/0000/0000/ffff\x1b\\", "dark"),
        (b"\x1b[?1;2c", None),
    ],
)
def test_the_background_in_the_reply_of_a_terminal(answer: bytes, expected: str | None) -> None:
    assert terminal.parse_answer(answer) == expected


def test_without_a_reply_the_environment_names_the_background() -> None:
    for value, expected in (
        ("15;0", "dark"),
        ("0;15", "light"),
        ("0;default;7", "light"),
        ("", None),
    ):
        assert terminal._from_environment({"COLORFGBG": value}) == expected


def test_picture(snap_compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("/home/me/.config/akunu/settings.toml")
    monkeypatch.setattr("akunu_py.tui.screens.settings_form.settings_file", lambda: path)
    host, _ = form(Settings(personas=PERSONAS, persona="coder"))

    async def shown(pilot: Pilot[None]) -> None:
        await pilot.press("tab")
        await at_rest(pilot)

    assert snap_compare(host, terminal_size=(80, 24), run_before=shown)


SOME = ChatOptions(0.25, 300, 0.5, 7, "low", 64)


def next_options(it: Chat) -> GenerateOptions:
    """How the next answer is made."""
    return it.app.conversation.tree.options.apply(it.app.settings.options)


async def fill(it: Chat, **values: str) -> None:
    await it.send("/options")
    await it.until(lambda: isinstance(it.app.screen, ChatOptionsScreen))
    for name, value in values.items():
        it.app.screen.query_one(f"#{name}", Input).value = value


@pytest.mark.long
async def test_the_dialog_changes_this_chat_only(own_directories: None) -> None:
    async with chat() as it:
        it.app.settings.options = GenerateOptions(NO_TOKEN_LIMIT, thinking_budget=900)
        plain = next_options(it)
        assert plain.max_tokens == NO_TOKEN_LIMIT
        await fill(it, temperature="0,25", top_p=".5", seed="7", max_tokens="300")
        it.app.screen.query_one("#thinking", Select).value = "low"
        it.app.screen.query_one("#thinking_budget", Input).value = "64"
        await it.press("enter")
        assert it.app.conversation.tree.options == SOME
        assert it.box.border_title == "starter · options"
        sampling = SamplingOptions(0.25, 0.5, seed=7)
        expected = GenerateOptions(300, sampling=sampling, thinking="low", thinking_budget=64)
        assert next_options(it) == expected
        await it.send("hello")
        await it.answer("Hi.")
        await it.press("ctrl+n")
        assert next_options(it) == plain
        assert it.box.border_title == "starter"


@pytest.mark.long
async def test_the_options_are_kept_with_the_chat(tmp_path: Path) -> None:
    """Also those that were set before its first prompt."""
    async with chat(store=tmp_path / "conversations.db") as it:
        await it.send("/temperature 0.25")
        await it.talk("hello", "Hi.")
        first = it.conversation
        await fill(it, seed="3")
        await it.press("enter")
        await it.press("ctrl+n")
        await it.app.open_chat(first)
        assert it.app.conversation.tree.options == ChatOptions(temperature=0.25, seed=3)


async def test_a_limit_is_a_setting() -> None:
    async with chat() as it:
        assert it.app.settings.current.token_limit == NO_TOKEN_LIMIT
        for settings, expected in (
            (Settings(max_tokens=200, thinking_budget=0), (200, 0)),
            (Settings(), (NO_TOKEN_LIMIT, None)),
        ):
            it.app.settings.apply(settings)
            made = next_options(it)
            assert (made.max_tokens, made.thinking_budget) == expected


@pytest.mark.long
async def test_a_wrong_field_is_named_and_escape_changes_nothing() -> None:
    wrong = {
        "temperature": ("6", "Temperature: expected a number from 0 to 5, found '6'"),
        "seed": (str(1 << 63), f"Seed: expected an integer of at most {(1 << 63) - 1}, found"),
        "max_tokens": ("-", "Answer limit: expected an integer of 0 or more, found '-'"),
        "thinking_budget": ("-2", "Thinking limit: expected an integer of -1 or more, found '-2'"),
    }
    async with chat() as it:
        for name, (value, message) in wrong.items():
            await fill(it, **{name: value})
            await it.press("enter")
            assert str(it.app.screen.query_one("#say", Static).render()).startswith(message)
            assert it.app.focused is it.app.screen.query_one(f"#{name}")
            await it.press("escape")
        assert it.app.conversation.tree.options == ChatOptions()
