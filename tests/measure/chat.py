"""Measure the key latency of the chat, and what drawing costs decoding.

`akunu chat` runs in a pseudo-terminal, which the tool types into. The latency ends when the
terminal receives the letter. `akunu run` gives the same answers without a screen. Each program has
its own temporary data directory; of the user's files, only the model is read.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import pty
import random
import re
import select
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from akunu_py.bench.command import add_count, add_model, add_repeats, progress, show
from akunu_py.bench.result import describe_machine, half_range, median, today
from akunu_py.bench.tables import to_text
from akunu_py.bench.workloads import load_workloads
from akunu_py.chats.conversation_store import ConversationStore
from akunu_py.errors import INTERRUPTED, AkunuError
from akunu_py.models.store import model_store
from akunu_py.parser import add_format
from akunu_py.types import DRAFT_MODES
from tests.measure.tool import run_tool, was_interrupted

SCREEN = (24, 80)  # lines, columns
GOALS = "goals: a median of 50 ms and 150 ms at worst while decoding, at least x0.95"
IDLE, DECODING = "idle", "decoding"
# One letter per key: rare in answers, one column wide, and few enough for one line of the box.
LETTERS = "".join(map(chr, range(0x13A0, 0x13A0 + 64)))  # Cherokee
_GAPS_S = (0.08, 0.18)  # between an echo and the next key, as by a fast typist
_LOST_S = 3.0  # timeout for a letter
_TIMEOUT_S = 120.0
_OVERLAP = 64  # bytes; longer than any text to find
_CLEAR, _QUIT, _ENTER = b"\x15", b"\x11", b"\r"  # Ctrl+U, Ctrl+Q, Enter
_ATTRIBUTES_QUERY, _ATTRIBUTES = b"\x1b[c", b"\x1b[?62;22c"  # the terminal identifies itself
_READY, _ANSWERING = "● ready", "◐ answering"
# A whole status: in several colors, up to the next sequence that is no color.
_STATUS = re.compile(
    f"({_ANSWERING}|{_READY}|■ stopped|× failed)".encode()
    + rb"([^\x1b]|\x1b\[[\d;]*m)*(?=\x1b\[[\d;?]*[A-Za-ln-z])"
)
_EMPTY = "Ask something"  # what an empty box shows
_IDLE_KEYS = 8
_MOST_ANSWERS = 6  # to type into, if answers are short
_SEQUENCE = re.compile(rb"\x1b(\[[0-9;?<>=$]*[@-~]|[\]P_][^\x1b\x07]*(\x07|\x1b\\)|[^\[\]P_])")


@dataclass
class KeyTimes:
    """Key latencies in seconds."""

    seconds: list[float] = field(default_factory=list)  # from the key to its letter
    lost: int = 0  # keys without a letter after 3 s

    def as_dict(self) -> dict[str, Any]:
        """Return the latencies in milliseconds, 0 for no keys, ready for JSON."""
        times = [round(1e3 * seconds, 2) for seconds in sorted(self.seconds)]
        nearest = times[math.ceil(0.95 * len(times)) - 1] if times else 0.0
        return {
            "count": len(times),
            "lost": self.lost,
            "median_ms": median(times),
            "p95_ms": nearest,
            "worst_ms": max(times, default=0.0),
            "ms": times,
        }


Answer = tuple[str, dict[str, Any]]
"""Text and statistics."""


@dataclass
class ChatResult:
    """All measurements so far."""

    keys: dict[str, KeyTimes] = field(
        default_factory=lambda: {IDLE: KeyTimes(), DECODING: KeyTimes()}
    )
    alone: list[Answer] = field(default_factory=list)  # by `akunu run`
    chat: list[Answer] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return all measurements, ready for JSON. ratio: of the median speeds, 0 if missing."""
        sides = {"alone": self.alone, "chat": self.chat}
        rates = {name: [speed(each) for each in answers] for name, answers in sides.items()}
        both = zip(rates["chat"], rates["alone"], strict=False)
        alone = median(rates["alone"])
        return {
            "keys": {name: keys.as_dict() for name, keys in self.keys.items()},
            "ratio": round(median(rates["chat"]) / alone, 4) if alone else 0.0,
            "ratio_spread": round(half_range([chat / other for chat, other in both if other]), 4),
            "identical": len({text for text, _ in (*self.alone, *self.chat)}) == 1,
            "tokens_per_s": rates,
            **{name: [stats for _, stats in answers] for name, answers in sides.items()},
        }


def speed(answer: Answer) -> float:
    """Return the tokens/s after the first token."""
    stats = answer[1]
    return (stats["generated_tokens"] - 1) / stats["decode_s"] if stats["decode_s"] else 0.0


class ChatBench:
    """Runs the programs one after the other, each with its own data directory."""

    def __init__(self, options: argparse.Namespace, prompt: str, model: Path) -> None:
        self.options, self.prompt, self.model = options, prompt, model
        self.common = [
            *("--draft", options.draft, "--weights", options.weights, "--temperature", "0"),
            *("--max-tokens", str(options.max_tokens), "--no-answer-cache"),
            *(["--force"] if options.force else []),
        ]

    def measure(self, result: ChatResult) -> None:
        """Measure the answer without the chat and in it, in alternating order."""
        progress("warm-up")
        self.run_alone()
        for number in range(1, self.options.repeats + 1):
            for in_chat in (False, True) if number % 2 else (True, False):
                place = "in the chat" if in_chat else "without the chat"
                progress(f"{place}, {number}/{self.options.repeats}")
                if in_chat:
                    result.chat.append(self.run_chat(result.keys))
                else:
                    result.alone.append(self.run_alone())

    def run_alone(self) -> Answer:
        """Return the answer of `akunu run` in a new process."""
        command = [sys.executable, "-m", "akunu_py", "run", self.prompt, "--model", str(self.model)]
        with tempfile.TemporaryDirectory(prefix="akunu-bench-") as data:
            done = subprocess.run(
                [*command, *self.common, "--format", "json"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env=environment(data),
                start_new_session=True,  # Ctrl-C ends only this process
            )
        if done.returncode:
            why = done.stderr.decode(errors="replace").strip()
            raise AkunuError(f"akunu run ended with {done.returncode}: {why}")
        answer = json.loads(done.stdout)
        return answer["text"], answer["stats"]

    def run_chat(self, keys: Mapping[str, KeyTimes]) -> Answer:
        """Return an answer without typing; then type during others."""
        command = [sys.executable, "-m", "akunu_py", "chat", str(self.model), *self.common]
        with tempfile.TemporaryDirectory(prefix="akunu-bench-") as data:
            with chat_terminal(command, environment(data)) as terminal:
                terminal.type_keys(_IDLE_KEYS, keys[IDLE], while_answering=False)
                terminal.send(self.prompt)
                terminal.wait_for_end()
                left = self.options.keys
                for _ in range(_MOST_ANSWERS):
                    terminal.send(self.prompt)
                    left -= terminal.type_keys(left, keys[DECODING], while_answering=True)
                    terminal.wait_for_end()
                    if left <= 0:
                        break
                terminal.quit()
            return saved_answer(Path(data, "akunu", "conversations.db"))


def saved_answer(path: Path) -> Answer:
    """Return the first saved answer. Raises AkunuError for an unfinished one."""
    with contextlib.closing(ConversationStore.open(path)) as store:
        (saved,) = store.list()
        answer = next(each for each in store.load(saved.id).messages if each.role == "assistant")
    if answer.stats is None or answer.finish_reason not in ("stop", "length"):
        raise AkunuError(f"an answer in the chat ended with {answer.finish_reason}")
    return answer.text, asdict(answer.stats)


def environment(data: str) -> dict[str, str]:
    """Return the environment of a program with its data directory."""
    places = {f"XDG_{name}_HOME": data for name in ("DATA", "CACHE", "CONFIG")}
    terminal = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "PYTHONUTF8": "1"}
    return {**os.environ, **places, **terminal}


class ChatTerminal:
    """A pseudo-terminal of 80 x 24 with a program and a simulated user."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, SCREEN)
        self._process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment,
            start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self._output = bytearray()  # since the last `write`
        self._searched = 0  # bytes of it
        self._status = ""  # the last one
        self._gaps = random.Random(0)

    def wait_for(self, text: str, start: int = 0) -> None:
        """Wait for `text` in the output since the last `write`. Raises AkunuError on timeout.

        start: bytes of that output to ignore.
        """

        def found() -> bool:
            nonlocal start
            if self._output.find(text.encode(), start) >= 0:
                return True
            start = max(start, len(self._output) - _OVERLAP)  # searching takes time from the chat
            return False

        self._wait(found, f"the chat did not show {text!r}")

    def write(self, keys: bytes) -> None:
        self._has_new_status()
        self._output.clear()
        self._searched = 0
        os.write(self._master, keys)

    def send(self, prompt: str) -> None:
        """Paste and send a prompt, and wait for the beginning of the answer."""
        self.write(b"\x1b[200~%b\x1b[201~" % prompt.encode())
        self.wait_for(prompt.split()[-1])
        self.write(_ENTER)
        self._wait(self._has_new_status, "an answer in the chat did not begin")

    def wait_for_end(self) -> None:
        """Wait for the end of the answer. Raises AkunuError if it fails or stops."""
        self._wait(self._has_ended, "an answer in the chat did not end")
        if not self._status.startswith(_READY):
            raise AkunuError(f"an answer in the chat {self._status[2:]}; {self._last_text()}")

    def type_keys(self, count: int, into: KeyTimes, *, while_answering: bool) -> int:
        """Type up to `count` letters, clear them, and return their number.

        while_answering: stop early at the end of the answer.
        """
        typed = 0
        for letter in LETTERS[:count]:
            end = time.perf_counter() + self._gaps.uniform(*_GAPS_S)
            while self._read(end):  # a full terminal buffer would stop the program
                pass
            if while_answering and self._has_ended():
                break
            self._type(letter.encode(), into)
            typed += 1
        if typed:
            before = len(self._output)
            # Keeps the output, which may contain the end of the answer.
            os.write(self._master, _CLEAR)
            self.wait_for(_EMPTY, start=before)
        return typed

    def quit(self) -> None:
        """Quit the chat, which saves everything. Raises AkunuError for a bad exit."""
        self.write(_QUIT)
        end = time.perf_counter() + _TIMEOUT_S
        while self._process.poll() is None and time.perf_counter() < end:
            self._read(time.perf_counter() + 0.05)
        if self._process.poll() != 0:
            raise AkunuError(f"the chat ended with {self._process.poll()}, expected 0")

    def close(self) -> None:
        """Terminate the program if it still runs."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(3.0)
        self._process.kill()
        self._process.wait()
        os.close(self._master)

    def _type(self, key: bytes, into: KeyTimes) -> None:
        before, started = len(self._output), time.perf_counter()
        os.write(self._master, key)
        while self._output.find(key, before) < 0:
            if not self._read(started + _LOST_S):
                into.lost += 1
                return
        into.seconds.append(time.perf_counter() - started)

    def _wait(self, condition: Callable[[], bool], failure: str) -> None:
        end = time.perf_counter() + _TIMEOUT_S
        while not condition():
            if not self._read(end):
                raise AkunuError(f"{failure}; {self._last_text()}")

    def _has_ended(self) -> bool:
        """Return True if the last status is not that of an answer."""
        self._has_new_status()
        return not self._status.startswith(_ANSWERING)

    def _has_new_status(self) -> bool:
        """Read the status up to the last one. Returns False if only the same was drawn again."""
        new = False
        for found in _STATUS.finditer(self._output, self._searched):
            self._searched = found.end()
            status = _visible_text(found[0])
            if not self._status.startswith(status):  # a part of it may be drawn again, too
                self._status, new = status, True
        return new

    def _last_text(self) -> str:
        return f"the end of its output: {_visible_text(bytes(self._output))[-300:]}"

    def _read(self, end: float) -> bool:
        """Read once before `end`. Returns False on timeout or at the end of the output."""
        left = end - time.perf_counter()
        if left <= 0 or not select.select([self._master], [], [], left)[0]:
            return False
        try:
            read = os.read(self._master, 1 << 16)
        except OSError:  # Linux raises this when the program has exited
            read = b""
        self._output += read
        if _ATTRIBUTES_QUERY in read:
            os.write(self._master, _ATTRIBUTES)
        return bool(read)


def _visible_text(shown: bytes) -> str:
    """Return terminal output without escape sequences."""
    return " ".join(_SEQUENCE.sub(b" ", shown).decode(errors="replace").split())


@contextlib.contextmanager
def chat_terminal(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[ChatTerminal]:
    """Start a chat, wait until its model is loaded, and terminate it at the end."""
    terminal = ChatTerminal(command, environment)
    try:
        terminal.wait_for(_READY)
        yield terminal
    finally:
        terminal.close()


def add_options(parser: argparse.ArgumentParser) -> None:
    add_repeats(parser, 4)
    add_count(parser, "--max-tokens", 96, "Maximum tokens of an answer")
    add_count(parser, "--keys", 24, "Keys to type during the answers of each repetition")
    what = "Workload whose last turn is the prompt"
    parser.add_argument("--workload", default="chat", metavar="NAME", help=what)
    parser.add_argument("--draft", choices=DRAFT_MODES, default="auto")
    parser.add_argument("--force", action="store_true", help="Load a model that does not fit")
    add_model(parser)
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    (workload,) = load_workloads([options.workload])
    model = model_store.resolve(options.model)
    model_store.check(model)
    bench = ChatBench(options, workload.turns[-1].user, model.path.absolute())
    result = ChatResult()
    interrupted = was_interrupted(lambda: bench.measure(result))
    found = {
        "command": options.command_line,
        "date": today(),
        "model": model.name,
        "draft": options.draft,
        "machine": describe_machine(),
    } | result.as_dict()
    show(options, found, lambda: print_chat(found))
    return INTERRUPTED if interrupted else 0


def print_chat(found: Mapping[str, Any]) -> None:
    """Print the tables. found: as in JSON."""
    print(f"{found['model']}, drafting {found['draft']}, in a terminal of 80 x 24\n")
    columns = ("count", "lost", "median_ms", "p95_ms", "worst_ms")
    cells = [[name, *(f"{keys[each]:g}" for each in columns)]
             for name, keys in found["keys"].items()]  # fmt: skip
    print(to_text((["ms from key to letter", "keys", "lost", "median", "95 %", "worst"], cells)))
    cells = [[name, str(len(rates)), f"{median(rates):.1f}", f"{half_range(rates):.1f}"]
             for name, rates in found["tokens_per_s"].items()]  # fmt: skip
    print(to_text((["decoding", "answers", "t/s", "±"], cells)))
    same = "the same answer" if found["identical"] else "NOT the same answer each time"
    print(f"in the chat: x{found['ratio']:.3f} ± {found['ratio_spread']:.3f}; {same}\n{GOALS}")


main = partial(run_tool, "chat", "Measure the key latency of the chat and what drawing costs "
               "decoding", add_options, run)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
