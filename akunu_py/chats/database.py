"""The SQLite file of the conversations: its tables, migrations, and errors.

Processes share a lock on the file `.lock` beside the database. A process that holds it alone may
rename a damaged database. Released migrations never change; they run in one transaction.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from akunu_py.chats.rows import decode, text_of
from akunu_py.chats.search import searchable
from akunu_py.errors import ConversationError, one_line

_BUSY_TIMEOUT_S = 5.0  # for another program that is writing
_PARTS = ("", "-wal", "-shm")  # SQLite's files, as endings of the name

_WRITTEN = "another program is writing to it; close that one, then try again"
_NO_ACCESS = "give yourself access, or set XDG_DATA_HOME to your own directory"
_NO_WRITE_ACCESS = "give yourself write access, or set XDG_DATA_HOME to your own directory"
_DAMAGE = "it is damaged; start akunu again, which sets it aside"
_HINTS = {
    sqlite3.SQLITE_BUSY: _WRITTEN,
    sqlite3.SQLITE_LOCKED: _WRITTEN,
    sqlite3.SQLITE_FULL: "free some space, or set XDG_DATA_HOME to a directory on another disk",
    # SQLite's code for a full disk where it cannot make the log's index.
    sqlite3.SQLITE_IOERR: "the disk is full or failing; free some space, or set XDG_DATA_HOME to a "
    "directory on another disk",
    sqlite3.SQLITE_READONLY: _NO_WRITE_ACCESS,
    sqlite3.SQLITE_CANTOPEN: _NO_ACCESS,
    sqlite3.SQLITE_PERM: _NO_WRITE_ACCESS,
    sqlite3.SQLITE_CORRUPT: _DAMAGE,
    sqlite3.SQLITE_NOTADB: _DAMAGE,
}
_OTHER_HINT = "see `akunu info` for where it is; XDG_DATA_HOME moves it"
_MAX_PROBLEMS = 10_000
_IN_A_ROW = re.compile(r"^(NULL|TEXT|NUMERIC|REAL|INT|BLOB) value in |^CHECK constraint failed in ")
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


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


class DatabaseFile:
    """An open database of conversations. `warnings`: what had to be set aside, one line each."""

    def __init__(self, path: Path) -> None:
        """Opens the database at `path`, a new one where there is none; readable by its owner only.

        Raises ConversationError where it cannot be opened, or must not be.
        """
        self.path = path
        self.warnings: list[str] = []
        try:
            self._lock = _lock_beside(path)
        except OSError as error:
            raise ConversationError(
                f"conversations cannot be kept in {path}: {error.strerror}; "
                f"{_HINTS[sqlite3.SQLITE_CANTOPEN]}"
            ) from error
        try:
            self.database = self._open()
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        """Closes it; the last one who does leaves a single file."""
        try:
            with self.errors():
                self.database.close()
        finally:
            os.close(self._lock)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Changes that are made all together or not at all. Raises ConversationError."""
        with self.errors(), _transaction(self.database):
            yield self.database

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Turns an error of SQLite into a ConversationError of one line."""
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:
            hint = _HINTS.get(_code(error), _OTHER_HINT)
            raise ConversationError(
                f"conversations in {self.path}: {one_line(error)}; {hint}"
            ) from error

    def _open(self) -> sqlite3.Connection:
        with self.errors():
            try:
                return self._connect()
            except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
                if _code(error) not in _DAMAGED:
                    raise
                self._set_aside(error)
                return self._connect()

    def _connect(self) -> sqlite3.Connection:
        database = sqlite3.connect(self.path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
        database.text_factory = decode
        try:
            self._prepare(database)
        except BaseException:
            database.close()
            raise
        return database

    def _prepare(self, database: sqlite3.Connection) -> None:
        """Checks the database, brings it up to date and sets how it is written."""
        with _transaction(database, "DEFERRED"):  # what is checked is of one moment
            version = self._check(database)
        # With a log beside the database readers do not wait for a writer, and a message is safe
        # from a killed program as soon as the system has it: no waiting for the disk.
        _keep_a_log(database)
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("PRAGMA foreign_keys = ON")
        database.execute("PRAGMA secure_delete = ON")
        if version < VERSION:
            with _transaction(database):
                migrate(database)  # looks at the version again: another program may have done it

    def _check(self, database: sqlite3.Connection) -> int:
        """The version of the database. Raises ConversationError where it is none of akunu's."""
        version = schema_version(database)
        if is_foreign(database):
            raise ConversationError(
                f"expected akunu's conversations in {self.path}, found a database of another "
                "program; move it away, then try again"
            )
        if version > VERSION:
            raise ConversationError(
                f"{self.path} was written by a newer akunu (its version is {version}, this one "
                f"knows {VERSION}) and stays as it is; update akunu, or set XDG_DATA_HOME to your "
                "own directory"
            )
        if stranger := _stranger(database):
            raise ConversationError(
                f"expected akunu's own tables in {self.path}, found {stranger}, which another "
                "program made; move the file away, then try again"
            )
        if version:
            _check_pages(database)
        return version

    def _set_aside(self, error: Exception) -> None:
        """Renames a damaged database and its log, unless another program has it open."""
        damaged = f"{self.path} is damaged ({one_line(error)})"
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConversationError(
                f"{damaged} and another akunu has it open; close all of them, then try again"
            ) from error
        aside = _unused(self.path)
        try:
            for part in _PARTS:
                with contextlib.suppress(FileNotFoundError):
                    Path(f"{self.path}{part}").rename(f"{aside}{part}")
            _create(self.path)
        except OSError as refusal:
            raise ConversationError(
                f"{damaged} and cannot be set aside: {refusal.strerror}; move it away, then try "
                "again"
            ) from refusal
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        self.warnings.append(f"{damaged} and was set aside as {aside.name}")


def _lock_beside(path: Path) -> int:
    """Makes the directory and the file where they are missing; returns the shared lock."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        _create(path)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _create(path: Path) -> None:
    # SQLite would make it with the mode that the user's mask leaves; its log takes over this one.
    # One that exists is not opened: to close it would drop the locks that SQLite has on it.
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def _keep_a_log(database: sqlite3.Connection) -> None:
    """Sets the write-ahead log. Whoever does so first must be alone, and SQLite does not wait."""
    until = time.monotonic() + _BUSY_TIMEOUT_S
    while True:
        try:
            database.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if _code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
            time.sleep(0.01)
        else:
            return


def _check_pages(database: sqlite3.Connection) -> None:
    """Raises sqlite3.DatabaseError where a page of the file is damaged. A value that does not fit
    its column damages one row, and `rows` sees to that."""
    for (found,) in database.execute(f"PRAGMA quick_check ({_MAX_PROBLEMS})"):
        if found != "ok" and not _IN_A_ROW.search(str(found)):
            error = sqlite3.DatabaseError(" ".join(str(found).split())[:200])
            error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise error


def _stranger(database: sqlite3.Connection) -> str | None:
    """What is there that akunu never makes, and that can run for ever when a table is used."""
    for kind, name, page, statement in database.execute(
        "SELECT type, name, rootpage, sql FROM sqlite_master"
    ):
        is_index = name in ("message_index", "title_index") and " USING fts5 " in str(statement)
        if kind in ("view", "trigger") or (kind == "table" and not page and not is_index):
            return f"a {kind} {name!r}"
    for table in ("conversations", "messages"):
        for row in database.execute(f"PRAGMA table_xinfo ({table})"):
            if row[-1]:
                return f"a computed column {row[1]!r}"
    return None


@contextlib.contextmanager
def _transaction(database: sqlite3.Connection, kind: str = "IMMEDIATE") -> Iterator[None]:
    # IMMEDIATE: waits for other writers now, and never finds out half-way that it cannot write.
    database.execute(f"BEGIN {kind}")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise


def _code(error: Exception) -> int:
    """SQLite's primary result code, without the bits of the extended one."""
    if isinstance(error, UnicodeDecodeError):  # of SQLite's message that names a damaged table
        return sqlite3.SQLITE_CORRUPT
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF


def _unused(path: Path) -> Path:
    """A name for a damaged file that nothing has yet."""
    number = 1
    while any(Path(f"{path}.damaged-{number}{part}").exists() for part in _PARTS):
        number += 1
    return Path(f"{path}.damaged-{number}")


# Migrations


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
            ((number, searchable(text_of(text))) for number, text in rows),
        )


def _run_all(database: sqlite3.Connection, statements: str) -> None:
    """Not `executescript`, which would end the transaction."""
    for statement in statements.split(";\n"):
        if statement.strip():
            database.execute(statement)


_MIGRATIONS: tuple[Callable[[sqlite3.Connection], None], ...] = (_make_tables, _make_indexes)
VERSION = len(_MIGRATIONS)


def schema_version(database: sqlite3.Connection) -> int:
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
    for migration in _MIGRATIONS[schema_version(database) :]:
        migration(database)
    database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    database.execute(f"PRAGMA user_version = {VERSION}")
