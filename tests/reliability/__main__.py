"""`python -m tests.reliability`: inject faults for some minutes and report the outcomes.

Ends with code 1 if a promise was broken. The same seed gives the same faults until the time is up.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from random import Random

from akunu_py.models.store import model_store
from tests.reliability import faults_chat, faults_writers
from tests.reliability import faults_commands as faults
from tests.reliability.faults import Home, Outcome, why_no_small_disk
from tests.reliability.faults_commands import CHATS, HARMS, LIST, RUN, SIGNALS

CHAT_KINDS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGSTOP, SIGCONT", "terminal closed")
Source = Generator[Outcome, None, None]  # endless


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="duration")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="run the sources whose name starts with ONLY")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the run and cleans up
    outcomes: list[Outcome] = []
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory,
        contextlib.suppress(KeyboardInterrupt),
    ):
        Path(directory).chmod(0o755)
        for outcome in strikes(Path(directory), args.seed, args.minutes * 60, args.only):
            outcomes.append(outcome)
            state = "BROKEN" if outcome.problems else "ok"
            what = f"{outcome.kind} | {outcome.command} | {outcome.moment} | {outcome.word}"
            lines = [f"{len(outcomes):4} {state:6} {what}", *outcome.problems]
            print(*lines, sep="\n       ", flush=True)
    broken = sum(bool(outcome.problems) for outcome in outcomes)
    print(f"\n{len(outcomes)} faults, {broken} with a promise broken")
    return 1 if broken else 0


def strikes(directory: Path, seed: int, seconds: float, only: str = "") -> Source:
    """Alternate between the sources, short ones more often, until the time is up."""
    end = time.monotonic() + seconds
    found = sources(directory, model_store.get("starter").path, seed)
    named = {name: source for name, source in found.items() if name.startswith(only)}
    try:
        while named and time.monotonic() < end:
            for source, turns in named.values():
                for _ in range(turns):
                    if time.monotonic() < end:
                        yield next(source)
    finally:
        for source, _ in found.values():
            source.close()  # unmounts disks


def sources(directory: Path, starter: Path, seed: int) -> dict[str, tuple[Source, int]]:
    """Return every source of faults with its turns; each has its own home."""
    made: dict[str, tuple[Callable[[Home, Random], Source], int]] = {
        "signals": (_signals, 3),
        "chats": (_chats, 2),
        "files": (_files, 4),
        "caches": (_caches, 2),
    }
    if why := why_no_small_disk():
        print(f"left out: full disks: {why}")
    else:
        made["full chats"] = (lambda home, _: _full_chats(home.directory / "disk", starter), 1)
    return {
        name: (make(Home(directory / name, starter), Random(f"{seed} {name}")), turns)
        for name, (make, turns) in made.items()
    }


def _signals(home: Home, random: Random) -> Source:
    wanted = faults.commands(home)
    seconds = {name: faults.duration(home, command) for name, command in wanted.items()}
    while True:
        command = random.choice([*wanted.values()])
        moment = random.uniform(0, seconds[command.name])
        yield faults.signalled(home, command, random.choice(SIGNALS), moment)


def _chats(home: Home, random: Random) -> Source:
    for number in itertools.count(1):
        kind, moment = random.choice(CHAT_KINDS), random.choice(faults_chat.MOMENTS)
        hurt = partial(faults_chat.hurt, home, kind, moment, random, number)
        yield _tried(hurt, kind, moment)


def _full_chats(directory: Path, starter: Path) -> Source:
    endings = itertools.cycle(("there is room again", "the person quits", "it is killed"))
    for number, ending in enumerate(endings, 1):
        full = partial(faults_chat.disk_full, directory, starter, ending, number)
        yield _tried(full, "disk full", ending)


def _files(home: Home, random: Random) -> Source:
    faults.keep_conversations(home)
    (home.config / "settings.toml").write_text('temperature = 0.5\ntheme = "auto"\n')
    home.run(RUN)
    while True:
        where = random.choice(("store", "cache", "database", "settings"))
        if where == "database":
            path, command = home.conversations, CHATS
        elif where == "settings":
            path, command = home.config / "settings.toml", RUN
        else:
            root = home.models / "starter" if where == "store" else home.cache
            path = random.choice(sorted(path for path in root.rglob("*") if path.is_file()))
            command = RUN if where == "cache" else random.choice((RUN, LIST))
        yield faults.altered(home, path, random.choice([*HARMS]), random, command)


def _caches(home: Home, random: Random) -> Source:
    while True:
        yield faults_writers.killed(home.directory / "caches", random, random.randint(1, 2))


def _tried(strike: Callable[[], Outcome], kind: str, moment: str = "") -> Outcome:
    """Return the outcome; a chat that does not reach the expected state breaks a promise."""
    try:
        return strike()
    except AssertionError as error:
        return Outcome(kind, "chat", moment, problems=[str(error)])


if __name__ == "__main__":
    sys.exit(main())
