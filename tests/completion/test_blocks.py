"""Blocks are completed where they begin, also where the model begins with a newline."""

from __future__ import annotations

import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akunu_py.completion.request import CompletionRequest
from akunu_py.completion.stops import CompletionStops

# The line at whose end the cursor is, what belongs there, and what does not any more.
BLOCKS = {
    "ruby do": ("items.each do |x|", "\n  puts x\nend", "\nother\n"),
    "ruby class": ("class Foo", "\n  def bar\n    1\n  end\nend", "\nclass Bar\n"),
    "ruby begin": ("begin", "\n  a\nrescue Foo => e\n  b\nensure\n  c\nend", "\nd\n"),
    "lua": ("function f(a)", "\n  if a then\n    b()\n  end\nend", "\nlocal x\n"),
    "html": ("<ul>", "\n  <li>a</li>\n  <li>b</li>\n</ul>", "\n<p>\n"),
    "allman": ("void f(int a)", "\n{\n  if (a)\n  {\n    b();\n  }\n}", "\nvoid g()\n"),
    "csharp": ("class Foo", "\n{\n    int x;\n\n    int y;\n}", "\nclass Bar\n"),
    "jsdoc": ("/**", "\n * Adds (a.\n * @param a\n */", "\nfunction f() {\n"),
    "c comment": ("/*", "\n   Adds.\n\n   More.\n*/", "\nint x;\n"),
    "chain": ("const x = items", "\n  .filter((y) => y)\n  .map(f);", "\nconst z = 1;\n"),
    "flat chain": ("return items", "\n.filter(y)\n.map(f);", "\nnext();\n"),
    "pipe": ("x", "\n|> f()\n|> g()", "\ny = 1\n"),
    "sql": ("SELECT a, b", "\nFROM t\nJOIN u ON u.a = t.a\nWHERE a > 1;", "\nSELECT c\n"),
    "sql indented": ("select a", "\n  from t\n where b\n order by c;", "\ndrop\n"),
    "sql as": ("AS", "\n  OPERATOR 1 a,\n  STORAGE b;", "\nCREATE\n"),
    "perl sub": ("sub add", "\n{\n  my $x;\n}", "\nsub b\n"),
    "pod": ("=head2 new", "\n\n  my $x = f(1);", "\n\nMakes it.\n"),
    "python try": ("try:", "\n    a()\nexcept Foo:\n    b()\nelse:\n    c()", "\nd()\n"),
    "python with": ("with a as b:", "\n    c()\n\n    d()", "\ne()\n"),
    "python class": ("class A(", "B):\n    x = 1\n\n    def f(self): ...", "\ny\n"),
    "js try": ("try {", "\n  a();\n} catch (e) {\n  b();\n} finally {\n  c();\n}", "\nd();\n"),
    "allman try": ("try", "\n{\n  a();\n}\ncatch (E e)\n{\n  b();\n}", "\nd();\n"),
    "docstring": ('"""', '\nDoes (this.\n\nArgs:\n    n: it\n"""', "\nx = 1\n"),
    "docstring text": ('"""', 'Does this.\n\nAnd that.\n"""', "\nx = 1\n"),
    "go": ("func f() {", "\n\tif a {\n\t\tb()\n\t}\n}", "\nfunc g() {\n"),
    "shell": ("for x in a; do", "\n  echo $x\ndone", "\nls\n"),
    "rust": ("fn f() -> u8", "\n{\n    1\n}", "\nfn g()\n"),
    "yaml": ("jobs:", "\n  test:\n    - a", "\nother:\n"),
    "css": ("#main", "\n{\n  color: #fff;\n}", "\n#b {\n"),
    "haskell": ("main = do", "\n  a\n  b", "\nf x = 1\n"),
}
# Between what an editor closed for the cursor.
BETWEEN = {
    "brace": ("function f() {", "\n  return 1;\n", "}"),
    "call": ("f(() => {", "\n  g();\n\n  h();\n", "});"),
    "list": ("x = [", "\n    1,\n    (2),\n", "]"),
    "arguments": ("f(", "a,\n  b", ")"),
    "tag": ("<ul>", "\n  <li>a</li>\n", "</ul>"),
    "docstring": ('"""', "Does.\n\nArgs:\n    n: it\n", '"""'),
    "comment": ("/**", "\n * Does.\n ", "*/"),
}


def indent(text: str, by: str) -> str:
    """`text` without its first line, which continues one, indented deeper."""
    first, newline, rest = text.partition("\n")
    return first + newline + textwrap.indent(rest, by)


@pytest.mark.rotating
@pytest.mark.parametrize("name", BLOCKS)
@given(
    by=st.sampled_from(["", "  ", "    ", "\t"]), behind=st.sampled_from(["", "\n", "\n\nzz(\n"])
)
def test_a_block_is_whole(name: str, by: str, behind: str) -> None:
    begun, block, after = BLOCKS[name]
    stops = CompletionStops(CompletionRequest(f"{by}{begun}", behind))
    text = indent(block, by)
    output = text + indent(after, by)
    assert stops.cut(output, final=True).text == text
    assert stops.cut(output + "x\n").done
    for end in range(len(output)):
        assert text.startswith(stops.cut(output[:end]).text)


@pytest.mark.parametrize("name", BETWEEN)
@given(by=st.sampled_from(["", "  ", "    ", "\t"]), repeats=st.booleans())
def test_between_brackets_that_an_editor_closed(name: str, by: str, repeats: bool) -> None:
    begun, block, closing = BETWEEN[name]
    stops = CompletionStops(CompletionRequest(f"{by}{begun}", f"{closing}\n{by}more()\n"))
    text = indent(block, by)
    text += by if text.endswith("\n") else ""  # where what closes it goes
    output = text + closing + f"\n{by}other()\n" if repeats else text
    whole = stops.cut(output, final=True).text
    # A tag is no bracket: its line break stays, its indentation is the editor's.
    assert whole in (text, text[: len(text) - len(by)] if name == "tag" else text)
    for end in range(len(output)):
        assert whole.startswith(stops.cut(output[:end]).text)


def test_a_line_that_is_whole_stays_one() -> None:
    for begun, output in [
        ("x = 1", "\ny = 2\n"),
        ("class Foo", "\nclass Bar\n"),
        ("foo();", "\n.bar\n"),
        ("import a", "\nfrom b import c\n"),
        ("from a import b", "\nfrom b import c\n"),
        ("return", "\n\n    x\n"),
    ]:
        assert CompletionStops(CompletionRequest(begun, "")).cut(output, final=True).text == ""
