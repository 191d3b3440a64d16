"""The tables of the conversations' database, and how an older database becomes a newer one.

Each step brings a database from one version to the next; a new one goes through all of them. A step
that was released is never changed: what is missing comes in another step. All steps that are needed
run in one transaction, so a program that is killed meanwhile leaves the old version behind.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable

APPLICATION_ID = 0x616B756E  # "akun", in the header of the file: whose database this is

# `chosen` grows with every message that is added or gone back to: of the siblings at one place the
# one with the highest is active. `parent` names a message of the same conversation and is no
# foreign key, because what follows a message that another program erased must be kept as well.
_TABLES = """
CREATE TABLE conversations (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    title TEXT NOT NULL,
    created REAL NOT NULL,
    updated REAL NOT NULL,
    model TEXT NOT NULL,
    deleted REAL
);
CREATE TABLE messages (
    number INTEGER PRIMARY KEY,
    conversation INTEGER NOT NULL REFERENCES conversations (number) ON DELETE CASCADE,
    id TEXT NOT NULL,
    parent TEXT,
    role TEXT NOT NULL CHECK (role IN ('system', 'user', 'assistant')),
    text TEXT NOT NULL,
    thinking TEXT NOT NULL,
    created REAL NOT NULL,
    model TEXT NOT NULL,
    stats TEXT,
    finish_reason TEXT,
    chosen INTEGER NOT NULL,
    UNIQUE (conversation, id)
);
CREATE INDEX conversations_by_time ON conversations (updated);
"""

# The words that are searched for. Each index has the number of what it indexes as its rowid.
_INDEXES = """
CREATE VIRTUAL TABLE message_index USING fts5 (words, tokenize = 'unicode61 remove_diacritics 2');
CREATE VIRTUAL TABLE title_index USING fts5 (words, tokenize = 'unicode61 remove_diacritics 2');
"""

# Scripts that are written without spaces between words: Thai, Lao, Burmese, Khmer, kana, Han.
UNSPACED = (
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\U00020000-\U0003ffff]"
)
_UNSPACED = re.compile(f"({UNSPACED})")


def searchable(text: str) -> str:
    """`text` as it goes into an index: in scripts without spaces each character is a word."""
    return _UNSPACED.sub(" \\1 ", text)


def _make_tables(database: sqlite3.Connection) -> None:
    _run_all(database, _TABLES)


def _make_indexes(database: sqlite3.Connection) -> None:
    _run_all(database, _INDEXES)
    for index, column, table in (
        ("message_index", "text", "messages"),
        ("title_index", "title", "conversations"),
    ):
        rows = database.execute(f"SELECT number, {column} FROM {table}")
        database.executemany(
            f"INSERT INTO {index} (rowid, words) VALUES (?, ?)",
            ((number, searchable(text)) for number, text in rows),
        )


def _run_all(database: sqlite3.Connection, statements: str) -> None:
    """Not `executescript`, which would end the transaction."""
    for statement in statements.split(";\n"):
        if statement.strip():
            database.execute(statement)


_STEPS: tuple[Callable[[sqlite3.Connection], None], ...] = (_make_tables, _make_indexes)
VERSION = len(_STEPS)


def version_of(database: sqlite3.Connection) -> int:
    """The version of a database, 0 for an empty one."""
    version: int = database.execute("PRAGMA user_version").fetchone()[0]
    return version


def is_foreign(database: sqlite3.Connection) -> bool:
    """Whether another program made this database."""
    owner: int = database.execute("PRAGMA application_id").fetchone()[0]
    tables: int = database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    return owner != APPLICATION_ID and (owner != 0 or tables > 0)


def migrate(database: sqlite3.Connection) -> None:
    """Brings the database to VERSION; the caller holds a transaction that may write."""
    for step in _STEPS[version_of(database) :]:
        step(database)
    database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    database.execute(f"PRAGMA user_version = {VERSION}")
