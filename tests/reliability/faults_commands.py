"""Commands that are killed, stopped and cut off from the network, at moments of a seed."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

from tests.reliability.faults import (
    Command,
    Done,
    Home,
    Outcome,
    after,
    check_restart,
    check_store,
    finished,
    stop_and_go,
)
from tests.support.hub_server import REPOSITORY, Fault, Hub, running

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_DEADLY = {-int(number) for number in SIGNALS} | {130}


def commands(home: Home) -> dict[str, Command]:
    """Those that a fault is done to, with what they say undisturbed."""
    requests = [{"id": n, "prefix": f"def area_{n}(width, height):\n    "} for n in (1, 2)]
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    cached = ("--prompt-cache", str(home.directory / "said.safetensors"))
    said = ("--max-tokens", "24", "--temperature", "0", "Tell me about walruses.")
    source = str(home.models / "starter")
    all_ = [
        Command("run", ("run", *said), answers=_says_something),
        Command("run --prompt-cache", ("run", *cached, *said), answers=_says_something),
        Command(
            "complete",
            ("complete", "--max-tokens", "12"),
            lines.encode(),
            lambda d: _answered(d, 2),
        ),
        Command("models verify", ("models", "verify"), answers=lambda d: "verified" in d.out),
        Command(
            "models import",
            ("models", "import", source, "--name", "copy"),
            answers=lambda d: "copy is ready" in d.err,
            undo=("models", "rm", "copy", "--yes"),
        ),
    ]
    return {command.name: command for command in all_}


def pull_of(hub: Hub) -> Command:
    return Command(
        "models pull",
        ("models", "pull", REPOSITORY, "--name", "pulled"),
        answers=lambda d: "pulled is ready" in d.err,
        undo=("models", "rm", "pulled", "--yes", "--hub-files"),
    )


def durations(home: Home, wanted: dict[str, Command]) -> dict[str, float]:
    """Seconds that each command takes undisturbed: moments of faults are drawn from these."""
    found = {}
    for command in wanted.values():
        started = time.monotonic()
        done = home.run(command)
        found[command.name] = time.monotonic() - started
        if done.code or not command.answers(done):
            raise AssertionError(f"{command.name} fails undisturbed: {done}")
        if command.undo:
            home.akunu(*command.undo)
    return found


def signalled(
    home: Home, command: Command, number: signal.Signals, seconds: float, *, restart: bool = True
) -> Outcome:
    """Sends the signal so many seconds after the start."""
    outcome = Outcome(number.name, command.name, f"after {seconds:.2f} s")
    process = home.start(command)
    if running := after(process, seconds):
        process.send_signal(number)
    done = finished(process)
    outcome.word = done.word if done.code >= 0 else f"ended by {signal.Signals(-done.code).name}"
    if _before_us(number, done):
        outcome.word = "Python had not come to akunu yet"
    else:
        outcome.check_words(done)
    if running and not _before_us(number, done):
        outcome.check(done.code in _DEADLY | {0}, f"code {done.code}: {done.err[-800:]}")
    if restart:
        _check_again(home, command, outcome)
    return outcome


def _before_us(number: signal.Signals, done: Done) -> bool:
    """Whether an interrupt came while Python itself was starting, which answers with a traceback
    before a line of ours is run."""
    told = "KeyboardInterrupt" in done.err and "/akunu_py/" not in done.err
    return number == signal.SIGINT and told and "Traceback" in done.err


def suspended(home: Home, command: Command, seconds: float) -> Outcome:
    """Stops it for a second, and lets it go on: nothing else may happen."""
    outcome = Outcome("SIGSTOP, SIGCONT", command.name, f"after {seconds:.2f} s")
    process = home.start(command)
    if after(process, seconds):
        stop_and_go(process.pid, 1.0)
    done = finished(process)
    outcome.word = done.word
    outcome.check_words(done)
    outcome.check(done.code == 0 and command.answers(done), f"did not go on: {done}")
    if command.undo:
        home.akunu(*command.undo)
    return outcome


def reader_gone(home: Home, command: Command, seconds: float) -> Outcome:
    """Whoever reads the output goes away, as `| head -1` does."""
    outcome = Outcome("output closed", command.name, f"after {seconds:.2f} s")
    process = home.start(command)
    after(process, seconds)
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    done = finished(process)
    outcome.judge(done, 0)
    return outcome


@contextmanager
def local_hub(home: Home, files: dict[str, bytes]) -> Iterator[Hub]:
    """A hub on this machine, that the home's commands take for the real one."""
    with running(dict(files)) as hub:
        home.changes["HF_ENDPOINT"] = hub.url
        try:
            yield hub
        finally:
            del home.changes["HF_ENDPOINT"]


def network_fault(home: Home, hub: Hub, random: Random) -> Outcome:
    """One thing that networks and servers do to a pull, which then goes on or says what is wrong.

    The next pull, undisturbed, must end well.
    """
    size = len(hub.files["model.safetensors"])
    kind, faults = random.choice([
        ("connection cut", [Fault(cut=random.randrange(size))]),
        ("connection cut, again and again", [Fault(cut=random.randrange(999)) for _ in range(9)]),
        ("server error 503", [Fault(status=503)] * random.randint(1, 3)),
        ("not allowed 403", [Fault(status=403)]),
        ("gone 404", [Fault(status=404)]),
        ("a byte altered", [Fault(flip=True)]),
        ("file too short", [Fault(short=random.randint(1, 1000))] * 9),
        ("file too long", [Fault(longer=random.randint(1, 1000))]),
        ("no ranges", [Fault(cut=random.randrange(size)), Fault(no_range=True)]),
    ])  # fmt: skip
    name = random.choice(["model.safetensors", "model.safetensors", "config.json", "api"])
    outcome = Outcome(f"network: {kind}", "models pull", f"of {name}")
    hub.faults[name].extend(faults)
    command = pull_of(hub)
    done = home.run(command)
    hub.faults.clear()
    outcome.judge(done, 0, 1)
    _check_again(home, command, outcome)
    return outcome


def network_gone(home: Home, command: Command) -> Outcome:
    """No server at all: connections are refused."""
    outcome = Outcome("network: refused", command.name, "from the start")
    before = dict(home.changes)
    nowhere = "http://127.0.0.1:9"
    home.changes |= {"HF_ENDPOINT": nowhere, "HTTPS_PROXY": nowhere, "HTTP_PROXY": nowhere}
    done = home.run(command)
    home.changes.clear()
    home.changes.update(before)
    outcome.judge(done, 1)
    return outcome


def slowly(hub: Hub, seconds: float) -> None:
    """Makes the hub trickle, so that a pull lasts long enough to be hurt."""
    hub.faults["model.safetensors"].append(
        Fault(pause=seconds * 1000 / len(hub.files["model.safetensors"]))
    )


def killed_pull(home: Home, hub: Hub, number: signal.Signals, seconds: float) -> Outcome:
    """A pull of some seconds that is ended on the way; the next one goes on."""
    slowly(hub, 2.0)
    outcome = signalled(home, pull_of(hub), number, seconds, restart=False)
    hub.faults.clear()
    _check_again(home, pull_of(hub), outcome)
    return outcome


def leftovers(home: Home) -> list[str]:
    """What unfinished commands left behind, beyond lock files."""
    unfinished = (".partial-*", ".memory-*", ".curve-*", "*.incomplete")
    return sorted(
        str(path.relative_to(home.directory))
        for root in (home.models, home.cache, home.directory / "hub")
        for pattern in unfinished
        for path in root.rglob(pattern)
    )


def _check_again(home: Home, command: Command, outcome: Outcome) -> None:
    check_store(home, outcome)
    if command.undo:  # where it had come to its end
        home.akunu(*command.undo)
    check_restart(home, command, outcome)
    left = leftovers(home)
    outcome.check(not left, f"left behind: {left}")


def _says_something(done: Done) -> bool:
    return len(done.out.split()) > 5


def _answered(done: Done, requests: int) -> bool:
    replies = [json.loads(line) for line in done.out.splitlines()]
    return sorted(reply["id"] for reply in replies) == [*range(1, requests + 1)] and all(
        "text" in reply for reply in replies
    )
