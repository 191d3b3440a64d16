"""Writes conversations_vN.sql, a database of the present version N as statements:

    python -m tests.golden.make_conversations

Run it once for each new version, before it is released; files of earlier versions stay as they are.
"""

import sqlite3
import tempfile
from pathlib import Path

from akunu_py.chats.conversation_store import ConversationStore
from akunu_py.chats.database import VERSION
from tests.support.chats import T0, branched, exchange_of


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "conversations.db"
        store = ConversationStore.open(path)
        store.save_tree(branched())
        store.save_tree(exchange_of("lists", "我想 reverse a list", "Use `xs[::-1]`.", T0 + 1000))
        store.rename("lists", "Lists")
        store.delete("lists")
        store.undo_delete()
        store.close()
        database = sqlite3.connect(path)
        lines = statements(database)
        database.close()
    target = Path(__file__).with_name(f"conversations_v{VERSION}.sql")
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(target)


def statements(database: sqlite3.Connection) -> list[str]:
    """What makes the database again; the inner tables of an index are left to SQLite."""
    lines = [
        f"PRAGMA {name} = {database.execute(f'PRAGMA {name}').fetchone()[0]};"
        for name in ("application_id", "user_version")
    ]
    made = database.execute("SELECT name, sql FROM sqlite_master WHERE sql NOTNULL").fetchall()
    indexes = tuple(name for name, sql in made if "VIRTUAL" in sql)
    outer = [
        (name, sql) for name, sql in made if not name.startswith(tuple(f"{i}_" for i in indexes))
    ]
    lines += [f"{sql};" for _, sql in outer]
    for name, sql in outer:
        if "INDEX" in sql.split()[:3]:
            continue
        columns = [row[1] for row in database.execute(f"PRAGMA table_info ({name})")]
        if name in indexes:
            columns.insert(0, "rowid")
        quoted = " || ', ' || ".join(f"quote({column})" for column in columns)
        rows = database.execute(f"SELECT {quoted} FROM {name} ORDER BY rowid")
        lines += [f"INSERT INTO {name} ({', '.join(columns)}) VALUES ({row[0]});" for row in rows]
    return lines


if __name__ == "__main__":
    main()
