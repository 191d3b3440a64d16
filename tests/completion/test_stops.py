"""Where completions end: lines, blocks, brackets, strings, loops, and existing text."""

import textwrap
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from akunu_py.completion.brackets import OpenBrackets
from akunu_py.completion.completion_request import CompletionRequest
from akunu_py.completion.stops import CompletionStops
from akunu_py.completion.syntax import syntax_of
from tests.measure.oracle import score_directory
from tests.support.paths import golden_sources


def kept(prefix: str, suffix: str, output: str, path: str = "", **more: Any) -> str:
    """Return the completion, and check that each part of `output` streams a beginning of it."""
    stops = CompletionStops(CompletionRequest(prefix, suffix, path, **more))
    whole = stops.cut(output, final=True).text
    assert output.startswith(whole)
    for end in range(len(output) + 1):
        cut = stops.cut(output[:end])
        assert whole.startswith(cut.text)
        if cut.done:
            assert cut.text == whole
            break
    return whole


FUNCTION = "def f(n):\n"


@pytest.mark.parametrize(
    ("prefix", "suffix", "output", "expected"),
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
        (FUNCTION + "    # If.", "", "\n    if n:\n     a()\n    b()\n", "\n    if n:\n     a()"),
        ("  // Adds.", "", "\n  f(a) {\n    b();\n  }\n  g() {}\n", "\n  f(a) {\n    b();\n  }"),
        ("-- all", "\n", "\nSELECT a\nFROM b;\nSELECT c;\n", "\nSELECT a\nFROM b;"),
        ("# The sum", "", " of a and b.\ntotal = a + b\n", " of a and b."),
        ("# The sum.", "\ntotal = a\n", "\ntotal = a\n", ""),
        ("#include <a.h>", "", "\n#include <b.h>\n#include <c.h>\n", ""),
        # The margin: one statement with its block; what a decorator needs.
        ("a()\n", "", "def g():\n    b()\n\n    c()\nd()\n", "def g():\n    b()\n\n    c()"),
        ("a()\n", "", "\n@b\ndef c():\n    d()\ne()\n", "\n@b\ndef c():\n    d()"),
        ("a()\n", "", "b()\nc()\n", "b()"),
        ("", "", '@file:JvmName("A")\n\npackage a\n', '@file:JvmName("A")'),
        # More code behind the cursor: this line, without what is there.
        ("f(", ", b)", "a, b)\ng()", "a"),
        ("f(", ")", "g(1)\n", "g(1)"),
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
        # A bracket behind the cursor is not closed again, and one that nothing opened ends it.
        ("f(", ")", "a)", "a"),
        ("f(\n    ", "\n)\n", "a\n)\nb", "a"),
        ("f(() => {\n  ", "\n});\n", "g();\n});\nh();", "g();"),
        ("class A {\n  void f() {\n    ", "\n}\n", "g();\n  }\n}\n", "g();\n  }"),
        ("if (foo(", ") {", "a)) {", "a)"),
        ('say("', '")', 'hello")', "hello"),
        ('x = """', '"""', 'Doc."""\n', "Doc."),
        ("    /** ", " */", "Doc. */", "Doc."),
        *[("x = a b", "", f"c{closing}\n", "c") for closing in ")]}"],
    ],
)
def test_ends(prefix: str, suffix: str, output: str, expected: str) -> None:
    assert kept(prefix, suffix, output) == expected


SCSS = "\n\n.more {\n  a: b;\n}\n"


@pytest.mark.parametrize(("path", "above", "expected", "more"), [
    ("a.sql", "", "CREATE VIEW a AS\n\nSELECT b\n\nFROM c;", "\nDROP d;"),
    ("a.sql", "", "SELECT a\n\nFROM b\n\nWHERE c;", "\n\nSELECT d;"),
    ("a.sql", "", "SELECT a", "\n\nSELECT b;"),
    ("a.sql", "", "INSERT INTO a\nVALUES (1)\n\nON CONFLICT DO NOTHING;", "\nSELECT b;"),
    ("a.sql", "AS 'a", "b'", "\nC;"),
    ("a.rs", "", "#![allow(\n    dead_code, // (\n    b,\n)]", "\n\nuse c;"),
    ("a.scss", "$x: 1;\n\n", ".a-#{$b} {\n  c: d;\n}", SCSS),
    ("a.scss", "$x: 1;\n\n", '@include a("b") {\n  .c#{$d}-e { f: g; }\n}', SCSS),
    ("a.scss", "$x: 1;\n\n", "@mixin a($b: 1px, $c...) {\n  @content;\n}", SCSS),
    ("a.scss", "$x: 1;\n\n", "#{$a} {\n  b: c;\n}", SCSS),
    ("a.html", "", "{% if a %}\n  {{ b }}\n{%- else %}\n  c\n{%- endif %}", "\n{{ d }}\n"),
    ("a.html", "{% panel a %}", "\n  {{ b }}\n{% endpanel %}", "\n{% load c %}\n"),
    ("a.html", "<p>\n", "{{ a }}", "\n{% load b %}\n"),
    ("a.cpp", "", "#define A(b) \\\n  if (b) { \\\n    c; \\\n  }", "\n\n#define C"),
    ("a.cpp", "#  ifdef A", "\n    b = c;\n    d();", "\n#  endif\n    e();"),
    ("a.pl", "sub f {\n  ", "die unless g \\(my $a = 0);\n  h();\n}", "\ni();"),
])  # fmt: skip
def test_ends_in_languages(path: str, above: str, expected: str, more: str) -> None:
    below = "\nC;  -- let's not\n"  # this apostrophe closes no string
    assert kept(above, below if above.startswith("AS") else "\n", expected + more, path) == expected


def test_ends_before_closing_text() -> None:
    assert kept("{% if a", "}\n<p>", " %}\n<p>", "a.html") == " %"
    assert kept("{{ {\n  ", "\n}[a] }}\n", '"b": 1,\n}[a] }}\n', "a.html") == '"b": 1,'
    output = "\n\n#if b\nint c;\n#endif\n"
    assert kept("namespace a {", "}\n", output, "a.cpp") == output


@pytest.mark.parametrize("output", [
    'case "$1" in a) b ;; c | "d e") f ;; esac', "case $x in '') usage ;; esac",
    'case "$1" in\n  --help | --h )\n    a ;;\n  "b c" | \\?)\n    d ;;\nesac',
    "sed 's/\"//' | cut -d' ' -f1\n", 'echo it\\\'s "$(b "c")"\n', "cat <<eof\ndon't (\neof",
])  # fmt: skip
def test_shell(output: str) -> None:
    expected = output if "<<" in output else output.strip().replace("\n", "\n  ")
    below = "\n  last\n}\n"
    assert kept("f() {\n  a\n  ", below, expected + below, "a.sh").rstrip() == expected


@pytest.mark.parametrize(("prefix", "output", "is_done"), [
    ("x = ", "1\n", True),
    (FUNCTION + "    ", "a()\nb", True),
    (FUNCTION + "    ", "a()\n", False),
    ("if a:\n  b\n  ", "c\nen", False),  # maybe `end`
])  # fmt: skip
def test_the_end_is_known_without_another_token(prefix: str, output: str, is_done: bool) -> None:
    assert CompletionStops(CompletionRequest(prefix, "")).cut(output).done == is_done
    assert CompletionStops(CompletionRequest("f(", ")")).cut("1)").done


def test_max_lines() -> None:
    stops = CompletionStops(CompletionRequest(FUNCTION + "    ", "", max_lines=2))
    cut = stops.cut("a()\n    b()\n    c()\n")
    assert (cut.text, cut.done, cut.full) == ("a()\n    b()", True, True)
    whole = stops.cut("a()\n    b()", final=True)
    assert (whole.text, whole.full) == ("a()\n    b()", False)


# The line at whose end the cursor is, what belongs there, and what does not any more.
BLOCKS = {
    "ruby do": ("items.each do |x|", "\n  puts x\nend", "\nother\n"),
    "ruby begin": ("begin", "\n  a\nrescue Foo => e\n  b\nensure\n  c\nend", "\nd\n"),
    "lua": ("function f(a)", "\n  if a then\n    b()\n  end\nend", "\nlocal x\n"),
    "html": ("<ul>", "\n  <li>a</li>\n  <li>b</li>\n</ul>", "\n<p>\n"),
    "allman": ("void f(int a)", "\n{\n  if (a)\n  {\n    b();\n  }\n}", "\nvoid g()\n"),
    "csharp": ("class Foo", "\n{\n    int x;\n\n    int y;\n}", "\nclass Bar\n"),
    "jsdoc": ("/**", "\n * Adds (a.\n * @param a\n */", "\nfunction f() {\n"),
    "chain": ("const x = items", "\n  .filter((y) => y)\n  .map(f);", "\nconst z = 1;\n"),
    "pipe": ("x", "\n|> f()\n|> g()", "\ny = 1\n"),
    "sql": ("SELECT a, b", "\nFROM t\nJOIN u ON u.a = t.a\nWHERE a > 1;", "\nSELECT c\n"),
    "sql as": ("AS", "\n  OPERATOR 1 a,\n  STORAGE b;", "\nCREATE\n"),
    "pod": ("=head2 new", "\n\n  my $x = f(1);", "\n\nMakes it.\n"),
    "python try": ("try:", "\n    a()\nexcept Foo:\n    b()\nelse:\n    c()", "\nd()\n"),
    "python class": ("class A(", "B):\n    x = 1\n\n    def f(self): ...", "\ny\n"),
    "js try": ("try {", "\n  a();\n} catch (e) {\n  b();\n} finally {\n  c();\n}", "\nd();\n"),
    "docstring": ('"""', '\nDoes (this.\n\nArgs:\n    n: it\n"""', "\nx = 1\n"),
    "shell": ("for x in a; do", "\n  echo $x\ndone", "\nls\n"),
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


INDENTS = ["", "  ", "    ", "\t"]


def indent(text: str, by: str) -> str:
    """Indent `text`, apart from its first line, which continues a line."""
    first, newline, rest = text.partition("\n")
    return first + newline + textwrap.indent(rest, by)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_is_whole(name: str) -> None:
    begun, block, after = BLOCKS[name]
    for by, behind in product(INDENTS, ["", "\n", "\n\nzz(\n"]):
        text = indent(block, by)
        output = text + indent(after, by)
        assert kept(f"{by}{begun}", behind, output) == text
        assert CompletionStops(CompletionRequest(f"{by}{begun}", behind)).cut(output + "x\n").done


@pytest.mark.parametrize("name", BETWEEN)
def test_between_brackets_that_an_editor_closed(name: str) -> None:
    begun, block, closing = BETWEEN[name]
    for by, repeats in product(INDENTS, [False, True]):
        text = indent(block, by)
        text += by if text.endswith("\n") else ""  # before the closing bracket
        output = text + closing + f"\n{by}other()\n" if repeats else text
        whole = kept(f"{by}{begun}", f"{closing}\n{by}more()\n", output)
        # A tag is no bracket: its line break stays, its indentation is the editor's.
        assert whole in (text, text[: len(text) - len(by)] if name == "tag" else text)


OPENING = {
    "a.js": ("const page = ", "`", "`;"), "a.tsx": ("f(", "`", "`);"),
    "a.go": ("var page = ", "`", "`"), "a.rs": ("let page = ", 'r#"', '"#;'),
    "a.sh": ("usage=", '"', '"'), "a.sql": ("SELECT ", "'", "';"),
    "a.cpp": ("auto page = ", 'R"x(', ')x";'), "a.py": ("page = r", '"""', '"""'),
}  # fmt: skip
TEXT = "\nOne (of\n\ntwo} lines;\n  and it is deep\n"


@pytest.mark.parametrize("path", OPENING)
def test_a_string_over_lines_is_kept_whole_and_closed_once(path: str) -> None:
    begun, opening, closing = OPENING[path]
    whole = begun + opening + TEXT + closing
    for cursor in (len(begun) - 1, len(begun), len(begun + opening)):
        output = whole[cursor:]
        assert kept(whole[:cursor], "\nrest()\n", f"{output}\nmore()\n", path) == output
    below = f"\nthree\n{closing}\nrest()\n"
    assert (
        kept(f"{begun}{opening}\nOne\n", below, f"two\n{closing}\nmore()\n", path).strip() == "two"
    )

    if path in ("a.js", "a.rs", "a.sh", "a.go"):  # the text of a string closes no bracket
        quoted = "" if path == "a.go" else f"it's \\{opening[-1]}\n"
        above = f"{begun}{opening}\n)]}}\n{quoted}{closing}\n"
        assert kept(above, "", "f(a)\ng(b)\n", path) == "f(a)"


def test_languages_are_known_by_name_and_by_first_line() -> None:
    output = '"One\ntwo"'
    for prefix, language in [("usage=", "shellscript"), ("#!/bin/bash\nusage=", ""), ("x=", "sh")]:
        assert kept(prefix, "", f"{output}\nmore\n", language=language) == output
    assert kept("usage=", "", f"{output}\nmore\n") == '"One'


# Brackets that close nothing, as they stand in real files.
PROSE = [
    '"""Ways:\n\n1) do this\n2) do that\n"""\n', "# 1) do this :)\n",
    "/* 1) one\n * 2) two } */\n", "-- 1) do this\n", "<!-- :) -->\n",
    'case "$x" in\n  a | b) run ;;\n  *) stop ;;\nesac\n', "const closing = /[)\\]}]/g;\n",
    "smile = ':)' + \")]}\"\n", "Well :) then.\n", "x = `)]}`\n", "    s = '''\n) }\n'''\n",
]  # fmt: skip
# What is at the cursor, what the model says there, and what follows in the file.
PLACES = [
    ('print("hello ', 'world")', ""), ("x = foo(a, ", "b)", ""), ("foo({ a: ", "[1] });", ""),
    ("items.map((x) => ", "x.y(1))", ""), ("f(\n    a,\n    b", ")", ""),
    ("echo $(date ", "+%s)", ""), ("  a", ") run ;;", ""), ("# Note (see ", "a), b) and c)", ""),
    ("foo(", "a, g(b)", ")"), ('say("', "hello :)", '")'), ("f(() => {", "\n  g();\n", "});"),
    ("function f() {", "\n  return (1);\n", "}"), ("foo(\n  ", "a(1),", "\n)\n"),
    ('x = """', "\n1) one\n", '"""'), ("  /**", "\n   * :) (\n   ", "*/"),
]  # fmt: skip


@pytest.mark.long
@settings(max_examples=200)
@given(
    st.lists(st.sampled_from(PROSE), max_size=3).map("".join),
    st.sampled_from(PLACES),
    st.lists(st.sampled_from(PROSE), max_size=3).map("".join),
    st.booleans(),
)
def test_brackets_in_prose_and_strings_do_not_count(
    above: str, place: tuple[str, str, str], below: str, repeats: bool
) -> None:
    """repeats: the model also generates the text behind the cursor."""
    begun, text, behind = place
    more = behind if repeats and not behind.startswith("\n") else ""
    whole = kept(above + begun, behind + "\n\n" + below, text + more)
    assert whole.rstrip() == text.rstrip()


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


@pytest.mark.parametrize(("language", "text", "depth"), [
    ("python", "int(a // b", 1), ("python", "f(a, /*b, /", 1),
    ("python", "f(r'[(]', rb'[', f'{', \"'\", x#(", 1),
    ("shellscript", "(rm -rf ${dir}/*; ls //", 1),
    ("shellscript", "x=${#a} ${b#(} $'\\'(' # (\n(", 1),
    ("shellscript", 'x="$(a "($b" | sed \'s/"(//\' "$(c "(")")" (', 1),
    ("shellscript", "(cat <<-end\n(\n\tend\n", 1), ("perl", "($a // $b, $#{x}, 1", 1),
    ("javascript", "class A { #x = (1); get #y() {", 2),
    ("typescript", "f(`(${a}\\`\n[`, x", 1),
    ("lua", "f(#t, [[\n(]], --[==[ ( ]] ]==] 'x(' -- (", 1),
    ("csharp", '(@"C:\\", $@"a""(" + x', 1),
    ("rust", "fn f<'a>(x: &'a str, y: '(', r#\"(\"#", 1),
    ("ruby", "f(<<~text, 1\n  (\n  text\n# (\n=begin\n(\n=end\n", 1),
    ("sql", "SELECT f('it''s (', \"a\" -- (\n", 1), ("pgsql", "AS $$ SELECT (1 # 2", 1),
    ("powershell", 'f("a`"(" + \'\\\', <# ( #> 1', 1),
    ("cpp", "f(1'000, '(', L\"(\", R\"x(()\" )x\"\n#error don't (\n", 1),
    ("go", "f(`(\n`, '(', \"(\" /* ( */ // (", 1),
    ("css", "a { color: #fff; b: url(//x) /* { */", 1), ("yaml", "[a#(, 'x' # (", 2),
    ("php", '#[A(\n"(\n" // (\n# (\n', 2), ("html", "{% if (a %}<p>{{ b }}</p> {# ( #} (", 1),
    ("html", "{#- (\n#} (", 1), ("haskell", "f (x' {- ( -}) -- (\n(", 1),
])  # fmt: skip
def test_comments_and_strings_belong_to_the_language(language: str, text: str, depth: int) -> None:
    brackets = OpenBrackets("", "", syntax_of(language=language))
    assert brackets.depth(text) == depth
    assert OpenBrackets(text, "", syntax_of(language=language)).inside in ("", "#")


@pytest.mark.long
def test_quotes_without_an_end_take_no_time() -> None:
    """Searching each of these quotes up to the end of its line took hours."""
    for quote in "\"'":
        text = (quote + "\\") * 4_000
        stops = CompletionStops(CompletionRequest(text, text))
        assert stops.cut("x = 1)", final=True).text == "x = 1"
    assert depth("'" + "x" * 999 + "('") == 0
    assert depth("'" + "x" * 9_999 + "('") == 1  # such long strings count as code


INIT = "class A:\n  def f(self, a, b):\n    "
A = "    self.a = a\n"


@pytest.mark.parametrize(("prefix", "suffix", "output", "expected"), [
    # The same line, five times and more.
    (INIT, "", A[4:] + A * 40, "self.a = a"),
    (INIT, "\n  x\n", "self.b = b\n" + A * 5, "self.b = b\n    self.a = a"),
    (INIT + "self.", "", "a = a\n" + A * 10, "a = a"),
    ("x = [\n", "\n]\n", "    1000,\n" * 30, "    1000,"),
    # A few lines, five times.
    ("def f(a):\n    ", "", ("x = a\n    y = a\n    " * 5), "x = a\n    y = a"),
    ("def f(a):\n  ", "", ("x = a\n\n  y = a\n  z(a)\n  " * 8), "x = a\n\n  y = a\n  z(a)"),
    # The same text within a line.
    ("text = ", "", '"' + "very " * 60 + '"\n', '"very very very'),
    ("x = [", "", "10, " * 50 + "]\n", "10, 10, 10, "),
    ("# ", "", "ab" * 400, "ab" * 6),
    # The lines above, said again.
    ("total = price * count\n", "", "total = price * count\nprint(total)\n", ""),
    ("f():\n  first(1)\n  second_one(2)\n  ", "", "first(1)\n  second_one(2)\n  a()\n", ""),
    # The markers of a conflict.
    ("a = 1\n", "", "<<<<<<< HEAD\nb = 2\n=======\nb = 3\n>>>>>>> x\n", ""),
    ("def f():\n    ", "", "a()\n<<<<<<< HEAD\n    b()\n", "a()"),
    ("def f():\n    ", "", "a()\n>>>>>>>", "a()"),
])  # fmt: skip
def test_loops_and_echoes_of_a_model_are_cut(
    prefix: str, suffix: str, output: str, expected: str
) -> None:
    assert kept(prefix, suffix, output).rstrip() == expected.rstrip()
    stops = CompletionStops(CompletionRequest(prefix, suffix))
    assert stops.cut(output + "\nx\n").done  # before the model has spent its tokens
    parts = [stops.cut(output[:end]).text for end in range(len(output))]
    assert parts == sorted(parts, key=len)


@pytest.mark.parametrize(("prefix", "output"), [
    (INIT, "self.a = a\n    self.b = b\n    self.c = c\n    self.d = d"),
    (INIT, "queue.pop()\n    queue.pop()\n    queue.pop()"),  # up to four times
    ("x = [", "0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]"),
    ("rows = [\n    [0x00, 0x00, 0x00, 0x00],\n    ", "[" + "0x00, " * 20 + "],"),
    ("line = ", '"' + "-" * 200 + '"'),
    ("<table>\n  ", "| --- " * 12 + "|"),
    ("def f():\n    pass\n\n\ndef g():\n    ", "pass"),
    ("a()\n<<<<<<< HEAD\nb()\n", "======="),
    ("for a in b:\n", "    for a in b:\n        c()"),
])  # fmt: skip
def test_repetitions_of_users_are_kept(prefix: str, output: str) -> None:
    assert kept(prefix, "", output) == output


WORDS = ["    ", "  ", "b = ", "def f", "end", "//", ", ", "done", '"' * 3, "/*", "*/", "try", "- "]
PIECES = st.lists(st.sampled_from([*"\n\na()[]{}:\"'# x@\\\t/`;.|", *WORDS]), max_size=16).map(
    "".join
)
LINES = ["aa(b)", "  aa(b)", "c = 1", "", "<<<<<<<", "|||||||", "x", "}"]
LINES += ["ab" * 40, "ab" * 5, "1, " * 30]
TEXTS = st.lists(st.sampled_from(LINES), max_size=14).map("\n".join)


@pytest.mark.long
@settings(max_examples=160)
@example("'", "'", "a'x", 0)
@example("total = price", "", "total = price  \nx", 0)
@example("", "", "<<<<<<<<\nx", 0)
@given(PIECES | TEXTS, PIECES, PIECES | TEXTS, st.sampled_from([0, 2]))
def test_streaming_any_output_returns_beginnings_of_the_completion(
    prefix: str, suffix: str, output: str, max_lines: int
) -> None:
    kept(prefix, suffix, output, max_lines=max_lines)


@pytest.mark.long
def test_stop_rules_reach_their_goals_in_20_languages(tmp_path: Path) -> None:
    """At least 99.5 % of all places are safe and 95 % of all blocks whole."""
    for name, text in golden_sources().items():
        (tmp_path / name).write_text(text)
    found = score_directory(tmp_path, 2)
    assert len(found["languages"]) == 20
    assert found["all"]["places"] > 90
    assert found["reached"], found["languages"]
