"""No bracket of the user's is eaten, whatever prose, labels and strings stand around the cursor."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akunu_py.completion.request import CompletionRequest
from akunu_py.completion.stops import CompletionStops

# Brackets that close nothing, as they stand in real files.
PROSE = [
    '"""Ways:\n\n1) do this\n2) do that\n"""\n',
    "# 1) do this :)\n",
    "// see a), b) and c]\n",
    "/* 1) one\n * 2) two } */\n",
    "-- 1) do this\n",
    "<!-- :) -->\n",
    'case "$x" in\n  a | b) run ;;\n  *) stop ;;\nesac\n',
    "const closing = /[)\\]}]/g;\n",
    "text.replace(/[)]/, '')\n",
    "smile = ':)' + \")]}\"\n",
    "c = ')'; d = '}';\n",
    "Well :) then.\n",
    "x = `)]}`\n",
    "    s = '''\n) }\n'''\n",
]
# What is at the cursor, what the model says there, and what follows in the file.
PLACES = [
    ('print("hello ', 'world")', ""),
    ("x = foo(a, ", "b)", ""),
    ("    values = [1, ", "2, (3)]", ""),
    ("foo({ a: ", "[1] });", ""),
    ("if (a && ", "f(b)) {\n  c();\n}", ""),
    ("items.map((x) => ", "x.y(1))", ""),
    ("f(\n    a,\n    b", ")", ""),
    ("echo $(date ", "+%s)", ""),
    ("  a", ") run ;;", ""),
    ("1", ") do this", ""),
    ("# Note (see ", "a), b) and c)", ""),
    ("foo(", "a, g(b)", ")"),
    ("foo([", "1, (2)", "])"),
    ('say("', "hello :)", '")'),
    ("f(() => {", "\n  g();\n", "});"),
    ("function f() {", "\n  return (1);\n", "}"),
    ("if (x) {\n  ", "y(1);", "\n} else {\n  z();\n}"),
    ("foo(\n  ", "a(1),", "\n)\n"),
    ('x = """', "\n1) one\n", '"""'),
    ("  /**", "\n   * :) (\n   ", "*/"),
]


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(PROSE), max_size=3).map("".join),
    st.sampled_from(PLACES),
    st.lists(st.sampled_from(PROSE), max_size=3).map("".join),
    st.booleans(),
)
def test_only_the_line_and_what_was_closed_for_it_count(
    above: str, place: tuple[str, str, str], below: str, repeats: bool
) -> None:
    """repeats: the model also says what stands behind the cursor."""
    begun, text, behind = place
    stops = CompletionStops(CompletionRequest(above + begun, behind + "\n\n" + below))
    more = behind if repeats and not behind.startswith("\n") else ""
    whole = stops.cut(text + more, final=True).text
    assert whole.rstrip() == text.rstrip()
    for end in range(len(text + more) + 1):
        assert whole.startswith(stops.cut((text + more)[:end]).text)


@pytest.mark.parametrize("closed", [")", "]", "}"])
def test_what_nothing_opened_ends_it(closed: str) -> None:
    assert (
        CompletionStops(CompletionRequest("x = a b", "")).cut(f"c{closed}\n", final=True).text
        == "c"
    )


def test_what_is_closed_behind_is_not_closed_again() -> None:
    for prefix, suffix, output, kept in [
        ("f(", ")", "a)", "a"),
        ("f(\n    ", "\n)\n", "a\n)\nb", "a"),
        ("f(() => {\n  ", "\n});\n", "g();\n});\nh();", "g();"),
        ("class A {\n  void f() {\n    ", "\n}\n", "g();\n  }\n}\n", "g();\n  }"),
        ("if (foo(", ") {", "a)) {", "a)"),
        ('say("', '")', 'hello")', "hello"),
        ('x = """', '"""', 'Doc."""\n', "Doc."),
        ("    /** ", " */", "Doc. */", "Doc."),
    ]:
        assert (
            CompletionStops(CompletionRequest(prefix, suffix)).cut(output, final=True).text == kept
        )
