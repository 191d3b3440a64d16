"""The comments and strings of languages, by file suffix or language."""

import re
from dataclasses import dataclass
from functools import cache

QUOTES = "\"'`"
PAIRS = {"(": ")", "[": "]", "{": "}"}
# Delimiters of strings and comments that may span lines.
_LONG = {
    **{'"""': '"""', "'''": "'''", "/*": "*/", "<!--": "-->", "{-": "-}", "<#": "#>", "#=": "=#"},
    **{"=begin": "=end", "{#": "#}"},
    **{prefix + f"[{'=' * n}[": f"]{'=' * n}]" for prefix in ("", "--") for n in range(3)},
}
_RAW = re.compile(r'b?r(#*)"|\w*R"([^\s()\\]{0,16})\(')

# Other strings end in their line. A quote inside or before a word is an apostrophe or a lifetime. A
# very long string counts as code, because the search for its end takes too long. A regular
# expression stands where no division can.
STRINGS = {
    '"': r"\"(?:\\.|[^\"\\\n]){0,1000}+",
    "'": r"(?<!\w)'(?:\\.|[^'\\\n]){0,1000}+",
    "`": r"`[^`\n]{0,1000}+",
    "w'": r"'(?:\\.|[^'\\\n]){0,1000}+",  # also after a word, as in Python's r''
    "/": r"(?:(?<=[(,=:!&|?;~])|(?<=[(,=:!&|?;~] )|(?<=return ))/(?![/*\s,)])"
    r"(?:\\.|\[(?:\\.|[^\]\\\n]){0,300}+(?:\]|\Z)|[^/\\\[\n]){0,300}+",
}
_ENDS = {'"': '"', "'": r"'(?!\w)", "`": "`", "w'": "'", "/": "/"}
_BRACKETS = r"\\(?!\((?:my|our)\b)[()\[\]{}]|[()\[\]{}]"  # in Perl, \(my $x) is a reference
_HEREDOC = r"(?<![^\s(=\d])<<[-~]?([\"']?)[A-Za-z_]\w*\1(?=\W|\Z)"
# Comments, other strings and brackets by the name that `_ROWS` uses. A here-document starts after
# <<WORD. "#" has a name for languages where it starts a comment anywhere, and for all others.
_TOKENS = {
    "#": r"#[^\n]*",
    " #": r"(?<![^\s;&|)}])#[^\n]*",
    "//": r"//[^\n]*",
    "--": r"--(?!\[=*\[)[^\n]*",
    ";": r";[^\n]*",
    "%": r"(?<!\\)%[^\n]*",
    "#php": r"(?<!\S)#(?!\[)[^\n]*",
    "#error": r"(?m:^)[ \t]*#[ \t]*(?:error|warning|pragma|(?:end)?region)\b[^\n]*",
    "[[": r"(?:--)?\[={0,2}\[",
    "=begin": r"(?m:^)=begin\b",
    "<<": _HEREDOC,
    "<<~": r"(?<![^\s(=,])<<(?:[-~]([\"']?)[A-Za-z_]\w*\1|([\"']?)[A-Z_]\w*\2)(?=\W|\Z)",
    "<<<": r"<<<[ \t]*([\"']?)[A-Za-z_]\w*\1(?=\W|\Z)",
    '@"': r"\$?@\$?\"",
    'r"': r"(?<!\w)b?r#*\"",
    'R"': r"(?<!\w)(?:u8|[uUL])?R\"[^\s()\\]{0,16}\(",
    "\\": r"\\[\"'`]",
    "``": "`[\"'`$]",
    "'x'": r"'(?:\\[^\n']*'?|[^'\\\n])'",
    "$'": r"\$'(?:\\.|[^'\\\n]){0,1000}+'",
}
# Of an unknown language. #name {, #fff; and #define are not comments. Neither is -- before a quote:
# it ends options.
_UNKNOWN = (
    r"\"\"\"|(?<!')'''(?!')|(?<![^\s(){},;\[\]=])/\*|<!--|--\[\["
    r"|(?<![^\s(=])<<[-~<]?([\"']?)[A-Z_]\w*\1(?=\W|\Z)"
    r"|(?<!\S)(?://(?! *\$|=)|--(?!\S| *[\"'$])"
    r"|#(?!!?[\[{(]|[\w-]+(?: ?[{(,.:>]|\))|[0-9a-fA-F]{3,8}[;,)]"
    r"|(?:define|if|ifn?def|el(?:if|se)|endif|include|undef|pragma|error|(?:end)?region)\b))[^\n]*"
    r"|(?<!\S):-?[()]|" + _BRACKETS
)
_TOKENS |= {"unknown": _UNKNOWN, "{{": r"\{\{[^\n{}]*\}\}|\{%[^\n%]*%\}|\{#[^\n#]*#\}"}
_C = ("//", "/*", "#error")
_SCRIPT = "js mjs cjs jsx javascript javascriptreact ts mts cts tsx typescript typescriptreact"
# Names, the start and end of a comment, tokens, and quotes: `"`, and `'` without lifetimes, in one
# line; a quote of a string of several lines has its escape character, if any, and a line break. "$"
# is the backslash of shells, whose strings may contain commands with strings.
_ROWS: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("py pyi pyw python", "#", ("#", '"""', "'''"), ('"', "w'")),
    (_SCRIPT, "//", ("//", "/*"), ('"', "'", "/", "`\\\n")),
    ("c h cc cpp hpp cxx hh hxx ino m mm", "//", (*_C, 'R"'), ('"', "'")),
    ("cs csharp", "//", (*_C, '@"', '"""'), ('"', "'")),
    ("java kt kts kotlin swift scala groovy", "//", ("//", "/*", '"""'), ('"', "'")),
    ("dart", "//", ("//", "/*", '"""', "'''"), ('"', "'")),
    ("go zig proto", "//", ("//", "/*"), ('"', "'", "`\n")),
    ("rs rust", "//", ("//", "/*", 'r"', "'x'"), ('"\\\n',)),
    ("php", "//", ("<<<", "//", "#php", "/*"), ('"\\\n', "'\\\n")),
    ("scss less", "//", ("//", "/*"), ('"', "'")),
    ("css", "/* */", ("/*",), ('"', "'")),
    ("sh bash zsh ksh dash bats shellscript", "#", ("<<", "\\", "$'", " #"), ('"$\n', "'\n")),
    ("rb ruby", "#", ("=begin", "<<~", " #"), ('"', "'", "/", "`")),
    ("pl pm perl", "#", ("<<~", " #"), ('"', "'", "/")),
    ("ps1 psm1 powershell", "#", ("<#", "``", " #"), ('"`\n', "'\n")),
    ("yml yaml dockerfile mk makefile", "#", (" #",), ('"', "'")),
    ("jl", "#", ("#=", '"""', "#"), ('"', "'")),
    ("toml ex exs elixir", "#", ('"""', "'''", "#"), ('"', "'")),
    ("r tf nix coffee", "#", ("#",), ('"', "'")),
    ("lua", "--", ("[[", "--"), ('"', "w'")),
    ("sql mysql pgsql postgresql", "--", ("--", "/*"), ('"', "'\n")),
    ("hs haskell elm adb ads vhd", "--", ("{-", "--"), ('"', "'")),
    ("lisp el clj scm asm", ";", (";",), ('"\\\n',)),
    ("tex latex erl erlang", "%", ("%",), ('"',)),
    ("vue svelte", "<!-- -->", (), ('"', "'", "/", "`\\\n")),
    ("html htm jinja j2 django-html", "<!-- -->", ("{{", "{#", "unknown"), tuple("\"'`/")),
    ("xml svg md markdown", "<!-- -->", (), ()),
)  # fmt: skip
_BY_NAME = {name: row for row in _ROWS for name in row[0].split()}
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
    _, comment, names, quotes = _BY_NAME.get(name, ("", "", (), ()))
    quotes = quotes or tuple("\"'`/")
    long_quotes = {kind[0]: kind for kind in quotes if kind.endswith("\n")}
    short = [kind for kind in quotes if not kind.endswith("\n")]
    tokens = [_TOKENS.get(each, re.escape(each)) for each in names] + [_BRACKETS]
    other = "|".join([*(tokens if names else [_UNKNOWN]), *map(re.escape, long_quotes)])
    return Syntax(
        re.compile("|".join([other, *(STRINGS[each] + _ENDS[each] for each in short)])),
        re.compile(
            "|".join([other, *(rf"{STRINGS[each]}(?:{_ENDS[each]}|\\?\Z)" for each in short)])
        ),
        long_quotes | dict.fromkeys(('@"', '$@"', '@$"'), '"\n'),
        comment,
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
