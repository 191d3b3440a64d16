"""The prompt: windows around the cursor, healing, related files, and imported files."""

import os
from itertools import product
from pathlib import Path
from string import punctuation
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akunu_py.completion.completer import Completer
from akunu_py.completion.completion_queue import CompletionQueue
from akunu_py.completion.completion_request import CompleteOptions, CompletionRequest, SourceFile
from akunu_py.completion.prompt.layout import (
    CodeTokens,
    comment_line,
    find_root,
    name_files,
    window_after,
    window_before,
)
from akunu_py.completion.prompt.project_imports import imported_files
from akunu_py.completion.prompt.related import (
    RelatedFiles,
    chunks_of,
    defined_names,
    names_near,
    rank,
)
from akunu_py.engine.engine import Engine
from akunu_py.engine.model.token_ids import common_prefix
from tests.support.complete import complete
from tests.support.paths import golden_sources
from tests.support.scripted_loop import RecordingLoop
from tests.support.targets import last_tokens
from tests.support.tiny_fim import load_tiny

# Windows and healing


LINES = [f"value_{number} = compute({number}, 'text {number}')\n" for number in range(400)]
TEXT = "".join(LINES)


def prompt_text(completer: Completer, request: CompletionRequest) -> str:
    return str(completer.engine.tokens.tokenizer.decode(completer.prompt(request).tokens))


@pytest.fixture(scope="module")
def code(starter_engine: Engine) -> CodeTokens:
    return CodeTokens(starter_engine.tokens.tokenizer, starter_engine.tokens.vocabulary)


@pytest.mark.parametrize("budget", [1, 5, 64, 1000, 100_000])
def test_windows_keep_to_their_budget_and_to_lines(code: CodeTokens, budget: int) -> None:
    before = TEXT[window_before(code, TEXT, budget) :]
    after = TEXT[: window_after(code, TEXT, budget)]
    for window, least in ((before, 0.6), (after, 0.7)):
        assert len(code.encode(window)) <= budget
        if budget >= 64:
            assert window.startswith("value_")
            assert window.endswith("\n")
            assert len(code.encode(window)) >= min(budget, len(code.encode(TEXT))) * least


def test_the_window_seldom_moves_while_the_user_types(code: CodeTokens) -> None:
    starts = [window_before(code, TEXT[:end], 256) for end in range(6000, 9000, 30)]
    assert starts == sorted(starts)
    assert len(set(starts)) <= 15


def test_a_long_line_is_cut_where_it_must(code: CodeTokens) -> None:
    line = "x" * 40_000
    assert 0 < len(code.encode(line[window_before(code, line, 100) :])) <= 100
    assert 0 < len(code.encode(line[: window_after(code, line, 100)])) <= 100


def test_text_outside_the_prompt_is_drafted_from(starter_engine: Engine) -> None:
    """The buffer is not its own neighbor."""
    completer = Completer(starter_engine, CompleteOptions(prefix_tokens=128))
    decode = completer.engine.tokens.tokenizer.decode
    files = [SourceFile(*each) for each in (("a.py", "near()\n"), ("b", "far"), ("c.py", "old"))]
    made = completer.prompt(CompletionRequest(TEXT, "rest()\n", "c.py", files=tuple(files)))
    assert len(made.tokens) <= 128
    far, near, before, after = (decode(list(tokens)) for tokens in made.draft_context)
    assert (far, near, after) == ("far", "near()\n", "rest()\n")
    prompt = decode(made.tokens).replace("# c.py\n", "")
    assert before + prompt + made.healed == TEXT


@pytest.mark.parametrize(("prefix", "healed"), [
    ("import os\nimport s", " s"), ("def f(", "("), ("https:", ":"), ("def main() -", " -"),
    ("if x =", " ="), ("std:", ":"), ("return ", " "), ("def f(x):\n    ", "\n    "),
    ("x = 'é", "é"), ("x", ""),
])  # fmt: skip
def test_the_end_of_a_prefix_is_generated_again(code: CodeTokens, prefix: str, healed: str) -> None:
    tokens, text = code.heal(prefix)
    assert text == healed
    allowed = code.compatible_tokens(healed) if healed else ()
    texts = [code.text(token) for token in allowed]
    assert all(each.startswith(healed) or healed.startswith(each) for each in texts)
    # The dropped tokens are one way to write it.
    taken = code.encode(prefix)[len(tokens) :]
    assert len(taken) != 1 or taken[0] in allowed


def test_any_prefix_of_a_longer_token_is_healed(code: CodeTokens) -> None:
    """After punctuation: the last token is healed if another one begins with its text."""
    texts = {code.text(token) for token in range(49_152)}
    beginnings = {text[:length] for text in texts for length in range(1, len(text))}
    pairs = ["".join(pair) for pair in product(punctuation, repeat=2)]
    for end in [*punctuation, *pairs[::8]]:
        text = f"a {end}"
        last = code.text(code.encode(text)[-1])
        tokens, healed = code.heal(text)
        assert healed == (last if last in beginnings else ""), text
        assert code.encode(text)[: len(tokens)] == tokens


def test_short_contexts_shrink_the_budgets(tmp_path: Path) -> None:
    engine = load_tiny(tmp_path, ["<|endoftext|>"])
    completer = Completer(engine, CompleteOptions(prefix_tokens=10**6, suffix_tokens=10**6))
    done = complete(completer, CompletionRequest("x = 1\n" * 2000, "y = 2\n" * 2000, max_tokens=4))
    assert done.stats.prompt_tokens < engine.plan.context_length


# Related files


LICENSE = "# Copyright somebody. All rights reserved, and so on for a while.\n" * 20
MARKERS = ["<|endoftext|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
MARKERS += ["<|repo_name|>", "<|file_sep|>"]


def project(count: int) -> tuple[SourceFile, ...]:
    """Return files that begin with a license and define two functions each."""
    return tuple(
        SourceFile(
            f"/home/me/shop/lib/file{n}.py",
            LICENSE + f"\n\ndef compute_{n}(first, second):\n    return first * {n} + second\n"
            f"\n\ndef describe_{n}(item):\n    return str(item) + 'x' * {n}\n",
        )
        for n in range(count)
    )


def requested(prefix: str, files: tuple[SourceFile, ...], **more: Any) -> CompletionRequest:
    path = "/home/me/shop/main.py"
    return CompletionRequest(prefix, "\n", path, files=files, root="/home/me/shop", **more)


@pytest.fixture
def completer(tmp_path: Path) -> Completer:
    options = CompleteOptions(fim="qwen2.5-coder", file_tokens=600)
    return Completer(load_tiny(tmp_path, MARKERS), options)


def test_fewer_new_tokens_are_prefilled_while_a_client_waits(completer: Completer) -> None:
    options = CompleteOptions(fim="qwen2.5-coder", file_tokens=1200, fresh_tokens=200)
    completer = Completer(completer.engine, options)
    prefix = "".join(f"compute_{n}(describe_{n}(" for n in range(8))
    waited = completer.prompt(requested(prefix, project(8))).ahead
    idle = completer.prompt(requested(prefix, project(8), max_tokens=0)).ahead
    assert 100 < waited < 300
    assert waited < idle <= 1300


@pytest.mark.parametrize("name", ["größe_der_datei", "naïve", "cafe\u0301s", "π_2r", "数据表"])
def test_words_are_not_split_at_accents(name: str) -> None:
    assert name in names_near(f"value = {name}(", "")
    (chunk,) = chunks_of("a.py", f"value = {name} + 1\n")
    assert name in chunk.names
    if "\u0301" not in name:
        assert name in defined_names(f"def {name}(x):\n")
        assert name in defined_names(f"{name} = 1\n")
        assert name in defined_names(f"int {name}(int x) {{\n")


@pytest.mark.parametrize("n", [0, 3, 7])
def test_functions_called_at_the_cursor_are_in_the_prompt(completer: Completer, n: int) -> None:
    """Not the license of the nearest file; paths are relative to the project's."""
    crlf = [SourceFile(each.path, each.text.replace("\n", "\r\n")) for each in project(8)]
    text = prompt_text(completer, requested(f"value = compute_{n}(", tuple(crlf)))
    assert f"def compute_{n}(first, second):\n    return first * {n}" in text
    assert "Copyright" not in text
    assert "<|repo_name|>shop\n" in text
    assert f"<|file_sep|>lib/file{n}.py\n" in text
    assert "<|file_sep|>main.py\n" in text
    assert "/home" not in text
    copied = requested("value = ", project(8), recent=("describe_5",))
    assert "def describe_5" in prompt_text(completer, copied)
    # Another client of a server, or the same after its files are closed.
    assert "def " not in prompt_text(completer, requested(f"value = compute_{n}(", ()))


def test_the_chosen_pieces_stay_while_the_user_types(completer: Completer) -> None:
    """Tokens before the buffer stay cached, also when the user types another name."""
    files = project(8)
    buffer = "".join(f"line_{n} = {n}\n" for n in range(30))
    complete(completer, requested(buffer + "value = compute_3(", files, max_tokens=1))
    for more in ("", "a", "ab", "ab, describe_6(", "ab, describe_6(c"):
        request = requested(buffer + "value = compute_3(" + more, files, max_tokens=1)
        made = completer.prompt(request)
        assert common_prefix(last_tokens(completer.loop), made.tokens) >= made.ahead
        text = completer.engine.tokens.tokenizer.decode(made.tokens)
        assert "def compute_3(" in text
        complete(completer, request)
    assert "def describe_6" not in text
    # A prefill, which no client waits for, may choose again.
    assert "def describe_6" in prompt_text(
        completer, requested(request.prefix, files, max_tokens=0)
    )


@given(
    st.lists(st.sampled_from([f"compute_{n}" for n in range(6)]), max_size=4),
    st.integers(0, 900),
    st.integers(0, 300),
    st.integers(0, 2000),
)
def test_budgets_are_kept(names: list[str], budget: int, fresh: int, known: int) -> None:
    files = [(file.path, file.text) for file in project(6)]
    related = RelatedFiles()
    before: list[tuple[str, str]] = []
    for name in [*names, "describe_2"]:
        near = names_near(f"x = {name}(", "")
        related.update(files, near, len, budget, fresh, known)
        sections = related.sections()
        assert sum(len(text.rstrip("\n")) for _, text in sections) <= budget + 2 * len(sections)
        added = [text for _, text in sections if text not in [text for _, text in before]]
        assert sum(len(text.rstrip("\n")) for text in added) <= max(fresh, 0) + 300 * bool(before)
        before = sections


def test_the_pieces_are_the_whole_file() -> None:
    for name, text in golden_sources().items():
        lines = [line for line in text.split("\n") if line.strip()]
        pieces = "\n".join(chunk.text for chunk in chunks_of(name, text)).split("\n")
        assert [line for line in pieces if line.strip()] == lines


@pytest.mark.parametrize(("name", "definitions"), [
    ("tree.py", {"Node", "add", "walk", "load"}),
    ("stock.js", {"Stock", "add", "scarce", "report"}),
    ("queue.ts", {"Job", "Queue", "add", "total", "describe", "Level"}),
    ("Ledger.java", {"Ledger", "Entry", "balances", "describe"}),
    ("Store.kt", {"Stamped", "Store", "newest", "close"}),
    ("Sync.swift", {"Syncable", "SyncError", "Sync", "add", "flush"}),
    ("ring.c", {"SIZE", "ring", "ring_new", "ring_push", "main"}),
    ("shapes.cpp", {"Shape", "Circle", "make", "largest", "total"}),
    ("Inbox.cs", {"Inbox", "Priority", "Message"}),
    ("cache.go", {"Cache", "New", "Get", "Set", "Watch", "ErrMissing"}),
    ("parse.rs", {"Node", "Parser", "parse", "ParseError"}),
    ("mailer.rb", {"Mailer", "Example", "deliver", "summary"}),
    ("Router.php", {"Router", "add", "dispatch", "count"}),
    ("timers.lua", {"after", "run", "describe"}),
    ("Counter.pm", {"add", "top", "report"}),
])  # fmt: skip
def test_definitions_are_known_in_any_language(name: str, definitions: set[str]) -> None:
    assert definitions - defined_names(golden_sources()[name]) == set()


def test_a_banner_defines_nothing() -> None:
    banner = f"/* banner\n{'*' * 75}\n*/\nint add(int a) {{\n}}\nstatic char **split(void)\n"
    assert defined_names(banner) == {"add", "split"}


def test_pieces_without_a_name_near_the_cursor_are_left_out() -> None:
    chunks = [chunk for file in project(4) for chunk in chunks_of(file.path, file.text)]
    assert rank(chunks, names_near("unheard_of = 1\n", "")) == []
    assert "describe_2" in rank(chunks, names_near("describe_2(", ""))[0].defines


def test_names_of_files(tmp_path: Path) -> None:
    (tmp_path / "repo" / ".git").mkdir(parents=True)
    path = str(tmp_path / "repo" / "src" / "a.py")
    assert find_root(path) == str(tmp_path / "repo")
    for root in ("", "/another/project"):
        names = name_files(path, "", root)
        assert (names.path, names.repository) == ("src/a.py", "repo")
    names = name_files("/x/y/src/a.py", "", "/x/y/")
    assert (names.path, names.repository) == ("src/a.py", "y")
    names = name_files("C:\\code\\shop\\a.py", "", "C:\\code\\shop")
    assert (names.path, names.repository) == ("a.py", "shop")
    names = name_files("/x/app/a.py", "", "")  # the directory of the file
    assert (names.path, names.repository) == ("a.py", "app")
    assert name_files("a.py", "", "").repository == "project"
    assert not name_files("", "", "").known
    assert name_files("", "python", "").path == "untitled.python"


@pytest.mark.parametrize(("path", "line"), [
    ("a/b.py", "# a/b.py\n"), ("b.rs", "// b.rs\n"), ("b.html", "<!-- b.html -->\n"),
    ("b.css", "/* b.css */\n"), ("untitled.lua", "-- untitled.lua\n"), ("README", ""),
    ("a.unknown", ""),
])  # fmt: skip
def test_the_comment_is_one_in_its_language(path: str, line: str) -> None:
    assert comment_line(path) == line


# Imported files


TWO = ["shop/tax.py", "shop/money.py"]
# The buffer's path and text, and the files that it imports.
PROJECTS = {
    "python": ("shop/cart.py", "import shop.tax\n", ["shop/tax.py"]),
    "python from": ("shop/cart.py", "from shop.tax import rate, other\n", ["shop/tax.py"]),
    "python relative": ("shop/a/cart.py", "from ..tax import rate\n", ["shop/tax.py"]),
    "python sibling": ("shop/cart.py", "from . import tax, money as m\n", TWO),
    "python lines": ("shop/cart.py", "from shop import (\n  tax,\n  money,\n)\n", TWO),
    "python package": ("cart.py", "from shop.util import x\n", ["shop/util/__init__.py"]),
    "python src": ("tests/test_cart.py", "from shop.tax import x\n", ["src/shop/tax.py"]),
    "typescript": ("web/cart.ts", 'import { rate } from "./tax";\n', ["web/tax.ts"]),
    "typescript js": ("web/cart.ts", "import rate from '../lib/tax.js'\n", ["lib/tax.ts"]),
    "typescript index": ("web/cart.tsx", 'export * from "./tax"\n', ["web/tax/index.ts"]),
    "javascript": ("web/cart.js", "const tax = require('./tax')\n", ["web/tax.js"]),
    "c": ("src/cart.c", '#include <stdio.h>\n#include "tax.h"\n', ["src/tax.h"]),
    "c include": ("src/cart.c", '#include "shop/tax.h"\n', ["include/shop/tax.h"]),
    "rust mod": ("src/main.rs", "mod tax;\npub mod money;\n", ["src/tax.rs", "src/money/mod.rs"]),
    "rust use": ("src/a/cart.rs", "use crate::shop::tax::Rate;\n", ["src/shop/tax.rs"]),
    "ruby": ("lib/cart.rb", "require_relative 'shop/tax'\n", ["lib/shop/tax.rb"]),
    "scss": ("css/cart.scss", '@use "base/tax";\n', ["css/base/_tax.scss"]),
    "shell": ("bin/cart.sh", ". ./tax.sh\n", ["bin/tax.sh"]),
    "lua": ("cart.lua", 'local tax = require("shop.tax")\n', ["shop/tax.lua"]),
    "java": ("src/main/java/a/Cart.java", "import a.b.Tax;\n", ["src/main/java/a/b/Tax.java"]),
    "php": ("cart.php", "require_once __DIR__ . '/lib/tax.php';\n", ["lib/tax.php"]),
}


def write(root: Path, *names: str, text: str = "def rate():\n    return 7\n") -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def in_project(root: Path, name: str, prefix: str, *files: SourceFile) -> CompletionRequest:
    return CompletionRequest(prefix, path=str(root / name), root=str(root), files=files)


@pytest.mark.parametrize("name", PROJECTS)
def test_imports_are_found(name: str, tmp_path: Path) -> None:
    path, text, expected = PROJECTS[name]
    write(tmp_path, path, *expected)
    found = imported_files(in_project(tmp_path, path, text + "\n\nx = "))
    assert [os.path.relpath(file.path, tmp_path) for file in found] == expected
    # Without a root or version control, no file is loaded.
    request = CompletionRequest(text, path=str(tmp_path / path))
    assert imported_files(request) == ()
    (tmp_path / ".git").mkdir()
    find_root.cache_clear()
    request = CompletionRequest(text, path=str(tmp_path / path), root="/another/project")
    assert imported_files(request) == found


def test_open_files_and_the_buffer_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, "a.py", "b.py", "c.py")
    text = "import a, b, c\n"
    opened = SourceFile(str(tmp_path / "b.py"), "newer = 1\n")
    found = imported_files(in_project(tmp_path, "a.py", text, opened))
    assert [Path(file.path).name for file in found] == ["c.py"]


def test_nothing_outside_the_project_is_read(tmp_path: Path) -> None:
    root = tmp_path / "project"
    write(tmp_path, "outside.py", "project/a/main.py", "project2/tax.py")
    (root / "link.py").symlink_to(tmp_path / "outside.py")
    (root / "tree").symlink_to(tmp_path / "project2")
    os.mkfifo(root / "pipe.py")
    text = "import link, pipe\nfrom ...outside import x\nfrom tree import tax\nimport outside\n"
    assert imported_files(in_project(root, "a/main.py", text)) == ()
    script = 'import x from "../../outside.py"\nimport "./\0.ts"\n'
    assert imported_files(in_project(root, "a/main.ts", script)) == ()


def test_changed_and_deleted_files_are_noticed(tmp_path: Path) -> None:
    write(tmp_path, "main.py", "tax.py", "money.py")
    request = in_project(tmp_path, "main.py", "import tax, money\n")
    assert len(imported_files(request)) == 2
    write(tmp_path, "tax.py", text="def other_rate(): ...\n")
    assert "other_rate" in imported_files(request)[0].text
    (tmp_path / "tax.py").unlink()
    assert len(imported_files(request)) == 1


def test_long_and_binary_files_and_many_imports(tmp_path: Path) -> None:
    names = [f"m{number}.py" for number in range(20)]
    write(tmp_path, "main.py", *names, text="x = 1\n" * 9000)
    (tmp_path / "m0.py").write_bytes(b"\0" * 100)
    text = "".join(f"import m{number}\n" for number in range(20))
    found = imported_files(in_project(tmp_path, "main.py", text))
    assert len(found) == 8
    assert "m0.py" not in {Path(file.path).name for file in found}
    assert all(len(file.text) <= 16_000 and file.text.endswith("\n") for file in found)


def test_completions_get_them_but_none_with_secrets(tmp_path: Path) -> None:
    loop = RecordingLoop()
    write(tmp_path, "main.py", "tax.py", "secrets.py")
    queue = CompletionQueue(lambda: loop)
    queue.start()
    queue.complete(in_project(tmp_path, "main.py", "import tax, secrets\nx = [[[["))
    assert queue.close(60)
    (made,) = loop.made
    assert [Path(file.path).name for file in made.files] == ["tax.py"]
