"""The command line of a measuring tool: `python -m tests.measure.NAME`."""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence

from akunu_py.bench.command import progress
from akunu_py.errors import INTERRUPTED, AkunuError
from akunu_py.parser import Parser
from akunu_py.text import print_warnings


def run_tool(
    name: str, documentation: str, add_options: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], int], argv: Sequence[str] | None = None,
) -> int:  # fmt: skip
    """Parse the options, run the tool, and return its exit code.

    An AkunuError becomes one line on stderr. documentation: of the tool's module. argv: the words
    of the command line for None.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    summary = documentation.partition("\n\n")[0]
    parser = Parser(prog=f"python -m tests.measure.{name}", description=summary)
    add_options(parser)
    options = parser.parse_args(words)
    options.command_line = shlex.join(["python", "-m", f"tests.measure.{name}", *words])
    try:
        return run(options)
    except AkunuError as error:
        print_warnings([str(error)])
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def with_data_in(directory: str) -> dict[str, str]:
    """Return the environment of a program with its data in `directory`."""
    return {**os.environ, **{f"XDG_{name}_HOME": directory for name in ("DATA", "CACHE", "CONFIG")}}


def run_akunu(words: Sequence[str], directory: str) -> bytes:
    """Run `akunu` with its data in `directory` and return its output. Raises AkunuError."""
    done = subprocess.run(
        [sys.executable, "-m", "akunu_py", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=with_data_in(directory),
        start_new_session=True,  # Ctrl-C ends only this process
    )
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip()
        raise AkunuError(f"akunu {words[0]} ended with exit code {done.returncode}: {why}")
    return done.stdout


def was_interrupted(measure: Callable[[], None]) -> bool:
    """Run `measure` and return True if Ctrl-C ended it; partial results stay valid."""
    try:
        measure()
    except KeyboardInterrupt:
        print("interrupted: only the results so far are shown", file=sys.stderr)
        return True
    finally:
        progress("")
    return False
