"""Neovim's own inline completion, configured by the snippet that is printed, on the starter."""

import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from akunu_py.models.store.model_store import StoredModel
from tests.support.command import AKUNU, until
from tests.support.lsp_servers import GHOST as SERVER
from tests.support.paths import EDITORS
from tests.support.terminal import Terminal, needs_tmux
from tests.support.terminal import terminal as terminal  # a fixture

CODE = "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n"
GHOST = "return a - b"  # what the starter proposes there


def has_inline_completion() -> bool:
    if not shutil.which("nvim"):
        return False
    shown = "+lua print(vim.lsp.inline_completion ~= nil)"
    command = ["nvim", "--clean", "--headless", shown, "+q"]
    return "true" in subprocess.run(command, capture_output=True, text=True).stderr


pytestmark = [
    needs_tmux,
    pytest.mark.skipif(not has_inline_completion(), reason="Neovim 0.12 is not installed"),
]


class Neovim:
    """Neovim in a terminal, and its file."""

    def __init__(self, terminal: Terminal, directory: Path) -> None:
        self.terminal, self.directory = terminal, directory
        self.path = directory / "a.py"
        self.type, self.wait_for = terminal.type, terminal.wait_for

    def start(self, init: str, text: str) -> None:
        (self.directory / "init.lua").write_text(init)
        self.path.write_text(text)
        options = f"-n -i NONE -u {self.directory}/init.lua"
        command = f"XDG_STATE_HOME={self.directory} nvim {options} {self.path}; echo code=$?"
        self.type(command, "Enter")

    def open(
        self, options: str = "", text: str = "first\nlast\n", *, init: str = "", at: str = "",
        loads: bool = True,
    ) -> None:  # fmt: skip
        """Open a file with a scripted server.

        init: lines before the plugin's in init.lua. at: text that is visible. loads: wait until the
        model is loaded.
        """
        command = ", ".join(f"'{word}'" for word in [*SERVER, str(self.directory)])
        lines = (
            f"{init}\nvim.opt.runtimepath:prepend('{EDITORS / 'neovim'}')\n"
            f"require('akunu').setup({{ cmd = {{ {command} }}, {options} }})\n"
            "vim.o.ttimeoutlen = 50\n"
            "vim.o.statusline = \"%{v:lua.require'akunu'.status()}. At %l:%c\"\n"
        )
        if loads:
            (self.directory / "model").touch()
        self.start(lines, text)
        self.wait_for(at or text.split()[-1])
        if loads:
            self.wait_for(r"ready\.")

    def written(self) -> str:
        """Return the file after leaving insert mode and Neovim."""
        self.terminal.write_and_quit()
        return self.path.read_text()


@pytest.fixture
def nvim(terminal: Terminal, tmp_path: Path) -> Neovim:
    return Neovim(terminal, tmp_path)


def test_a_ghost_from_the_starter_is_accepted_with_tab(nvim: Neovim, starter: StoredModel) -> None:
    command = [*AKUNU, "complete", "--print-config", "neovim", "--model", "starter"]
    command += ["--time-ms", "200000"]  # on a busy machine too
    config = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    nvim.start(f"{config}vim.o.ttimeoutlen = 50\n", CODE)
    nvim.wait_for("def subtract")
    nvim.type("G", "o", shows=GHOST, seconds=150)
    assert nvim.path.read_text() == CODE
    nvim.type("Tab")
    assert re.fullmatch(f"{re.escape(CODE)} *{GHOST}\n", nvim.written())


def test_without_a_ghost_tab_keeps_its_mapping(nvim: Neovim) -> None:
    """The user's own, and Neovim's, which jumps in snippets."""
    init = "vim.keymap.set('i', '<C-F>', function() return '[own]' end, { expr = true })"
    nvim.open(init=init)
    snippet = ":lua vim.snippet.expand('f(${1:x}, ${2:y}) ')"
    nvim.type("A", " ", "Escape", snippet, "Enter", shows=r"firstf\(x, y\)")
    nvim.type("a", shows=r"firstf\(a, y\)")
    nvim.type("Tab", shows="-- SELECT --")
    nvim.type("b", "C-f", shows=r"firstf\(a, b\[own\]\)")
    nvim.type("Tab", "!")
    assert nvim.written() == "firstf(a, b[own]) ! \nlast\n"


def test_a_letter_that_was_not_predicted_hides_the_ghost(nvim: Neovim) -> None:
    """At once: the next request is never answered here. Undo keeps what was typed before."""
    nvim.open()
    nvim.type("o", shows=r"first *\none two three *\nfour *\nlast")
    nvim.type("on", shows=r"first *\none two three *\nfour *\nlast")
    nvim.type("x", shows=r"first *\nonx *\nlast *\n~")
    nvim.type("Tab")  # it is a key like any other
    nvim.type("C-u", shows=r"first *\none two three *\nfour *\nlast")
    nvim.type("x", "Tab")  # faster than it can be hidden
    assert re.fullmatch(r"first\nx[ \t]+\nlast\n", nvim.written())


def test_a_letter_cancels_the_pending_request(nvim: Neovim, tmp_path: Path) -> None:
    nvim.open(
        init=f"""
        local client = require('vim.lsp.client')
        local cancel = client.cancel_request
        client.cancel_request = function(self, id)
          vim.fn.writefile({{}}, '{tmp_path}/cancelled')
          return cancel(self, id)
        end"""
    )
    for key, name in (("A", "endless"), ("x", "cancelled")):
        nvim.type(key)
        until((tmp_path / name).exists)


def test_requests_have_recent_texts_and_files_that_are_not_loaded(
    nvim: Neovim, tmp_path: Path
) -> None:
    (tmp_path / "never.py").write_text("never = 1\n")
    nvim.open(init=f"vim.cmd('badd {tmp_path}/never.py')")
    nvim.type("yy", "o", shows="one two three")
    nvim.type("s", "Escape", ":w", "Enter", "o", shows=r"first *\ns *\none two three")
    found = [json.loads(line) for line in (tmp_path / "requests").read_text().splitlines()]
    assert found[-1] == [[[f"{tmp_path}/never.py", "never = 1\n"]], ["first\ns\nlast", "first"]]


def test_requests_have_the_files_that_define_names_at_the_cursor(
    nvim: Neovim, tmp_path: Path
) -> None:
    """As another language server answers, with one request for each name."""
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
    nvim.open(init=init, text="x = area(x)\nlast\n")
    until(lambda: Path(log).exists() and "area" in Path(log).read_text())
    nvim.type("o", shows="one two three")
    found = json.loads((tmp_path / "requests").read_text().splitlines()[-1])
    assert found[0] == [[f"{tmp_path}/area.py", "def area(): ...\n"]]
    assert sorted(Path(log).read_text().split()) == ["area"]


def test_ghosts_by_key_and_alternatives(nvim: Neovim, tmp_path: Path) -> None:
    """No ghost before the key, nor with a popup menu."""
    nvim.open("trigger = 'key'", text="slow\nslower\n", at="slower")
    nvim.type("o")
    time.sleep(0.4)  # longer than Neovim's delay
    assert not (tmp_path / "requests").exists() or "one" not in nvim.terminal.screen()
    nvim.type("C-Space", shows=r"slow *\none two three *\nfour *\nslower")
    # A menu whose entry begins as the ghost does.
    nvim.type("C-r", "=complete(1, ['one', 'two']) ? '' : ''", "Enter")
    nvim.wait_for(r"slow *\none *\n *one")
    nvim.type("C-e", shows=r"slow *\n *\nslower")
    nvim.type("sl", "C-n", shows=r"slow *\nslower *\nslower")
    nvim.type("C-Space", "C-e", "C-u", "C-Space", shows=r"slow *\none two three *\nfour *\nslower")
    nvim.type("C-Space", shows=r"slow *\nuno *\(2 of 2\) *\nslower")
    nvim.type("C-Space", shows=r"slow *\none two three *\nfour *\(1 of 2\) *\nslower")
    nvim.type("C-Space", "C-f", "x")
    assert nvim.written() == "slow\nunox\nslower\n"


def test_entries_of_nvim_cmp_and_blink(nvim: Neovim, tmp_path: Path) -> None:
    """As the documented interfaces of the two plugins call the source."""
    init = f"vim.keymap.set('i', '<C-B>', '<Cmd>luafile {tmp_path}/menus.lua<CR>')"
    nvim.open("trigger = 'key'", text="é teh\nlast\n", init=init)
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
    nvim.type("A", "C-b", shows=r"é teh two four")
    until((tmp_path / "seen").exists)
    assert (tmp_path / "seen").read_text().splitlines() == ["teh two four", "teh", "3"]
    assert nvim.written() == "é teh two four\nlast\n"


def test_a_server_that_was_killed_comes_back_by_itself(nvim: Neovim) -> None:
    nvim.open()
    nvim.type("o", "die", shows="quit with exit code 0 and signal 9")
    nvim.type("Enter", "C-w")  # dismisses Neovim's own message
    nvim.wait_for(r"failed: the helper ended with 9\.")
    nvim.wait_for(r"ready\.")
    nvim.type("x", "BSpace", shows="one two three")


def test_a_binary_buffer_has_no_ghost(nvim: Neovim, tmp_path: Path) -> None:
    nvim.open(init="vim.o.binary = true", loads=False)
    (tmp_path / "model").touch()
    nvim.type("o", "x", shows=r"first *\nx *\n(?s:.*)idle\.")
    assert not (tmp_path / "requests").exists()
    nvim.type("Escape", ":new", "Enter", ":set nobinary", "Enter", "i")
    nvim.wait_for(r"ready\.")  # in this buffer
    nvim.type("Escape", ":q!", "Enter")
    assert nvim.written() == "first\nx\nlast\n"


def test_a_missing_program_is_reported_without_a_prompt(nvim: Neovim) -> None:
    nvim.open("cmd = { 'no-such-program' }", loads=False)
    nvim.wait_for(r"failed: no-such-program: no such program\.")
    nvim.wait_for("akunu: no-such-program: no such program; install")
    nvim.type("o", "x", "Escape", ":new", "Enter", "i", "y", "Escape", ":q!", "Enter")
    assert nvim.written() == "first\nx\nlast\n"


def test_a_missing_model_is_reported_and_loaded_when_it_exists(
    nvim: Neovim, tmp_path: Path
) -> None:
    (tmp_path / "missing").touch()
    nvim.open(loads=False)
    nvim.wait_for(r"failed: no such model\.")
    (tmp_path / "model").touch()
    time.sleep(1)  # before that, loading is not tried again
    nvim.type("o", shows=r"ready\.")
    nvim.wait_for("one two three")


def test_a_ghost_grows_while_it_is_written_and_does_not_blink(nvim: Neovim, tmp_path: Path) -> None:
    """Each word comes when a file is there. Letters of it may be typed, a part of it accepted; the
    answer takes its place. What was shown before, and is not typed on, goes."""
    nvim.open()
    nvim.type("o", shows=r"first *\none two three *\nfour *\nlast")
    nvim.type("slow")
    (tmp_path / "word1").touch()
    nvim.wait_for(r"first *\nslowone *\nlast")
    nvim.type("o")
    (tmp_path / "word2").touch()
    nvim.wait_for(r"first *\nslowone two *\nlast")
    nvim.type("C-f")
    for _ in range(5):
        time.sleep(0.1)
        nvim.wait_for(r"first *\nslowone two *\nlast", seconds=0)
    for word in (3, 4):
        (tmp_path / f"word{word}").touch()
    nvim.wait_for(r"first *\nslowone two three *\nfour *\nlast")
    for _ in range(3):  # it stays there when the answer has come
        time.sleep(0.1)
        nvim.wait_for(r"first *\nslowone two three *\nfour *\nlast", seconds=0)
    nvim.type("C-l", shows="At 2:18")
    nvim.type("C-l", shows="At 3:5")
    assert nvim.written() == "first\nslowone two three\nfour\nlast\n"


def test_an_accepted_ghost_behaves_like_typed_text(nvim: Neovim) -> None:
    """Undone by itself, and repeated with what was typed around it. An abbreviation before it
    is expanded, and one at its end by the next key; inside it what was shown is inserted."""
    nvim.open(text="first\n  last\n")
    nvim.type(":iabbrev teh the|iabbrev two 2", "Enter", ":iabbrev four 4", "Enter")
    nvim.type("G", "o", "teh", shows=r"\n  teh two four *\n~")
    nvim.type("Tab", shows=r"\n  the two four *\n~")
    nvim.type(".", "Escape", shows=r"\n  the two 4\. *\n~")
    nvim.type("u")  # the ghost, not what was typed before it
    nvim.wait_for(r"first *\n  last *\n  the *\n~")
    nvim.type("u", shows=r"first *\n  last *\n~")
    nvim.type("C-r", "C-r", "G", ".", shows=r"(\n  the two 4\. *){2}\n~")
    nvim.type("o", "teh", shows=r"\n  teh two four *\n~")
    nvim.type("C-f", shows=r"\n  the two four *\n~")
    nvim.type("C-f", ".")  # at once
    block = "  the two 4.\n"
    assert nvim.written() == f"first\n  last\n{block * 3}"
