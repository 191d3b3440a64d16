"""Where completions end: lines, blocks, brackets, and what is there already."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from akunu_py.completion.brackets import OpenBrackets
from akunu_py.completion.request import CompletionRequest
from akunu_py.completion.stops import CompletionStops

FUNCTION = "def f(n):\n"


@pytest.mark.parametrize(
    ("prefix", "suffix", "output", "kept"),
    [
        # A line that is begun: this line, and the block that it opens.
        ("x = ", "", "1\ny = 2\n", "1"),
        (FUNCTION[:-1], "", "\n    return n\n\ndef g():\n", "\n    return n"),
        ("if a", "", ":\n    b()\n    c()\nelse:\n", ":\n    b()\n    c()"),
        ("f(a", "", ",\n  b)\ng()\n", ",\n  b)"),
        ("def f(a", "", ",\n      b):\n    return a\nx\n", ",\n      b):\n    return a"),
        ("x = [", "", "\n    1,\n]\ny\n", "\n    1,\n]"),
        ("while read x; do", "", "\n  echo\ndone\nls\n", "\n  echo\ndone"),
        # An empty line in a block: the block, a shallower line ends it.
        (FUNCTION + "    ", "", "a()\n    b()\n\n    c()\nd()\n", "a()\n    b()\n\n    c()"),
        (FUNCTION + "    ", "", "a()\n\n\n\n    b()\n", "a()"),
        ("function f() {\n  ", "", "return 1;\n}\nf()\n", "return 1;\n}"),
        ("function f() {\n  ", "\n}\n", "return 1;\n}\nf()\n", "return 1;"),
        ("def f\n  ", "", "if x\n    y\n  end\nend\nz", "if x\n    y\n  end\nend"),
        (FUNCTION, "", "    return n\n\nx = 1\n", "    return n"),
        # A comment that announces the next line: its statement, if the model begins a line.
        ("# The sum.", "", "\ntotal = a + b\nprint(total)\n", "\ntotal = a + b"),
        (FUNCTION + "    # The sum.", "", "\n    return n\n\nx\n", "\n    return n"),
        (
            FUNCTION + "    # If not.",
            "",
            "\n    if n:\n        a()\n    b()\n",
            "\n    if n:\n        a()",
        ),
        ("  // Adds.", "", "\n  f(a) {\n    b();\n  }\n  g() {}\n", "\n  f(a) {\n    b();\n  }"),
        ("-- all", "\n", "\nSELECT a\nFROM b;\nSELECT c;\n", "\nSELECT a\nFROM b;"),
        ("# The sum", "", " of a and b.\ntotal = a + b\n", " of a and b."),
        ("# The sum.", "\ntotal = a\n", "\ntotal = a\n", ""),
        ("#include <a.h>", "", "\n#include <b.h>\n#include <c.h>\n", ""),
        # The margin: one statement with its block; what a decorator needs.
        ("a()\n", "", "def g():\n    b()\n\n    c()\nd()\n", "def g():\n    b()\n\n    c()"),
        ("a()\n", "", "\n@b\ndef c():\n    d()\ne()\n", "\n@b\ndef c():\n    d()"),
        ("a()\n", "", "b()\nc()\n", "b()"),
        # More code behind the cursor: this line, without what is there.
        ("f(", ", b)", "a, b)\ng()", "a"),
        ("f(", ")", "a, b)\ng()", "a, b"),
        ("f(", ")", "g(1)\n", "g(1)"),
        ('say("', '")', 'hello")\nx', "hello"),
        ("return ", "+ b", "a ", "a "),
        # Brackets: none is closed that is closed behind the cursor, or that nothing opened.
        ("f(g(", "\n)\n", "1))\n", "1)"),
        ("x = 1", "", ")\ny", ""),
        ("x = ", "", '")" + f(1))', '")" + f(1)'),
        ("x = ", "", "1  # :)\ny", "1  # :)"),
        ("fn f<'a>(x: &'a str", "", ") {\n    x\n}\nfn g", ") {\n    x\n}"),
        # A line that stands there more than once tells nothing without the next, nor do decorators.
        ("f()\n  check(x)\n  ", "\n  check(x)\n  k()\n", "check(x)\n  h()", "check(x)\n  h()"),
        ("f()\n  check(x)\n  ", "\n  check(x)\n  k()\n", "check(x)\n  k()\n  l()", ""),
        ("f()\n  check(x)\n  ", "\n  check(x)\n  k()\n", "check(x)", ""),
        ("c {\n  ", "\n  @A\n  @B\n  int g();\n}", "@A\n  @B\n  int f();", "@A\n  @B\n  int f();"),
        ("c {\n  ", "\n  @A\n  @B\n  int g();\n}", "@A\n  @B\n  int g();\n}", ""),
        # What is too far above to be seen may have opened what is closed.
        ("x = [\n" + "  1,\n" * 9000 + "  ", "", "2,\n];\n", "2,\n];"),
        # The next line of the buffer is not repeated.
        ("a = 1\n", "\nb = 2\n", "b = 2\nc = 3\n", ""),
        (FUNCTION + "    ", "\n    return n\n", "n += 1\n    return n\n", "n += 1"),
        ("a = 1\n", "\nb = 2\n", "b = 22\n", "b = 22"),
        (FUNCTION + "    ", "\n    # It.\n    return a\n", "return a\n", ""),
        (FUNCTION + "    ", "\n    // A\n    // B\n    c()\n", "a()\n    // B\n", "a()"),
    ],
)
def test_ends(prefix: str, suffix: str, output: str, kept: str) -> None:
    assert CompletionStops(CompletionRequest(prefix, suffix)).cut(output, final=True).text == kept


def test_what_is_over_is_known_at_once() -> None:
    """Not a token more is asked of the model than is needed to know."""
    assert CompletionStops(CompletionRequest("x = ", "")).cut("1\n").done
    assert CompletionStops(CompletionRequest("f(", ")")).cut("1)").done
    assert CompletionStops(CompletionRequest(FUNCTION + "    ", "")).cut("a()\nb").done
    assert not CompletionStops(CompletionRequest(FUNCTION + "    ", "")).cut("a()\n").done
    assert (
        not CompletionStops(CompletionRequest("if a:\n  b\n  ", "")).cut("c\nen").done
    )  # maybe `end`


def test_max_lines() -> None:
    stops = CompletionStops(CompletionRequest(FUNCTION + "    ", "", max_lines=2))
    cut = stops.cut("a()\n    b()\n    c()\n")
    assert (cut.text, cut.done, cut.full) == ("a()\n    b()", True, True)
    whole = stops.cut("a()\n    b()", final=True)
    assert (whole.text, whole.full) == ("a()\n    b()", False)


@pytest.mark.long
def test_quotes_without_an_end_take_no_time() -> None:
    """Where each was looked for to the end of its line, this line took hours."""
    for quote in "\"'":
        text = (quote + "\\") * 100_000
        assert (
            CompletionStops(CompletionRequest(text, text)).cut("x = 1)", final=True).text == "x = 1"
        )
    assert depth("'" + "x" * 999 + "('") == 0
    assert depth("'" + "x" * 9_999 + "('") == 1  # and so long ones are read as code


def depth(text: str) -> int:
    return OpenBrackets("", "").depth(text)


def test_brackets() -> None:
    assert depth("f([{") == 3
    assert depth("f('(' \"[\" # {\n") == 1
    assert depth("don't (it's") == 1
    assert depth('"(') == 1  # no end in its line: not a quote
    assert depth("#count() {\n# (\n#a .b {\ncolor: #fff; [") == 3
    assert depth("x = /[)]/; s = `(`; -- (\n/* ( */ (") == 1
    assert depth("{ ( }") == 0  # what was left open inside is closed too
    assert depth("f(function() { a) b") == 2


WORDS = ["    ", "  ", "b = ", "def f", "end", "//", ", ", "done", '"' * 3, "/*", "*/", "try", "- "]
PIECES = st.lists(
    st.sampled_from([*"\n\na()[]{}:\"'# x@\\\t/`;.|", *WORDS]),
    max_size=16,
).map("".join)


@pytest.mark.long
@settings(max_examples=160, deadline=None)
@example("'", "'", "a'x", 0)
@given(PIECES, PIECES, PIECES, st.sampled_from([0, 2]))
def test_streaming_is_a_beginning_of_the_whole(
    prefix: str, suffix: str, output: str, max_lines: int
) -> None:
    """Whatever pieces it comes in: nothing is given out that is not kept, `done` means done."""
    stops = CompletionStops(CompletionRequest(prefix, suffix, max_lines=max_lines))
    whole = stops.cut(output, final=True).text
    given = ""
    for end in range(len(output) + 1):
        cut = stops.cut(output[:end])
        assert whole.startswith(cut.text)
        assert cut.text.startswith(given) or given.startswith(cut.text)
        given = max(given, cut.text, key=len)
        if cut.done:
            assert cut.text == whole
            break
    assert whole.startswith(given)
    assert output.startswith(whole)
