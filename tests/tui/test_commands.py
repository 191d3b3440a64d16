"""Commands and the key help: one table and the bindings."""

import re
from pathlib import Path

import pytest

from akunu_py.errors import UsageError
from akunu_py.tui.app import ChatApp, ChatConfig
from akunu_py.tui.prompt.slash_commands import COMMANDS, keys_of_actions, parse
from akunu_py.tui.screens.help import HelpScreen, help_sections
from akunu_py.types import GenerateOptions
from tests.support.tui_chat import chat as running_chat

pytestmark = pytest.mark.usefixtures("own_directories")


def chat(tmp_path: Path) -> ChatApp:
    return ChatApp(ChatConfig("starter", GenerateOptions(), directory=tmp_path))


@pytest.mark.parametrize(("prompt", "expected"), [
    ("/NEW  ", ("new", "")), ("/model qwen3-4b", ("model", "qwen3-4b")),
    ("/model", ("model", "")), ("/rename  a longer title ", ("rename", "a longer title")),
    ('/json {\n"type": "integer"}', ("json", '{\n"type": "integer"}')),
    ("/modle", "did you mean /model?"), ("/xyzzy", "/help lists"),
    ("/new chat", "/new takes no argument, found 'chat'"),
    ("/find", "requires an argument: /find TEXT"),
    *((prompt, None) for prompt in ("hello", "/usr/bin/env", "/", "//", "/ new", "and /new")),
    *((prompt, None) for prompt in ("/etc is a directory", "/export a\nb", "")),
])  # fmt: skip
def test_commands_mistakes_and_prompts(prompt: str, expected: tuple[str, str] | str | None) -> None:
    if isinstance(expected, str):
        with pytest.raises(UsageError, match=re.escape(expected)):
            parse(prompt)
    else:
        parsed = parse(prompt)
        assert (parsed and (parsed.command.name, parsed.argument)) == expected


def helped(app: ChatApp) -> bool:
    """Whether the help is on top; a function, for a type checker believes that screens stay."""
    return isinstance(app.screen, HelpScreen)


async def test_the_help_of_a_list_has_the_keys_of_the_list(tmp_path: Path) -> None:
    async with running_chat(store=tmp_path / "c.db") as it:
        await it.press("ctrl+o", "f1")
        assert all(words in it.screen for words in ("In this list", "Ctrl+S", "Export", "Delete"))
        assert "Settings" not in it.screen, "a key of the chat"
        await it.press("escape", "escape", "f1")
        assert "Writing" in it.screen


@pytest.mark.long
async def test_the_help_lists_every_key_and_every_command(tmp_path: Path) -> None:
    app = chat(tmp_path)
    async with app.run_test(size=(100, 40)) as pilot:
        sections = help_sections(app)
        rows = {what: key for each in sections.values() for key, what in each}
        listed = "\n".join(f"{key} {what}" for what, key in rows.items())
        for key in keys_of_actions(app).values():
            assert key in listed or key.startswith(("Ctrl+C", "Tab", "Shift+Tab", "Super"))
        for command in COMMANDS:
            assert command.usage in listed
        assert rows["Edit and resend your last message"] == "F6"
        assert rows["Edit the prompt and send it again"] == "e", "as it is typed"
        assert [heading.split(" (")[0] for heading in sections] == [
            "Writing", "Everywhere", "On a message", "Commands",
        ]  # fmt: skip
        await pilot.press("f1")
        assert len(app.screen.query("*")) < 20, "it opens fast"
        for key in ("escape", "f1", "question_mark", "q"):
            assert helped(app), "'?' opens it in an empty box"
            await pilot.press(key)
            assert not helped(app), key
            await pilot.press("question_mark")
