"""Strings over several lines, shell labels, and SQL behind an empty line end where they should."""

from __future__ import annotations

import pytest

from akunu_py.completion.request import CompletionRequest
from akunu_py.completion.stops import CompletionStops

FILES = ["a.js", "a.ts", "a.tsx", "a.go", "a.rs", "a.sh", "a.bash", "a.sql", "a.cpp", "a.py"]
OPENING = {
    "a.js": ("const page = ", "`", "`;"),
    "a.ts": ("const page = html", "`", "`;"),
    "a.tsx": ("f(", "`", "`);"),
    "a.go": ("var page = ", "`", "`"),
    "a.rs": ("let page = ", 'r#"', '"#;'),
    "a.sh": ("usage=", '"', '"'),
    "a.bash": ("awk ", "'", "' file"),
    "a.sql": ("SELECT ", "'", "';"),
    "a.cpp": ("auto page = ", 'R"x(', ')x";'),
    "a.py": ("page = r", '"""', '"""'),
}
TEXT = "\nOne (of\n\ntwo} lines;\n  and it is deep\n"


@pytest.mark.parametrize("path", FILES)
@pytest.mark.parametrize("at", ["before", "after", "within"])
def test_string_over_lines_is_kept_whole(path: str, at: str) -> None:
    begun, opening, closing = OPENING[path]
    whole = begun + opening + TEXT + closing
    cursor = {"before": len(begun), "after": len(begun + opening)}.get(at, len(begun) - 1)
    stops = CompletionStops(CompletionRequest(whole[:cursor], "\nrest()\n", path=path))
    output = whole[cursor:]
    assert stops.cut(f"{output}\nmore()\n", final=True).text == output
    for end in range(len(output)):
        assert output.startswith(stops.cut(output[:end]).text)


@pytest.mark.parametrize("path", FILES)
def test_string_that_is_closed_behind_is_not_closed_again(path: str) -> None:
    begun, opening, closing = OPENING[path]
    stops = CompletionStops(
        CompletionRequest(f"{begun}{opening}\nOne\n", f"\nthree\n{closing}\nrest()\n", path=path)
    )
    kept = stops.cut(f"two\n{closing}\nmore()\n", final=True).text
    assert kept.strip() == "two"


@pytest.mark.parametrize("path", ["a.js", "a.rs", "a.sh", "a.go"])
def test_the_text_of_a_string_closes_no_bracket(path: str) -> None:
    begun, opening, closing = OPENING[path]
    above = f"{begun}{opening}\n)]}}\nit's \\{opening[-1]}\n{closing}\n"
    if path == "a.go":
        above = f"{begun}{opening}\n)]}}\n{closing}\n"
    stops = CompletionStops(CompletionRequest(above, "", path=path))
    assert stops.cut("f(a)\ng(b)\n", final=True).text == "f(a)"


def test_languages_are_known_by_name_and_by_first_line() -> None:
    output = '"One\ntwo"'
    for prefix, language in [("usage=", "shellscript"), ("#!/bin/bash\nusage=", ""), ("x=", "sh")]:
        stops = CompletionStops(CompletionRequest(prefix, "", language=language))
        assert stops.cut(f"{output}\nmore\n", final=True).text == output
    assert (
        CompletionStops(CompletionRequest("usage=", "")).cut(f"{output}\nmore\n", final=True).text
        == '"One'
    )


@pytest.mark.parametrize(
    "output",
    [
        'case "$1" in a) b ;; c | "d e") f ;; esac',
        "case $x in '') usage ;; esac",
        'case "$1" in\n  --help | --h )\n    a ;;\n  "b c" | \\?)\n    d ;;\nesac',
        "sed 's/\"//' | cut -d' ' -f1\n",
        'echo it\\\'s "$(b "c")"\n',
        "cat <<eof\ndon't (\neof",
    ],
)
def test_shell(output: str) -> None:
    prefix = "f() {\n  a\n  "
    indented = output.strip().replace("\n", "\n  ") if "<<" not in output else output
    stops = CompletionStops(CompletionRequest(prefix, "\n  last\n}\n", path="a.sh"))
    assert stops.cut(f"{indented}\n  last\n}}\n", final=True).text.rstrip() == indented


@pytest.mark.parametrize(
    ("kept", "more"),
    [
        ("CREATE VIEW a AS\n\nSELECT b\n\nFROM c;", "\nDROP d;"),
        ("SELECT a\n\nFROM b\n\nWHERE c;", "\n\nSELECT d;"),
        ("SELECT a", "\n\nSELECT b;"),
        ("INSERT INTO a\nVALUES (1)\n\nON CONFLICT DO NOTHING;", "\nSELECT b;"),
    ],
)
def test_sql_behind_an_empty_line(kept: str, more: str) -> None:
    assert (
        CompletionStops(CompletionRequest("", "", path="a.sql")).cut(kept + more, final=True).text
        == kept
    )


@pytest.mark.parametrize(
    "block",
    [
        ".a-#{$b} {\n  c: d;\n}",
        '@include a("b") {\n  .c#{$d}-e { f: g; }\n}',
        "@each $a, $b in $c {\n  .#{$a} { d: $b; }\n}",
        "@media #{$a} and (b: c) {\n  d { e: f; }\n}",
        "@mixin a($b: 1px, $c...) {\n  @content;\n}",
        "#{$a} {\n  b: c;\n}",
    ],
)
def test_scss(block: str) -> None:
    stops = CompletionStops(CompletionRequest("$x: 1;\n\n", "\n", path="a.scss"))
    assert stops.cut(f"{block}\n\n.more {{\n  a: b;\n}}\n", final=True).text == block


def test_attribute_of_a_rust_file_over_lines() -> None:
    output = "#![allow(\n    dead_code, // (\n    b,\n)]"
    assert (
        CompletionStops(CompletionRequest("", "", path="a.rs"))
        .cut(f"{output}\n\nuse c;", final=True)
        .text
        == output
    )


def test_apostrophe_in_a_comment_below_closes_no_string() -> None:
    stops = CompletionStops(CompletionRequest("AS 'a", "\nC;  -- let's not\n", path="a.sql"))
    assert stops.cut("b'\nC;", final=True).text == "b'"
