"""Ranks of a divided model are killed: `python -m tests.reliability.hosts_killed`.

Each rank of 2 and of 3 processes in turn, at a random moment of an answer that has begun, which
drafts or does not; with `--starting` at a random second from the start of the processes on. What
was said must be the beginning of the right answer, `akunu run` must end within 10 seconds, and all
processes with it; the next answer is the one that is hurt next, and at last there is a whole one. A
line of counts for each number of processes; ends with 1 where something was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.support.family_table import FAMILIES
from tests.support.hosts import all_gone, command, ranks, running, write_family

_WITHIN = 10.0  # seconds
_LATEST = 30.0  # seconds after the start of the processes that one is hurt, at most
_PASS = 0.1  # seconds; so that it happens anywhere in a pass
_TOKENS = 4000
_MODEL = {  # which 2 and 3 divide
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "intermediate_size": 96,
}


@dataclass
class _Found:
    """How often something was so. begun: something was said until then. bytes: how much of answers
    was said and right. left: a process stayed."""

    hurt: int = 0
    begun: int = 0
    bytes: int = 0
    rank_0: int = 0
    wrong: int = 0
    mute: int = 0
    late: int = 0
    left: int = 0
    slowest_s: float = 0.0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--moments", type=int, default=30, help="of each rank")
    parser.add_argument("--hosts", type=int, nargs="*", default=(2, 3))
    parser.add_argument("--suspended", action="store_true", help="the ranks are, not killed")
    parser.add_argument("--starting", action="store_true", help="from the processes' start on")
    parser.add_argument("--most", type=int, default=600, help="bytes of an answer until then")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    most = 0 if args.starting else args.most
    number = signal.SIGSTOP if args.suspended else signal.SIGKILL
    failed = False
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory, "llama")
        model.mkdir()
        write_family(model, FAMILIES["llama"], **_MODEL)
        whole = _answer(model, "")
        for size in args.hosts:
            found = _Found()
            for _ in range(args.moments):
                for rank in range(1 if args.suspended else 0, size):
                    _hurt(model, str(size), rank, number, whole, found, chance, most)
            right = whole.startswith(_answer(model, str(size), tokens=200).rstrip())
            failed |= bool(found.wrong or found.mute or found.late or found.left) or not right
            print(json.dumps({"hosts": size} | asdict(found) | {"next_is_right": right}))
            sys.stdout.flush()
    return int(failed)


def _answer(model: Path, hosts: str, tokens: int = _TOKENS) -> str:
    asked = command(model, hosts, "--draft", "auto" if hosts else "off", tokens=tokens)
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout


def _hurt(
    model: Path,
    hosts: str,
    rank: int,
    number: signal.Signals,
    whole: str,
    found: _Found,
    chance: random.Random,
    most: int,
) -> None:
    """Has one rank of a new answer hurt, and adds what came of it to `found`.

    most: bytes of the answer until then, 0 for any time from the processes' start on.
    """
    draft = chance.choice(("auto", "off"))
    with running(model, hosts, "--draft", draft, tokens=_TOKENS) as process:
        assert process.stdout is not None
        begun = b""
        if most:
            begun = _read(process, chance.randint(1, most))
        time.sleep(chance.uniform(0, _PASS) if most else chance.uniform(0.5, _LATEST))
        others = ranks(process)  # in the order in which they were started
        pids = [process.pid, *others]
        os.kill(pids[rank if rank < len(pids) else 0], number)
        started = time.monotonic()
        out, errors = process.communicate(timeout=120)
        took = time.monotonic() - started
    text = (begun + out).decode(errors="replace").rstrip()
    wrong = not whole.startswith(text) or (most > 0 and not begun)
    mute = rank > 0 and len(pids) > rank and b"was " not in errors
    late, left = took > _WITHIN, not all_gone(pids, _WITHIN)
    if wrong or mute or late or left:
        print(hosts, rank, draft, [wrong, mute, late, left], took, text[-80:], errors[-400:])
    found.hurt += 1
    found.begun += bool(begun or out.strip())
    found.bytes += len(text) * (not wrong)
    found.rank_0 += rank == 0
    found.wrong += wrong
    found.mute += mute
    found.late += late
    found.left += left
    found.slowest_s = max(found.slowest_s, round(took, 1))


def _read(process: subprocess.Popen[bytes], count: int) -> bytes:
    """So many bytes of what it says, fewer where it ends before."""
    assert process.stdout is not None
    said = b""
    while len(said) < count and (more := process.stdout.read(count - len(said))):
        said += more
    return said


if __name__ == "__main__":
    sys.exit(main())
