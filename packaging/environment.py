"""Install akunu from source into a virtual environment, for the Makefile.

Uses uv if it is installed, pip otherwise. `constraints.txt` pins every dependency, so a clone still
works when newer releases do not.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = Path(__file__).with_name("constraints.txt")
# What pip and uv print for a package that they fetch, with its size.
FETCHED = re.compile(
    r"(?:Downloading|Using cached) (\S+)(?<!\.metadata) .*?\(([\d.]+) ?([kKMG])i?B"
)
MEGABYTES = {"k": 0.001, "K": 0.001, "M": 1.0, "G": 1000.0}
REASONS = (
    (
        r"from versions: none|name resolution|getaddrinfo|nodename nor|dns error"
        r"|Connection refused|Network is unreach"
        r"|ConnectionError|ConnectTimeout|error sending request|timed out|Max retries",
        "no connection to the package index; check the network or the proxy, and run it again",
    ),
    (r"No space left|ENOSPC|os error 28", "the disk is full; free some space, and run it again"),
    (r"Permission denied|EACCES", "no permission to write there; check who owns the directory"),
    (
        r"requires a different Python|Requires-Python|does not satisfy Python",
        "a dependency does not support this Python; choose another: make chat PYTHON=python3.12",
    ),
    (
        r"ensurepip is not available|No module named '?(?:venv|ensurepip)",
        "Python lacks its venv package; install it (Debian: apt install python3-venv)",
    ),
)


class Failed(Exception):
    """A step failed; the message is one line."""


def run_step(title: str, command: list[str], environment: dict[str, str], log: Path) -> None:
    """Run a command, log its output, and show its progress on one line.

    Raises Failed with the reason in one line.
    """
    live, started = sys.stdout.isatty(), time.monotonic()
    sizes: dict[str, float] = {}  # of fetched packages, in MB

    def show(end: str = "") -> None:
        fetched = f"{sum(sizes.values()):.0f} MB, " if sizes else ""
        progress = f"{fetched}{time.monotonic() - started:.0f} s"
        if live:
            print(f"\r\033[K{title} ... {progress}", end=end, flush=True)
        elif end:
            print(f"  {progress}", flush=True)

    if not live:
        print(f"{title} ...", flush=True)
    show()
    try:
        with (
            log.open("a", encoding="utf-8") as output,
            subprocess.Popen(
                command, cwd=ROOT, env=environment, text=True, errors="replace",
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            ) as process,
        ):  # fmt: skip
            assert process.stdout is not None
            for line in process.stdout:
                output.write(line)
                if found := FETCHED.search(line):
                    sizes.setdefault(found[1], float(found[2]) * MEGABYTES[found[3]])
                    show()
    finally:
        show("\n")
    if process.returncode:
        raise Failed(f"{reason(log.read_text(encoding='utf-8'))} (log: {log})")


def reason(log: str) -> str:
    """Return what went wrong and what to do, from the output of pip or uv."""
    for pattern, text in REASONS:
        if re.search(pattern, log):
            return text
    errors = [line.strip() for line in log.splitlines() if re.match(r"\s*(error|ERROR|×)\b", line)]
    last = errors or log.strip().splitlines() or ["no output"]
    return last[-1]


def install(venv: Path, dev: bool) -> None:
    """Create the virtual environment if it is missing, and install akunu into it."""
    uv, python = shutil.which("uv"), venv / "bin" / "python"
    venv.parent.mkdir(parents=True, exist_ok=True)
    log = venv.parent / f"{venv.name}.log"
    log.write_text("", encoding="utf-8")
    environment = os.environ | {"UV_NO_PROGRESS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    version = ".".join(map(str, sys.version_info[:2]))
    if not python.exists():
        shutil.rmtree(venv, ignore_errors=True)
        title = f"Creating {venv.name} with Python {version}"
        make = [uv, "venv", "--python", sys.executable] if uv else [sys.executable, "-m", "venv"]
        try:
            run_step(title, [*make, str(venv)], environment, log)
        except BaseException:
            shutil.rmtree(venv, ignore_errors=True)  # never leave half an environment
            raise
    what = [".[dev]" if dev else ".", "--constraint", str(CONSTRAINTS)]
    tool = (
        [uv, "pip", "install", "--python", str(python)]
        if uv
        else [str(python), "-m", "pip", "install", "--no-compile", "--progress-bar", "off"]
    )
    title = "Installing akunu" + (" and the test tools" if dev else "")
    title += f" with {'uv' if uv else 'pip'}"
    run_step(title, [*tool, "--editable", *what], environment, log)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("venv", type=Path, help="directory of the virtual environment")
    parser.add_argument("--dev", action="store_true", help="install the test tools too")
    options = parser.parse_args()
    try:
        install(options.venv.absolute(), options.dev)
    except Failed as error:
        print(f"akunu: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("akunu: interrupted; run it again to continue", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
