"""`python -m tests.reliability`: does harm for some minutes, and says what it did to whom.

Ends with a table in Markdown, of what was done, how often, and what was lost; with code 1 where a
promise was broken. The same seed does the same harm, up to where time runs out.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from random import Random

from akunu_py.models.store import model_store
from tests.reliability import (
    concurrency,
    faults_caches,
    faults_chat,
    faults_commands,
    faults_files,
)
from tests.reliability import faults_writers as writers
from tests.reliability.faults import Command, Home, Outcome, why_no_small_disk
from tests.reliability.faults_commands import SIGNALS
from tests.support.tiny_model import tiny_files

RUN = Command("run", ("run", "--max-tokens", "4", "--temperature", "0", "Say hello."))
LIST = Command("models list", ("models", "list"), answers=lambda done: "starter" in done.out)
CHAT_KINDS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGSTOP, SIGCONT", "terminal closed")
Source = Generator[Outcome, None, None]  # never ends


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="when to stop")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="sources whose name begins so")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the run, and cleans up
    outcomes: list[Outcome] = []
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory,
        contextlib.suppress(KeyboardInterrupt),
    ):
        Path(directory).chmod(0o755)
        for outcome in harm(Path(directory), args.seed, args.minutes * 60, args.only):
            outcomes.append(outcome)
            state = "BROKEN" if outcome.problems else "ok"
            what = f"{outcome.kind} | {outcome.command} | {outcome.moment} | {outcome.word}"
            print(
                f"{len(outcomes):4} {state:6} {what}",
                *outcome.problems,
                sep="\n       ",
                flush=True,
            )
    print(f"\n{table(outcomes)}")
    broken = sum(bool(outcome.problems) for outcome in outcomes)
    print(f"\n{len(outcomes)} faults, {broken} with a promise broken")
    return 1 if broken else 0


def harm(directory: Path, seed: int, seconds: float, only: str = "") -> Source:
    """Takes turns between the sources, the shorter ones more often, until the time is up."""
    end = time.monotonic() + seconds
    starter = model_store.get("starter").path
    found = sources(directory, starter, seed)
    named = {name: source for name, source in found.items() if name.startswith(only)}
    try:
        while named and time.monotonic() < end:
            for source, turns in named.values():
                for _ in range(turns):
                    if time.monotonic() < end:
                        yield next(source)
    finally:
        for source, _ in found.values():
            source.close()  # gives back what it has mounted


def sources(directory: Path, starter: Path, seed: int) -> dict[str, tuple[Source, int]]:
    """Everything that does harm, each in a home of its own, and how often at a turn."""
    tiny = tiny_files(directory)

    def home(name: str) -> Home:
        return Home(directory / name, starter)

    def made(name: str, make: Callable[[Home, Random], Source], turns: int) -> None:
        found[name] = make(home(name), Random(f"{seed} {name}")), turns

    found: dict[str, tuple[Source, int]] = {}
    made("signals", _signals, 3)
    made("chats", _chats, 2)
    made("files", _files, 4)
    made("network", lambda at, random: _neural_drafter(at, tiny, random), 3)
    made("limits", _limits, 1)
    made("together", lambda at, random: _together(at, tiny, random), 1)
    made("writers", lambda at, random: _writers(at.directory, random), 6)
    made("caches", lambda at, random: _caches(at.directory, random), 2)
    if why := why_no_small_disk():
        print(f"left out: full disks and permissions: {why}")
    else:
        made("permissions", _permissions, 2)
        random = Random(f"{seed} disk")
        found["disk"] = faults_files.disk_full(directory / "disk", starter, 150, random), 1
        found["full chats"] = _full_chats(directory / "chat disk", starter), 1
    return found


def _signals(home: Home, random: Random) -> Source:
    wanted = faults_commands.commands(home)
    seconds = faults_commands.durations(home, wanted)
    while True:
        command = random.choice([*wanted.values()])
        moment = random.uniform(0, seconds[command.name])
        what = random.randrange(6)
        if what == 0:
            yield faults_commands.suspended(home, command, moment)
        elif what == 1 and command.name in ("run", "complete"):
            yield faults_commands.reader_gone(home, command, moment)
        else:
            yield faults_commands.signalled(home, command, random.choice(SIGNALS), moment)


def _chats(home: Home, random: Random) -> Source:
    number = 0
    while True:
        number += 1
        kind, moment = random.choice(CHAT_KINDS), random.choice(faults_chat.MOMENTS)
        hurt = partial(faults_chat.hurt, home, kind, moment, random, number)
        yield _tried(hurt, kind, moment)


def _full_chats(directory: Path, starter: Path) -> Source:
    number = 0
    while True:
        for ending in ("there is room again", "the person quits", "it is killed"):
            number += 1
            full = partial(faults_chat.disk_full, directory, starter, ending, number)
            yield _tried(full, "disk full", ending)


def _files(home: Home, random: Random) -> Source:
    faults_files.keep_conversations(home)
    (home.config / "settings.toml").write_text('memory = true\ntheme = "auto"\n')
    home.run(RUN)
    while True:
        harm = random.choice([*faults_files.HARMS])
        where = random.choice(("store", "cache", "database", "settings"))
        if where == "database":
            path, command = home.conversations, faults_files.CHATS
        elif where == "settings":
            path, command = home.config / "settings.toml", RUN
        else:
            root = home.models / "starter" if where == "store" else home.cache
            there = sorted(path for path in root.rglob("*") if path.is_file())
            path, command = random.choice(there), random.choice((RUN, LIST))
            command = RUN if where == "cache" else command
        yield faults_files.altered(home, path, harm, random, command)


def _neural_drafter(home: Home, files: dict[str, bytes], random: Random) -> Source:
    with faults_commands.local_hub(home, files) as hub:
        pull = faults_commands.pull_of(hub)
        while True:
            for _ in range(4):
                yield faults_commands.network_fault(home, hub, random)
            for number in SIGNALS:
                yield faults_commands.killed_pull(home, hub, number, random.uniform(0, 4))
            yield faults_commands.network_gone(home, pull)


def _limits(home: Home, random: Random) -> Source:
    wanted = faults_commands.commands(home)
    while True:
        for name in ("models import", "run", "run --prompt-cache"):
            most = random.choice([0, random.randrange(5000), random.randrange(1 << 27)])
            yield faults_files.limited(home, wanted[name], most)
        for name in ("run", "complete", "models verify"):
            yield faults_files.output_full(home, wanted[name])


def _permissions(home: Home, random: Random) -> Source:
    faults_files.keep_conversations(home, 3)
    home.run(RUN)
    for path in (home.models / "starter").iterdir():
        home.own_copy(path)
    home.belongs_to_nobody()
    number = 0
    while True:
        number += 1
        if number % 5 == 1:
            yield _tried(partial(faults_chat.forbidden, home, number), "permissions revoked")
        chats = random.random() < 0.3
        below = (home.data, home.cache, home.config)
        there = sorted(path for root in below for path in (root, *root.rglob("*")))
        path = random.choice([p for p in there if p.exists() and not p.is_symlink()])
        command = faults_files.CHATS if chats else RUN
        if random.random() < 0.3:
            yield faults_files.forbidden_meanwhile(home, path, command, random.uniform(0, 4))
        else:
            yield faults_files.forbidden(home, path, random.choice([0o000, 0o500, 0o400]), command)


def _together(home: Home, files: dict[str, bytes], random: Random) -> Source:
    number = 0
    while True:
        number += 1
        yield concurrency.remembered_together(home.directory / f"memory{number}")
        yield concurrency.read_while_migrated(home)
        yield concurrency.killed_migration(home, random.uniform(0.1, 0.8))
        home.conversations.unlink()
        yield _tried(partial(concurrency.all_at_once, home, files, number), "at once")
        yield concurrency.import_twice(home, random.randint(2, 3))
        yield concurrency.pull_twice(home, files, random.randint(2, 3))
        yield concurrency.remove_meanwhile(home)


def _writers(directory: Path, random: Random) -> Source:
    while True:
        yield writers.killed_store(directory, random)
        yield writers.killed_memory(directory, random)


def _caches(directory: Path, random: Random) -> Source:
    full_disks = not why_no_small_disk()
    while True:
        yield faults_caches.killed(directory / "caches", random, random.randrange(2))
        if full_disks and random.randrange(5) == 0:
            yield faults_caches.full(directory / "caches" / "disk", random)


def _tried(harm: Callable[[], Outcome], kind: str, moment: str = "") -> Outcome:
    """What came of it; a chat that does not come to where it should be has broken a promise."""
    try:
        return harm()
    except AssertionError as error:
        return Outcome(kind, "chat", moment, problems=[str(error)])


def table(outcomes: list[Outcome]) -> str:
    """What was done to whom, in Markdown."""
    kinds: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        kinds.setdefault(outcome.kind.partition(":")[0], []).append(outcome)
    lines = [
        "| fault | times | to | promises broken | characters lost |",
        "|---|--:|---|--:|--:|",
    ]
    for kind, some in sorted(kinds.items()):
        commands = Counter(outcome.command for outcome in some)
        whom = ", ".join(f"{command} {count}" for command, count in commands.most_common())
        broken = sum(bool(outcome.problems) for outcome in some)
        lost = sum(outcome.lost for outcome in some)
        lines.append(f"| {kind} | {len(some)} | {whom} | {broken} | {lost} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
