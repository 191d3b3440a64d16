"""What of other files the model reads: what belongs to the cursor, in an order that stays."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akunu_py.completion.completer import Completer
from akunu_py.completion.prompt import related
from akunu_py.completion.prompt.layout import comment_line, find_root, name_files
from akunu_py.completion.prompt.related import (
    Chunk,
    RelatedFiles,
    chunks_of,
    defined_names,
    names_near,
    rank,
)
from akunu_py.completion.request import CompleteOptions, CompletionRequest, SourceFile
from akunu_py.decoding.token_ids import common_prefix
from tests.support.complete import complete
from tests.support.tiny_fim import load_tiny

SOURCES = Path(__file__).parents[2] / "golden" / "sources"
LICENCE = "# Copyright somebody. All rights reserved, and so on for a while.\n" * 20
MARKERS = ["<|endoftext|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
MARKERS += ["<|repo_name|>", "<|file_sep|>"]


def project(count: int) -> tuple[SourceFile, ...]:
    """Files that begin with a licence; each has two functions of its own."""
    return tuple(
        SourceFile(
            f"/home/me/shop/lib/file{n}.py",
            LICENCE + f"\n\ndef compute_{n}(first, second):\n    return first * {n} + second\n"
            f"\n\ndef describe_{n}(item):\n    return str(item) + 'x' * {n}\n",
        )
        for n in range(count)
    )


@pytest.fixture(scope="module")
def completer(tmp_path_factory: pytest.TempPathFactory) -> Completer:
    engine = load_tiny(tmp_path_factory.mktemp("tiny"), MARKERS)
    return Completer(engine, CompleteOptions(fim="qwen2.5-coder", file_tokens=600))


def asked(prefix: str, files: tuple[SourceFile, ...], **more: object) -> CompletionRequest:
    path = "/home/me/shop/main.py"
    return CompletionRequest(prefix, "\n", path, files=files, root="/home/me/shop", **more)  # type: ignore[arg-type]


def read(completer: Completer, request: CompletionRequest) -> str:
    return str(completer.engine.tokens.tokenizer.decode(completer.prompt(request).tokens))


def test_the_pieces_of_many_open_files_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 150 files as with two; a file that changed is cut again, and nothing else."""
    cut: list[str] = []

    def count(path: str, text: str) -> tuple[Chunk, ...]:
        cut.append(path)
        return chunks_of(path, text)

    monkeypatch.setattr(related, "chunks_of", count)
    files = [(file.path, file.text) for file in project(150)]
    pieces, near = RelatedFiles(), names_near("compute_3(describe_140(", "")
    pieces.update(files, near, len, 3000, 3000, 0)
    assert len(cut) == 150
    sections = pieces.sections()
    for _ in range(3):
        assert pieces.covers(files, near) in (True, False)
        pieces.update(files, near, len, 3000, 3000, 0)
    assert len(cut) == 150
    assert pieces.sections() == sections
    files[7] = (files[7][0], files[7][1] + "\n\ndef more():\n    pass\n")
    pieces.update(files, near, len, 3000, 3000, 0)
    assert cut[150:] == [files[7][0]]


def test_the_size_of_the_texts_limits_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    cut: list[str] = []

    def count(path: str, text: str) -> tuple[Chunk, ...]:
        cut.append(path)
        return chunks_of(path, text)

    monkeypatch.setattr(related, "chunks_of", count)
    files = [(file.path, file.text) for file in project(10)]
    size = len(files[0][1])
    cache = related.ChunkCache(4 * size + 100)
    cache.chunks(files[:4])
    cache.chunks(files[:4])
    assert len(cut) == 4
    cache.chunks(files[4:5])  # takes the place of the first
    cache.chunks(files[1:5])
    assert len(cut) == 5
    cache.chunks([("long.py", "x = 1\n" * size)])  # longer than the limit: is kept by nobody
    assert sum(len(text) for _, text in cache._chunks) <= 4 * size + 100


@pytest.mark.parametrize(
    "name", ["größe_der_datei", "änderung", "naïve", "cafe\u0301s", "π_2r", "数据表"]
)
def test_words_are_not_split_at_accents(name: str) -> None:
    assert name in names_near(f"value = {name}(", "")
    (chunk,) = chunks_of("a.py", f"value = {name} + 1\n")
    assert name in chunk.names
    if "\u0301" not in name:
        assert name in defined_names(f"def {name}(x):\n")
        assert name in defined_names(f"{name} = 1\n")
        assert name in defined_names(f"int {name}(int x) {{\n")


@pytest.mark.parametrize("n", [0, 3, 7])
def test_what_is_called_at_the_cursor_is_read(completer: Completer, n: int) -> None:
    """And not the licence of the nearest file; paths as the project has them, and its name."""
    completer._related = RelatedFiles()
    text = read(completer, asked(f"value = compute_{n}(", project(8)))
    assert f"def compute_{n}(first, second):\n    return first * {n}" in text
    assert "Copyright" not in text
    assert "<|repo_name|>shop\n" in text
    assert f"<|file_sep|>lib/file{n}.py\n" in text
    assert "<|file_sep|>main.py\n" in text
    assert "/home" not in text


def test_what_was_copied_is_read(completer: Completer) -> None:
    completer._related = RelatedFiles()
    text = read(completer, asked("value = ", project(8), recent=("describe_5",)))
    assert "def describe_5" in text


def test_the_order_stays_while_one_types(completer: Completer) -> None:
    """What stands before the buffer is the same from key to key, so nothing of it is read again,
    also when another name is typed; after a jump to another place it is chosen again."""
    completer._related = RelatedFiles()
    files = project(8)
    buffer = "".join(f"line_{n} = {n}\n" for n in range(30))
    complete(completer, asked(buffer + "value = compute_3(", files, max_tokens=1))
    for more in ("", "a", "ab", "ab, describe_6(", "ab, describe_6(c"):
        request = asked(buffer + "value = compute_3(" + more, files, max_tokens=1)
        made = completer.prompt(request)
        known = completer.session.target.tokens
        assert common_prefix(known, made.tokens) >= made.ahead
        text = completer.engine.tokens.tokenizer.decode(made.tokens)
        assert "def compute_3(" in text
        complete(completer, request)
    assert "def describe_6" not in text
    # Nobody waits: it may be read now.
    assert "def describe_6" in read(completer, asked(request.prefix, files, max_tokens=0))


def test_less_is_read_at_once_while_somebody_waits(tmp_path: Path) -> None:
    engine = load_tiny(tmp_path, MARKERS)
    options = CompleteOptions(fim="qwen2.5-coder", file_tokens=1200, fresh_tokens=200)
    completer = Completer(engine, options)
    prefix = "".join(f"compute_{n}(describe_{n}(" for n in range(8))
    waited = completer.prompt(asked(prefix, project(8))).ahead
    idle = completer.prompt(asked(prefix, project(8), max_tokens=0)).ahead
    assert 100 < waited < 300
    assert waited < idle <= 1300


@settings(max_examples=40, deadline=None)
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


def test_pieces_are_the_whole_file() -> None:
    for path in sorted(SOURCES.iterdir()):
        text = path.read_text()
        lines = [line for line in text.split("\n") if line.strip()]
        pieces = "\n".join(chunk.text for chunk in chunks_of(str(path), text)).split("\n")
        assert [line for line in pieces if line.strip()] == lines


@pytest.mark.parametrize(
    ("name", "definitions"),
    [
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
    ],
)
def test_definitions_are_known_in_any_language(name: str, definitions: set[str]) -> None:
    assert definitions - defined_names((SOURCES / name).read_text()) == set()


def test_what_has_nothing_to_do_with_it_is_not_read() -> None:
    chunks = [chunk for file in project(4) for chunk in chunks_of(file.path, file.text)]
    assert rank(chunks, names_near("unheard_of = 1\n", "")) == []
    best = rank(chunks, names_near("describe_2(", ""))[0]
    assert "describe_2" in best.defines


def test_names_of_files(tmp_path: Path) -> None:
    (tmp_path / "repo" / ".git").mkdir(parents=True)
    path = str(tmp_path / "repo" / "src" / "a.py")
    assert find_root(path) == str(tmp_path / "repo")
    names = name_files(path, "", "", [])
    assert (names.path, names.repository) == ("src/a.py", "repo")
    names = name_files("/x/y/src/a.py", "", "/x/y/", ["/x/z.py"])
    assert (names.path, names.repository) == ("src/a.py", "y")
    names = name_files("C:\\code\\shop\\a.py", "", "C:\\code\\shop", [])
    assert (names.path, names.repository) == ("a.py", "shop")
    assert not name_files("", "", "", []).known
    assert name_files("", "python", "", []).path == "untitled.python"


def test_the_comment_is_one_in_its_language() -> None:
    for path, line in {
        "a/b.py": "# a/b.py\n",
        "b.rs": "// b.rs\n",
        "b.html": "<!-- b.html -->\n",
        "b.css": "/* b.css */\n",
        "untitled.lua": "-- untitled.lua\n",
        "README": "",
        "a.unknown": "",
    }.items():
        assert comment_line(path) == line
        assert not re.search(r"\n.", line)
