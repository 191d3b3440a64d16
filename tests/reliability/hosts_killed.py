"""Ranks of a divided model are killed: `python -m tests.reliability.hosts_killed`.

Each time another answer is begun, and one of its ranks killed or suspended at a random moment, from
the start of the processes on. What was said must be the beginning of the right answer, `akunu run`
must end within 10 seconds, and all processes with it. A line of counts at the end; ends with 1
where something was wrong.
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
from pathlib import Path

from tests.support.divided import all_gone, command, ranks, running
from tests.support.host_models import write_named

_WITHIN = 10.0  # seconds
_LONGEST = 30.0  # seconds after its beginning that an answer is hurt, at most


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--moments", type=int, default=30)
    parser.add_argument("--hosts", default="2")
    parser.add_argument("--suspended", action="store_true", help="the ranks are, not killed")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    counts = {"hurt": 0, "before a token": 0, "rank 0": 0, "wrong": 0, "late": 0, "left": 0}
    slowest = 0.0
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory, "llama")
        model.mkdir()
        write_named(model, "llama")
        whole = subprocess.run(
            command(model, "", "--draft", "off", tokens=4000), capture_output=True, text=True
        ).stdout
        for _ in range(args.moments):
            with running(model, args.hosts) as process:
                time.sleep(chance.uniform(0.5, _LONGEST))
                others = ranks(process)
                victim = chance.choice([process.pid, *others]) if others else process.pid
                if args.suspended and victim == process.pid:
                    victim = others[0] if others else victim
                number = signal.SIGSTOP if args.suspended and others else signal.SIGKILL
                os.kill(victim, number)
                started = time.monotonic()
                out, _ = process.communicate(timeout=120)
                took = time.monotonic() - started
            slowest = max(slowest, took)
            counts["hurt"] += 1
            counts["before a token"] += not out.strip()
            counts["rank 0"] += victim == process.pid
            counts["wrong"] += not whole.startswith(out.decode().rstrip())
            counts["late"] += took > _WITHIN
            counts["left"] += not all_gone([process.pid, *others], _WITHIN)
    print(json.dumps(counts | {"slowest_s": round(slowest, 1)}))
    return int(any(counts[name] for name in ("wrong", "late", "left")))


if __name__ == "__main__":
    sys.exit(main())
