"""Several akunus at once on one store, one database and one cache; each must do all its work."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from akunu_py.chats.conversation_store import ConversationStore
from akunu_py.chats.database import APPLICATION_ID, _make_tables
from tests.reliability.faults import _PANIC, Command, Done, Home, Outcome, check_store, finished
from tests.reliability.faults_chat import Chat, kept, terminals
from tests.reliability.faults_commands import commands, local_hub, pull_of, slowly

_SLOW_S = 240.0


def all_at_once(home: Home, files: dict[str, bytes], number: int, tokens: int = 150) -> Outcome:
    """Two chats that answer, a completion helper that completes and a pull that trickles."""
    outcome = Outcome("at once", "2 chats, complete, models pull", "")
    helper = commands(home)["complete"]
    prompts = [f"Tell me about walrus {number}{letter}." for letter in "ab"]
    with terminals() as make, local_hub(home, files) as hub:
        slowly(hub, tokens / 25)
        pull = pull_of(hub)
        pulling, completing = home.start(pull), home.start(helper)
        chats = [Chat(home, make(), f"--max-tokens {tokens}") for _ in prompts]
        for chat, prompt in zip(chats, prompts, strict=True):
            chat.ready().send(prompt)
        for chat in chats:
            screen = chat.terminal.wait_for(r"● ready .* tokens/s|✗", seconds=_SLOW_S)
            outcome.check("not saved" not in screen, f"the chat says:\n{screen}")
        for chat in chats:
            screen = chat.quit()
            outcome.check("code=0" in screen, f"a chat ends with:\n{screen}")
            for panic in _PANIC:
                outcome.check(panic not in screen, f"{panic!r}:\n{screen}")
        for command, process in ((pull, pulling), (helper, completing)):
            _check(outcome, command, finished(process))
    now = kept(home)
    for prompt in prompts:
        outcome.check(bool(now.get(prompt, "").strip()), f"the answer to {prompt!r} is lost")
    check_store(home, outcome)
    home.akunu(*pull.undo)
    return outcome


def import_twice(home: Home, processes: int = 2) -> Outcome:
    """Processes that import the same model: one does, the others say that it is here."""
    command = commands(home)["models import"]
    outcome = Outcome("at once", f"{processes} x models import", "")
    done = _at_once(home, [command] * processes)
    outcome.check(sorted(each.code for each in done) == [0] + [2] * (processes - 1), f"{done}")
    for each in done:
        outcome.check_words(each)
        if each.code:
            outcome.word = each.word
            outcome.check("is already installed" in each.word, each.word)
    _no_partials(home, outcome)
    check_store(home, outcome)
    home.akunu(*command.undo)
    return outcome


def pull_twice(home: Home, files: dict[str, bytes], processes: int = 2) -> Outcome:
    """Processes that pull the same model: all say that it is ready, and it was fetched once."""
    outcome = Outcome("at once", f"{processes} x models pull", "")
    with local_hub(home, files) as hub:
        slowly(hub, 1.0)
        command = pull_of(hub)
        for each in _at_once(home, [command] * processes):
            outcome.check_words(each)
            outcome.check(each.code == 0, f"code {each.code}: {each.err}")
        fetched = hub.asked("model.safetensors")
        outcome.check(len(fetched) == 1, f"fetched {len(fetched)} times")
        outcome.word = "fetched once"
        _no_partials(home, outcome)
        check_store(home, outcome)
        home.akunu(*command.undo)
    return outcome


def remove_meanwhile(home: Home) -> Outcome:
    """A model is removed while it is imported: the remover says who is at work, or it is gone."""
    command = commands(home)["models import"]
    outcome = Outcome("at once", "models import, models rm", "")
    process = home.start(command)
    words = set()
    while process.poll() is None:
        removed = home.akunu(*command.undo)
        outcome.check_words(removed, "rm: ")
        words.add(removed.word)
    imported = finished(process)
    outcome.check_words(imported)
    outcome.check(imported.code in (0, 1), f"import: {imported}")
    outcome.word = "; ".join(sorted(words))[:200]
    home.akunu(*command.undo)
    check_store(home, outcome)
    return outcome


def remembered_together(directory: Path, processes: int = 4, answers: int = 30) -> Outcome:
    """Processes that remember answers in one memory, which is folded all the time: none is lost."""
    outcome = Outcome("at once", f"{processes} writers of one memory", f"{answers} answers each")
    code = (
        "import os, sys; from pathlib import Path\n"
        "from akunu_py.decoding import learned_state as l\n"
        "l._JOURNAL_TOKENS = 400\n"
        "e = l.LearnedState(Path('/a/model'), 't', 'l', answer_cache=True)\n"
        f"for n in range({answers}): e.add_answer(range(40))\n"
        "e.flush()\n"
        "again = l.LearnedState(Path('/a/model'), 't', 'l', answer_cache=True)\n"
        "print(e.answer_cache.total, again.answer_cache.total, e.warnings)\n"
    )
    done = [finished(process) for process in _python(code, directory, processes)]
    for each in done:
        outcome.check(each.code == 0 and "[]" in each.out, f"{each}")
    most = max(int(each.out.split()[1]) for each in done if each.out)
    outcome.word = f"{most} tokens"
    outcome.check(most == processes * answers * 41, f"{most} tokens are there")
    return outcome


def read_while_migrated(home: Home, readers: int = 4, conversations: int = 400) -> Outcome:
    """A database of the first version, which every program that opens it wants to bring up to
    date: one does, all see every conversation."""
    outcome = Outcome("at once", f"{readers} readers of an old database", "")
    home.conversations.unlink(missing_ok=True)
    make_old(home.conversations, conversations)
    command = Command("chats list", ("chats", "list", "--format", "json"))
    for done in _at_once(home, [command] * readers):
        outcome.check_words(done)
        outcome.check(done.code == 0, f"code {done.code}: {done.err}")
        if done.code == 0:
            found = len(json.loads(done.out))
            outcome.check(found == conversations, f"{found} of {conversations} conversations")
    store = ConversationStore.open(home.conversations)
    hits = len(store.search("walrus"))
    outcome.check(hits == conversations, f"search finds {hits} of {conversations}")
    store.close()
    outcome.word = f"{conversations} conversations, {hits} found by a word"
    return outcome


def killed_migration(home: Home, seconds: float, conversations: int = 3000) -> Outcome:
    """A program is killed while it brings an old database up to date; the next one does it."""
    outcome = Outcome("SIGKILL", "a migration", f"after {seconds:.2f} s")
    home.conversations.unlink(missing_ok=True)
    make_old(home.conversations, conversations)
    command = Command("chats list", ("chats", "list", "--format", "json"))
    process = home.start(command)
    time.sleep(seconds)
    process.kill()
    finished(process)
    done = home.run(command)
    outcome.check_words(done)
    outcome.check(done.code == 0, f"code {done.code}: {done.err}")
    outcome.check("damaged" not in done.err, done.err)
    outcome.check(len(json.loads(done.out or "[]")) == conversations, "conversations are lost")
    return outcome


def make_old(path: Path, conversations: int) -> None:
    """A database as the first version of its tables had it, without the words to search for."""
    path.parent.mkdir(parents=True, exist_ok=True)
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


def _at_once(home: Home, wanted: Sequence[Command]) -> list[Done]:
    return [finished(process) for process in [home.start(command) for command in wanted]]


def _python(code: str, directory: Path, processes: int) -> list[subprocess.Popen[bytes]]:
    import os

    environment = os.environ | {"XDG_CACHE_HOME": str(directory)}
    return [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        for _ in range(processes)
    ]


def _check(outcome: Outcome, command: Command, done: Done) -> None:
    outcome.check_words(done, f"{command.name}: ")
    outcome.check(done.code == 0, f"{command.name}: code {done.code}: {done.err[-800:]}")
    outcome.check(command.answers(done), f"{command.name}: {done}")


def _no_partials(home: Home, outcome: Outcome) -> None:
    left = [path.name for path in home.models.glob(".partial-*")]
    outcome.check(not left, f"left behind: {left}")
