"""Neovim's own inline completion, configured by the snippet that is printed, on the starter."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from functools import cache
from pathlib import Path

import pytest

from akunu_py.completion.acceptance import read_counts
from akunu_py.models.store.model_store import StoredModel
from tests.support.command import AKUNU, until
from tests.support.lsp_servers import GHOST as SERVER
from tests.support.paths import EDITORS
from tests.support.terminal import Terminal, needs_tmux
from tests.support.terminal import terminal as terminal  # a fixture

PRINT_CONFIG = [*AKUNU, "complete", "--print-config", "neovim", "--model", "starter"]
PRINT_CONFIG += ["--time-ms", "200000"]  # on a busy machine too
CODE = "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n"
GHOST = "return a - b"  # what the starter proposes there


def has_inline_completion() -> bool:
    if not shutil.which("nvim"):
        return False
    command = [
        "nvim",
        "--clean",
        "--headless",
        "+lua print(vim.lsp.inline_completion ~= nil)",
        "+q",
    ]
    return "true" in subprocess.run(command, capture_output=True, text=True).stderr


pytestmark = [
    needs_tmux,
    pytest.mark.skipif(not has_inline_completion(), reason="Neovim 0.12 is not installed"),
]


@cache
def printed_config() -> str:
    return subprocess.run(PRINT_CONFIG, capture_output=True, text=True, check=True).stdout


def start(terminal: Terminal, directory: Path) -> Path:
    """Neovim on a file; returns its path as soon as the server has started."""
    ready = (
        "vim.o.ttimeoutlen = 50\n"
        "vim.api.nvim_create_autocmd('LspProgress', {pattern = 'end', callback = function(its)\n"
        "  vim.o.statusline = its.data.params.value.message .. ', at %l:%c'\n"
        "end})\n"
    )
    (directory / "init.lua").write_text(printed_config() + ready)
    path = directory / "a.py"
    path.write_text(CODE)
    nvim = f"XDG_STATE_HOME={directory} nvim -n -i NONE -u {directory}/init.lua"
    terminal.type(f"{nvim} {path}; echo code=$?", "Enter")
    terminal.wait_for("starter is ready", seconds=150)
    return path


def start_with_a_ghost(terminal: Terminal, directory: Path) -> Path:
    path = start(terminal, directory)
    terminal.type("G", "o")
    terminal.wait_for(GHOST, seconds=150)
    return path


def written(terminal: Terminal, path: Path) -> str:
    """The buffer, after leaving insert mode and Neovim."""
    terminal.write_and_quit()
    return path.read_text()


def test_a_ghost_from_the_starter_is_accepted_with_tab(
    terminal: Terminal, tmp_path: Path, starter: StoredModel
) -> None:
    path = start_with_a_ghost(terminal, tmp_path)
    assert path.read_text() == CODE
    terminal.type("Tab")
    assert re.fullmatch(f"{re.escape(CODE)} *{GHOST}\n", written(terminal, path))


@pytest.mark.parametrize(
    "steps",
    [
        [("C-f", 11), ("C-f", 13), ("C-f", 15), ("C-f", 17)],  # after return, a, -, b
        [("C-f", 11), ("C-l", 17)],  # a word, and the line of what it left
    ],
    ids=["words", "line"],
)
def test_a_ghost_is_accepted_in_parts_without_a_pause(
    terminal: Terminal, tmp_path: Path, starter: StoredModel, steps: list[tuple[str, int]]
) -> None:
    path = start_with_a_ghost(terminal, tmp_path)
    for key, column in steps:
        terminal.type(key)
        terminal.wait_for(f"at 5:{column}")
    assert re.fullmatch(rf"{re.escape(CODE)} *{GHOST}\n", written(terminal, path))


def test_without_a_ghost_the_keys_are_themselves(
    terminal: Terminal, tmp_path: Path, starter: StoredModel
) -> None:
    path = start(terminal, tmp_path)
    terminal.type(":lua vim.lsp.inline_completion.enable(false)", "Enter")
    terminal.type("G", "o", "(", "C-l", "Tab", ")")
    assert re.fullmatch(rf"{re.escape(CODE)} *\([ \t]+\)\n", written(terminal, path))


def open_with_ghosts(
    terminal: Terminal,
    directory: Path,
    options: str = "",
    text: str = "first\nlast\n",
    *,
    name: str = "a.py",
    init: str = "",
    arguments: str = "",
    at: str = "",
) -> Path:
    """Neovim on a file, with a server that is told by files what to do.

    init: lines before the plugin's in init.lua. at: text that is visible.
    """
    command = ", ".join(f"'{word}'" for word in [*SERVER, str(directory)])
    (directory / "init.lua").write_text(
        f"{init}\nvim.opt.runtimepath:prepend('{EDITORS / 'neovim'}')\n"
        f"require('akunu').setup({{ cmd = {{ {command} }}, {options} }})\n"
        "vim.o.ttimeoutlen = 50\n"
        "vim.o.statusline = \"%{v:lua.require'akunu'.status()}.\"\n"
    )
    path = directory / name
    path.write_text(text)
    nvim = f"XDG_STATE_HOME={directory} nvim -n -i NONE -u {directory}/init.lua {arguments}"
    terminal.type(f"{nvim} {path}; echo code=$?", "Enter")
    terminal.wait_for(at or text.split()[-1])
    return path


def test_loading_is_shown_and_a_ghost_stays_while_it_is_accepted_in_parts(
    terminal: Terminal, tmp_path: Path
) -> None:
    """Its rest is requested again each time, and that is never answered here."""
    path = open_with_ghosts(terminal, tmp_path)
    terminal.wait_for("akunu: the model is being loaded")
    terminal.wait_for(r"loading\.")
    (tmp_path / "model").touch()
    terminal.wait_for(r"ready\.")
    terminal.type("o")
    terminal.wait_for(r"first *\none two three *\nfour *\nlast")
    terminal.type("one")  # some letters of it, and a key before it is requested again
    terminal.type("C-f")
    for _ in range(5):  # it stays there, all the time
        time.sleep(0.1)
        terminal.wait_for(r"first *\none two three *\nfour *\nlast", seconds=0)
    terminal.type(" t")
    terminal.wait_for(r"first *\none two three *\nfour *\nlast")
    terminal.type("C-l")
    terminal.wait_for(r"first *\none two three *\nfour *\nlast")
    terminal.type("C-l", "C-l", "C-l")
    assert written(terminal, path) == "first\none two three\nfour\nlast\n"
    (counts,) = read_counts(tmp_path / "counts").values()
    assert counts == {"shown": 1, "accepted": 1, "characters": len(" twohree\nfour")}


def test_without_a_ghost_tab_keeps_its_mapping(terminal: Terminal, tmp_path: Path) -> None:
    """The user's own, and Neovim's, which jumps in snippets."""
    (tmp_path / "model").touch()
    init = "vim.keymap.set('i', '<C-F>', function() return '[own]' end, { expr = true })"
    path = open_with_ghosts(terminal, tmp_path, init=init)
    terminal.wait_for(r"ready\.")
    snippet = ":lua vim.snippet.expand('f(${1:x}, ${2:y}) ')"
    terminal.type("A", " ", "Escape", snippet, "Enter")
    terminal.wait_for(r"firstf\(x, y\)")
    terminal.type("a")
    terminal.wait_for(r"firstf\(a, y\)")
    terminal.type("Tab")
    terminal.wait_for("-- SELECT --")
    terminal.type("b", "C-f")
    terminal.wait_for(r"firstf\(a, b\[own\]\)")
    terminal.type("Tab", "!")
    assert written(terminal, path) == "firstf(a, b[own]) ! \nlast\n"


def test_insert_mode_before_the_server_attached_has_a_ghost(
    terminal: Terminal, tmp_path: Path
) -> None:
    (tmp_path / "model").touch()
    open_with_ghosts(terminal, tmp_path, text="\nlast\n", arguments="+startinsert")
    terminal.wait_for(r"one two three *\nfour *\nlast")


def test_a_letter_that_was_not_predicted_hides_the_ghost(
    terminal: Terminal, tmp_path: Path
) -> None:
    """At once: the next request is never answered here. Undo keeps what was typed before."""
    (tmp_path / "model").touch()
    path = open_with_ghosts(terminal, tmp_path)
    terminal.wait_for(r"ready\.")
    terminal.type("o")
    terminal.wait_for(r"first *\none two three *\nfour *\nlast")
    terminal.type("on")
    terminal.wait_for(r"first *\none two three *\nfour *\nlast")
    terminal.type("x")
    terminal.wait_for(r"first *\nonx *\nlast *\n~")
    terminal.type("Tab")  # it is a key like any other
    terminal.type("C-u")
    terminal.wait_for(r"first *\none two three *\nfour *\nlast")
    terminal.type("x", "Tab")  # faster than it can be hidden
    assert re.fullmatch(r"first\nx[ \t]+\nlast\n", written(terminal, path))


@pytest.mark.parametrize("name", ["words", ""], ids=["without a type", "without a name"])
def test_buffers_without_a_type_or_a_name_have_ghosts(
    terminal: Terminal, tmp_path: Path, name: str
) -> None:
    (tmp_path / "model").touch()
    open_with_ghosts(terminal, tmp_path, name=name or "a.py")
    terminal.wait_for(r"ready\.")
    terminal.type(*([] if name else [":enew", "Enter"]), "o")
    terminal.wait_for(r"one two three *\nfour *\n")


def test_requests_have_recent_texts_and_files_that_are_not_loaded(
    terminal: Terminal, tmp_path: Path
) -> None:
    (tmp_path / "model").touch()
    (tmp_path / "never.py").write_text("never = 1\n")
    open_with_ghosts(terminal, tmp_path, init=f"vim.cmd('badd {tmp_path}/never.py')")
    terminal.wait_for(r"ready\.")
    terminal.type("yy", "o")
    terminal.wait_for("one two three")
    terminal.type("s", "Escape", ":w", "Enter", "o")
    terminal.wait_for(r"first *\ns *\none two three")
    found = [json.loads(line) for line in (tmp_path / "requests").read_text().splitlines()]
    assert found[-1] == [[[f"{tmp_path}/never.py", "never = 1\n"]], ["first\ns\nlast", "first"]]


def test_requests_have_the_files_that_define_names_at_the_cursor(
    terminal: Terminal, tmp_path: Path
) -> None:
    """As another language server tells, asked once for each name."""
    (tmp_path / "model").touch()
    (tmp_path / "area.py").write_text("def area(): ...\n")
    log = str(tmp_path / "asked")
    init = (
        "local function answer(method, params, callback)\n"
        "  local result = { capabilities = { definitionProvider = true } }\n"
        "  if method == 'textDocument/definition' then\n"
        "    local row, col = params.position.line, params.position.character\n"
        "    local name = vim.fn.getline(row + 1):sub(col + 1):match('^%w+')\n"
        f"    vim.fn.writefile({{ name }}, '{log}', 'a')\n"
        "    result = nil\n"
        f"    local place = {{ uri = vim.uri_from_fname('{tmp_path}/area.py') }}\n"
        "    if name == 'area' then result = { place } end\n"
        "  end\n"
        "  vim.schedule(function() callback(nil, result) end)\n"
        "  return true, 1\n"
        "end\n"
        "vim.api.nvim_create_autocmd('BufEnter', { callback = function()\n"
        "  vim.lsp.start({ name = 'other', cmd = function() return {\n"
        "    request = answer, notify = function() end,\n"
        "    is_closing = function() end, terminate = function() end,\n"
        "  } end })\n"
        "end })"
    )
    open_with_ghosts(terminal, tmp_path, init=init, text="x = area(x)\nlast\n")
    terminal.wait_for(r"ready\.")
    until(lambda: Path(log).exists() and "area" in Path(log).read_text())
    terminal.type("o")
    terminal.wait_for("one two three")
    found = json.loads((tmp_path / "requests").read_text().splitlines()[-1])
    assert found[0] == [[f"{tmp_path}/area.py", "def area(): ...\n"]]
    assert sorted(Path(log).read_text().split()) == ["area"]


def test_ghosts_by_key_and_alternatives(terminal: Terminal, tmp_path: Path) -> None:
    """No ghost before the key, nor with a popup menu."""
    (tmp_path / "model").touch()
    path = open_with_ghosts(
        terminal, tmp_path, "trigger = 'key'", text="slow\nslower\n", at="slower"
    )
    terminal.wait_for(r"ready\.")
    terminal.type("o")
    time.sleep(0.4)  # longer than Neovim's delay
    assert not (tmp_path / "requests").exists() or "one" not in terminal.screen()
    terminal.type("C-Space")
    terminal.wait_for(r"slow *\none two three *\nfour *\nslower")
    terminal.type(
        "C-r", "=complete(1, ['one', 'two']) ? '' : ''", "Enter"
    )  # which begins as the ghost does
    terminal.wait_for(r"slow *\none *\n *one")
    terminal.type("C-e")
    terminal.wait_for(r"slow *\n *\nslower")
    terminal.type("sl", "C-n")
    terminal.wait_for(r"slow *\nslower *\nslower")
    terminal.type("C-Space", "C-e", "C-u", "C-Space")
    terminal.wait_for(r"slow *\none two three *\nfour *\nslower")
    terminal.type("C-Space")
    terminal.wait_for(r"slow *\nuno *\(2 of 2\) *\nslower")
    terminal.type("C-Space")
    terminal.wait_for(r"slow *\none two three *\nfour *\(1 of 2\) *\nslower")
    terminal.type("C-Space", "C-f", "x")
    assert written(terminal, path) == "slow\nunox\nslower\n"


def test_entries_of_nvim_cmp_and_blink(terminal: Terminal, tmp_path: Path) -> None:
    """As the documented interfaces of the two plugins call the source."""
    (tmp_path / "model").touch()
    init = f"vim.keymap.set('i', '<C-B>', '<Cmd>luafile {tmp_path}/menus.lua<CR>')"
    path = open_with_ghosts(terminal, tmp_path, "trigger = 'key'", text="é teh\nlast\n", init=init)
    terminal.wait_for(r"ready\.")
    (tmp_path / "menus.lua").write_text(
        "local source, entries = require('akunu.source').new({}, {}), {}\n"
        "assert(source:is_available() and source:enabled())\n"
        "local function add(response) table.insert(entries, response.items[1]) end\n"
        "source:complete({ context = {}, offset = 1 }, add)\n"
        "assert(vim.wait(60000, function() return #entries == 1 end, 10))\n"
        "source:get_completions({ bufnr = 0 }, add)\n"
        "assert(vim.wait(60000, function() return #entries == 2 end, 10))\n"
        "local called, edit = 0, entries[1].textEdit\n"
        "local function count() called = called + 1 end\n"
        "source:execute(entries[1], count)\n"
        "local buf, encoding = vim.fn.bufnr(), source:get_position_encoding_kind()\n"
        "vim.lsp.util.apply_text_edits({ edit }, buf, encoding)\n"
        "source:execute({}, entries[2], count, count)\n"
        "local seen = { entries[1].label, entries[2].filterText, tostring(called) }\n"
        f"vim.fn.writefile(seen, '{tmp_path}/seen')\n"
    )
    terminal.type("A", "C-b")
    terminal.wait_for(r"é teh two four")
    until((tmp_path / "seen").exists)
    assert (tmp_path / "seen").read_text().splitlines() == ["teh two four", "teh", "3"]
    assert written(terminal, path) == "é teh two four\nlast\n"
    (counts,) = read_counts(tmp_path / "counts").values()
    assert counts["accepted"] == 1


def test_the_next_edit_is_shown_and_made(terminal: Terminal, tmp_path: Path) -> None:
    """A name is changed in one line; the others follow with Tab, each a change to undo. What was
    undone is not offered again."""
    (tmp_path / "model").touch()
    text = "old = 1\nprint(old)\n\nlast = old\n"
    path = open_with_ghosts(terminal, tmp_path, "next_edit = true", text)
    terminal.wait_for(r"ready\.")
    terminal.type("cw", "new")
    terminal.wait_for(r"print\(old\)  → print\(new\)")  # what comes, beside what goes
    terminal.type("Tab")  # in insert mode
    terminal.wait_for(r"last = old  → last = new")
    terminal.type("Escape")
    terminal.wait_for(r"\n(?!.*-- INSERT --)[^\n]*$")
    terminal.type("Escape")  # hides it
    terminal.wait_for(r"new = 1 *\nprint\(new\) *\n *\nlast = old *\n")
    terminal.type("u")
    for _ in range(5):
        terminal.wait_for(r"print\(old\) *\n *\nlast = old *\n")
        time.sleep(0.1)
    terminal.type("C-r")
    terminal.wait_for(r"last = old  → last = new")
    terminal.type("Tab")  # in normal mode
    terminal.wait_for(r"print\(new\) *\n *\nlast = new *\n")
    assert written(terminal, path) == text.replace("old", "new")
    counts = read_counts(tmp_path / "counts")["python", "next edit"]
    assert counts["characters"] == 11 + 11


def test_the_key_of_the_next_edit_keeps_its_mapping(terminal: Terminal, tmp_path: Path) -> None:
    (tmp_path / "model").touch()
    maps = "vim.keymap.set('n', '<Tab>', 'A!<Esc>'); vim.keymap.set('i', '<Tab>', '?')"
    path = open_with_ghosts(terminal, tmp_path, "next_edit = true", "old = 1\n", init=maps)
    terminal.wait_for(r"ready\.")
    terminal.type("Tab")
    terminal.wait_for("old = 1!")
    terminal.type("A", "Tab")
    terminal.wait_for(r"old = 1!\?")
    assert written(terminal, path) == "old = 1!?\n"


def test_a_next_edit_outside_the_window_is_a_jump_first(terminal: Terminal, tmp_path: Path) -> None:
    (tmp_path / "model").touch()
    text = "old = 1\n" + "\n" * 50 + "long = old" + " " * 10 + "# " + "x" * 50 + "\n"
    path = open_with_ghosts(terminal, tmp_path, "next_edit = true", text, at="old")
    terminal.wait_for(r"ready\.")
    terminal.type("cw", "new")
    terminal.wait_for(r"new = 1  ↓ next edit in line 52")
    terminal.type("Tab")
    terminal.wait_for(r"long = old +# x+ *\n *long = new +# x+")  # no room beside it
    terminal.type("Tab")
    terminal.wait_for(r"long = new +# x+ *\n[ ~]")
    assert written(terminal, path) == text.replace("old", "new")


def test_a_server_that_was_killed_comes_back_by_itself(terminal: Terminal, tmp_path: Path) -> None:
    (tmp_path / "model").touch()
    open_with_ghosts(terminal, tmp_path)
    terminal.wait_for(r"ready\.")
    terminal.type("o", "die")
    terminal.wait_for("quit with exit code 0 and signal 9")
    terminal.type("Enter", "C-w")  # Neovim's own message wants to be read
    terminal.wait_for(r"failed: the helper ended with 9\.")
    terminal.wait_for(r"ready\.")
    terminal.type("x", "BSpace")
    terminal.wait_for("one two three")


def test_messages_that_come_at_once_do_not_ask_for_enter(
    terminal: Terminal, tmp_path: Path
) -> None:
    (tmp_path / "model").touch()
    open_with_ghosts(terminal, tmp_path)
    terminal.wait_for(r"ready\.")
    (tmp_path / "two.lua").write_text(
        "local client = vim.lsp.get_clients()[1]\n"
        "for _, text in ipairs({ 'one', 'two' }) do\n"
        "  vim.schedule(function()\n"
        "    client.handlers['window/showMessage'](\n"
        "      nil, { type = 1, message = text }, { client_id = client.id })\n"
        "  end)\n"
        "end\n"
    )
    terminal.type(f":luafile {tmp_path}/two.lua", "Enter")
    assert "Press ENTER" not in terminal.wait_for("akunu: two")


def test_a_missing_program_is_told_without_enter(terminal: Terminal, tmp_path: Path) -> None:
    path = open_with_ghosts(terminal, tmp_path, "cmd = { 'no-such-program' }")
    terminal.wait_for(r"failed: no-such-program: no such program\.")
    terminal.wait_for("akunu: no-such-program: no such program; install")
    terminal.type("o", "x", "Escape", ":new", "Enter", "i", "y", "Escape", ":q!", "Enter")
    assert written(terminal, path) == "first\nx\nlast\n"


def test_a_long_reason_for_a_missing_model_needs_no_enter(
    terminal: Terminal, tmp_path: Path
) -> None:
    (tmp_path / "missing").write_text("no model called " + "x" * 200)
    path = open_with_ghosts(terminal, tmp_path)
    terminal.wait_for("akunu: no model called x+ *\n?")
    terminal.type("o", "x")
    assert written(terminal, path) == "first\nx\nlast\n"


def test_a_model_that_is_missing_is_told_and_found_when_it_comes(
    terminal: Terminal, tmp_path: Path
) -> None:
    (tmp_path / "missing").touch()
    open_with_ghosts(terminal, tmp_path)
    terminal.wait_for(r"failed: no such model\.")
    (tmp_path / "model").touch()
    time.sleep(1)  # no sooner is it tried again
    terminal.type("o")
    terminal.wait_for(r"ready\.")
    terminal.wait_for("one two three")


def test_a_ghost_grows_while_it_is_written_and_does_not_blink(
    terminal: Terminal, tmp_path: Path
) -> None:
    """Each word comes when a file is there. Letters of it may be typed, a part of it accepted; the
    answer takes its place. What was shown before, and is not typed on, goes."""
    (tmp_path / "model").touch()
    path = open_with_ghosts(terminal, tmp_path)
    terminal.wait_for(r"ready\.")
    terminal.type("o")
    terminal.wait_for(r"first *\none two three *\nfour *\nlast")
    terminal.type("slow")
    (tmp_path / "word1").touch()
    terminal.wait_for(r"first *\nslowone *\nlast")
    terminal.type("o")
    (tmp_path / "word2").touch()
    terminal.wait_for(r"first *\nslowone two *\nlast")
    terminal.type("C-f")
    for _ in range(5):
        time.sleep(0.1)
        terminal.wait_for(r"first *\nslowone two *\nlast", seconds=0)
    for word in (3, 4):
        (tmp_path / f"word{word}").touch()
    terminal.wait_for(r"first *\nslowone two three *\nfour *\nlast")
    for _ in range(3):  # it stays there when the answer has come
        time.sleep(0.1)
        terminal.wait_for(r"first *\nslowone two three *\nfour *\nlast", seconds=0)
    terminal.type("C-l")
    terminal.wait_for(r"first *\nslowone two three *\nfour *\nlast")
    terminal.type("C-l")
    assert written(terminal, path) == "first\nslowone two three\nfour\nlast\n"
    counts = read_counts(tmp_path / "counts")["python", "at the end of a line"]
    assert counts == {"shown": 1, "accepted": 1, "characters": len("ne two three\nfour")}


def test_an_accepted_ghost_is_as_if_it_had_been_typed(terminal: Terminal, tmp_path: Path) -> None:
    """Undone by itself, and repeated with what was typed around it. An abbreviation before it
    is expanded, and one at its end by the next key; inside it what was shown is inserted."""
    (tmp_path / "model").touch()
    path = open_with_ghosts(terminal, tmp_path, text="first\n  last\n")
    terminal.wait_for(r"ready\.")
    terminal.type(":iabbrev teh the|iabbrev two 2", "Enter", ":iabbrev four 4", "Enter")
    terminal.type("G", "o", "teh")
    terminal.wait_for(r"\n  teh two four *\n~")
    terminal.type("Tab")
    terminal.wait_for(r"\n  the two four *\n~")
    terminal.type(".", "Escape")
    terminal.wait_for(r"\n  the two 4\. *\n~")
    terminal.type("u")  # the ghost, not what was typed before it
    terminal.wait_for(r"first *\n  last *\n  the *\n~")
    terminal.type("u")
    terminal.wait_for(r"first *\n  last *\n~")
    terminal.type("C-r", "C-r", "G", ".")
    terminal.wait_for(r"(\n  the two 4\. *){2}\n~")
    terminal.type("o", "teh")
    terminal.wait_for(r"\n  teh two four *\n~")
    terminal.type("C-f")
    terminal.wait_for(r"\n  the two four *\n~")
    terminal.type("C-f", ".")  # at once
    block = "  the two 4.\n"
    assert written(terminal, path) == f"first\n  last\n{block * 3}"
