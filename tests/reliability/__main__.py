"""`python -m tests.reliability`: inject faults for some minutes and report the outcomes.

Ends with code 1 if a promise was broken. The same seed gives the same faults until the time is up.
"""

import argparse
import contextlib
import itertools
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from akunu_py.models.store import model_store
from tests.reliability import faults
from tests.reliability.faults import Home, Outcome


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="duration")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", choices=["", *SOURCES], help="run one kind of fault")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the run and cleans up
    outcomes: list[Outcome] = []
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory,
        contextlib.suppress(KeyboardInterrupt),
    ):
        for outcome in strikes(Path(directory), args.seed, args.minutes * 60, args.only):
            outcomes.append(outcome)
            state = "BROKEN" if outcome.problems else "ok"
            what = f"{outcome.kind} | {outcome.command} | {outcome.moment} | {outcome.word}"
            lines = [f"{len(outcomes):4} {state:6} {what}", *outcome.problems]
            print(*lines, sep="\n       ", flush=True)
    broken = sum(bool(outcome.problems) for outcome in outcomes)
    print(f"\n{len(outcomes)} faults, {broken} with a promise broken")
    return 1 if broken else 0


def strikes(directory: Path, seed: int, seconds: float, only: str = "") -> Iterator[Outcome]:
    """Alternate between the kinds of faults, short ones more often, until the time is up."""
    starter = model_store.get("starter").path
    started = [
        (source(Home(directory / name, starter), Random(f"{seed} {name}")), turns)
        for name, (source, turns) in SOURCES.items()
        if only in ("", name)
    ]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for outcomes, turns in started:
            for _ in range(turns):
                if time.monotonic() < end:
                    yield next(outcomes)


def _signals(home: Home, random: Random) -> Iterator[Outcome]:
    timed = [(command, faults.duration(home, command)) for command in faults.commands(home)]
    while True:
        command, seconds = random.choice(timed)
        yield faults.signalled(
            home, command, random.choice(faults.SIGNALS), random.uniform(0, seconds)
        )


def _chats(home: Home, random: Random) -> Iterator[Outcome]:
    for number in itertools.count(1):
        kind, moment = random.choice(faults.KINDS), random.choice(faults.MOMENTS)
        yield _tried(lambda: faults.hurt(home, kind, moment, random, number))  # noqa: B023


def _disks(home: Home, _: Random) -> Iterator[Outcome]:
    for number in itertools.count(1):
        yield _tried(lambda: faults.disk_full(home, number % 2 == 1, number))  # noqa: B023


def _tried(strike: Callable[[], Outcome]) -> Outcome:
    """Return the outcome; a chat that does not reach the expected state breaks a promise."""
    try:
        return strike()
    except AssertionError as error:
        return Outcome("unknown", "chat", "", problems=[str(error)])


# Endless sources of faults, and the turns of each.
SOURCES: dict[str, tuple[Callable[[Home, Random], Iterator[Outcome]], int]] = {
    "signals": (_signals, 3), "chats": (_chats, 2),
} | ({"disks": (_disks, 1)} if sys.platform == "linux" else {})  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
