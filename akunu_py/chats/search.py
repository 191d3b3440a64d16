"""Full-text search in conversations: queries as SQLite FTS5 terms, and snippets.

A conversation matches if its messages and title contain every word or prefix, ignoring case and
accents. Quotation marks enclose an exact phrase.
"""

import json
import re
import sqlite3
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from akunu_py.chats.rows import all_text

# Scripts without spaces between words: Thai, Lao, Burmese, Khmer, kana, Han.
_UNSPACED = (
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\U00020000-\U0003ffff]"
)
_UNSPACED_CHARACTER = re.compile(f"({_UNSPACED})")
_TERM = re.compile(r'"([^"]*)"|([^\s"]+)')
_MAX_MARKS = 5000  # matches considered in a text
_BEFORE, _AFTER = 30, 120  # characters of a snippet around the start of its first match
_LETTER = f"(?!{_UNSPACED})[^\\W_]"
_WORD = re.compile(f"{_UNSPACED}|{_LETTER}(?:{_LETTER}|[\u0300-\u036f])*")

_MATCHING = """
SELECT m.conversation FROM message_index i JOIN messages m ON m.number = i.rowid
WHERE message_index MATCH ?1
UNION SELECT rowid FROM title_index WHERE title_index MATCH ?1
"""
_RANKED = """
SELECT m.conversation, m.number, m.id
FROM message_index i JOIN messages m ON m.number = i.rowid
WHERE message_index MATCH ? ORDER BY rank
"""
_TEXTS = """
SELECT number, text, rounds FROM messages WHERE number IN (SELECT value FROM json_each(?))
"""


@dataclass(frozen=True, slots=True)
class SearchHit:
    """The best match in a conversation."""

    message: str | None = None  # message id; None if only the title matches
    snippet: str = ""  # text around the match, on one line
    marks: tuple[tuple[int, int], ...] = ()  # matching half-open ranges in the snippet


def searchable(text: str) -> str:
    """Return text for the index; characters of scripts without spaces become words."""
    return _UNSPACED_CHARACTER.sub(" \\1 ", text)


def terms_of(words: str) -> list[str]:
    """Return the words of a query as FTS5 terms, without pure punctuation."""
    terms = []
    for exact, prefix in _TERM.findall(words.replace("\0", " ")):  # NUL would end the query
        term = searchable(exact or prefix)
        if any(character.isalnum() for character in term):
            terms.append(f'"{term}"' + ("" if exact else "*"))
    return terms


def find_words(text: str, words: str) -> list[tuple[int, int]]:
    """Return the half-open ranges of the words of a query in a text."""
    return [(start, end) for start, end, _ in islice(_marks(text, terms_of(words)), _MAX_MARKS)]


def find_matches(database: sqlite3.Connection, terms: Sequence[str]) -> dict[int, SearchHit]:
    """Return the best match of each conversation with all `terms`, by conversation number."""
    found = [{number for (number,) in database.execute(_MATCHING, (term,))} for term in terms]
    matching: set[int] = set.intersection(*found) if found else set()
    if not matching:
        return {}
    best: dict[int, tuple[int, str]] = {}  # conversation -> number and id of its message
    for conversation, number, message in database.execute(_RANKED, (" OR ".join(terms),)):
        if conversation in matching:
            best.setdefault(conversation, (number, message))
    messages = json.dumps([number for number, _ in best.values()])
    texts = {number: all_text(*row) for number, *row in database.execute(_TEXTS, (messages,))}
    hits = dict.fromkeys(matching, SearchHit())
    for conversation, (number, message) in best.items():
        line = " ".join(texts.get(number, "").split())
        hits[conversation] = SearchHit(message, *_snippet(line, terms))
    return hits


def _snippet(text: str, terms: Sequence[str]) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Return the part of a text with most `terms` within _AFTER characters, and their ranges."""
    # FTS5's own snippet functions take quadratic time in the number of matches.
    marks = [*islice(_marks(text, terms), _MAX_MARKS)]
    counts: Counter[str] = Counter()  # of terms in the window
    best = first = most = 0
    for place, _, word in marks:
        counts[word] += 1
        while place - marks[first][0] > _AFTER:
            counts[marks[first][2]] -= 1
            first += 1
        if len(+counts) > most:  # `+` drops zero counts
            best, most = marks[first][0], len(+counts)
    start = max(0, best - _BEFORE)
    start = 0 if start == 0 else text.find(" ", start, best) + 1 or start
    end = min(best + _AFTER + _BEFORE, len(text))
    if end < len(text) and (space := text.rfind(" ", best, end)) > best:
        end = space
    offset = start - bool(start)  # of the ellipsis
    ranges: list[tuple[int, int]] = []
    position = start
    for begin, stop, _ in marks:
        if position <= begin < stop <= end:
            ranges.append((begin - offset, stop - offset))
            position = stop
    snippet = "…" * bool(start) + text[start:end] + "…" * (end < len(text))
    return snippet, tuple(ranges)


def _marks(text: str, terms: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """Yield the start, end and term of each match in a text."""
    phrases = [([fold(word[0]) for word in _WORD.finditer(term)], term) for term in terms]
    words = [(word.start(), word.end(), fold(word[0])) for word in _WORD.finditer(text)]
    for number, (start, _, _) in enumerate(words):
        for phrase, term in phrases:
            candidate = words[number : number + len(phrase)]
            folded = [word for _, _, word in candidate]
            if folded and term.endswith("*"):
                folded[-1] = folded[-1][: len(phrase[-1])]
            if folded and folded == phrase:
                yield start, candidate[-1][1], term
                break


def fold(text: str) -> str:
    """Return text without case and accents, as the FTS5 index compares it."""
    if text.isascii():
        return text.lower()
    plain = unicodedata.normalize("NFD", text)
    return "".join(each for each in plain if not unicodedata.combining(each)).lower()
