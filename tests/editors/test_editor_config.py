"""`--print-config`: the snippets, read by the editors' own languages where they are installed."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from akunu_py.commands.complete import editor_config
from tests.support import paths
from tests.support.command import assert_one_line_error, run_here

NASTY = ["--model", 'it\'s a "model" \\ $HOME, ok']
PROGRAM = [str(Path(sys.executable).with_name("akunu"))]


def read_vim(path: Path, out: Path) -> None:
    """Writes the command of the sourced snippet to `out`, as JSON."""
    write = f"call writefile([json_encode(g:akunu_command)], '{out}')"
    subprocess.run(["vim", "-Nu", "NONE", "-es", "-S", path, "-c", write, "-c", "q"], timeout=60)


def read_neovim(path: Path, out: Path) -> None:
    write = f"vim.fn.writefile({{vim.json.encode(vim.lsp.config.akunu.cmd)}}, '{out}')"
    commands = [f"+luafile {path}", f"+lua {write}", "+q"]
    subprocess.run(["nvim", "--clean", "--headless", *commands], timeout=60)


# Stands in for lsp-mode, which Debian has in a version without inline completion.
LSP_MODE = """
(progn (provide 'lsp-mode) (provide 'lsp-inline-completion)
  (defvar lsp-inline-completion-active-map (make-sparse-keymap))
  (fset 'lsp-register-client (lambda (client) (setq registered client)))
  (fset 'make-lsp-client #'list)
  (fset 'lsp-stdio-connection #'identity))
"""


def read_emacs(path: Path, out: Path) -> None:
    command = "(json-encode (funcall (plist-get registered :new-connection)))"
    write = f'(progn (require \'json) (write-region {command} nil "{out}"))'
    options = ["--eval", LSP_MODE, "--load", str(path), "--eval", write]
    subprocess.run(["emacs", "-Q", "--batch", *options], timeout=60)


def read_vscode(path: Path, out: Path) -> None:
    settings = "".join(line for line in path.open() if not line.startswith("//"))
    out.write_text(json.dumps(json.loads(settings)["akunu.command"]))


@pytest.mark.parametrize(("editor", "program", "read", "more"), [
    ("vim", "vim", read_vim, []), ("neovim", "nvim", read_neovim, ["--lsp"]),
    ("emacs", "emacs", read_emacs, ["--lsp"]), ("vscode", None, read_vscode, []),
])  # fmt: skip
def test_the_command_arrives_as_it_was_meant(
    editor: str, program: str | None, read: Callable[[Path, Path], None], more: list[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    snippet, out = tmp_path / "snippet", tmp_path / "out"
    snippet.write_text(editor_config(editor, NASTY))
    assert str(paths.EDITORS / editor) in snippet.read_text()
    assert "@" not in snippet.read_text()
    if program and not shutil.which(program):
        pytest.skip(f"{program} is not installed")
    read(snippet, out)
    assert json.loads(out.read_text()) == [*PROGRAM, "complete", *NASTY, *more]


def test_other_options_go_along(tmp_path: Path) -> None:
    options = ["--max-lines", "3", "--draft", "off", "--no-answer-cache", "--file-tokens", "0"]
    options += ["--memory-limit", "12.000000000GB"]
    done = run_here("complete", "--print-config", "vscode", "--model", str(tmp_path), *options)
    settings = "".join(line for line in done.stdout.splitlines() if not line.startswith("//"))
    command = json.loads(settings)["akunu.command"]
    assert command[:4] == [*PROGRAM, "complete", "--model", str(tmp_path)]
    assert sorted(command[4:]) == sorted(options)


def test_wrong_usage() -> None:
    done = run_here("complete", "--print-config", "vim", "--lsp")
    assert_one_line_error(done, 2, "expected one of --filter, --lsp and --print-config")
    done = run_here("complete", "--print-config", "ed")
    assert_one_line_error(done, 2, "unknown value 'ed'")
