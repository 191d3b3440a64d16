"""The comments and strings of languages (syntax.toml), by file suffix or language."""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

QUOTES = "\"'`"
PAIRS = {"(": ")", "[": "]", "{": "}"}
_DATA = tomllib.loads(Path(__file__).with_name("syntax.toml").read_text(encoding="utf-8"))
_LONG, STRINGS, _ENDS = _DATA["long"], _DATA["strings"], _DATA["ends"]
_BY_NAME = {name: row for row in _DATA["language"] for name in row["names"].split()}
_RAW = re.compile(r'b?r(#*)"|\w*R"([^\s()\\]{0,16})\(')
_SHEBANG = re.compile(r"#!.*\b(?:ba|da|k|z)?sh\b")


@dataclass(frozen=True, slots=True)
class Syntax:
    """The comments and strings of a language."""

    closed: re.Pattern[str]  # finds strings, comments and brackets
    may_close: re.Pattern[str]  # also a string that is open at the end of the text
    long_quotes: dict[str, str]  # the kind of a string of several lines by its first characters
    comment: str  # start and end of a comment, "" if unknown


def syntax_of(path: str = "", language: str = "", prefix: str = "") -> Syntax:
    """Return the syntax by the suffix of `path`, the language, or the first line of `prefix`."""
    name = path.replace("\\", "/").rpartition("/")[2].rpartition(".")[2].lower()
    names = [name, language.lower(), "sh" if _SHEBANG.match(prefix) else ""]
    return _make_syntax(next((name for name in names if name in _BY_NAME), ""))


@cache
def _make_syntax(name: str) -> Syntax:
    """Return the syntax of a language or file suffix, "" for an unknown one."""
    row = _BY_NAME.get(name, {})
    quotes = row.get("quotes", ['"', "'", "`", "/"])
    long_quotes = {kind[0]: kind for kind in quotes if kind.endswith("\n")}
    short = [kind for kind in quotes if not kind.endswith("\n")]
    tokens = [_DATA["tokens"].get(each, re.escape(each)) for each in row.get("tokens", ["unknown"])]
    other = "|".join([*tokens, _DATA["brackets"], *map(re.escape, long_quotes)])
    return Syntax(
        re.compile("|".join([other, *(STRINGS[each] + _ENDS[each] for each in short)])),
        re.compile(
            "|".join([other, *(rf"{STRINGS[each]}(?:{_ENDS[each]}|\\?\Z)" for each in short)])
        ),
        long_quotes | dict.fromkeys(('@"', '$@"', '@$"'), '"\n'),
        row.get("comment", ""),
    )


# ---- strings and comments of several lines


# A string of a shell after its opening quote, with commands: "$(a "$(b "c")")".
_WORD = r"[^()\"'\\]|\\.|'[^']*+'"
_IN_STRING = r"\\.|\$(?!\()|[^\"\\$]"
_INNER_COMMAND = rf"\((?:{_WORD}|\"(?:\\.|[^\"\\])*+\")*+\)"
_INNER_STRING = rf"\"(?:{_IN_STRING}|\${_INNER_COMMAND})*+\""
_COMMAND = rf"\((?:{_WORD}|{_INNER_STRING}|{_INNER_COMMAND})*+\)"
_SHELL = re.compile(rf"(?s)(?:{_IN_STRING}|\${_COMMAND})*+\"")
# The rest of a string in one line, without its opening quote.
_REST = {kind: re.compile(STRINGS[kind].partition(kind)[2] + _ENDS[kind]) for kind in QUOTES}


def is_long(kind: str) -> bool:
    """Return True if `kind` opens a string, comment or here-document of several lines."""
    return kind in _LONG or kind[-1:] == "\n" or kind[:2] == "<<" or bool(_RAW.match(kind))


def closer_of(kind: str) -> str:
    """Return the closing delimiter; for a here-document its word."""
    if kind.endswith("\n"):
        return kind[0]
    if raw := _RAW.match(kind):
        return f'){raw.group(2)}"' if raw.group(1) is None else f'"{raw.group(1)}'
    return PAIRS.get(kind) or _LONG.get(kind) or kind.strip("<-~\"' \t")


def find_end(text: str, kind: str, at: int) -> tuple[int, int] | None:
    """Return the span of the first closing delimiter of `kind` after `at`."""
    closer = closer_of(kind)
    if kind.startswith("<<"):
        found = re.compile(rf"(?m)^[ \t]*{closer}\b").search(text, at)
        return found.span() if found else None
    if kind.endswith("\n"):
        escape = kind[1:-1] or closer
        shell = escape == "$"
        ended = _SHELL.match(text, at) if shell else _quoted(closer, escape).match(text, at)
        return (ended.end() - 1, ended.end()) if ended else None
    start = text.find(closer, at)
    return None if start < 0 else (start, start + len(closer))


@cache
def _quoted(quote: str, escape: str) -> re.Pattern[str]:
    """Return the pattern of the text after an opening quote, with the closing one."""
    q, e = re.escape(quote), re.escape(escape)
    return re.compile(rf"(?s)(?:{e}{q if quote == escape else '.'}|[^{q}{e}])*+{q}")


def rest_of_string(text: str, quote: str) -> int:
    """Return where the string that `quote` opened before `text` ends in its line, 0 for nowhere."""
    found = _REST[quote].match(text) if quote in _REST else None
    return found.end() if found else 0
