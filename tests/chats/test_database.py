"""The database file: versions, damage, concurrent processes, and disk errors."""

import contextlib
import signal
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from akunu_py.chats import database
from akunu_py.chats.conversation_store import ConversationStore
from akunu_py.chats.database import VERSION
from akunu_py.chats.options import ChatOptions
from akunu_py.chats.tree import ChatMessage
from akunu_py.errors import ConversationError
from tests.support.chats import T0, branched, exchange_of
from tests.support.paths import GOLDEN


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "conversations.db"


def opened(path: Path) -> contextlib.closing[ConversationStore]:
    return contextlib.closing(ConversationStore.open(path))


def filled(path: Path, conversations: int = 1) -> Path:
    with opened(path) as store:
        for number in range(conversations):
            store.save_tree(exchange_of(f"c{number}", f"Prompt {number}", "word " * 500, T0))
    return path


# Versions


@pytest.mark.parametrize(
    ("version", "change"),
    [
        *((n, "") for n in range(1, VERSION + 1)),
        (3, "ALTER TABLE conversations DROP COLUMN options"),
    ],
)
def test_every_schema_version_is_migrated(
    path: Path, tmp_path: Path, version: int, change: str
) -> None:
    """golden/make_conversations.py writes the golden files before a release."""
    database = sqlite3.connect(path)
    golden = (GOLDEN / f"conversations_v{version}.sql").read_text("utf-8")
    database.executescript(golden + change)
    assert database.execute("PRAGMA user_version").fetchone() == (version,)
    database.close()
    with opened(path) as store:
        assert [info.title for info in store.list()] == ["Lists", "What is a queue?"]
        tree, kept = branched(), store.load("queue")
        assert (kept.messages, kept.active_branch()) == (tree.messages, tree.active_branch())
        for words, found in {"welcome": "queue", "想": "lists", "lists": "lists"}.items():
            assert [each.info.id for each in store.search(words)] == [found]
        store.save("queue", ChatMessage("user", "One more", "queue-5"))
        store.set_options("queue", ChatOptions(seed=1))
        assert store.load("queue").options == ChatOptions(seed=1)
    assert schema_of(path) == schema_of(filled(tmp_path / "new.db"))


def schema_of(path: Path) -> tuple[int, list[tuple[str, str]]]:
    database = sqlite3.connect(path)
    made = database.execute("SELECT name, sql FROM sqlite_master ORDER BY name").fetchall()
    (version,) = database.execute("PRAGMA user_version").fetchone()
    database.close()
    return version, made


def test_a_migration_that_fails_leaves_the_old_version(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(database: sqlite3.Connection) -> None:
        database.execute("DROP TABLE messages")
        raise sqlite3.OperationalError("the disk is on fire")

    before = schema_of(filled(path))
    monkeypatch.setattr(database, "_migrate", fail)
    monkeypatch.setattr(database, "VERSION", VERSION + 1)
    with pytest.raises(ConversationError, match="the disk is on fire"):
        ConversationStore.open(path)
    assert schema_of(path) == before


@pytest.mark.parametrize(("script", "expected"), [
    (f"PRAGMA user_version = {VERSION + 1}", f"newer akunu .*{VERSION + 1}.*rename the file"),
    ("PRAGMA application_id = 0; CREATE TABLE theirs (a)", "another program"),
    ("CREATE VIEW theirs AS SELECT 1", "theirs. of another program"),
])  # fmt: skip
def test_databases_of_others_are_refused_and_unchanged(
    path: Path, script: str, expected: str
) -> None:
    database = sqlite3.connect(filled(path))
    database.executescript(script)
    database.close()
    before = path.read_bytes()
    with pytest.raises(ConversationError, match=expected):
        ConversationStore.open(path)
    assert path.read_bytes() == before


# Damage


@pytest.mark.parametrize("damage", ["a page", "the end", "everything"])
def test_a_damaged_database_is_set_aside(path: Path, damage: str) -> None:
    size = filled(path, conversations=40).stat().st_size
    for number in (1, 2):
        with path.open("r+b") as file:
            if damage == "the end":
                file.truncate(size // 2)
            else:
                file.seek(4 * 4096 if damage == "a page" else 0)
                file.write(b"\xff" * 4096)
        damaged = path.read_bytes()
        with opened(path) as store:
            (warning,) = store.warnings
            assert warning.endswith(f"was set aside as conversations.db.damaged-{number}")
            assert store.list() == []
        assert path.with_name(f"conversations.db.damaged-{number}").read_bytes() == damaged
        filled(path, conversations=40)


def test_damaged_database_in_use_is_not_set_aside(path: Path) -> None:
    with opened(filled(path)):
        path.write_bytes(b"garbage" * 1000)
        with pytest.raises(ConversationError, match="another akunu has it open"):
            ConversationStore.open(path)
        assert path.read_bytes() == b"garbage" * 1000


# Other programs


WRITER = """
import sys
from pathlib import Path
from akunu_py.chats import database
from akunu_py.chats.conversation_store import ConversationStore
from akunu_py.chats.tree import ChatMessage
database._BUSY_TIMEOUT_S = 60.0  # on a busy machine
store = ConversationStore.open(Path(sys.argv[1]))
parent = None
for number in range(int(sys.argv[3])):
    message = ChatMessage("user", f"{sys.argv[2]} {number} " + "word " * 500, parent)
    store.save(sys.argv[2], message)
    parent = message.id
    print(number, flush=True)
store.close()
"""


def writer(path: Path, name: str, messages: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), name, str(messages)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_concurrent_writers(path: Path) -> None:
    writers = [writer(path, name, 60) for name in ("one", "two")]
    for process in writers:
        process.communicate(timeout=60)
        assert process.returncode == 0
    with opened(path) as store:
        for name in ("one", "two"):
            assert len(store.load(name).active_branch()) == 60


@pytest.mark.long
def test_concurrent_first_opens(path: Path) -> None:
    def open_and_close(path: Path, start: threading.Barrier) -> list[str]:
        start.wait()
        with opened(path) as store:
            return store.warnings

    with ThreadPoolExecutor(4) as pool:
        for number in range(50):
            start = threading.Barrier(4)
            new = path.with_name(f"{number}.db")
            opens = [pool.submit(open_and_close, new, start) for _ in range(4)]
            assert [each.result() for each in opens] == [[]] * 4


@pytest.mark.e2e
def test_killed_process_loses_no_saved_message(path: Path) -> None:
    process = writer(path, "killed", 100_000)
    assert process.stdout is not None
    while int(process.stdout.readline()) < 50:
        pass
    process.send_signal(signal.SIGKILL)
    written = [50, *map(int, process.stdout.read().split())][-1]
    process.wait()
    with opened(path) as store:
        assert store.warnings == []
        assert len(store.load("killed").active_branch()) >= written + 1


# Disks that refuse


def test_a_full_disk(path: Path) -> None:
    with opened(filled(path)) as store:
        pages = store._database.execute("PRAGMA page_count").fetchone()[0]
        store._database.execute(f"PRAGMA max_page_count = {pages + 1}")
        with pytest.raises(ConversationError, match=r"full; free some space$"):
            store.save_tree(exchange_of("big", "Prompt", "word " * 100_000, T0))
        assert [info.id for info in store.list()] == ["c0"]
        store._database.execute("PRAGMA max_page_count = 100000")
        store.save_tree(exchange_of("big", "Prompt", "word " * 100_000, T0))
        assert len(store.list()) == 2


def test_a_directory_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConversationError, match="XDG_DATA_HOME"):
        ConversationStore.open(tmp_path / "file" / "conversations.db")
