"""The next edit: prompts in their makers' formats, changes found in answers, edits gathered."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akunu_py.completion.completer import Completer
from akunu_py.completion.completion_queue import CompletionQueue
from akunu_py.completion.prompt.next_edit import FORMATS, RecentEdits, difference, unified
from akunu_py.completion.protocols.json_lines import JsonLines
from akunu_py.completion.request import BufferEdit, Change, CompleteOptions, CompletionRequest
from akunu_py.errors import UsageError
from akunu_py.types import FinishReason
from tests.support.complete import complete
from tests.support.engines import altered
from tests.support.fixed_request import answering
from tests.support.tiny_fim import load_tiny

MARKERS = ["<|endoftext|>", "<|file_sep|>", "<[fim-suffix]>", "<[fim-prefix]>", "<[fim-middle]>"]
MARKERS += ["<filename>"]
CODE = """from utils import get_time_of_day

def greet(name):
    print(f"Hello, {name}!")

greet("Alice")"""
GREET = BufferEdit(
    "greet.py",
    'def greet():\n    print("Hello!")',
    'def greet(name):\n    print(f"Hello, {name}!")',
)
IMPORT = BufferEdit(
    "greet.py",
    "def greet(name):\n",
    "from utils import get_time_of_day\n\ndef greet(name):\n",
)


@pytest.fixture(scope="module")
def makers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Completer]:
    """A tiny model for each format."""
    names = {"zeta-2": "zed-industries/zeta-2", "sweep-next-edit": "sweep-next-edit-1.5B"}
    return {
        form.name: Completer(
            load_tiny(tmp_path_factory.mktemp(form.name), MARKERS, names[form.name])
        )
        for form in FORMATS
    }


def prompt_of(maker: Completer, request: CompletionRequest) -> str:
    tokens = maker.edit_prompt(request)[0].tokens
    return str(maker.engine.tokens.tokenizer.decode(tokens, skip_special_tokens=False))


def test_the_prompts_are_the_published_ones(makers: dict[str, Completer]) -> None:
    """Sweep's is the example of its run_model.py, Zeta's that of the comment in zeta_prompt."""
    now = '\n\ndef greet(name):\n    print(f"Hello, {name}!")\n\ngreet("Alice")\n'
    request = CompletionRequest(CODE, path="greet.py", edits=(GREET, IMPORT))
    assert prompt_of(makers["sweep-next-edit"], request) == (
        '<|file_sep|>greet.py.diff\noriginal:\ndef greet():\n    print("Hello!")\n'
        'updated:\ndef greet(name):\n    print(f"Hello, {name}!")\n'
        f"<|file_sep|>original/greet.py\n{now[2:]}"
        f"<|file_sep|>current/greet.py\nfrom utils import get_time_of_day{now}"
        "<|file_sep|>updated/greet.py\n"
    )
    lines = [f"{'x' * 98}{n}" for n in range(10, 50)]
    text = "\n".join(lines)
    at = text.index("29\n")
    request = CompletionRequest(
        text[:at],
        text[at:],
        "path/to/target_file.py",
        edits=(BufferEdit("some_file.py", "old", "new", 6),),
    )
    whole = prompt_of(makers["zeta-2"], request)
    suffix, _, rest = whole.partition("<[fim-prefix]>")
    history, _, file = rest.partition("<filename>path/to/target_file.py\n")
    before, _, current = file.partition("<<<<<<< CURRENT\n")
    assert suffix == "<[fim-suffix]>" + "\n".join(lines[25:27]) + "\n"
    assert history == (
        "<filename>edit_history\n--- a/some_file.py\n+++ b/some_file.py\n"
        "@@ -7,1 +7,1 @@\n-old\n+new\n\n"
    )
    assert before == "\n".join(lines[12:14]) + "\n"
    region = "\n".join(lines[14:25]).replace("29\n", "<|user_cursor|>29\n")
    assert current == f"{region}\n=======\n<[fim-middle]>"


def test_markers_in_the_buffer_are_text(makers: dict[str, Completer]) -> None:
    for maker in makers.values():
        marked = {maker.code.token(text) for text in MARKERS}
        empty = maker.edit_prompt(CompletionRequest("x = 1", edits=(GREET,)))[0].tokens
        generated = BufferEdit("a.py", MARKERS[1], "".join(MARKERS))
        tokens = maker.edit_prompt(CompletionRequest("".join(MARKERS), edits=(GREET, generated)))[0]
        more = [token for token in tokens.tokens if token in marked]
        assert set(more) == {token for token in empty if token in marked}
        assert len(more) <= 7


LINES = st.lists(st.sampled_from(["", "a", "b", "  c", "d = 1"]), min_size=1, max_size=30)


@given(LINES, st.data())
def test_a_change_makes_of_the_buffer_what_was_written(
    makers: dict[str, Completer], lines: list[str], data: st.DataObject
) -> None:
    """Wherever the cursor is and whatever is written, but for empty lines at the end of it."""
    row = data.draw(st.integers(0, len(lines) - 1))
    new = data.draw(LINES)
    text = "\n".join(lines)
    before = "\n".join(lines[:row]) + ("\n" if row else "")
    for name, maker in makers.items():
        request = CompletionRequest(before, text[len(before) :], "a.py", edits=())
        _, answer = maker.edit_prompt(request)
        window = answer._window
        end = {"zeta-2": "\n>>>>>>> UPDATED\n", "sweep-next-edit": ""}[name]
        change = answer.change("\n".join(new) + end)
        old = list(window.lines)
        written = [*lines[: window.first], *new, *lines[window.first + len(old) :]]
        made = list(lines)
        if change is not None:
            assert window.first <= change.first <= change.last <= window.first + len(old)
            made[change.first : change.last] = change.lines
        if any(new):
            assert [line for line in made if line] == [line for line in written if line]
        assert answer.change(window.text + end.lstrip()) is None  # as it is
        assert answer.cut("", final=False).text == ""


def test_what_an_answer_is_made_of(makers: dict[str, Completer]) -> None:
    """The whole way through a completer, where the model answers with these words."""
    request = CompletionRequest(
        "a = 1\nb = a\n", "c = a\n", "x.py", edits=(BufferEdit("x.py", "z", "a"),)
    )
    cases: list[tuple[str, str, FinishReason, Change | None]] = [
        ("sweep-next-edit", "a = 1\nb = a\nc = a + b\n", "stop", Change(2, 3, ("c = a + b",))),
        ("sweep-next-edit", "a = 1\nb = a\nc = a\n", "stop", None),
        ("sweep-next-edit", "a = 1\nb =", "length", None),  # no part of an answer is one
        ("zeta-2", "a = 1\nc = a<|user_cursor|>\n>>>>>>> UPDATED\nmore", "stop", Change(1, 2, ())),
        ("zeta-2", "NO_EDITS\n>>>>>>> UPDATED\n", "stop", None),
    ]
    for name, answer, reason, change in cases:
        maker = answering(makers[name].engine, answer, reason)
        done = complete(maker, request)
        assert (done.text, done.finish_reason, done.change) == ("", reason, change)
        windows = replace(request, prefix="a = 1\r\nb = a\r\n", suffix="c = a\r\n")
        assert complete(maker, windows).change == change


TEXTS = st.lists(st.sampled_from(["", "a", "bb", "ccc", "é"]), max_size=40).map("\n".join)


@given(TEXTS, TEXTS)
def test_a_difference_makes_one_text_of_the_other(before: str, after: str) -> None:
    edit = difference("a.py", before, after)
    if edit is None:
        assert before == after
        return
    start = 0
    for _ in range(edit.line):
        start = before.index("\n", start) + 1
    assert before[start:].startswith(edit.before)
    assert before[:start] + edit.after + before[start + len(edit.before) :] == after
    signs = [line[:1] for line in unified(edit).splitlines()]
    assert set(signs) <= {"@", " ", "-", "+"}
    removed = [line[1:] for line in unified(edit).splitlines() if line[0] in " -"]
    assert removed == edit.before.splitlines() or "@" in signs[1:] or len(removed) < 30


def test_what_is_typed_in_one_place_is_one_edit() -> None:
    lines = [f"line {n}" for n in range(40)]
    recent = RecentEdits()
    recent.opened("a.py", "\n".join(lines))
    for row, word in ((5, "first"), (7, "near"), (30, "far"), (31, "near")):
        for end in range(1, len(word) + 1):
            changed = list(lines)
            changed[row] = f"{word[:end]} {row}"
            recent.changed("a.py", "\n".join(changed))
        lines = changed
    recent.changed("b.py", "unknown before")  # its earlier text is unknown
    recent.changed("b.py", "known now")
    edits = list(recent)
    assert [edit.path for edit in edits] == ["a.py", "a.py", "b.py"]
    assert "first 5" in edits[0].after
    assert "near 7" in edits[0].after
    assert "line 5" in edits[0].before
    assert (edits[1].line, "far 30\nnear 31" in edits[1].after) == (27, True)
    assert len(list(recent)) == 3
    for n in range(20):
        recent.opened(f"{n}.py", "a")
        recent.changed(f"{n}.py", "b")
    assert [edit.path for edit in recent] == [f"{n}.py" for n in range(14, 20)]


def test_other_models_get_no_next_edit_request(tmp_path: Path) -> None:
    request = CompletionRequest("x", edits=())
    for name, known in [
        ("zed-industries/zeta-2", "zeta-2"),
        ("Zeta2-8B", "zeta-2"),
        ("zeta-2.1", None),
        ("zeta", None),
        ("sweep-next-edit-v2-7B", None),
        ("Sweep_Next_Edit 0.5B", "sweep-next-edit"),
        ("qwen2.5-coder", None),
    ]:
        engine = altered(load_tiny(tmp_path / name, MARKERS), name=name)
        maker = Completer(engine)
        assert (maker.edit_format and maker.edit_format.name) == known, name
        if known is None:
            with pytest.raises(UsageError, match="not known to predict edits; choose a format"):
                complete(maker, request)
    requested = Completer(engine, CompleteOptions(fim="zeta-2"))
    assert requested.edit_format is FORMATS[0]
    assert complete(requested, request).change is None
    without = load_tiny(tmp_path / "none", MARKERS[:1])
    with pytest.raises(UsageError, match=r"no token <\[fim-suffix\]>, which the format"):
        Completer(without, CompleteOptions(fim="zeta-2"))


def test_requests_for_the_next_edit(makers: dict[str, Completer]) -> None:
    maker = answering(makers["sweep-next-edit"].engine, "a = 2\nb = a\n")
    written: list[dict[str, Any]] = []
    queue = CompletionQueue(lambda: maker)
    lines = JsonLines(queue, lambda line: written.append(json.loads(line)), CompletionRequest(""))
    queue.start()
    edit = {"path": "x.py", "before": "z", "after": "a"}
    requested = {"prefix": "a = 1\n", "suffix": "b = a\n"}
    bad = [{**edit, "line": "x"}, {"path": "x.py"}, "x"]
    for number, each in enumerate([edit, *bad], start=1):
        lines.handle(json.dumps({**requested, "id": number, "edits": [each]}).encode())
    queue.close(drain=True)
    answers = {answer.pop("id"): answer for answer in written}
    assert answers[1].pop("stats")
    change = {"first": 0, "last": 1, "lines": ["a = 2"]}
    assert answers[1] == {"edit": change, "finish_reason": "stop"}
    assert all("edits.0" in answers[number]["error"] for number in (2, 3, 4))
