"""Stand-ins for `akunu complete`, the program behind the plugins of Vim and VS Code."""

import sys
import textwrap
from pathlib import Path

_LOOP = """
import json, os, pathlib, sys, time

directory, seen = pathlib.Path(sys.argv[0]).parent, []
log = (directory / "log").open("a", buffering=1)

def say(**fields):
    print(json.dumps({"id": request["id"]} | fields), flush=True)

for line in sys.stdin:
    log.write(line)
    request = json.loads(line)
"""


def write_helper(directory: Path, code: str) -> list[str]:
    """Return the command of a program that runs `code` for each `request`.

    `say` prints a reply to it. The program logs all lines in `directory / "log"`; `seen` is a list.
    """
    program = directory / "helper.py"
    program.write_text(_LOOP + textwrap.indent(textwrap.dedent(code), " " * 4))
    return [sys.executable, str(program)]
