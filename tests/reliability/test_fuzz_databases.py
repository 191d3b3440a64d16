"""Damaged values in the database of conversations: only their rows are affected."""

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from akunu_py.chats.conversation_store import ConversationStore
from akunu_py.chats.export import render
from akunu_py.chats.json import as_json, read_json
from akunu_py.errors import ConversationError
from akunu_py.tui.open_conversation import Conversation
from akunu_py.tui.screens.conversation_list import format_time
from tests.reliability.fuzz import NUMBERS, TEXTS, explore, lengths
from tests.support.chats import T0, branched, exchange_of

_COLUMNS = {
    "conversations": ("title", "created", "updated", "model", "deleted"),
    "messages": (
        *("parent", "role", "text", "thinking", "created", "model", "stats"),
        *("finish_reason", "chosen"),
    ),
}
_bytes = st.binary(max_size=12) | st.sampled_from(
    [b"\xed\xa0\x80", b"\xff\xfe", b"queue\x1b[2J", b"[" * 100_000, b'{"drafted": 1e999}']
)
# Values; bytes in a pair are stored as text.
_values = st.one_of(
    st.none(),
    NUMBERS.filter(lambda number: isinstance(number, float) or -(2**63) <= number < 2**63),
    TEXTS.map(lambda text: text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")),
    _bytes,
)
_as_text = st.tuples(_bytes, st.just(True))
_damage = st.sampled_from([(table, name) for table in _COLUMNS for name in _COLUMNS[table]])


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    """A database of two conversations, `queue` and `other`."""
    path = tmp_path / "whole.db"
    store = ConversationStore.open(path)
    store.save_tree(branched())
    store.save_tree(exchange_of("other", "Another one", "Yes", T0))
    store.close()
    return path.read_bytes()


@contextlib.contextmanager
def without_constraints(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a connection that may violate the constraints of the tables."""
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("PRAGMA ignore_check_constraints = ON")
    tables = database.execute("SELECT name, sql FROM sqlite_master WHERE sql NOTNULL").fetchall()
    change = "UPDATE sqlite_master SET sql = ? WHERE name = ?"
    database.execute("PRAGMA writable_schema = ON")
    database.executemany(change, [(sql.replace(" NOT NULL", ""), name) for name, sql in tables])
    database.execute("PRAGMA writable_schema = RESET")
    yield database
    database.execute("PRAGMA writable_schema = ON")
    database.executemany(change, [(sql, name) for name, sql in tables])
    database.close()


def use(store: ConversationStore, name: str) -> None:
    """Show a conversation in all forms, and continue it."""
    tree = store.load(name)
    for form in ("markdown", "json"):
        render(tree, form)
    for message in tree.messages:
        assert message.stats is None or message.stats.as_dict()
        format_time(message.created, time.time())
    assert len(read_json(as_json([tree]), "again")[0]) == len(tree)
    Conversation(tree).ask("More?")
    for message in tree.active_branch():
        store.save(name, message)
    again = store.load(name)
    branch = again.active_branch()
    assert [each.text for each in branch] == [each.text for each in tree.active_branch()]
    assert len(again) == len(tree)
    store.activate_branch(name, branch[0].id)
    store.remove(name, [branch[-1].id])


def use_all(store: ConversationStore) -> list[str]:
    infos = store.list()
    for info in infos:
        format_time(info.updated, time.time())
        use(store, store.resolve(info.id).id)
        store.rename(info.id, "New")
    for words in ("first", "yes", "que\x1b", "queue"):
        store.search(words)
    store.recent_prompts(10)
    store.delete(infos[0].id)
    store.undo_delete()
    store.save_tree(branched("third"))
    return [info.id for info in infos]


def set_value(database: sqlite3.Connection, update: str, table: str, row: int, value: Any) -> None:
    """Set a value, or a tuple's only value as text; `conversations` has one row to damage."""
    set_to = "CAST(? AS TEXT)" if isinstance(value, tuple) else "?"
    given = value[0] if isinstance(value, tuple) else value
    number = 1 if table == "conversations" else row
    database.execute(f"{update} = {set_to} WHERE number = ?", (given, number))


@lengths(10)
def test_any_value_in_any_column_affects_only_its_row(
    whole: bytes, tmp_path: Path, examples: int
) -> None:
    path = tmp_path / "conversations.db"
    other = exchange_of("other", "Another one", "Yes", T0)

    def check(damage: tuple[tuple[str, str], int, Any]) -> None:
        (table, column), row, value = damage
        path.write_bytes(whole)
        with without_constraints(path) as database:
            set_value(database, f"UPDATE {table} SET {column}", table, row, value)
        store = ConversationStore.open(path)
        try:
            assert store.warnings == []
            assert store.load("other").messages == other.messages
            listed = use_all(store)
        finally:
            store.close()
        assert "other" in listed
        assert len(listed) == 1 + (column != "deleted" or value is None or value != value)

    explore(check, examples, st.tuples(_damage, st.integers(1, 6), _values | _as_text))


@lengths(10)
def test_a_damaged_id_is_at_most_an_error_of_its_conversation(
    whole: bytes, tmp_path: Path, examples: int
) -> None:
    path = tmp_path / "conversations.db"
    other = exchange_of("other", "Another one", "Yes", T0)

    def check(damages: list[tuple[str, int, Any]]) -> None:
        path.write_bytes(whole)
        with without_constraints(path) as database:
            for table, row, value in damages:
                set_value(database, f"UPDATE OR IGNORE {table} SET id", table, row, value)
        store = ConversationStore.open(path)
        try:
            for info in store.list():
                with contextlib.suppress(ConversationError):
                    store.load(store.resolve(info.id).id)
            assert store.load("other").messages == other.messages
        finally:
            store.close()

    tables = st.sampled_from(["conversations", "messages"])
    damage = st.tuples(tables, st.integers(1, 4), _values | _as_text)
    explore(check, examples, st.lists(damage, min_size=1, max_size=4))


_ENDLESS = "WITH RECURSIVE n (x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x FROM n"


@pytest.mark.parametrize("statement", [
    "ALTER TABLE messages RENAME TO old; CREATE VIEW messages AS "
    "SELECT x AS number, 1 AS conversation, '' AS text, '' AS id FROM (" + _ENDLESS + ")",
    f"CREATE VIEW more AS {_ENDLESS}",
    "CREATE TRIGGER more AFTER INSERT ON messages BEGIN SELECT zeroblob(900000000); END",
    "ALTER TABLE messages ADD COLUMN more AS (hex(zeroblob(900000000)))",
    "CREATE VIRTUAL TABLE more USING rtree (a, b, c)",
])  # fmt: skip
def test_objects_of_other_programs_are_not_run(
    whole: bytes, tmp_path: Path, statement: str
) -> None:
    path = tmp_path / "conversations.db"
    path.write_bytes(whole)
    database = sqlite3.connect(path)
    database.executescript(statement)
    database.close()
    kept = path.read_bytes()
    with pytest.raises(ConversationError, match="of another program; move the file away"):
        ConversationStore.open(path)
    assert path.read_bytes() == kept
