"""Compare `akunu models pull` with `hf download`, from a hub that limits each connection.

Run: python -m tests.measure.hub [--files 4] [--mb 60] [--rate 20] [--repeat 3]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.hub_server import REPOSITORY, running
from tests.support.tiny_model import tiny_files

_AKUNU = [sys.executable, "-m", "akunu_py", "models", "pull", REPOSITORY]
_HF = [str(Path(sys.executable).with_name("hf")), "download", REPOSITORY]


def main() -> None:
    """Print the median seconds of both commands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=4, help="Number of large files (default: 4)")
    parser.add_argument("--mb", type=float, default=60, help="Size of each in MB (default: 60)")
    parser.add_argument("--rate", type=float, default=20, help="MB/s per connection (default: 20)")
    parser.add_argument("--repeat", type=int, default=3, help="Runs of each (default: 3)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        (home / "made").mkdir()
        files = tiny_files(home / "made")
        for number in range(args.files):
            files[f"mtp-{number}.safetensors"] = _weights(number, int(args.mb * 1e6))
        with running(files) as hub:
            hub.rate = args.rate * 1e6
            environment = os.environ | {
                "HF_ENDPOINT": hub.url,
                "HF_HOME": str(home / "hf"),
                "XDG_DATA_HOME": str(home / "data"),
                "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            }
            for command in (_AKUNU, _HF):
                seconds = [_seconds(command, environment, home) for _ in range(args.repeat)]
                runs = ", ".join(f"{each:.1f}" for each in seconds)
                name = "akunu models pull" if command is _AKUNU else "hf download"
                print(f"{name}: {statistics.median(seconds):.1f} s ({runs})", flush=True)


def _weights(number: int, size: int) -> bytes:
    """Return a safetensors file with one tensor of `size` bytes and a name of its own."""
    header = {f"unused.{number}": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    text = json.dumps(header).encode()
    return (
        len(text).to_bytes(8, "little")
        + text
        + os.urandom(1 << 20) * (size >> 20)
        + bytes(size % (1 << 20))
    )


def _seconds(command: list[str], environment: dict[str, str], home: Path) -> float:
    for cache in ("hf", "data"):
        shutil.rmtree(home / cache, ignore_errors=True)
    started = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return time.monotonic() - started


if __name__ == "__main__":
    main()
