"""Measure the key latency of the chat, and what drawing costs decoding.

`akunu chat` runs in a pseudo-terminal, which the tool types into. The latency ends when the
terminal receives the letter. `akunu run` gives the same answers without a screen. Each program has
its own temporary data directory; of the user's files, only the model is read.
"""

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from akunu_py.bench.command import add_count, add_model, progress, show
from akunu_py.bench.result import describe_machine, half_range, median, today
from akunu_py.bench.tables import to_text
from akunu_py.bench.workloads import load_workloads
from akunu_py.chats.conversation_store import ConversationStore
from akunu_py.errors import INTERRUPTED, AkunuError
from akunu_py.models.store import model_store
from akunu_py.parser import add_format
from akunu_py.types import DRAFT_MODES
from tests.measure.tool import run_akunu, run_tool, was_interrupted, with_data_in

SCREEN = (24, 80)  # lines, columns
GOALS = "goals: a median of 50 ms and 150 ms at worst while decoding, at least x0.95"
# One letter per key: rare in answers, one column wide, and few enough for one line of the box.
LETTERS = "".join(map(chr, range(0x13A0, 0x13A0 + 64)))  # Cherokee
_GAPS_S = (0.08, 0.18)  # between an echo and the next key, as by a fast typist
_LOST_S = 3.0  # timeout for a letter
_TIMEOUT_S = 120.0
_CLEAR, _QUIT, _ENTER = b"\x15", b"\x11", b"\r"  # Ctrl+U, Ctrl+Q, Enter
_ATTRIBUTES_QUERY, _ATTRIBUTES = b"\x1b[c", b"\x1b[?62;22c"  # the terminal identifies itself
_READY, _ANSWERING = "● ready", "◐ answering"
# A whole status: in several colors, up to the next sequence that is no color.
_STATUS = re.compile(
    f"({_READY}|{_ANSWERING}|■ stopped|× failed)".encode()
    + rb"([^\x1b]|\x1b\[[\d;]*m)*(?=\x1b\[[\d;?]*[A-Za-ln-z])"
)
_EMPTY = "Ask something"  # what an empty box shows
_IDLE_KEYS = 8
_MOST_ANSWERS = 6  # to type into, if answers are short
_SEQUENCE = re.compile(rb"\x1b(\[[0-9;?<>=$]*[@-~]|[\]P_][^\x1b\x07]*(\x07|\x1b\\)|[^\[\]P_])")

Answer = tuple[str, dict[str, Any]]
"""Text and statistics."""
Keys = list[float | None]
"""Seconds from each key to its letter, None without a letter."""


@dataclass
class ChatResult:
    """All measurements so far."""

    keys: dict[str, Keys] = field(default_factory=lambda: {"idle": [], "decoding": []})
    answers: dict[str, list[Answer]] = field(default_factory=lambda: {"alone": [], "chat": []})

    def as_dict(self) -> dict[str, Any]:
        """Return all measurements, ready for JSON. ratio: of the median speeds, 0 if missing."""
        rates = {side: [speed(each) for each in found] for side, found in self.answers.items()}
        both = zip(rates["chat"], rates["alone"], strict=False)
        alone = median(rates["alone"])
        return {
            "keys": {name: key_figures(keys) for name, keys in self.keys.items()},
            "ratio": round(median(rates["chat"]) / alone, 4) if alone else 0.0,
            "ratio_spread": round(half_range([chat / other for chat, other in both if other]), 4),
            "identical": len({text for found in self.answers.values() for text, _ in found}) == 1,
            "tokens_per_s": rates,
            **{side: [stats for _, stats in found] for side, found in self.answers.items()},
        }


def speed(answer: Answer) -> float:
    """Return the tokens/s after the first token."""
    stats = answer[1]
    return (stats["generated_tokens"] - 1) / stats["decode_s"] if stats["decode_s"] else 0.0


def key_figures(keys: Keys) -> dict[str, Any]:
    """Return the latencies in milliseconds, 0 for no keys, ready for JSON."""
    times = sorted(round(1e3 * seconds, 2) for seconds in keys if seconds is not None)
    return {
        "count": len(times), "lost": len(keys) - len(times), "median_ms": median(times),
        "p95_ms": times[math.ceil(0.95 * len(times)) - 1] if times else 0.0,
        "worst_ms": max(times, default=0.0), "ms": times,
    }  # fmt: skip


def measure(options: argparse.Namespace, prompt: str, model: Path, result: ChatResult) -> None:
    """Measure the answer without the chat and in it, in alternating order."""
    common = [
        *("--draft", options.draft, "--weights", options.weights, "--temperature", "0"),
        *("--max-tokens", str(options.max_tokens), "--no-answer-cache"),
        *(["--force"] if options.force else []),
    ]

    def run_alone() -> Answer:
        with tempfile.TemporaryDirectory(prefix="akunu-bench-") as data:
            words = ["run", prompt, "--model", str(model), *common, "--format", "json"]
            answer = json.loads(run_akunu(words, data))
        return answer["text"], answer["stats"]

    progress("warm-up")
    run_alone()
    for number in range(1, options.repeats + 1):
        for side in ("alone", "chat") if number % 2 else ("chat", "alone"):
            progress(f"{side}, {number}/{options.repeats}")
            if side == "alone":
                answer = run_alone()
            else:
                answer = run_chat([str(model), *common], prompt, options.keys, result.keys)
            result.answers[side].append(answer)


def run_chat(words: Sequence[str], prompt: str, count: int, keys: Mapping[str, Keys]) -> Answer:
    """Return an answer without typing; then type `count` keys during others."""
    with tempfile.TemporaryDirectory(prefix="akunu-bench-") as data:
        terminal = ChatTerminal(words, data)
        with contextlib.closing(terminal):
            terminal.wait_for(_READY)
            terminal.type_keys(_IDLE_KEYS, keys["idle"], while_answering=False)
            terminal.send(prompt)
            terminal.wait_for_end()
            for _ in range(_MOST_ANSWERS):
                terminal.send(prompt)
                count -= terminal.type_keys(count, keys["decoding"], while_answering=True)
                terminal.wait_for_end()
                if count <= 0:
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


class ChatTerminal:
    """A pseudo-terminal of 80 x 24 with `akunu chat` and a simulated user."""

    def __init__(self, words: Sequence[str], data: str) -> None:
        terminal = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "PYTHONUTF8": "1"}
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, SCREEN)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "akunu_py", "chat", *words], stdin=slave, stdout=slave,
            stderr=slave, env=with_data_in(data) | terminal, start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self._output = bytearray()  # since the last `write`
        self._searched = 0  # bytes of it, for statuses
        self._status, self._has_new_status = "", False
        self._gaps = random.Random(0)

    def wait_for(self, text: str, start: int = 0) -> None:
        """Wait for `text` in the output since the last `write`. Raises AkunuError on timeout.

        start: bytes of that output to ignore.
        """
        self._wait(lambda: self._output.find(text.encode(), start) >= 0, f"no {text!r} was shown")

    def write(self, keys: bytes) -> None:
        self._output.clear()
        self._searched = 0
        os.write(self._master, keys)

    def send(self, prompt: str) -> None:
        """Paste and send a prompt, and wait for the beginning of the answer."""
        self.write(b"\x1b[200~%b\x1b[201~" % prompt.encode())
        self.wait_for(prompt.split()[-1])
        self._has_new_status = False
        self.write(_ENTER)
        self._wait(lambda: self._has_new_status, "an answer did not begin")

    def wait_for_end(self) -> None:
        """Wait for the end of the answer. Raises AkunuError if it fails or stops."""
        self._wait(lambda: not self._status.startswith(_ANSWERING), "an answer did not end")
        if not self._status.startswith(_READY):
            raise AkunuError(f"an answer in the chat {self._status[2:]}; {self._last_text()}")

    def type_keys(self, count: int, into: Keys, *, while_answering: bool) -> int:
        """Type up to `count` letters, clear them, and return their number.

        while_answering: stop early at the end of the answer.
        """
        typed = 0
        for letter in LETTERS[:count]:
            end = time.perf_counter() + self._gaps.uniform(*_GAPS_S)
            while self._read(end):  # a full terminal buffer would stop the program
                pass
            if while_answering and not self._status.startswith(_ANSWERING):
                break
            into.append(self._type(letter.encode()))
            typed += 1
        if typed:
            before = len(self._output)
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

    def _type(self, key: bytes) -> float | None:
        before, started = len(self._output), time.perf_counter()
        os.write(self._master, key)
        while self._output.find(key, before) < 0:
            if not self._read(started + _LOST_S):
                return None
        return time.perf_counter() - started

    def _wait(self, condition: Callable[[], bool], failure: str) -> None:
        end = time.perf_counter() + _TIMEOUT_S
        while not condition():
            if not self._read(end):
                raise AkunuError(f"{failure} in the chat; {self._last_text()}")

    def _last_text(self) -> str:
        return f"the end of its output: {_visible_text(self._output)[-300:]}"

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
        for found in _STATUS.finditer(self._output, self._searched):
            self._searched = found.end()
            status = _visible_text(found[0])
            if not self._status.startswith(status):  # a part of it may be drawn again, too
                self._status, self._has_new_status = status, True
        if _ATTRIBUTES_QUERY in read:
            os.write(self._master, _ATTRIBUTES)
        return bool(read)


def _visible_text(shown: bytes | bytearray) -> str:
    """Return terminal output without escape sequences."""
    return " ".join(_SEQUENCE.sub(b" ", shown).decode(errors="replace").split())


def add_options(parser: argparse.ArgumentParser) -> None:
    add_count(parser, "--repeats", 4, "Number of repetitions")
    add_count(parser, "--max-tokens", 96, "Maximum tokens of an answer")
    add_count(parser, "--keys", 24, "Keys to type during the answers of each repetition")
    parser.add_argument("--draft", choices=DRAFT_MODES, default="auto")
    parser.add_argument("--force", action="store_true", help="Load a model that does not fit")
    add_model(parser)
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    (workload,) = load_workloads(["chat"])
    model = model_store.resolve(options.model)
    model_store.check(model)
    result, prompt = ChatResult(), workload.turns[-1].user
    interrupted = was_interrupted(lambda: measure(options, prompt, model.path.absolute(), result))
    found = {
        "command": options.command_line, "date": today(), "model": model.name,
        "draft": options.draft, "machine": describe_machine(),
    } | result.as_dict()  # fmt: skip
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
