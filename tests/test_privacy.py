"""What SECURITY.md promises: nothing leaves the machine unasked, what was said is for its owner's
eyes only, and no file can make the program run code of its own."""

from __future__ import annotations

import ast
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from akunu_py.tui.archive import Archive
from tests.chats import exchange_of
from tests.reliability.dependencies import FILE, PERMISSIVE, declared, facts
from tests.terminal import Terminal, needs_tmux
from tests.terminal import terminal as terminal  # a fixture
from tests.tiny_fim import byte_level, write_model
from tests.tiny_gguf import write_tiny

ROOT = Path(__file__).parents[1]
AKUNU = [sys.executable, "-m", "akunu_py"]
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


class Home:
    """Folders of a person, and the environment of programs that are watched."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "attempts"
        watch = folder / "watch"
        watch.mkdir()
        (watch / "sitecustomize.py").write_text(WATCH)
        (folder / "tmp").mkdir()
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HF_", "TRANSFORMERS_", "XDG_", "PIP_"))
        } | {
            "HOME": str(folder),
            "XDG_DATA_HOME": str(folder / "data"),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "TMPDIR": str(folder / "tmp"),
            "PYTHONPATH": f"{watch}:{ROOT}",
            "AKUNU_WATCH": str(self.log),
        }

    def akunu(self, *words: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*AKUNU, *words],
            input=data,
            capture_output=True,
            env=self.environment,
            cwd=self.folder,
            timeout=180,
            umask=0o022,
        )

    @property
    def attempts(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Where somebody imported a model, was answered by it, and kept the session."""
    home = Home(tmp_path_factory.mktemp("home"))
    write_tiny(home.folder / "tiny.gguf")
    folder = write_model(home.folder / "plain", byte_level(["<|end|>"]), end="<|end|>")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (home.folder / "trace.json").write_text(
        json.dumps({"tokenizer": "t", "workloads": {"a": [{"prompt": [1, 2], "output": [1, 2]}]}})
    )
    done = home.akunu("models", "import", "tiny.gguf", "--name", "tiny")
    assert done.returncode == 0, done.stderr
    return home


ASKED = json.dumps({"id": 1, "prefix": "def f(", "max_tokens": 4}).encode() + b"\n"
COMMANDS: list[tuple[list[str], bytes]] = [
    (["models", "list"], b""),
    (["models", "show", "tiny"], b""),
    (["models", "verify"], b""),
    (["models", "gc"], b""),
    (["models", "import", "plain", "--name", "copy"], b""),
    (["run", "--model", "tiny", "--raw", "--max-tokens", "8", "--prompt-cache",
      "kept.safetensors", "Once"], b""),
    (["run", "--model", "plain", "--max-tokens", "8", "Once"], b""),
    (["complete", "--model", "tiny"], ASKED),
    (["chats", "list"], b""),
    (["bench", "replay", "trace.json"], b""),
    (["info"], b""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "data"), COMMANDS, ids=[" ".join(words[:3]) for words, _ in COMMANDS]
)
def test_nothing_leaves_the_machine(words: list[str], data: bytes, home: Home) -> None:
    done = home.akunu(*words, data=data)
    assert done.returncode == 0, done.stderr
    assert home.attempts == []


@needs_tmux
def test_a_chat_leaves_the_machine_alone(terminal: Terminal, home: Home) -> None:
    variables = " ".join(
        f"{name}='{home.environment[name]}'"
        for name in ("HOME", "PYTHONPATH", "AKUNU_WATCH", "TMPDIR")
    )
    folders = " ".join(
        f"{name}='{home.environment[name]}'"
        for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
    )
    terminal.type("umask 022; cd /", "Enter")
    terminal.type(f"clear; {variables} {folders} {' '.join(AKUNU)} chat", "Space")
    terminal.type(f"{home.folder / 'plain'}; echo code=$?", "Enter")
    terminal.wait_for("Ask something", seconds=120)
    terminal.type("Hello", "Enter")
    terminal.wait_for(r"(ready|tok/s|cut off|length)", seconds=120)
    terminal.type("C-q")
    terminal.wait_for("code=0", seconds=60)
    assert home.attempts == []
    archive = Archive.open(home.folder / "data" / "akunu" / "conversations.db")
    kept = [info.title for info in archive.list()]
    archive.close()
    assert "Hello" in kept


def test_a_pull_is_what_asks_the_network(tmp_path: Path) -> None:
    """The watch sees what it is there to see, and a refused network is one clear line."""
    home = Home(tmp_path)
    done = home.akunu("models", "pull", "owner/name")
    assert done.returncode == 1
    assert home.attempts
    assert done.stderr.decode().strip().splitlines()[-1].startswith("akunu: ")
    assert "Traceback" not in done.stderr.decode()


def mode(path: Path) -> str:
    return oct(stat.S_IMODE(path.stat().st_mode))


def test_what_was_said_is_for_its_owner_alone(home: Home) -> None:
    """With a mask that lets everybody read."""
    done = home.akunu("run", "--model", "tiny", "--raw", "--max-tokens", "4", "--prompt-cache",
                      "modes.safetensors", "Twice")  # fmt: skip
    assert done.returncode == 0, done.stderr
    before = os.umask(0o022)
    try:
        archive = Archive.open(home.folder / "data" / "akunu" / "conversations.db")
        archive.save_tree(exchange_of("private", "secret", "secret", 1e9))
        found = {path.name: mode(path) for path in (home.folder / "data" / "akunu").glob("conv*")}
        archive.close()
    finally:
        os.umask(before)
    assert {"conversations.db", "conversations.db-wal", "conversations.db.lock"} <= set(found)
    assert set(found.values()) == {"0o600"}
    assert mode(home.folder / "modes.safetensors") == "0o600"
    learned = home.folder / "cache" / "akunu" / "learned"
    folders = [folder for folder in learned.iterdir() if folder.is_dir()]
    assert folders
    assert {mode(folder) for folder in folders} == {"0o700"}
    kept = [path for folder in folders for path in folder.iterdir() if path.name != "lock"]
    assert [path for path in kept if path.name.startswith("memory-")]
    assert {mode(path) for path in kept} == {"0o600"}


def test_settings_are_for_their_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from akunu_py.settings import save_settings, settings_file

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    before = os.umask(0o022)
    try:
        save_settings({"system_prompt": "secret"})
    finally:
        os.umask(before)
    assert mode(settings_file()) == "0o600"


def test_kernels_are_compiled_in_a_folder_of_ones_own(tmp_path: Path) -> None:
    """MLX loads the libraries that it finds below TMPDIR, so they must be nobody else's."""
    ask = "import akunu_py.backend, os; print(os.environ.get('TMPDIR'))"

    def where(base: Path) -> Path:
        environment = os.environ | {"TMPDIR": str(base)}
        command = [sys.executable, "-c", ask]
        done = subprocess.run(command, capture_output=True, env=environment, cwd=ROOT, check=True)
        return Path(done.stdout.decode().strip())

    tmp_path.chmod(0o700)
    assert where(tmp_path) == tmp_path
    if sys.platform != "linux":
        return
    tmp_path.chmod(0o1777)
    own = where(tmp_path)
    assert own == tmp_path / f"akunu-{os.getuid()}"
    assert mode(own) == "0o700"
    own.rename(tmp_path / "theirs")
    (tmp_path / "theirs").chmod(0o777)
    own.symlink_to(tmp_path / "theirs")
    other = where(tmp_path)
    assert other not in (own, tmp_path / "theirs")
    assert mode(other) == "0o700"


def test_nothing_else_is_left_in_the_folder_for_temporary_files(home: Home) -> None:
    kept = {path.name for path in (home.folder / "tmp").iterdir()}
    assert {name for name in kept if not name.startswith("tmux")} <= {"mlx"}


# What no source of ours may do.

SOURCES = sorted(
    path
    for folder in ("akunu_py", "ngram", "tui", "models", "bench")
    for path in (ROOT / folder).rglob("*.py")
    if not any(parent.is_symlink() for parent in path.parents)
)
RUNS_CODE = {"pickle", "cPickle", "marshal", "shelve", "dill", "joblib", "cloudpickle", "code"}
CALLS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "os.execv", "os.execvp",
    "os.spawnv", "np.load", "numpy.load", "torch.load", "yaml.load", "tempfile.mktemp",
    "subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell",
}  # fmt: skip


def test_every_source_is_looked_at() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in SOURCES}
    assert {"akunu_py/engine.py", "tui/app.py", "models/store.py", "ngram/memory.py"} <= names


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_pickle_no_shell_no_code_from_files(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            roots = {name.name.partition(".")[0] for name in node.names}
            assert not roots & RUNS_CODE, where
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").partition(".")[0] not in RUNS_CODE, where
        elif isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in CALLS, where
            for keyword in node.keywords:
                value = ast.unparse(keyword.value)
                assert (keyword.arg, value) != ("trust_remote_code", "True"), where
                assert (keyword.arg, value) != ("allow_pickle", "True"), where
                assert keyword.arg != "shell" or value == "False", where


# Dependencies


def listed() -> dict[str, tuple[str, str]]:
    """The page's first table: where each is installed, and its licence."""
    page = (ROOT / FILE).read_text("utf-8").partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return {name: (where, licence) for name, where, licence, _ in rows[1:]}


def test_the_list_of_dependencies_is_that_of_the_project() -> None:
    """`python -m tests.reliability.dependencies` writes it anew."""
    assert {name: where for name, (where, _) in listed().items()} == declared()
    assert all(facts(name).purpose for name in declared())


@pytest.mark.parametrize("name", sorted(declared()))
def test_licences_are_permissive(name: str) -> None:
    found = facts(name).licence
    for licence in (listed()[name][1], found if found != "?" else "mit"):  # "?": not on this system
        assert any(word in licence.lower() for word in PERMISSIVE), (name, licence)


def test_security_names_what_is_tested_here() -> None:
    text = (ROOT / "SECURITY.md").read_text("utf-8")
    for word in ("conversations.db", "settings.toml", "learned", "0600", "dependencies.md"):
        assert word in text
