"""The real commands, hurt: killed, stopped, cut off, without room, with damaged files.

A few of the faults that `python -m tests.reliability` does by the hundred; the rest is `slow`.
"""

from __future__ import annotations

import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random

import pytest

from akunu_py.decoding.model.engine import Engine
from akunu_py.errors import DamagedModel
from akunu_py.models.store.model_store import StoredModel
from tests.reliability import __main__ as all_faults
from tests.reliability import (
    faults_caches,
    faults_chat,
    faults_commands,
    faults_files,
    faults_writers,
)
from tests.reliability.faults import Home, Outcome, stop_and_go, why_no_small_disk
from tests.support.slow import slow
from tests.support.terminal import needs_tmux
from tests.support.tiny_model import tiny_directory

LIST = all_faults.LIST


@pytest.fixture
def home(tmp_path: Path, shallow_directory: Path) -> Home:
    return Home(tmp_path / "home", shallow_directory)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("tiny"))


def good(*outcomes: Outcome) -> None:
    broken = {f"{outcome.kind}, {outcome.moment}": outcome.problems for outcome in outcomes}
    assert not any(broken.values()), broken


def test_an_answer_that_is_killed(home: Home) -> None:
    """And the next one is whole."""
    run = all_faults.RUN
    number = Random(1).choice(faults_commands.SIGNALS)
    good(faults_commands.signalled(home, run, number, 1.0))


@pytest.mark.rotating
@pytest.mark.parametrize("seconds", [0.05, 0.3, *slow(0.15, 0.6)])
def test_an_interrupt_is_no_traceback(home: Home, seconds: float) -> None:
    """Not while modules are imported, either."""
    good(
        faults_commands.signalled(home, LIST, signal.SIGINT, seconds, restart=False),
        faults_commands.signalled(home, all_faults.RUN, signal.SIGINT, seconds * 4, restart=False),
    )


def test_only_akunu_itself_changes_what_an_interrupt_does() -> None:
    code = "import signal; before = signal.getsignal(signal.SIGINT); import akunu_py; "
    code += "print(signal.getsignal(signal.SIGINT) is before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout == b"True\n"


@pytest.mark.rotating
@pytest.mark.parametrize("harm", [*faults_files.HARMS])
def test_a_database_that_is_altered(home: Home, harm: str) -> None:
    faults_files.keep_conversations(home)
    random = Random(harm)
    chats = faults_files.CHATS
    good(faults_files.altered(home, home.conversations, harm, random, chats))


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["akunu.json", "model.safetensors", "tokenizer.json"])
def test_a_model_that_is_altered(home: Home, name: str) -> None:
    random = Random(name)
    harm = random.choice([*faults_files.HARMS])
    path = home.models / "starter" / name
    good(faults_files.altered(home, path, harm, random, LIST))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_settings_of_a_model_that_are_no_json(tiny: Path, tmp_path: Path, name: str) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    content = (model / name).read_bytes()
    for altered in (content[:-3], content.replace(b'":', b'"\xff', 1), content.replace(b",", b" ")):
        (model / name).write_bytes(altered)
        with pytest.raises(DamagedModel, match="akunu models rm, akunu models pull"):
            Engine.load(model)


def test_a_tokenizer_that_lacks_a_field(tiny: Path, tmp_path: Path) -> None:
    """The tokenizers library raises a plain Exception, and writes the unknown name to stdout."""
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    path = model / "tokenizer.json"
    path.write_bytes(path.read_bytes().replace(b'"normalized"', b'"xormalized"', 1))
    with pytest.raises(DamagedModel, match="xormalized"):
        Engine.load(model)


def test_a_disk_without_any_room(home: Home) -> None:
    """Not even for temporary files of Python."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    done = home.run(LIST, limit)
    assert (done.code, done.err) == (0, "")
    if Path("/dev/full").exists():  # not on a Mac
        good(faults_files.output_full(home, LIST))


def test_writers_that_are_killed(tmp_path: Path) -> None:
    random = Random(1)
    for number in range(4):
        directory = tmp_path / str(number % 2)
        directory.mkdir(exist_ok=True)
        good(faults_writers.killed_store(directory, random))
        good(faults_writers.killed_memory(directory, random))


def test_writers_of_prompt_caches_that_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    good(faults_caches.killed(tmp_path, Random(1)))


@pytest.mark.skipif(bool(why_no_small_disk()), reason="no small disk can be made here")
def test_a_disk_that_fills_up_while_a_prompt_cache_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    good(faults_caches.full(tmp_path / "disk", Random(1)))


@needs_tmux
def test_a_chat_that_is_stopped_and_goes_on(home: Home, tiny: Path) -> None:
    """It reads its terminal once, and gives it back as it was."""
    with faults_chat.terminals() as make:
        chat = faults_chat.Chat(home, make(), str(tiny)).ready()
        tasks = Path(f"/proc/{chat.process}/task")
        chat.terminal.wait_for("● ready", seconds=60)
        before = len([*tasks.iterdir()]) if tasks.exists() else 0
        for _ in range(3):
            stop_and_go(chat.process, 0.1)
            time.sleep(0.3)
        if before:
            assert len([*tasks.iterdir()]) <= before
        screen = chat.quit()
    assert "code=0" in screen
    assert faults_chat.RAW not in screen


@needs_tmux
def test_a_chat_whose_terminal_is_closed(home: Home) -> None:
    good(faults_chat.hurt(home, "terminal closed", "while answering", Random(1), 1))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("source", ["signals", "chats", "files", "network", "limits", "writers"])
def test_minutes_of(source: str, tmp_path: Path, starter: StoredModel) -> None:
    good(*all_faults.harm(tmp_path, 2, 90, source))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(bool(why_no_small_disk()), reason=why_no_small_disk() or "it can be done")
@pytest.mark.parametrize("source", ["permissions", "disk", "full chats"])
def test_minutes_as_administrator(source: str, starter: StoredModel) -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        Path(directory).chmod(0o755)  # another user must get there
        good(*all_faults.harm(Path(directory), 2, 90, source))
