"""What is kept while it is said, hurt at its smallest: programs that only write, and are killed.

A chat takes seconds to start, so few of them can be killed. Here the parts that write, the store
of conversations and the memory of answers, run by themselves in a process that says on stdout what
it was told is safe; hundreds of kills hit every place of a write. `python -m
tests.reliability.faults_writers store|memory FOLDER` is that process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

from tests.reliability.faults import Outcome, finished

MODEL = Path("/a/model")
_LENGTH = 40  # tokens of an answer


def killed_store(directory: Path, random: Random) -> Outcome:
    """Kills a process that saves messages; every one that `save` returned for must be there."""
    from akunu_py.chats.conversation_store import ConversationStore

    seconds = random.uniform(0.0, 0.3)
    outcome = Outcome("SIGKILL", "the conversation store, writing", f"after {seconds:.3f} s")
    said = _killed("store", directory, seconds, outcome)
    store = ConversationStore.open(directory / "conversations.db")
    outcome.check(not store.warnings, f"warnings: {store.warnings}")
    kept = {message.id for info in store.list() for message in store.load(info.id).messages}
    hits = {found.info.id for found in store.search("walrus")}
    outcome.check(len(hits) == len(store.list()), "the index lacks conversations")
    store.close()
    missing = [name for name in said if name not in kept]
    outcome.check(not missing, f"{len(missing)} of {len(said)} messages are lost: {missing[:5]}")
    outcome.word = f"{len(said)} messages were safe"
    return outcome


def killed_memory(directory: Path, random: Random) -> Outcome:
    """Kills a process that remembers answers; nothing may be set aside, and none may be lost."""
    from akunu_py.decoding.learned_state import LearnedState

    seconds = random.uniform(0.0, 0.3)
    outcome = Outcome("SIGKILL", "the memory, writing", f"after {seconds:.3f} s")
    before = _remembered(directory)
    said = _killed("memory", directory, seconds, outcome)
    os.environ["XDG_CACHE_HOME"] = str(directory)
    learned_state = LearnedState(MODEL, "tokens", "layout", answer_cache=True)
    outcome.check(not learned_state.warnings, f"warnings: {learned_state.warnings}")
    grown = _remembered(directory) - before
    expected = len(said) * (_LENGTH + 1)
    outcome.check(grown >= expected, f"{grown} tokens are there, {expected} were safe")
    outcome.word = f"{len(said)} answers were safe"
    return outcome


def _remembered(directory: Path) -> int:
    from akunu_py.decoding.learned_state import LearnedState

    os.environ["XDG_CACHE_HOME"] = str(directory)
    memory = LearnedState(MODEL, "tokens", "layout", answer_cache=True).answer_cache
    assert memory is not None
    return memory.total


def _killed(part: str, directory: Path, seconds: float, outcome: Outcome) -> list[str]:
    """What the process had said is safe when it was killed."""
    environment = os.environ | {"XDG_CACHE_HOME": str(directory)}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.reliability.faults_writers", part, str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    assert process.stdout is not None
    first = process.stdout.readline().decode()  # it is writing from here on
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    done = finished(process)
    outcome.check(done.code == -signal.SIGKILL, f"it had ended already: {done.err[-500:]}")
    return (first + done.out).split()


def _write_messages(directory: Path) -> None:
    from akunu_py.chats.conversation_store import ConversationStore
    from akunu_py.chats.tree import ChatMessage

    store = ConversationStore.open(directory / "conversations.db")
    number = 0
    while True:
        conversation = f"{os.getpid()}-{number // 6}"
        message = ChatMessage("user", f"a walrus, number {number}", None)
        store.save(conversation, message)
        print(message.id, flush=True)
        number += 1


def _remember_answers(directory: Path) -> None:
    from akunu_py.decoding import learned_state

    learned_state._JOURNAL_TOKENS = 400  # so that a snapshot is made every ten answers
    state = learned_state.LearnedState(MODEL, "tokens", "layout", answer_cache=True)
    while True:
        state.add_answer(range(_LENGTH))
        state.flush()
        if state.warnings:
            raise SystemExit(state.warnings[0])
        print("kept", flush=True)


if __name__ == "__main__":
    {"store": _write_messages, "memory": _remember_answers}[sys.argv[1]](Path(sys.argv[2]))
