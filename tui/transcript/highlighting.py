"""Colors of code: four hues for keywords, functions, types and numbers; strings, comments, diffs.

The hues are CSS variables of the theme (`themes.py`). The tokens are those of Pygments.
"""

from __future__ import annotations

import re
from typing import Any

from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.token import Token
from pygments.util import ClassNotFound
from textual.content import Content, Span

_KEYWORD, _FUNCTION, _TYPE, _NUMBER = (
    "$code-keyword",
    "$code-function",
    "$code-type",
    "$code-number",
)
_STYLES: dict[Any, str] = {  # A token without a style has that of its parent.
    Token: "",
    Token.Comment: "$code-comment italic",
    Token.Comment.Preproc: _KEYWORD,
    Token.Generic.Deleted: "$text-error",
    Token.Generic.Emph: "italic",
    Token.Generic.Heading: "bold",
    Token.Generic.Inserted: "$text-success",
    Token.Generic.Prompt: "$code-comment",
    Token.Generic.Strong: "bold",
    Token.Generic.Subheading: _FUNCTION,
    Token.Keyword: _KEYWORD,
    Token.Keyword.Constant: _NUMBER,
    Token.Keyword.Type: _TYPE,
    Token.Literal: "",
    Token.Literal.Date: _NUMBER,
    Token.Literal.Number: _NUMBER,
    Token.Literal.String: "$code-string",
    Token.Literal.String.Escape: _NUMBER,
    Token.Literal.String.Interpol: _NUMBER,
    Token.Name.Attribute: _FUNCTION,
    Token.Name.Builtin: _FUNCTION,
    Token.Name.Builtin.Pseudo: "italic",
    Token.Name.Class: _TYPE,
    Token.Name.Constant: _NUMBER,
    Token.Name.Decorator: _FUNCTION,
    Token.Name.Exception: _TYPE,
    Token.Name.Function: _FUNCTION,
    Token.Name.Tag: _KEYWORD,
    Token.Name.Variable: _TYPE,
    Token.Operator.Word: _KEYWORD,
}
_TYPE_NAMES = ("bool", "bytes", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple")
_CAPITALIZED = re.compile(r"[A-Z]\w*[a-z]\w*")


def highlight(code: str, language: str) -> Content:
    """Return `code` in colors; a language that Pygments does not know has none."""
    spans: list[Span] = []
    start = 0
    tokens = list(_lexer(language).get_tokens(code))
    for place, (kind, text) in enumerate(tokens):
        following = tokens[place + 1][1] if place + 1 < len(tokens) else ""
        if style := _style(kind, text, following):
            spans.append(Span(start, min(start + len(text), len(code)), style))
        start += len(text)
    return Content(code, spans=spans)


def _lexer(language: str) -> Lexer:
    try:
        return get_lexer_by_name(language, stripnl=False)
    except ClassNotFound:
        return get_lexer_by_name("text", stripnl=False)


def _style(kind: Any, text: str, following: str) -> str:
    """Return the style of a token; names of calls and types are recognized by their form."""
    if kind in (Token.Name, Token.Name.Other, Token.Name.Builtin):
        if text in _TYPE_NAMES or _CAPITALIZED.fullmatch(text):
            return _TYPE
        if following.startswith("("):
            return _FUNCTION
    while kind not in _STYLES:
        kind = kind.parent
    return _STYLES[kind]
