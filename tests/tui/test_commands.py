"""Commands, the palette and the key help: one table and the bindings."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.command import CommandPalette

from akunu_py.settings import save_settings
from akunu_py.tui.app import ChatApp, ChatConfig
from akunu_py.tui.prompt.box import PromptBox
from akunu_py.tui.prompt.slash_commands import (
    COMMANDS,
    ChatCommands,
    CommandCall,
    InvalidCommand,
    keys_of_actions,
    parse,
)
from akunu_py.tui.screens.help import HelpScreen, help_sections
from akunu_py.types import GenerateOptions
from tests.support.tui_chat import at_rest, until

pytestmark = pytest.mark.usefixtures("own_directories")


def chat(tmp_path: Path) -> ChatApp:
    return ChatApp(ChatConfig("starter", GenerateOptions(), directory=tmp_path))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("/NEW  ", ("new", "")),
        ("/model qwen3-4b", ("model", "qwen3-4b")),
        ("/model", ("model", "")),
        ("/rename  a longer title ", ("rename", "a longer title")),
        ("/system You are terse.\nVery.", ("system", "You are terse.\nVery.")),
        ("/modles", "did you mean /models?"),
        ("/xyzzy", "/help lists"),
        ("/new chat", "/new takes no argument, found 'chat'"),
        ("/temperature", "requires an argument: /temperature NUMBER"),
        *((prompt, None) for prompt in ("hello", "/usr/bin/env", "/", "//", "/ new", "and /new")),
        *((prompt, None) for prompt in ("/etc is a directory", "/export a\nb", "")),
    ],
)
def test_commands_mistakes_and_prompts(prompt: str, expected: tuple[str, str] | str | None) -> None:
    parsed = parse(prompt)
    if isinstance(parsed, CommandCall):
        assert (parsed.command.name, parsed.argument) == expected
    elif isinstance(parsed, InvalidCommand):
        assert isinstance(expected, str)
        assert expected in parsed.text
    else:
        assert parsed is expected is None


def helped(app: ChatApp) -> bool:
    """Whether the help is on top; a function, for a type checker believes that screens stay."""
    return isinstance(app.screen, HelpScreen)


@pytest.mark.long
async def test_the_help_lists_every_key_and_every_command(tmp_path: Path) -> None:
    app = chat(tmp_path)
    async with app.run_test(size=(100, 40)) as pilot:
        sections = help_sections(app)
        rows = {what: key for each in sections for key, what in each.rows}
        listed = "\n".join(f"{key} {what}" for what, key in rows.items())
        for action, key in keys_of_actions(app).items():
            described = [
                binding
                for bindings in app._bindings.key_to_bindings.values()
                for binding in bindings
                if binding.action == action and binding.description and not binding.system
            ]
            assert not described or key in listed, action
        for command in COMMANDS:
            assert command.usage in listed
        assert rows["Edit your last message and send it again"] == "F6"
        assert rows["Edit the prompt and send it again"] == "e", "as it is typed"
        assert [each.heading.split(" (")[0] for each in sections] == [
            "Writing", "The answer", "Chats and models", "On a message", "Commands", "Editing",
        ]  # fmt: skip
        assert "Focus" not in listed, "what no user needs is not listed"
        await pilot.press("f1")
        for key in ("escape", "f1", "question_mark", "q"):
            assert helped(app), "'?' opens it in an empty box"
            await pilot.press(key)
            assert not helped(app), key
            await pilot.press("question_mark")


async def found(app: ChatApp, words: str) -> list[str]:
    """What the palette of `app` offers for `words`, best first."""
    provider = ChatCommands(app.screen)
    hits = [hit async for hit in provider.search(words)]
    return [str(hit.text) for hit in sorted(hits, key=lambda hit: -hit.score)]


async def test_the_palette_has_everything(tmp_path: Path) -> None:
    save_settings({"personas": {"poet": "You rhyme."}})
    app = chat(tmp_path)
    async with app.run_test():
        provider = ChatCommands(app.screen)
        titles = [str(hit.text) async for hit in provider.discover()]
        assert titles == [command.title for command in COMMANDS]
        assert (await found(app, "regen"))[0] == "Regenerate the answer on a new branch"
        assert "Use the persona poet" in await found(app, "poet")
        assert "Theme nord" in await found(app, "nord")


@pytest.mark.long
async def test_the_palette_runs_commands_and_inserts_those_with_an_argument(tmp_path: Path) -> None:
    app = chat(tmp_path)
    async with app.run_test() as pilot:
        await pilot.press("ctrl+p")
        await pilot.pause()
        assert isinstance(app.screen, CommandPalette)
        await pilot.press(*"keys and")
        await until(pilot, lambda: app.screen.query_one("CommandList").display)
        await at_rest(pilot)
        await pilot.press("enter")
        await until(pilot, lambda: helped(app))
        await pilot.press("escape")
        provider = ChatCommands(app.screen)
        hits = [hit async for hit in provider.search("temperature")]
        hits[0].command()
        assert app.query_one(PromptBox).text == "/temperature "
