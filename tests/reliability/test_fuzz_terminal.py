"""Nothing that a file, a model or a name holds is obeyed by the terminal: it is shown."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import strategies as st

from akunu_py.chats.conversation_store import ConversationStore
from akunu_py.chats.json import as_json
from akunu_py.cli import main
from akunu_py.models.manifest import FileRecord, Manifest, write_manifest
from akunu_py.settings import settings_file
from akunu_py.text import displayable, for_output, on_one_line, typeable
from akunu_py.tui.workers.chat_client import AnswerFailed, AnswerFinished, ModelLoaded
from tests.reliability.fuzz import TEXTS, explore, lengths
from tests.support.chats import exchange_of
from tests.support.tui_chat import GAUGES, STATS, Chat, chat

CLEAR = "\x1b[2J"
CLIPBOARD = "\x1b]52;c;ZXZpbA==\x07"
EVIL = f"a{CLEAR}b{CLIPBOARD}c\x9b31md\x7f\x08\r\u202e\u2066\udc80"


def is_safe(text: str) -> bool:
    """Whether a terminal only writes it down, and in the order in which it is."""
    return not any(
        (ord(letter) < 0x20 and letter not in "\n\t") or 0x7F <= ord(letter) < 0xA0
        or 0xD800 <= ord(letter) < 0xE000 or letter in "\u202a\u202b\u202c\u202d\u202e"
        or letter in "\u2066\u2067\u2068\u2069" for letter in text
    )  # fmt: skip


@lengths(150)
def test_what_is_displayed(examples: int) -> None:
    def check(text: str) -> None:
        assert is_safe(displayable(text))
        assert is_safe(typeable(text))
        assert len(displayable(text)) == len(on_one_line(text)) == len(text)
        assert displayable(displayable(text)) == displayable(text)
        assert len(on_one_line(text).splitlines()) <= 1
        assert "\t" not in on_one_line(text)

    explore(check, examples, TEXTS | st.text(st.characters(max_codepoint=0xA5), max_size=30))


def test_a_terminal_is_shown_what_a_pipe_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert for_output(CLEAR) == CLEAR
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert for_output(CLEAR) == "␛[2J"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    return tmp_path / "akunu"


def hostile_home(home: Path) -> None:
    """A store, settings and conversations in which every text is EVIL."""
    model = home / "models" / "good-name"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    evil = EVIL.encode("utf-8", "replace").decode()
    manifest = Manifest(
        name="x",
        source=evil,
        created=evil,
        context_length=10,
        parameters=10,
        quantization=evil,
        license=evil,
        files={"config.json": FileRecord(2, "0" * 64)},
    )
    write_manifest(model, manifest)
    (home / "models" / f"bad{CLEAR}\udc80").mkdir()
    (home / "conversations.db").unlink(missing_ok=True)
    store = ConversationStore.open(home / "conversations.db")
    store.save_tree(exchange_of("evil", evil, evil, 1e9))
    store.close()


COMMANDS = [
    ["models", "list"],
    ["models", "show", "good-name"],
    ["models", "show", "--verify", "good-name"],
    ["models", "show", EVIL],
    ["models", "verify"],
    ["models", "rm", "--yes", EVIL],
    ["models", "gc", "--dry-run"],
    ["models", "forget", EVIL],
    ["models", "import", f"/nowhere/{EVIL}"],
    ["models", "pull", EVIL],
    ["models", "recommend", "--memory", EVIL],
    ["chats", "list"],
    ["chats", "search", "a"],
    ["chats", "export", "evil"],
    ["chats", "export", EVIL],
    ["chats", "import", f"/nowhere/{EVIL}"],
    ["chats", "rm", "--yes", "evil"],
    ["run", "--model", f"/nowhere/{EVIL}", "hi"],
    ["run", "--model", EVIL, "hi"],
    ["bench", "replay", f"/nowhere/{EVIL}"],
    ["info"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[:2]))
def test_commands_that_meet_hostile_names(
    command: list[str], home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hostile_home(home)
    code = main(command)
    out, err = capfd.readouterr()
    assert code in (0, 1, 2)
    assert is_safe(out)
    assert is_safe(err)
    assert out or err


def test_settings_with_control_codes(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    home.mkdir()
    settings_file().write_text('model = "x\\u001b[2J"\n"\\u001b[2J" = 1\n')
    for command in (["info"], ["run", "hi"]):
        main(command)
        out, err = capfd.readouterr()
        assert is_safe(out + err)
        assert "\\x1b[2J" in out + err


def test_an_imported_title(home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    content = json.loads(as_json([exchange_of("evil", EVIL, EVIL, 1e9)]))
    content["conversations"][0]["title"] = EVIL
    path = tmp_path / "chats.json"
    path.write_text(json.dumps(content))
    assert main(["chats", "import", str(path)]) == 0
    assert main(["chats", "list"]) == 0
    out, err = capfd.readouterr()
    assert "␛[2J" in out
    assert is_safe(out + err)


def on_screen(chat: Chat) -> str:
    """Every character that the terminal is told to write, of all layers."""
    strips = chat.app.screen._compositor.render_strips()
    return "\n".join(strip.text for strip in strips)


async def test_the_chat_shows_and_does_not_obey() -> None:
    """Names, reasons and errors come from model directories; answers from the model."""
    evil = EVIL.replace("\udc80", "")
    async with chat(loaded=False, size=(100, 40)) as here:
        await here.post(ModelLoaded(evil, 8192, evil, evil, GAUGES))
        assert is_safe(on_screen(here))
        await here.send(f"Hello {evil}")
        await here.piece(evil)
        await here.post(AnswerFinished(1, "stop", STATS))
        assert is_safe(on_screen(here))
        await here.send("More")
        await here.post(AnswerFailed(2, evil))
        screen = on_screen(here)
        assert is_safe(screen)
        assert "␛[2J" in screen
        here.app.notify(evil, title=evil)
        here.app.view.prompt.write(evil)
        await here.pilot.pause(0.2)
        assert is_safe(on_screen(here))
        here.app.view.prompt.extend_history([evil])
        await here.pilot.press("ctrl+r")
        await here.pilot.pause(0.2)
        assert is_safe(on_screen(here))
