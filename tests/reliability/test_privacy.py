"""Promises of SECURITY.md: akunu makes no connection unless a command needs one, and only the owner
can read conversations. `test_privacy_sources` checks the sources."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from akunu_py.chats.conversation_store import ConversationStore
from akunu_py.workarounds.private_kernels import keep_kernels_private
from tests.reliability.watched import Home
from tests.support.chats import exchange_of
from tests.support.terminal import Terminal, needs_tmux
from tests.support.terminal import terminal as terminal  # a fixture
from tests.support.tiny_fim import byte_level, write_model
from tests.support.tiny_gguf import write_tiny

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A home with an imported model."""
    home = Home(tmp_path_factory.mktemp("home"))
    write_tiny(home.directory / "tiny.gguf")
    directory = write_model(home.directory / "plain", byte_level(["<|end|>"]), end="<|end|>")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    (home.directory / "trace.json").write_text(
        json.dumps({"tokenizer": "t", "workloads": {"a": [{"prompt": [1, 2], "output": [1, 2]}]}})
    )
    done = home.akunu("models", "import", "tiny.gguf", "--name", "tiny")
    assert done.returncode == 0, done.stderr
    return home


COMMANDS = [
    ["models", "list"],
    ["models", "show", "tiny"],
    ["models", "verify"],
    ["models", "gc"],
    ["models", "import", "plain", "--name", "copy"],
    ["run", "--model", "tiny", "--raw", "--max-tokens", "8", "--prompt-cache",
     "kept.safetensors", "Once"],
    ["run", "--model", "plain", "--max-tokens", "8", "Once"],
    ["complete", "--model", "tiny"],
    ["chats", "list"],
    ["bench", "replay", "trace.json"],
    ["info"],
]  # fmt: skip


def test_commands_make_no_connection(home: Home) -> None:
    """All in one process, which the watches follow."""
    script = f"from akunu_py import cli\nfor words in {COMMANDS}: print(words, cli.main(words))"
    request = json.dumps({"id": 1, "prefix": "def f(", "max_tokens": 4}).encode() + b"\n"
    done = home.run(sys.executable, "-c", script, data=request)
    assert done.returncode == 0, done.stderr
    for words in COMMANDS:
        assert f"{words} 0\n".encode() in done.stdout, (words, done.stderr)
    assert home.attempts == []


@needs_tmux
def test_the_chat_makes_no_connection(terminal: Terminal, home: Home) -> None:
    script = home.directory / "chat.sh"
    own = (f"export {name}='{value}'" for name, value in home.own.items())
    plain = str(home.directory / "plain")
    command = " ".join([*home.command, "chat", "--max-tokens", "8", plain])
    script.write_text("\n".join([*own, "umask 022", "cd /", "clear", command, "echo code=$?"]))
    terminal.type(f"sh {script}", "Enter")
    terminal.wait_for("Ask something", seconds=120)
    terminal.type("Hello", "Enter")
    terminal.wait_for("▌ Hello", seconds=60)
    terminal.wait_for(r"\d tokens/s", seconds=60)
    terminal.type("C-q")
    terminal.wait_for("code=0", seconds=60)
    assert home.attempts == []
    store = ConversationStore.open(home.directory / "data" / "akunu" / "conversations.db")
    kept = [info.title for info in store.list()]
    store.close()
    assert "Hello" in kept


def test_the_watch_sees_the_connection_of_a_pull(tmp_path: Path) -> None:
    home = Home(tmp_path)
    with home.start(sys.executable, "-m", "akunu_py", "models", "pull", "owner/name") as pull:
        while not home.attempts and pull.poll() is None:
            time.sleep(0.05)
        os.killpg(pull.pid, signal.SIGKILL)
    assert home.attempts


def mode(path: Path) -> str:
    return oct(stat.S_IMODE(path.stat().st_mode))


def test_only_the_owner_can_read_conversations_and_caches(home: Home) -> None:
    """Under a mask that permits everyone."""
    done = home.akunu("run", "--model", "tiny", "--raw", "--max-tokens", "4", "--prompt-cache",
                      "modes.safetensors", "Twice")  # fmt: skip
    assert done.returncode == 0, done.stderr
    before = os.umask(0o022)
    try:
        store = ConversationStore.open(home.directory / "data" / "akunu" / "conversations.db")
        store.save_tree(exchange_of("private", "secret", "secret", 1e9))
        found = {
            path.name: mode(path) for path in (home.directory / "data" / "akunu").glob("conv*")
        }
        store.close()
    finally:
        os.umask(before)
    assert {"conversations.db", "conversations.db-wal", "conversations.db.lock"} <= set(found)
    assert set(found.values()) == {"0o600"}
    assert mode(home.directory / "modes.safetensors") == "0o600"
    learned = home.directory / "cache" / "akunu" / "learned"
    directories = [directory for directory in learned.iterdir() if directory.is_dir()]
    assert directories
    assert {mode(directory) for directory in directories} == {"0o700"}
    kept = [
        path for directory in directories for path in directory.iterdir() if path.name != "lock"
    ]
    assert [path for path in kept if path.name.startswith("memory-")]
    assert {mode(path) for path in kept} == {"0o600"}


def test_only_the_owner_can_read_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from akunu_py.settings import save_settings, settings_file

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    before = os.umask(0o022)
    try:
        save_settings({"system_prompt": "secret"})
    finally:
        os.umask(before)
    assert mode(settings_file()) == "0o600"


def test_kernels_are_compiled_in_a_private_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX loads the libraries that it finds below TMPDIR."""

    def where() -> Path:
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.setattr("tempfile.tempdir", None)
        keep_kernels_private()
        return Path(os.environ["TMPDIR"])

    tmp_path.chmod(0o700)
    assert where() == tmp_path
    if sys.platform != "linux":
        return
    tmp_path.chmod(0o1777)
    own = where()
    assert own == tmp_path / f"akunu-{os.getuid()}"
    assert mode(own) == "0o700"
    submit = "import akunu_py.decoding.device, os; print(os.environ['TMPDIR'])"
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", submit], capture_output=True, env=environment)
    assert Path(done.stdout.decode().strip()) == own
    own.rename(tmp_path / "theirs")
    (tmp_path / "theirs").chmod(0o777)
    own.symlink_to(tmp_path / "theirs")
    other = where()
    assert other not in (own, tmp_path / "theirs")
    assert mode(other) == "0o700"


def test_temporary_files_are_removed(home: Home) -> None:
    kept = {path.name for path in (home.directory / "tmp").iterdir()}
    assert {name for name in kept if not name.startswith("tmux")} <= {"mlx"}
