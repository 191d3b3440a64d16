"""Full-text search in conversations: the words of a query as SQLite FTS5 terms, and snippets.

A conversation is found where every word is somewhere in it, in a message or in the title; words may
be unfinished, and what is in quotation marks is looked for as it stands. Case and accents do not
matter. Nothing typed can be a syntax error of FTS5's query language.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

# Scripts that are written without spaces between words: Thai, Lao, Burmese, Khmer, kana, Han.
_UNSPACED = (
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\U00020000-\U0003ffff]"
)
_UNSPACED_CHARACTER = re.compile(f"({_UNSPACED})")
_TERM = re.compile(r'"([^"]*)"|([^\s"]+)')
_SNIPPET_WORDS = 24
_OPEN, _CLOSE = "\x02", "\x03"  # begin and end of a match, as SQLite is asked to mark it
_SPACED_OUT = re.compile(f" ?({_OPEN}?)({_UNSPACED})({_CLOSE}?) ?")

_IN_MESSAGES = """
SELECT m.conversation FROM message_index i JOIN messages m ON m.number = i.rowid
WHERE message_index MATCH ?
"""
_IN_TITLES = "SELECT rowid FROM title_index WHERE title_index MATCH ?"
_RANKED = """
SELECT m.conversation, m.number, m.id
FROM message_index i JOIN messages m ON m.number = i.rowid
WHERE message_index MATCH ? ORDER BY rank
"""
# +rowid: one walk over what matches. Asked for one row after the other it walks for each.
_SNIPPETS = """
SELECT rowid, snippet(message_index, 0, ?, ?, '…', ?) FROM message_index
WHERE message_index MATCH ? AND +rowid IN (SELECT value FROM json_each(?))
"""


@dataclass(frozen=True, slots=True)
class Hit:
    """Where a conversation was found. message: the id of the best match, None where only the title
    matches. snippet: words around it. marks: half-open ranges into the snippet that match."""

    message: str | None = None
    snippet: str = ""
    marks: tuple[tuple[int, int], ...] = ()


def searchable(text: str) -> str:
    """`text` as it goes into an index: in scripts without spaces each character is a word."""
    return _UNSPACED_CHARACTER.sub(" \\1 ", text)


def terms_of(words: str) -> list[str]:
    """The words of a query as FTS5 terms; punctuation alone is left out."""
    terms = []
    for exact, prefix in _TERM.findall(words.replace("\0", " ")):  # which would end the query
        term = searchable(exact or prefix)
        if any(character.isalnum() for character in term):
            terms.append(f'"{term}"' + ("" if exact else "*"))
    return terms


def find(database: sqlite3.Connection, terms: Sequence[str]) -> dict[int, Hit]:
    """The numbers of the conversations where all `terms` are, each with its best match."""
    found: set[int] | None = None
    for term in terms:
        here = {row[0] for row in database.execute(_IN_MESSAGES, (term,))}
        here |= {row[0] for row in database.execute(_IN_TITLES, (term,))}
        found = here if found is None else found & here
    return _best(database, " OR ".join(terms), found) if found else {}


def _best(database: sqlite3.Connection, query: str, found: set[int]) -> dict[int, Hit]:
    """The best match of `query` in each of the conversations `found`."""
    best: dict[int, tuple[int, str]] = {}  # conversation -> number and id of its message
    for conversation, number, message in database.execute(_RANKED, (query,)):
        if conversation in found:
            best.setdefault(conversation, (number, message))
    numbers = json.dumps([number for number, _ in best.values()])
    parameters = (_OPEN, _CLOSE, _SNIPPET_WORDS, query, numbers)
    snippets = dict(database.execute(_SNIPPETS, parameters).fetchall())
    hits = dict.fromkeys(found, Hit())
    for conversation, (number, message) in best.items():
        hits[conversation] = Hit(message, *_read_marks(snippets[number]))
    return hits


def _read_marks(snippet: str) -> tuple[str, tuple[tuple[int, int], ...]]:
    """A snippet of an index as one line of the original text, and the ranges that were marked.

    The text may hold the characters of a mark too. They are left out; at worst a mark is missing.
    """
    line = _SPACED_OUT.sub(r"\1\2\3", snippet.replace(_CLOSE + _OPEN, ""))
    text, marks, start = "", [], -1
    for part in re.split(f"([{_OPEN}{_CLOSE}])", " ".join(line.split())):
        if part == _OPEN:
            start = len(text)
        elif part == _CLOSE:
            if 0 <= start < len(text):
                marks.append((start, len(text)))
            start = -1
        else:
            text += part
    return text, tuple(marks)
