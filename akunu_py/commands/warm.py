"""`akunu models warm`: a model answers prompts of ours while nobody needs the machine."""

from __future__ import annotations

import argparse
import os
import sys
import time

from akunu_py.commands.run import cancelled_by_interrupt
from akunu_py.decoding.load import load_engine, load_learned
from akunu_py.errors import UsageError
from akunu_py.settings import load_settings, settings_file
from akunu_py.text import human_duration, human_size, rewrite_line, say
from akunu_py.types import LoadOptions

_BUSY = 1.5  # processes that want to run, for each core
_WAIT = 20.0  # seconds


def run(args: argparse.Namespace) -> None:
    """Says what it will take, then answers until enough is remembered. Ctrl-C ends it."""
    settings = load_settings()
    if not settings.memory:
        raise UsageError(f"answers are not remembered: memory = false in {settings_file()}")
    engine = load_engine(args.name, LoadOptions())
    from akunu_py.decoding.generate import warm
    from akunu_py.decoding.generate.session import Session

    learned = load_learned(engine, no_memory=False, settings=settings)
    done, wanted = warm.progress(learned), args.tokens or warm.TOKENS
    again = f"akunu models warm {args.name}"
    if done.tokens >= wanted:
        say(f"{engine.name} remembers {done.tokens:,} tokens of such answers; more: --tokens N")
        return
    session, left = Session(engine, learned), wanted - done.tokens
    speed = max(warm.tokens_per_s(session), 1e-3)
    taken = human_size(engine.plan.fit.at(warm.ANSWER).total)
    say(
        f"{engine.name} answers prompts of ours until {left:,} more tokens are remembered: "
        f"about {human_duration(left / speed)} at {speed:.0f} tokens/s, {taken} of memory "
        f"meanwhile, at most 20 MB on disk. Ctrl-C stops it; {again} goes on from there.",
        error=True,
    )
    if not args.now:
        os.nice(10)
    for generation in warm.answers(session, learned, wanted):
        while not args.now and _busy():
            _show("waiting: the machine is busy (--now does not)")
            time.sleep(_WAIT)
        with cancelled_by_interrupt(generation):
            generation.answer()
        done = warm.progress(learned)
        _show(f"{done.tokens:,} of {wanted:,} tokens")
        if generation.finish_reason == "cancelled":
            _show("")
            say(f"stopped; to go on: {again}", error=True)
            raise KeyboardInterrupt
    _show("")
    done = warm.progress(learned)
    say(f"{engine.name} remembers {done.tokens:,} tokens of {done.answers:,} answers")


def _busy() -> bool:
    """Whether others want the machine."""
    return os.getloadavg()[0] > _BUSY * (os.cpu_count() or 1)


def _show(line: str) -> None:
    """On a terminal, a line that changes."""
    if sys.stderr.isatty():
        rewrite_line(line)
