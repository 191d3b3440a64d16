"""Several akunus at once on one store, one database and one cache; each does all its work."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

from akunu_py.chats.conversation_store import ConversationStore
from akunu_py.chats.database import APPLICATION_ID, _make_tables
from tests.reliability.faults import Command, Done, Home, Outcome, check_store, finished
from tests.reliability.faults_commands import leftovers, local_hub, pull_of, slowly

_LIST = Command("chats list", ("chats", "list", "--format", "json"))


def pull_twice(home: Home, files: dict[str, bytes], processes: int = 2) -> Outcome:
    """Pull one model in several processes: all report success, and it is fetched once."""
    outcome = Outcome("at once", f"{processes} x models pull", "")
    with local_hub(home, files) as hub:
        hub.faults["model.safetensors"].extend(slowly(hub, 1.0))
        command = pull_of(hub)
        for each in _at_once(home, command, processes):
            _check(outcome, command, each)
        fetched = hub.asked("model.safetensors")
        outcome.check(len(fetched) == 1, f"fetched {len(fetched)} times")
        _check_store(home, outcome, command)
    return outcome


def add_answers_together(directory: Path, processes: int = 4, answers: int = 25) -> Outcome:
    """Add answers to one answer cache, whose journal is moved all the time: none is lost."""
    outcome = Outcome("at once", f"{processes} writers of answers", f"{answers} answers each")
    code = (
        "from pathlib import Path\n"
        "from akunu_py.decoding.learned_state import LearnedState\n"
        "def state(): return LearnedState(Path('/a/model'), 't', 'l', answer_cache=True)\n"
        "mine = state()\n"
        f"for n in range({answers}): mine.add_answer(range(2000))\n"  # more than the journal takes
        "mine.flush()\n"
        "print(state().answer_cache.total, mine.warnings)\n"
    )
    environment, pipe = os.environ | {"XDG_CACHE_HOME": str(directory)}, subprocess.PIPE
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe, env=environment)
        for _ in range(processes)
    ]
    done = [finished(process) for process in started]
    for each in done:
        outcome.check(each.code == 0 and "[]" in each.out, f"{each}")
    most = max(int(each.out.split()[0]) for each in done if each.out)
    outcome.check(most == processes * answers * 2001, f"{most} tokens are there")
    return outcome


def migrate_together(home: Home, readers: int = 4, conversations: int = 400) -> Outcome:
    """Open a database of the first version in several programs: all see every conversation."""
    outcome = Outcome("at once", f"{readers} readers of an old database", "")
    make_old(home.conversations, conversations)
    for done in _at_once(home, _LIST, readers):
        _check_list(outcome, done, conversations)
    store = ConversationStore.open(home.conversations)
    hits = len(store.search("walrus"))
    outcome.check(hits == conversations, f"search finds {hits} of {conversations}")
    store.close()
    return outcome


def kill_migration(home: Home, seconds: float, conversations: int = 3000) -> Outcome:
    """Kill a program during the migration of a database; the next program completes it."""
    outcome = Outcome("SIGKILL", "a migration", f"after {seconds:.2f} s")
    make_old(home.conversations, conversations)
    process = home.start(_LIST)
    time.sleep(seconds)
    process.kill()
    finished(process)
    done = home.run(_LIST)
    outcome.check("damaged" not in done.err, done.err)
    _check_list(outcome, done, conversations)
    return outcome


def make_old(path: Path, conversations: int) -> None:
    """Write a database of the first version, without an index of words."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    database = sqlite3.connect(path)
    _make_tables(database)
    for n in range(conversations):
        database.execute(
            "INSERT INTO conversations VALUES (?, ?, 'about a walrus', ?, ?, 'starter', NULL)",
            (n + 1, f"old{n}", n, n),
        )
        database.execute(
            "INSERT INTO messages VALUES (?, ?, ?, NULL, 'user', 'Tell me of a walrus.', '', ?, "
            "'', NULL, NULL, 1)",
            (n + 1, n + 1, f"m{n}", n),
        )
    database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    database.execute("PRAGMA user_version = 1")
    database.commit()
    database.close()


def _at_once(home: Home, command: Command, processes: int) -> list[Done]:
    return [finished(each) for each in [home.start(command) for _ in range(processes)]]


def _check(outcome: Outcome, command: Command, done: Done) -> None:
    outcome.check_words(done, f"{command.name}: ")
    outcome.check(done.code == 0, f"{command.name}: code {done.code}: {done.err[-800:]}")


def _check_list(outcome: Outcome, done: Done, conversations: int) -> None:
    _check(outcome, _LIST, done)
    found = len(json.loads(done.out or "[]"))
    outcome.check(found == conversations, f"{found} of {conversations} conversations")


def _check_store(home: Home, outcome: Outcome, command: Command) -> None:
    left = [path for path in leftovers(home) if ".partial-" in path]
    outcome.check(not left, f"left behind: {left}")
    check_store(home, outcome)
    home.akunu(*command.undo)
