"""Commands and the key help: one table and the bindings."""

import re
from pathlib import Path

import pytest

from akunu_py.errors import UsageError
from akunu_py.tui.prompt.slash_commands import COMMANDS, keys_of_actions, parse
from akunu_py.tui.screens.help import HelpScreen, help_sections
from tests.support.tui_chat import Chat, chat

pytestmark = pytest.mark.usefixtures("own_directories")


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
        assert (parsed and (parsed[0].name, parsed[1])) == expected


def helped(it: Chat) -> bool:
    """Whether the help is on top; a function, for a type checker believes that screens stay."""
    return isinstance(it.app.screen, HelpScreen)


async def test_the_help_of_a_list_has_the_keys_of_the_list(tmp_path: Path) -> None:
    async with chat(store=tmp_path / "c.db") as it:
        await it.press("ctrl+o", "f1")
        assert all(words in it.screen for words in ("In this list", "Ctrl+S", "Export", "Delete"))
        assert "Settings" not in it.screen, "a key of the chat"
        await it.press("escape", "escape", "f1")
        assert "Writing" in it.screen


@pytest.mark.long
async def test_the_help_lists_every_key_and_every_command() -> None:
    async with chat(size=(100, 40)) as it:
        sections = help_sections(it.app)
        rows = {what: key for each in sections.values() for key, what in each}
        listed = "\n".join(f"{key} {what}" for what, key in rows.items())
        for key in keys_of_actions(it.app).values():
            assert key in listed or key.startswith(("Ctrl+C", "Tab", "Shift+Tab", "Super"))
        for command in COMMANDS:
            assert command.usage in listed
        assert rows["Edit and resend your last message"] == "F6"
        assert rows["Edit the prompt and send it again"] == "e", "as it is typed"
        assert [heading.split(" (")[0] for heading in sections] == [
            "Writing", "Everywhere", "On a message", "Commands",
        ]  # fmt: skip
        await it.press("f1")
        assert len(it.app.screen.query("*")) < 20, "it opens fast"
        for key in ("escape", "f1", "question_mark", "q"):
            assert helped(it), "'?' opens it in an empty box"
            await it.press(key)
            assert not helped(it), key
            await it.press("question_mark")
