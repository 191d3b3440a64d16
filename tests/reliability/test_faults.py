"""Real commands under faults, and several at once.

A few of the faults that `python -m tests.reliability` injects by the hundred; the rest is `slow`.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from akunu_py.models.store.model_store import StoredModel
from tests.reliability import __main__ as all_faults
from tests.reliability import faults
from tests.reliability.faults import Home, Outcome, signalled
from tests.support.command import until
from tests.support.paths import ROOT
from tests.support.slow import slow
from tests.support.terminal import needs_tmux
from tests.support.tiny_model import tiny_directory


@pytest.fixture
def home(tmp_path: Path, tiny_chat_model: Path) -> Home:
    return Home(tmp_path / "home", tiny_chat_model)


def good(*outcomes: Outcome) -> None:
    broken = {f"{outcome.kind}, {outcome.moment}": outcome.problems for outcome in outcomes}
    assert not any(broken.values()), broken


def test_answer_after_a_killed_one_is_whole(home: Home) -> None:
    saving = faults.commands(home)[1]
    good(signalled(home, saving, Random(1).choice(faults.SIGNALS), 1.0))


@pytest.mark.parametrize("seconds", [0.05, *slow(0.3, 0.15, 0.6)])
def test_interrupt_is_no_traceback(home: Home, seconds: float) -> None:
    """Also while modules are imported."""
    good(
        signalled(home, faults.LIST, signal.SIGINT, seconds, restart=False),
        signalled(home, faults.RUN, signal.SIGINT, seconds * 4, restart=False),
    )


def test_only_akunu_itself_changes_what_an_interrupt_does() -> None:
    code = "import signal; before = signal.getsignal(signal.SIGINT); import akunu_py; "
    code += "print(signal.getsignal(signal.SIGINT) is before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout == b"True\n"


@pytest.mark.parametrize(("name", "silent"), [("akunu", True), ("-c", False)])
def test_interrupt_in_the_first_import(name: str, silent: bool) -> None:
    """It ends the process as a signal does, so that a shell's loop around it ends."""
    code = f"""if True:
        import os, sys
        class Interrupt:
            def find_spec(self, name, *_):
                if name != "akunu_py":
                    os.kill(os.getpid(), {signal.SIGINT:d})
        sys.meta_path.insert(0, Interrupt())
        sys.argv[0] = {name!r}
        import akunu_py"""
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, cwd=ROOT)
    assert (done.returncode == -signal.SIGINT and not done.stderr) == silent
    assert (b"KeyboardInterrupt" in done.stderr) != silent


@needs_tmux
def test_stopped_chat_continues(home: Home, tmp_path: Path) -> None:
    """At any moment: it still reads its terminal, and gives it back as it was."""
    draw = Random(1)
    with faults.terminals() as make:
        chat = faults.Chat(home.variables, make(), str(tiny_directory(tmp_path)))
        tasks = Path(f"/proc/{chat.process}/task")
        chat.terminal.wait_for("● ready", seconds=60)
        before = len([*tasks.iterdir()]) if tasks.exists() else 0
        faults.stop_and_go(chat.process, 0.1)
        for _ in range(50):
            os.kill(chat.process, signal.SIGCONT)
            time.sleep(draw.random() / 100)
        until(chat.shows_typed)
        if before:
            assert len([*tasks.iterdir()]) <= before
        screen = chat.quit()
    assert "code=0" in screen
    assert faults.RAW not in screen


@needs_tmux
def test_suspended_chat_continues(tmp_path: Path, shallow_directory: Path) -> None:
    """While it answers, and first in the background, where it may not use the terminal."""
    home = Home(tmp_path / "home", shallow_directory)
    with faults.terminals() as make:
        chat = faults.Chat(home.variables, make(), job="-m")
        chat.terminal.wait_for("● ready", seconds=60)
        chat.send("Tell me about walruses.")
        process = chat.process
        os.kill(process, signal.SIGTSTP)
        chat.terminal.wait_for(r"code=\d+")
        chat.terminal.type("bg", "Enter")
        time.sleep(0.5)
        until(lambda: faults.state_of(process).startswith("T"))
        chat.terminal.type('fg; echo "ended=$?"', "Enter")
        until(chat.shows_typed)
        chat.terminal.type("C-q", shows="ended=0")


@needs_tmux
def test_chat_whose_terminal_is_closed_is_saved(tmp_path: Path, shallow_directory: Path) -> None:
    home = Home(tmp_path / "home", shallow_directory)  # it answers for seconds
    good(faults.hurt(home, "terminal closed", "while answering", Random(1), 1))


@needs_tmux
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("source", all_faults.SOURCES)
def test_minutes_of(source: str, tmp_path: Path, starter: StoredModel) -> None:
    good(*all_faults.strikes(tmp_path, 2, 90, source))
