"""Looking for words in what was said: what a person types, as questions to the database.

A conversation is found where every word is somewhere in it, in a message or in the title; words may
be unfinished, and what is in quotation marks is looked for as it stands. Case and accents do not
matter. Refuses the query language of SQLite: nothing typed can be a syntax error.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

from akunu_py.chats.schema import UNSPACED, searchable

_TERM = re.compile(r'"([^"]*)"|([^\s"]+)')
_SNIPPET_WORDS = 24
_OPEN, _CLOSE = "\x02", "\x03"  # begin and end of a match, as SQLite is asked to mark it
_SPREAD = re.compile(f" ?({_OPEN}?)({UNSPACED})({_CLOSE}?) ?")

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


def terms_of(words: str) -> list[str]:
    """What a person typed as terms of SQLite's query language; signs alone are left out."""
    terms = []
    for exact, begun in _TERM.findall(words.replace("\0", " ")):  # which would end the query
        term = searchable(exact or begun)
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
    asked = (_OPEN, _CLOSE, _SNIPPET_WORDS, query, numbers)
    snippets = dict(database.execute(_SNIPPETS, asked).fetchall())
    hits = dict.fromkeys(found, Hit())
    for conversation, (number, message) in best.items():
        hits[conversation] = Hit(message, *_read_marks(snippets[number]))
    return hits


def _read_marks(snippet: str) -> tuple[str, tuple[tuple[int, int], ...]]:
    """A snippet of an index in one line as it was said, and the ranges that were marked.

    What was said may hold the signs of a mark too. They are left out; at worst a mark is missing.
    """
    line = _SPREAD.sub(r"\1\2\3", snippet.replace(_CLOSE + _OPEN, ""))
    text, marks, begun = "", [], -1
    for part in re.split(f"([{_OPEN}{_CLOSE}])", " ".join(line.split())):
        if part == _OPEN:
            begun = len(text)
        elif part == _CLOSE:
            if 0 <= begun < len(text):
                marks.append((begun, len(text)))
            begun = -1
        else:
            text += part
    return text, tuple(marks)
