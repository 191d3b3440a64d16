"""Loops and echoes of a model are cut; what a user repeats is not."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from akunu_py.completion.request import CompletionRequest
from akunu_py.completion.stops import CompletionStops

INIT = "class A:\n    def __init__(self, a, b):\n        "
PAIR = "if a:\n    b(a)\n"


@pytest.mark.parametrize(
    ("prefix", "suffix", "output", "kept"),
    [
        # The same line, five times and more.
        (INIT, "", "self.a = a\n        " * 40, "self.a = a"),
        (
            INIT,
            "\n    x\n",
            "self.b = b\n" + "        self.a = a\n" * 5,
            "self.b = b\n        self.a = a",
        ),
        (INIT + "self.", "", "a = a\n        self.a = a\n" + "        self.a = a\n" * 9, "a = a"),
        ("x = [\n", "\n]\n", "    1000,\n" * 30, "    1000,"),
        # A few lines, five times.
        ("def f(a):\n    ", "", ("x = a\n    y = a\n    " * 5), "x = a\n    y = a"),
        (
            "def f(a):\n    ",
            "",
            ("x = a\n\n    y = a\n    z(a)\n    " * 8),
            "x = a\n\n    y = a\n    z(a)",
        ),
        # The same text within a line.
        ("text = ", "", '"' + "very " * 60 + '"\n', '"very very very'),
        ("x = [", "", "10, " * 50 + "]\n", "10, 10, 10, "),
        ("# ", "", "ab" * 400, "ab" * 6),
        # The lines above, said again.
        ("total = price * count\n", "", "total = price * count\nprint(total)\n", ""),
        (
            "def f():\n    first(1)\n    second_one(2)\n    ",
            "",
            "first(1)\n    second_one(2)\n    third(3)\n",
            "",
        ),
        ("import os\nimport sys\n", "", "\nimport os\nimport sys\n", ""),
        # The markers of a conflict.
        ("a = 1\n", "", "<<<<<<< HEAD\nb = 2\n=======\nb = 3\n>>>>>>> x\n", ""),
        ("def f():\n    ", "", "a()\n<<<<<<< HEAD\n    b()\n", "a()"),
        ("def f():\n    ", "", "a()\n>>>>>>>", "a()"),
    ],
)
def test_repetitions_are_cut(prefix: str, suffix: str, output: str, kept: str) -> None:
    stops = CompletionStops(CompletionRequest(prefix, suffix))
    cut = stops.cut(output, final=True)
    assert cut.text.rstrip() == kept.rstrip()
    # It ends at once, before the model has spent its tokens.
    assert stops.cut(output + "\nx\n").done
    given = ""
    for end in range(len(output)):
        part = stops.cut(output[:end]).text
        assert cut.text.startswith(part)
        assert len(part) >= len(given)
        given = part


@pytest.mark.parametrize(
    ("prefix", "output"),
    [
        (INIT, "self.a = a\n        self.b = b\n        self.c = c\n        self.d = d"),
        (INIT, "queue.pop()\n        queue.pop()\n        queue.pop()"),  # up to four times
        ("x = [", "0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]"),
        ("rows = [\n    [0x00, 0x00, 0x00, 0x00],\n    ", "[" + "0x00, " * 20 + "],"),
        ("line = ", '"' + "-" * 200 + '"'),
        (
            "<table>\n  ",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        ),
        ("def f():\n    pass\n\n\ndef g():\n    ", "pass"),
        ("{\n  {\n  }\n", "}"),
        ("a()\n<<<<<<< HEAD\nb()\n", "======="),
        ("for a in b:\n", "    for a in b:\n        c()"),
    ],
)
def test_what_is_no_loop_is_kept(prefix: str, output: str) -> None:
    assert CompletionStops(CompletionRequest(prefix, "")).cut(output, final=True).text == output


LINES = st.sampled_from(["aa(b)", "  aa(b)", "c = 1", "", "<<<<<<<", "|||||||", "x", "}"])
TEXTS = st.lists(st.one_of(LINES, st.sampled_from(["ab" * 40, "ab" * 5, "1, " * 30])), max_size=14)


@settings(max_examples=120, deadline=None)
@example(["total = price"], ["total = price  ", "x"])
@example([""], ["<<<<<<<<", "x"])
@given(TEXTS, TEXTS)
def test_streaming_is_a_beginning_of_the_whole(above: list[str], output: list[str]) -> None:
    stops, text = CompletionStops(CompletionRequest("\n".join(above), "")), "\n".join(output)
    whole = stops.cut(text, final=True).text
    for end in range(len(text) + 1):
        cut = stops.cut(text[:end])
        assert whole.startswith(cut.text)
        if cut.done:
            assert cut.text == whole
            break
