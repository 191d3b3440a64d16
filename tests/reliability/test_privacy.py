"""Promises of SECURITY.md: akunu makes no connection unless a command needs one, and only the owner
can read conversations. `test_privacy_sources` checks the sources.

The programs of the tests are watched: Python's audit events refuse and log each outward connection.
strace, if available, logs the system calls of native code too.
"""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from akunu_py.chats.conversation_store import ConversationStore
from akunu_py.settings import save_settings, settings_file
from akunu_py.workarounds.private_kernels import keep_kernels_private
from tests.support.chats import exchange_of
from tests.support.command import until
from tests.support.paths import ROOT
from tests.support.terminal import Terminal, needs_tmux
from tests.support.terminal import terminal as terminal  # a fixture
from tests.support.tiny_fim import byte_level, write_model
from tests.support.tiny_gguf import write_tiny

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
# Python runs a module of this name before anything else. Audit events cannot be worked around from
# Python code; sockets of the system's own (AF_UNIX: tmux, clipboards) lead nowhere outside.
WATCH = """
import os, sys
def watch(event, arguments):
    outward = event in ("socket.getaddrinfo", "socket.gethostbyname") or (
        event in ("socket.connect", "socket.sendto", "socket.sendmsg", "socket.bind")
        and isinstance(arguments[1], tuple)
    )
    if outward:
        with open(os.environ["AKUNU_WATCH"], "a") as log:
            log.write(f"{event} {arguments[1:]} {sys.argv}\\n")
        raise OSError(101, "the network is refused")
sys.addaudithook(watch)
"""
STRACE = ["strace", "--follow-forks", "--seccomp-bpf", "--output-append-mode",
          "-e", "trace=connect,bind,sendto,sendmsg,sendmmsg"]  # fmt: skip
AKUNU = [sys.executable, "-m", "akunu_py"]


class Home:
    """Directories of a user, whose programs are watched."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._log, self._calls = directory / "attempts", directory / "calls"
        watch = directory / "watch"
        watch.mkdir()
        (watch / "sitecustomize.py").write_text(WATCH)
        (directory / "tmp").mkdir()
        self.variables = {
            "HOME": str(directory), "XDG_DATA_HOME": str(directory / "data"),
            "XDG_CACHE_HOME": str(directory / "cache"),
            "XDG_CONFIG_HOME": str(directory / "config"), "TMPDIR": str(directory / "tmp"),
            "PYTHONPATH": f"{watch}:{ROOT}", "AKUNU_WATCH": str(self._log),
        }  # fmt: skip
        self.watched = [*STRACE, f"--output={self._calls}"] if can_trace() else []

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Start a program in its own process group."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HF_", "TRANSFORMERS_", "XDG_", "PIP_"))
        }
        return subprocess.Popen(
            [*self.watched, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env=inherited | self.variables, cwd=self.directory,
            start_new_session=True,
        )  # fmt: skip

    def run(self, *words: str, data: bytes = b"") -> str:
        """Run a program to its end; return what it prints."""
        with self.start(*words) as process:
            out, err = process.communicate(data, timeout=180)
        assert process.returncode == 0, err
        return out.decode()

    @property
    def attempts(self) -> list[str]:
        """Every attempted outward connection."""
        calls = self._calls.read_text().splitlines() if self._calls.exists() else []
        seen = self._log.read_text().splitlines() if self._log.exists() else []
        return [*seen, *(line for line in calls if "AF_INET" in line)]


@cache
def can_trace() -> bool:
    """Return whether strace is installed and permitted."""
    return bool(shutil.which("strace")) and not subprocess.call([*STRACE, "-o/dev/null", "true"])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A home with an imported model."""
    home = Home(tmp_path_factory.mktemp("home"))
    write_tiny(home.directory / "tiny.gguf")
    end = "<|end|>"
    write_model(home.directory / "plain", byte_level([end]), end=end, template=TEMPLATE)
    (home.directory / "trace.json").write_text(
        json.dumps({"tokenizer": "t", "workloads": {"a": [{"prompt": [1, 2], "output": [1, 2]}]}})
    )
    home.run(*AKUNU, "models", "import", "tiny.gguf", "--name", "tiny")
    return home


COMMANDS = [
    ["models", "list"], ["models", "show", "tiny"], ["models", "verify"], ["models", "gc"],
    ["models", "import", "plain", "--name", "copy"],
    ["run", "--model", "tiny", "--raw", "--max-tokens", "8", "--prompt-cache",
     "kept.safetensors", "Once"],
    ["run", "--model", "plain", "--max-tokens", "8", "Once"],
    ["complete", "--model", "tiny"], ["chats", "list"], ["bench", "replay", "trace.json"], ["info"],
]  # fmt: skip


def test_commands_make_no_connection(home: Home) -> None:
    """All in one process, which the watches follow."""
    script = f"from akunu_py import cli\nfor words in {COMMANDS}: print(words, cli.main(words))"
    request = json.dumps({"id": 1, "prefix": "def f(", "max_tokens": 4}).encode() + b"\n"
    printed = home.run(sys.executable, "-c", script, data=request)
    assert [words for words in COMMANDS if f"{words} 0\n" not in printed] == []
    assert home.attempts == []


@needs_tmux
def test_the_chat_makes_no_connection(terminal: Terminal, home: Home) -> None:
    script = home.directory / "chat.sh"
    exports = (f"export {name}='{value}'" for name, value in home.variables.items())
    plain = str(home.directory / "plain")
    command = " ".join([*home.watched, *AKUNU, "chat", "--max-tokens", "8", plain])
    script.write_text("\n".join([*exports, "cd /", "clear", command, "echo code=$?"]))
    terminal.type(f"sh {script}", "Enter", shows="Ask something", seconds=120)
    terminal.type("Hello", "Enter", shows="▌ Hello")
    terminal.wait_for(r"\d tokens/s", seconds=60)
    terminal.type("C-q", shows="code=0")
    assert home.attempts == []


def test_the_watch_sees_the_connection_of_a_pull(tmp_path: Path) -> None:
    home = Home(tmp_path)
    with home.start(*AKUNU, "models", "pull", "owner/name") as pull:
        until(lambda: home.attempts or pull.poll() is not None)
        os.killpg(pull.pid, signal.SIGKILL)
    assert home.attempts


def mode(path: Path) -> str:
    return oct(stat.S_IMODE(path.stat().st_mode))


def test_only_the_owner_can_read_conversations_and_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a mask that permits everyone."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    before = os.umask(0)
    try:
        save_settings({"system_prompt": "secret"})
        store = ConversationStore.open(tmp_path / "chats" / "conversations.db")
        store.save_tree(exchange_of("private", "secret", "secret", 1e9))
        files = [settings_file(), *(tmp_path / "chats").iterdir()]
        modes = {mode(path) for path in files}
        assert mode(tmp_path / "chats") == "0o700"
        store.close()
    finally:
        os.umask(before)
    assert len(files) == 5  # -wal, -shm and .lock
    assert modes == {"0o600"}


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
    code = """if True:
        import os, sys
        from unittest import mock
        sys.modules |= dict.fromkeys(("mlx_lm", "mlx_lm.utils"), mock.Mock())  # slow to import
        import akunu_py.engine.model.device
        print(os.environ["TMPDIR"])"""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
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
