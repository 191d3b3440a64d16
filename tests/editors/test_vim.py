"""The Vim plugin: real Vim in a real terminal, with the starter and with helpers that fail."""

import json
import re
import shutil
import subprocess
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from akunu_py.models.store.model_store import StoredModel
from tests.support.command import AKUNU, until
from tests.support.editor_helper import write_helper
from tests.support.paths import EDITORS
from tests.support.terminal import Terminal, needs_tmux
from tests.support.terminal import terminal as terminal  # a fixture

PLUGIN = EDITORS / "vim"
CODE = "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n"
GHOST = "return a - b"  # what the starter proposes there

pytestmark = [
    needs_tmux,
    pytest.mark.skipif(not shutil.which("vim"), reason="vim is not installed"),
]


@cache
def snippet() -> str:
    """What is printed to be pasted."""
    command = [*AKUNU, "complete", "--print-config", "vim", "--model", "starter"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class Vim:
    """Vim with the plugin, on a file that can be read back."""

    def __init__(self, terminal: Terminal, directory: Path, text: str, settings: str = "") -> None:
        """settings: lines of the vimrc; they come after the snippet that is printed."""
        self.terminal, self.type = terminal, partial(terminal.type, seconds=150)
        self.path = directory / "a.py"
        self.path.write_text(text)
        options = "set nocompatible noswapfile viminfo= ttimeout ttimeoutlen=50\n"
        options += "let g:akunu_time_ms = 200000\n"  # on a busy machine too
        (directory / "vimrc").write_text(options + snippet() + settings)
        terminal.type(f"vim -Nu {directory}/vimrc {self.path}; echo code=$?", "Enter")
        terminal.wait_for(re.escape(text.splitlines()[0]))

    def wait_for(self, pattern: str) -> str:
        return self.terminal.wait_for(pattern, seconds=150)

    def written(self) -> str:
        """The buffer, after leaving insert mode and Vim."""
        self.terminal.write_and_quit()
        return self.path.read_text()


def test_typing_into_the_ghost_and_accepting_it_in_parts(
    terminal: Terminal, tmp_path: Path, starter: StoredModel
) -> None:
    vim = Vim(terminal, tmp_path, CODE)
    vim.type("G", "o", shows=GHOST)
    vim.type("    re", "C-f", shows=GHOST)  # the rest of the word; its rest is a ghost still
    vim.type("C-f", "x", shows="return ax")  # " a", and then something else
    vim.type("BSpace", shows=GHOST)
    vim.type("C-l")
    assert vim.written() == CODE + f"    {GHOST}\n"


REPLY = "say(text=text, finish_reason='stop', stats={})"
# A helper that completes on the spot, so that the keys can be tried one by one.
HELPER = f"""
if "prefix" not in request or request.get("max_tokens") == 0:
    continue
if "die" in request["prefix"]:
    os.kill(os.getpid(), 9)
text = "" if request["prefix"].split("\\n")[-1].strip() else "one two(\\n\\tthree\\n\\n)"
{REPLY}
"""


def helper(directory: Path, code: str = HELPER) -> str:
    """The vimrc line that makes `code` the helper."""
    return f"let g:akunu_command = {write_helper(directory, code)}\n"


def test_a_ghost_of_several_lines(terminal: Terminal, tmp_path: Path) -> None:
    vim = Vim(terminal, tmp_path, "first\nlast\n", helper(tmp_path))
    vim.type("o")
    shown = r"first *\none two\( *\n {8}three *\n *\n\) *\nlast *\n"
    vim.wait_for(shown)
    vim.type("o", shows=shown)  # typed through
    vim.type("C-f", "C-f", shows=shown)
    vim.type("Escape", shows=r"first *\none two *\nlast *\n")
    vim.type("u", shows=r"first *\no *\nlast *\n~")  # and undo shows no ghost again
    vim.type("u", shows=r"first *\nlast *\n~")
    vim.type("o", "Escape", shows=r"first *\n *\nlast *\n~")
    vim.type("i", shows=shown)  # on the empty line: nothing changes, nothing moves
    vim.type("C-l", "C-l", "C-l", shows=shown)
    assert vim.written() == "first\none two(\n\tthree\n\nlast\n"


# All that changes what is typed, and an abbreviation that the ghost would trigger.
OPTIONS = (
    "set autoindent smartindent cindent textwidth=9 formatoptions=tcro comments=b:two\n"
    "inoreabbrev teh the\ninoreabbrev three 3\ninoremap t T\n"
)


def test_an_accepted_block_is_as_shown_and_is_repeated(terminal: Terminal, tmp_path: Path) -> None:
    settings = helper(tmp_path) + OPTIONS
    vim = Vim(terminal, tmp_path, "first\n  last\n", settings)
    vim.type("G", "o", shows="one two")
    vim.type("Tab", ".", "Escape", shows=r"\n {0,2}one two\( *\n {8}three *\n *\n\)\.")
    vim.type(":set ai? si? cin? tw? fo?", "Enter")
    vim.wait_for(r"(?s)\bautoindent.*\bsmartindent.*\bcindent.*textwidth=9.*formatoptions=tcro")
    vim.type("Enter", "u", "u", shows=r"first *\n  last *\n~")
    vim.type(":set noai nosi nocin tw=0 fo=", "Enter", "C-r", "C-r", "G", ".")
    block = "one two(\n\tthree\n\n)."
    assert vim.written() == f"first\n  last\n  {block}\n{block}\n"


def test_without_a_ghost_keys_do_what_they_did(terminal: Terminal, tmp_path: Path) -> None:
    settings = helper(tmp_path) + "inoremap <expr> <C-F> '[' .. line('.') .. ']'\n"
    vim = Vim(terminal, tmp_path, "first\n", settings)
    vim.type("o", shows="one two")
    vim.type("C-]", shows=r"first *\n *\n~")
    vim.type("Tab", "C-l", "C-f", shows=r"\[2\]")
    vim.type("Enter", shows="one two")
    vim.type("z", "Tab", "C-f")  # in one burst, faster than the ghost can be hidden
    assert vim.written() == "first\n\t[2]\nz\t[3]\n"


@pytest.mark.parametrize(("settings", "message"), [
    ("let g:akunu_command = ['no-such-program']\n", "akunu: no-such-program: no such program"),
    ("let g:akunu_command += ['--model', 'nonesuch']\n", "no model called .nonesuch"),
])  # fmt: skip
def test_a_helper_that_is_missing_or_fails_is_reported_once(
    terminal: Terminal, tmp_path: Path, settings: str, message: str
) -> None:
    vim = Vim(terminal, tmp_path, "first\n", settings + STATUS)
    vim.type("o", "a")
    vim.wait_for(r"^first *\na *\n(?:~ *\n)+.*(?:failed: |akunu models list)")  # no popup
    vim.type("Enter", "b", "Tab", "Escape")
    vim.type(":redir! > ", str(tmp_path / "messages"), " | messages | redir END", "Enter")
    vim.type("Enter")
    assert vim.written() == "first\na\nb\t\n"
    shown = (tmp_path / "messages").read_text().replace("\n", " ")
    assert len(re.findall(message, shown)) == 1
    assert len(re.findall("akunu:", shown)) == 1


@pytest.mark.parametrize("part", ["one", ""])
def test_another_letter_cancels_the_request_of_an_unfinished_ghost(
    terminal: Terminal, tmp_path: Path, part: str
) -> None:
    endless = HELPER.replace(REPLY, f"say(delta={part!r})")
    vim = Vim(
        terminal, tmp_path, "first\n", helper(tmp_path, endless) + "let g:akunu_delay = 9999\n"
    )
    vim.type(":inoremap <C-J> <Plug>(akunu-ask)", "Enter", "o", "C-j")
    vim.wait_for(rf"first *\n{part} *\n")
    log = tmp_path / "log"
    until(lambda: log.exists() and log.read_text().count("stream") == 1)
    vim.type("x")
    until(lambda: '"cancel"' in log.read_text())


def test_a_binary_buffer_has_no_ghost(terminal: Terminal, tmp_path: Path) -> None:
    vim = Vim(terminal, tmp_path, "first\n", helper(tmp_path) + STATUS + "set binary\n")
    vim.type("o", shows=r"off\.")
    assert vim.written() == "first\n\n"
    assert not (tmp_path / "log").exists()


def test_a_helper_that_was_killed_comes_back_by_itself(terminal: Terminal, tmp_path: Path) -> None:
    vim = Vim(terminal, tmp_path, "first\n", helper(tmp_path) + STATUS)
    vim.type("o", "die", shows="failed: the helper ended with -1")
    vim.type("C-w", "Escape")
    vim.type(":call timer_start(2500, {-> feedkeys('i')})", "Enter", shows=r"one two\(")


STATUS = "set laststatus=2 statusline=%{akunu#Status()}.\n"
# Says that it loads, then half of the completion, then all of it, each when a file is there.
SLOW_HELPER = """
if "accepted" in request:
    with (directory / "accepted").open("a") as file:
        file.write(f"{request['accepted'] - number}|")
if "prefix" not in request or request.get("max_tokens") == 0:
    continue
number = request["id"]
if request.get("alternatives") == 2:
    say(text="one two", alternatives=["another"])
    continue
say(status="loading")
end = {"text": "one two", "finish_reason": "stop"}
for name, reply in ("loaded", {"delta": "one"}), ("whole", end):
    while not (directory / name).exists():
        time.sleep(0.01)
    say(**reply)
"""


def test_a_ghost_grows_and_loading_is_shown(terminal: Terminal, tmp_path: Path) -> None:
    settings = helper(tmp_path, SLOW_HELPER) + STATUS
    settings += "let g:akunu_keys = {'another': '<C-J>'}\n"
    vim = Vim(terminal, tmp_path, "first\n", settings)
    vim.type("o", shows="the model is being loaded")
    vim.wait_for(r"loading\.")
    (tmp_path / "loaded").touch()
    assert "being loaded" not in vim.wait_for(r"first *\none *\n")
    (tmp_path / "whole").touch()
    vim.wait_for(r"first *\none two *\n")
    vim.type("C-f", shows=r"first *\none two *\n")
    vim.type("C-f", shows=r"first *\none twoone two *\n")
    for shown in (r"another \(2 of 2\)", r"one two \(1 of 2\)", r"another \(2 of 2\)"):
        vim.type("C-j", shows=rf"first *\none two{shown} *\n")
    vim.type("C-f")
    until(lambda: (tmp_path / "accepted").read_text() == "0|0|0|")  # the helper ends with Vim
    assert vim.written() == "first\none twoanother\n"


def test_ghosts_by_key(terminal: Terminal, tmp_path: Path) -> None:
    """No request before the key or after an acceptance; no ghost with a popup menu."""
    settings = helper(tmp_path) + "let g:akunu_trigger = 'key'\n"
    vim = Vim(terminal, tmp_path, "first\nfirth\n", settings)
    vim.type("o")
    time.sleep(0.3)  # longer than the delay
    vim.type("C-Space", shows=r"first *\none two\( *\n")
    # A menu whose entry begins as the ghost does.
    vim.type("C-r", "=complete(1, ['one', 'two']) ? '' : ''", "Enter")
    vim.wait_for(r"first *\none *\n *one")
    vim.type("C-e", shows=r"first *\n *\nfirth")
    vim.type("fir", "C-n", shows=r"first *\nfirth *\nfirth *\n *first")
    vim.type("C-Space", "C-e", "C-w", "C-Space", shows=r"first *\none two\( *\n")
    vim.type("C-l", "C-l", "C-l", "C-l", "x")
    assert vim.written() == "first\none two(\n\tthree\n\n)x\nfirth\n"
    assert len([each for each in requests(tmp_path, 2) if "max_tokens" not in each]) == 2


def requests(directory: Path, count: int) -> list[dict[str, Any]]:
    """The requests so far, as soon as there are `count`."""
    log, found = directory / "log", list[dict[str, Any]]()

    def read() -> bool:
        lines = log.read_text().splitlines() if log.exists() else []
        found[:] = [line for line in map(json.loads, lines) if "prefix" in line]
        return len(found) >= count

    until(read)
    return found


def test_a_resting_cursor_prefills_only_after_a_change(terminal: Terminal, tmp_path: Path) -> None:
    settings = helper(tmp_path) + "let g:akunu_rest = 50\n"
    settings += "let g:akunu_filetypes = {'text': v:false}\nset ft=python\n"
    vim = Vim(terminal, tmp_path, "first\nlast\n", settings)
    for keys in ("j", "k", "l"):  # the cursor rests each time
        vim.type(keys)
        time.sleep(0.2)
        until((tmp_path / "log").exists)  # the helper has started, as it does at the first rest
    vim.type("x")
    (read,) = requests(tmp_path, 1)
    assert (read["prefix"], read["max_tokens"]) == ("f", 0)
    vim.type("j")
    time.sleep(0.2)
    vim.type("A")  # entering insert mode, and then the request
    found = requests(tmp_path, 3)[1:]
    assert [(each["prefix"], each.get("max_tokens")) for each in found] == [
        ("frst\nlast", 0),
        ("frst\nlast", None),
    ]
    vim.type("Escape", ":set ft=text", "Enter", "o", ":", "Escape", ":echo akunu#Status()", "Enter")
    vim.wait_for(r"\noff")
    vim.type(":set ft=gitcommit", "Enter", ":echo akunu#Status()", "Enter", shows=r"\noff")


def test_requests_have_files_recent_texts_and_the_root(terminal: Terminal, tmp_path: Path) -> None:
    """With 'nohidden', buffers are unloaded; large ones are sent in part."""
    project = tmp_path / "project"
    (project / ".git").mkdir(parents=True)
    (project / "never.py").write_text("never = 1\n")
    (project / "large.py").write_text("".join(f"large_{n} = {n}\n" for n in range(20_000)))
    settings = helper(tmp_path) + "set nohidden noswapfile laststatus=2\n"
    vim = Vim(terminal, tmp_path, "first\nlast\n", settings)
    vim.type(f":args {project}/large.py {project}/never.py {project}/own.py", "Enter")
    vim.wait_for("large_0")
    vim.type(":10000", "Enter", "yy", f":e {project}/own.py", "Enter", shows="own.py")
    vim.type("i", "saved()", "Escape", ":w", "Enter", "o")
    requested = next(each for each in reversed(requests(tmp_path, 3)) if "max_tokens" not in each)
    files = {Path(file["path"]).name: file["text"] for file in requested["files"]}
    assert set(files) == {"a.py", "never.py", "large.py"}
    assert files["a.py"] == "first\nlast"
    assert files["never.py"] == "never = 1"
    assert "large_9999 = 9999\n" in files["large.py"]
    assert len(files["large.py"]) <= 100_000
    assert requested["root"] == str(project)
    assert requested["recent"] == ["saved()", "large_9999 = 9999"]


def test_the_help_tags_are_those_of_the_help(tmp_path: Path) -> None:
    shutil.copytree(PLUGIN / "doc", tmp_path / "doc")
    subprocess.run(["vim", "-Nu", "NONE", "-es", "-c", f"helptags {tmp_path}/doc", "-c", "q"])
    assert (tmp_path / "doc" / "tags").read_text() == (PLUGIN / "doc" / "tags").read_text()
