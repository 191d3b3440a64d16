"""The form of settings and of a chat's options; themes."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from textual.widgets import Static, TextArea

from akunu_py.chats.options import ChatOptions
from akunu_py.settings import Settings, load_settings, save_settings, settings_file
from akunu_py.tui import terminal, themes
from akunu_py.tui.app import ChatApp
from akunu_py.tui.screens.settings_form import SettingsScreen
from akunu_py.types import NO_TOKEN_LIMIT, GenerateOptions, Message, SamplingOptions
from tests.support.tui_chat import Chat, Compare, chat, has_picture

pytestmark = pytest.mark.usefixtures("own_directories")

PERSONAS = {"coder": "You write Python.\nShort answers.", "poet": "You rhyme."}


def hint_text(it: Chat) -> str:
    """The line below the form, which is always in sight."""
    line, frame = it.app.screen.query_one("#say", Static), it.app.screen.query_one("#dialog")
    assert frame.region.shrink((1, 1, 1, 1)).contains_region(line.region)
    return str(line.render())


def next_options(it: Chat) -> GenerateOptions:
    """How the next answer is made."""
    return it.app.conversation.tree.options.apply(it.app.settings.options)


async def fill(it: Chat, **values: object) -> None:
    """Open the form if it is closed, and fill in fields."""
    if not isinstance(it.app.screen, SettingsScreen):
        await it.press("ctrl+s")
    for name, value in values.items():
        field: Any = it.app.screen.query_one(f"#{name.replace('chat_', 'chat-')}")
        if isinstance(field, TextArea):
            field.text = str(value)
        else:
            field.value = value
        await it.pilot.pause()


async def save(it: Chat) -> None:
    await it.press("ctrl+s")
    await it.until(lambda: not isinstance(it.app.screen, SettingsScreen))


@pytest.mark.long
async def test_saved_settings_are_in_the_file_and_in_use() -> None:
    async with chat(settings=save_settings({"draft_model": "small"})) as it:
        await fill(it, draft_model="", temperature="0,25", max_tokens="200", theme="light")
        await fill(it, system="Be brief.\x1b", server="off", thinking_budget="0")
        assert it.app.theme == "dark", "until it is saved"
        it.app.screen.query_one("#server").focus()
        await it.press(*["tab", "space"] * 3)
        await save(it)
        expected = Settings(
            answer_cache=False, temperature=0.25, max_tokens=200, thinking_budget=0,
            system_prompt="Be brief.", theme="light", server="off", model_titles=False,
            reduced_motion=True,
        )  # fmt: skip
        assert it.app.settings.current == load_settings() == expected
        used = next_options(it)
        assert (used.sampling.temperature, used.max_tokens, used.thinking_budget) == (0.25, 200, 0)
        assert it.app.theme == "light"
        assert it.box.border_title == "system prompt"
        await fill(it, max_tokens="", thinking_budget="")
        await save(it)
        assert (next_options(it).max_tokens, next_options(it).thinking_budget) == (
            NO_TOKEN_LIMIT,
            None,
        )
        await it.send("hello")
        assert it.history[0] == Message("system", "Be brief.")
    assert "model =" not in settings_file().read_text(), "only what was changed is written"


async def test_the_chat_starts_with_its_theme(monkeypatch: pytest.MonkeyPatch) -> None:
    """It applies the style sheets once, and looks as if the theme was chosen later."""
    with monkeypatch.context() as patch:
        patch.setattr(ChatApp, "refresh_css", refresh := Mock())
        async with chat(settings=Settings(theme="light")) as it:
            refresh.assert_not_called()
            patch.undo()
            before = it.strips()
            for theme in ("nord", "light"):
                it.app.show_theme(theme)
                await it.pilot.pause()
                assert (it.strips() == before) == (theme == "light")


@pytest.mark.long
async def test_the_gallery_previews_a_theme_and_enter_saves_it() -> None:
    async with chat(size=(100, 30), settings=Settings(theme="light")) as it:
        await it.act("use_theme")
        await it.press(*"gruv")
        assert it.app.theme == "gruvbox"
        await it.press("escape")
        assert it.app.theme == "light"
        await it.act("use_theme")
        await it.press(*"gruv", "enter")
        assert (it.app.theme, it.app.settings.current.theme) == ("gruvbox", "gruvbox")
        assert load_settings().theme == "gruvbox"
        await it.act("use_theme('nord')")
        assert it.app.theme == load_settings().theme == "nord"


@pytest.mark.long
async def test_personas_are_added_changed_and_deleted() -> None:
    async with chat(settings=save_settings({"personas": PERSONAS, "persona": "coder"})) as it:
        await fill(it, system="You write Rust.", persona="poet")
        assert it.app.screen.query_one("#system", TextArea).text == "You rhyme."
        await save(it)
        assert load_settings().personas == PERSONAS | {"coder": "You write Rust."}
        assert load_settings().persona == "poet"
        assert it.box.border_title == "poet"
        await fill(it, persona="\n")
        for name, text, says in (
            ("", "x", "Enter a name"), ("new", "", "Enter a name"), ("poet", "x", "already exists"),
        ):  # fmt: skip
            await fill(it, name=name, system=text)
            await it.press("ctrl+s")
            assert says in hint_text(it)
        await fill(it, name=" new ", system="You are new.")
        await save(it)
        saved = load_settings()
        assert (saved.persona, saved.system, len(saved.personas)) == ("new", "You are new.", 3)
        await fill(it, system="")
        await save(it)
        assert (load_settings().persona, len(load_settings().personas)) == ("", 2)


async def test_a_file_that_cannot_be_written_keeps_the_form_open() -> None:
    settings_file().parent.parent.mkdir()
    settings_file().parent.write_text("in the way")
    async with chat(size=(100, 30)) as it:
        await fill(it, temperature="1")
        await it.press("ctrl+s")
        await it.until(lambda: "settings.toml" in hint_text(it).splitlines()[0])


@pytest.mark.parametrize(("setting", "background", "colours", "expected"), [
    ("auto", None, "truecolor", "dark"), ("auto", "light", "256", "light-256"),
    ("dark", None, "256", "dark-256"), ("auto", None, None, "terminal-dark"),
    ("light", "dark", "standard", "terminal-dark"),
    ("light", None, "standard", "terminal-light"), ("nord", None, "standard", "terminal-dark"),
    ("nord", "light", "256", "nord"), ("there is none", "light", "256", "light-256"),
])  # fmt: skip
def test_the_theme_follows_the_terminal(
    setting: str, background: themes.Background | None, colours: str | None, expected: str
) -> None:
    assert themes.theme_name(setting, background, colours) == expected


@pytest.mark.parametrize(("answer", "expected"), [
    (b"\x1b]11;rgb:ffff/ffff/ffff\x1b\\\x1b[?62;c", "light"),
    (b"\x1b]11;rgb:1c1c/1c1c/1c1c\x07\x1b[?1;2c", "dark"), (b"\x1b]11;rgb:f/f/f\x07", "light"),
    (b"\x1b]11;rgba:0000/0000/0000/ffff\x1b\\", "dark"), (b"\x1b[?1;2c", None),
])  # fmt: skip
def test_the_background_in_the_reply_of_a_terminal(answer: bytes, expected: str | None) -> None:
    assert terminal.parse_answer(answer) == expected


def test_without_a_reply_the_environment_names_the_background() -> None:
    backgrounds = {"15;0": "dark", "0;15": "light", "0;default;7": "light", "": None}
    for value, expected in backgrounds.items():
        assert terminal._from_environment({"COLORFGBG": value}) == expected


def test_picture(snap_compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("/home/me/.config/akunu/settings.toml")
    monkeypatch.setattr("akunu_py.tui.screens.settings_form.settings_file", lambda: path)
    settings = Settings(theme="dark", personas=PERSONAS, persona="coder", reduced_motion=True)

    async def shown(it: Chat) -> None:
        await it.press("ctrl+s", "tab", "tab")

    assert has_picture(snap_compare, shown, settings=settings)


@pytest.mark.long
async def test_options_are_those_of_this_chat_only() -> None:
    async with chat() as it:
        it.app.settings.options = GenerateOptions(NO_TOKEN_LIMIT, thinking_budget=900)
        plain = next_options(it)
        await fill(it, chat_temperature="0,25", chat_top_p=".5", chat_seed="7", thinking="low")
        await fill(it, chat_max_tokens="300", chat_thinking_budget="64")
        await it.press("enter")
        await it.until(lambda: not isinstance(it.app.screen, SettingsScreen))
        assert it.app.conversation.tree.options == ChatOptions(0.25, 300, 0.5, 7, "low", 64)
        assert it.box.border_title == "options"
        sampling = SamplingOptions(0.25, 0.5, seed=7)
        expected = GenerateOptions(300, sampling=sampling, thinking="low", thinking_budget=64)
        assert next_options(it) == expected
        await it.talk("hello", "Hi.")
        await it.press("ctrl+n")
        assert next_options(it) == plain
        assert it.box.border_title == ""
    assert not settings_file().exists()


@pytest.mark.long
async def test_the_options_are_kept_with_the_chat(tmp_path: Path) -> None:
    """Also those that were set before its first prompt."""
    async with chat(store=tmp_path / "conversations.db") as it:
        await fill(it, chat_temperature="0.25")
        await save(it)
        await it.talk("hello", "Hi.")
        first = it.conversation
        await fill(it, chat_seed="3")
        await save(it)
        await it.press("ctrl+n")
        await it.open(first)
        assert it.app.conversation.tree.options == ChatOptions(temperature=0.25, seed=3)


@pytest.mark.long
async def test_a_wrong_field_is_named_and_escape_saves_nothing() -> None:
    wrong = {
        "chat_temperature": ("6", "Temperature: expected a number from 0 to 5, found '6'"),
        "temperature": ("1.2.3", "Temperature: expected a number from 0 to 5, found '1.2.3'"),
        "chat_seed": (str(1 << 63), f"Seed: expected an integer of at most {(1 << 63) - 1}, found"),
        "max_tokens": ("-", "Answer limit: expected an integer of 0 or more, found '-'"),
        "chat_thinking_budget": ("-2", "Thinking limit: expected an integer of -1 or more, found"),
        "server": ("localhost:8012", "http://HOST:PORT"),
    }
    async with chat() as it:
        for name, (value, message) in wrong.items():
            await fill(it, **{name: value})
            await it.press("ctrl+s")
            await it.until(lambda message=message: message in hint_text(it))  # type: ignore[misc]
            if name != "server":
                assert it.app.focused
                assert it.app.focused.id == name.replace("chat_", "chat-")
            await fill(it, **{name: ""})
        await fill(it, theme="nord", temperature="1", chat_temperature="2")
        await it.press("escape")
        assert it.app.settings.current == Settings()
        assert it.app.conversation.tree.options == ChatOptions()
    assert not settings_file().exists()
