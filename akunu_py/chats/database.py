"""The SQLite database file of conversations: its tables, migrations and errors.

Processes share a lock on `<database>.lock`; renaming a damaged database needs an exclusive lock.
`<database>.open` has a locked byte for each conversation that a process has open.
VERSION never decreases. Migrations add only what is missing, all in one transaction.
"""

import contextlib
import fcntl
import os
import re
import sqlite3
import time
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path

from akunu_py.chats.rows import decode, text_of
from akunu_py.chats.search import searchable
from akunu_py.errors import ConversationError, one_line

_BUSY_TIMEOUT_S = 5.0  # waits for another writer
_SUFFIXES = ("", "-wal", "-shm")  # suffixes of SQLite's files

_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_ACCESS_HINT = "give yourself write access, or set XDG_DATA_HOME to your own directory"
_SPACE_HINT = "free some space"
_HINTS = {
    **dict.fromkeys(_DAMAGED, "it is damaged; restart akunu to set it aside"),
    sqlite3.SQLITE_BUSY: "another program is writing to it; close that program, then try again",
    sqlite3.SQLITE_FULL: _SPACE_HINT,
    # SQLite also reports this if the disk is too full to create the log's index.
    sqlite3.SQLITE_IOERR: f"the disk is full or failing; {_SPACE_HINT}",
    sqlite3.SQLITE_READONLY: _ACCESS_HINT,
    sqlite3.SQLITE_CANTOPEN: _ACCESS_HINT,
}
_OTHER_HINT = "`akunu info` shows its path; XDG_DATA_HOME changes it"
_MAX_PROBLEMS = 10_000
_BAD_ROW = re.compile(r"^(NULL|TEXT|NUMERIC|REAL|INT|BLOB) value in |^CHECK constraint failed in ")
APPLICATION_ID = 0x616B756E  # "akun", in the file header
VERSION = 4  # version 3 may lack the options, so it has the same migration

# `chosen` increases with every added or selected message: among siblings, the highest is active.
# `parent` is the id of a message in the same conversation. It is not a foreign key, because the
# descendants of a message erased by another program must be kept.
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

# Full-text indexes. Each rowid is the number of the indexed message or conversation.
_INDEXES = """
CREATE VIRTUAL TABLE message_index USING fts5 (words, tokenize = 'unicode61 remove_diacritics 2');
CREATE VIRTUAL TABLE title_index USING fts5 (words, tokenize = 'unicode61 remove_diacritics 2');
"""


class DatabaseFile:
    def __init__(self, path: Path) -> None:
        """Open or create the database, readable by its owner only. Raises ConversationError."""
        self.path = path
        self.warnings: list[str] = []  # one line per damaged file that was set aside
        try:
            self._lock = _open_lock(path)
        except OSError as error:
            raise ConversationError(
                f"cannot open the conversations in {path}: {error.strerror}; {_ACCESS_HINT}"
            ) from error
        try:
            self.database = self._open()
        except BaseException:
            os.close(self._lock)
            raise
        self._open_file: int | None = None  # `<database>.open`
        self._held: set[str] = set()  # conversations whose byte is locked

    def close(self) -> None:
        """Close the database. The last process to close it leaves a single file."""
        try:
            with self.convert_errors():
                self.database.close()
        finally:
            os.close(self._lock)
            if self._open_file is not None:
                os.close(self._open_file)

    def hold(self, conversations: Collection[str]) -> set[str]:
        """Lock these conversations and no others; return those that another process has locked.

        The locks end with the process. Without access to the file, nothing is locked.
        """
        elsewhere: set[str] = set()
        with contextlib.suppress(OSError):
            if self._open_file is None:
                self._open_file = _open_file(f"{self.path}.open")
            for name in self._held.difference(conversations):
                fcntl.lockf(self._open_file, fcntl.LOCK_UN, 1, _byte_of(name))
            self._held.intersection_update(conversations)
            for name in set(conversations) - self._held:
                try:
                    fcntl.lockf(self._open_file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _byte_of(name))
                    self._held.add(name)
                except (BlockingIOError, PermissionError):
                    elsewhere.add(name)
        return elsewhere

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Run an atomic transaction. Raises ConversationError."""
        with self.convert_errors(), _transaction(self.database):
            yield self.database

    @contextlib.contextmanager
    def convert_errors(self) -> Iterator[None]:
        """Convert SQLite errors in the block to ConversationError, with a hint."""
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:
            hint = _HINTS.get(_code(error), _OTHER_HINT)
            raise ConversationError(
                f"conversations in {self.path}: {one_line(error)}; {hint}"
            ) from error

    def _open(self) -> sqlite3.Connection:
        with self.convert_errors():
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
            with _transaction(database, "DEFERRED"):  # all checks see the same state
                version = self._check(database)
            _use_write_ahead_log(database)
            # With WAL and synchronous = NORMAL, a save does not wait for the disk.
            for setting in ("synchronous = NORMAL", "foreign_keys = ON", "secure_delete = ON"):
                database.execute(f"PRAGMA {setting}")
            if version < VERSION:
                with _transaction(database):
                    _migrate(database)
        except BaseException:
            database.close()
            raise
        return database

    def _check(self, database: sqlite3.Connection) -> int:
        """Return the schema version. Raises ConversationError for a database of another program."""
        version: int = database.execute("PRAGMA user_version").fetchone()[0]
        owner: int = database.execute("PRAGMA application_id").fetchone()[0]
        tables: int = database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if owner != APPLICATION_ID and (owner or tables):
            raise ConversationError(
                f"expected akunu's conversations in {self.path}, found a database of another "
                "program; move it away, then try again"
            )
        if version > VERSION:
            raise ConversationError(
                f"{self.path} was written by a newer akunu (version {version}, expected at most "
                f"{VERSION}) and is unchanged; update akunu, or rename the file to start a new one"
            )
        if foreign := _foreign_object(database):
            raise ConversationError(
                f"expected only akunu's tables in {self.path}, found {foreign} of another program; "
                "move the file away, then try again"
            )
        if version:
            _check_pages(database)
        return version

    def _set_aside(self, error: Exception) -> None:
        """Rename a damaged database and its log, unless another process has it open."""
        damaged = f"{self.path} is damaged ({one_line(error)})"
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConversationError(
                f"{damaged} and another akunu has it open; close all of them, then try again"
            ) from error
        number = 1
        while any(Path(f"{self.path}.damaged-{number}{part}").exists() for part in _SUFFIXES):
            number += 1
        aside = Path(f"{self.path}.damaged-{number}")
        try:
            for part in _SUFFIXES:
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


def _byte_of(conversation: str) -> int:
    """Return the place of a conversation in `<database>.open`."""
    return zlib.crc32(conversation.encode(errors="replace"))


def _open_file(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _open_lock(path: Path) -> int:
    """Create missing directories and files; return the descriptor of the shared lock."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = _open_file(f"{path}.lock")
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        _create(path)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _create(path: Path) -> None:
    # SQLite would use the umask for the mode. Its log files inherit this mode.
    # Do not open an existing file: closing it would drop SQLite's locks on it.
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def _use_write_ahead_log(database: sqlite3.Connection) -> None:
    """Enable WAL, so that readers do not wait for a writer. Retry while the database is busy."""
    # The first process to do so needs exclusive access, which SQLite does not wait for.
    deadline = time.monotonic() + _BUSY_TIMEOUT_S
    while True:
        try:
            database.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if _code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


def _check_pages(database: sqlite3.Connection) -> None:
    """Raise sqlite3.DatabaseError for a damaged page. `rows` handles damaged values."""
    for (found,) in database.execute(f"PRAGMA quick_check ({_MAX_PROBLEMS})"):
        if found != "ok" and not _BAD_ROW.search(str(found)):
            error = sqlite3.DatabaseError(" ".join(str(found).split())[:200])
            error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise error


def _foreign_object(database: sqlite3.Connection) -> str | None:
    """Describe a view, trigger or computed column, if any: akunu has none, and theirs may hang."""
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
    # IMMEDIATE waits for other writers now; otherwise a later write could fail.
    database.execute(f"BEGIN {kind}")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise


def _code(error: Exception) -> int:
    if isinstance(error, UnicodeDecodeError):  # a message with the name of a damaged table
        return sqlite3.SQLITE_CORRUPT
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF


def _migrate(database: sqlite3.Connection) -> None:
    """Add what is missing; another process may have added it, too."""
    if not _columns(database, "messages"):
        _run_all(database, _TABLES)
    if not _columns(database, "title_index"):
        _run_all(database, _INDEXES)
        for index, query in (
            ("message_index", "SELECT number, text FROM messages"),
            ("title_index", "SELECT number, title FROM conversations"),
        ):
            rows = ((number, searchable(text_of(text))) for number, text in database.execute(query))
            database.executemany(f"INSERT INTO {index} (rowid, words) VALUES (?, ?)", rows)
    # The tool calls of messages and the options of conversations: JSON, or NULL.
    for table, column in (("messages", "rounds"), ("conversations", "options")):
        if column not in _columns(database, table):
            database.execute(f"ALTER TABLE {table} ADD COLUMN {column} TEXT")
    database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    database.execute(f"PRAGMA user_version = {VERSION}")


def _columns(database: sqlite3.Connection, table: str) -> set[str]:
    """Return the names of a table's columns, none if the table does not exist."""
    return {row[1] for row in database.execute(f"PRAGMA table_info ({table})")}


def _run_all(database: sqlite3.Connection, statements: str) -> None:
    # `executescript` would commit the transaction.
    for statement in statements.strip().split(";\n"):
        database.execute(statement)
