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
import signal
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from akunu_py.bench.command import (
    add_model,
    add_repeats,
    exit_code,
    progress,
    show,
    was_interrupted,
)
from akunu_py.bench.result import describe_machine, half_range, median, today
from akunu_py.bench.tables import to_text
from akunu_py.bench.workloads import load_workloads
from akunu_py.chats.conversation_store import ConversationStore
from akunu_py.chats.tree import ChatMessage, ConversationTree
from akunu_py.errors import AkunuError
from akunu_py.models.store import model_store
from akunu_py.parser import add_format, positive
from akunu_py.types import DRAFT_MODES, DraftMode, Stats, WeightMode
from tests.measure.tool import run_tool

SUMMARY = "Measure the key latency of the chat and what drawing costs decoding"
SCREEN = (24, 80)  # lines, columns
GOAL_MS, GOAL_RATIO = 50, 0.95  # the median of a key while decoding, at most; the ratio, at least
GOAL_WORST_MS = 150
IDLE, DECODING, LONG = "idle", "decoding", "decoding, long chat"
HEAVY = "decoding, heavy chat"
# One letter per key: rare in answers, one column wide, and few enough for one line of the box.
LETTERS = "".join(map(chr, range(0x13A0, 0x13A0 + 64)))  # Cherokee
_GAPS_S = (0.08, 0.18)  # between an echo and the next key, as by a fast typist
_LOST_S = 3.0  # timeout for a letter
_TIMEOUT_S = 120.0
_OVERLAP = 64  # bytes; longer than any text to find
_CLEAR, _QUIT, _ENTER, _CHATS = b"\x15", b"\x11", b"\r", b"\x0f"  # Ctrl+U, Ctrl+Q, Enter, Ctrl+O
_ATTRIBUTES_QUERY, _ATTRIBUTES = b"\x1b[c", b"\x1b[?62;22c"  # the terminal identifies itself
_READY, _ANSWERING = "● ready", "◐ answering"
# A whole status: in several colors, up to the next sequence that is no color.
_STATUS = re.compile(
    f"({_ANSWERING}|{_READY}|■ stopped|× failed)".encode()
    + rb"([^\x1b]|\x1b\[[\d;]*m)*(?=\x1b\[[\d;?]*[A-Za-ln-z])"
)
_EMPTY = "Ask something"  # what an empty box shows
_WARM_UP_TOKENS = 32
_IDLE_KEYS = 8
_MOST_ANSWERS = 6  # to type into, if answers are short
_LONG_CHAT = "An earlier chat with a long answer"
_LONG_END = "So ends the long answer."
_LONG_LENGTH = 6500  # characters: about 1,500 tokens
_HEAVY_CHAT = "An earlier chat of many turns"
_HEAVY_TURNS, _HEAVY_ROWS, _HEAVY_PROMPT = 300, 200, 250_000  # turns, rows, characters
_CODE = """
```python
def weighted_mean(values, weights):
    total = sum(weights)
    return sum(v * w for v, w in zip(values, weights)) / total
```

- one value for each weight,
- **no** weight below zero.
"""
_SEQUENCE = re.compile(rb"\x1b(\[[0-9;?<>=$]*[@-~]|[\]P_][^\x1b\x07]*(\x07|\x1b\\)|[^\[\]P_])")


@dataclass
class KeyTimes:
    """Key latencies in seconds."""

    seconds: list[float] = field(default_factory=list)  # from the key to its letter
    lost: int = 0  # keys without a letter after 3 s

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def worst(self) -> float:
        """The longest latency, 0 for no keys."""
        return max(self.seconds, default=0.0)

    @property
    def p95(self) -> float:
        """The 95th percentile (nearest rank), 0 for no keys."""
        rank = math.ceil(0.95 * len(self.seconds)) - 1
        return sorted(self.seconds)[rank] if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the latencies in milliseconds, ready for JSON."""
        return {
            "count": len(self.seconds),
            "lost": self.lost,
            "median_ms": round(1e3 * self.median, 2),
            "p95_ms": round(1e3 * self.p95, 2),
            "worst_ms": round(1e3 * self.worst, 2),
            "ms": [round(1e3 * seconds, 2) for seconds in self.seconds],
        }


@dataclass
class ChatResult:
    """All measurements so far."""

    keys: dict[str, KeyTimes] = field(
        default_factory=lambda: {IDLE: KeyTimes(), DECODING: KeyTimes()}
    )
    alone: list[tuple[str, Stats]] = field(default_factory=list)  # by `akunu run`
    chat: list[tuple[str, Stats]] = field(default_factory=list)
    history: int = 0  # prompt tokens of the long conversation

    @property
    def ratio(self) -> float:
        """Median tokens/s in the chat divided by that without it; 0 if one is missing."""
        alone = median(speeds(self.alone))
        return median(speeds(self.chat)) / alone if alone else 0.0

    @property
    def identical(self) -> bool:
        """True if all answers are equal."""
        return len({text for text, _ in (*self.alone, *self.chat)}) == 1

    @property
    def spread(self) -> float:
        """Half the range of the ratios of consecutive answers."""
        both = zip(speeds(self.chat), speeds(self.alone), strict=False)
        return half_range([chat / alone for chat, alone in both if alone])

    def as_dict(self) -> dict[str, Any]:
        """Return all measurements, ready for JSON."""
        return {
            "keys": {name: keys.as_dict() for name, keys in self.keys.items()},
            "long_chat_tokens": self.history,
            "ratio": round(self.ratio, 4),
            "ratio_spread": round(self.spread, 4),
            "identical": self.identical,
            "alone": [asdict(stats) for _, stats in self.alone],
            "chat": [asdict(stats) for _, stats in self.chat],
        }


def speeds(answers: Sequence[tuple[str, Stats]]) -> list[float]:
    """Return the tokens/s of each answer."""
    return [stats.tokens_per_s for _, stats in answers]


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options of the measurement."""

    model: Path  # its directory
    prompt: str
    repeats: int
    max_tokens: int
    keys: int  # typed during decoding, per repetition
    long: bool  # type in long conversations too
    draft: DraftMode
    weights: WeightMode
    force: bool


class ChatBench:
    """Runs the programs one after the other, each with its own data directory."""

    def __init__(
        self, options: ChatOptions, directory: Path, progress: Callable[[str], None]
    ) -> None:
        self._options, self._directory, self._progress = options, directory, progress
        self._program = [sys.executable, "-m", "akunu_py"]
        self._common = [
            *("--draft", options.draft, "--weights", options.weights),
            *("--temperature", "0", "--no-answer-cache"),
            *(["--force"] if options.force else []),
        ]
        self._chats = 0

    def measure(self, result: ChatResult) -> None:
        """Measure the answer without the chat and in it, then type into each chat.

        The two alternate in order from round to round.
        """
        repeats = self._options.repeats
        self._progress("warm-up")
        self.run_alone(min(_WARM_UP_TOKENS, self._options.max_tokens))
        for number in range(1, repeats + 1):
            sides = [self._alone, self._in_chat]
            for side in sides if number % 2 else reversed(sides):
                side(result, f"{number}/{repeats}")
        if self._options.long:
            self._in_long_chat(result)
            self._in_heavy_chat(result)

    def _alone(self, result: ChatResult, round_: str) -> None:
        self._progress(f"without the chat, {round_}")
        result.alone.append(self.run_alone(self._options.max_tokens))

    def run_alone(self, max_tokens: int) -> tuple[str, Stats]:
        """Return the answer of `akunu run` in a new process."""
        model = str(self._options.model)
        command = [*self._program, "run", self._options.prompt, "--model", model, *self._common]
        command += ["--max-tokens", str(max_tokens), "--format", "json"]
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=self._environment("run"),
            start_new_session=True,  # Ctrl-C ends only this process
        )
        if done.returncode:
            why = done.stderr.decode(errors="replace").strip()
            raise AkunuError(f"akunu run ended with {done.returncode}: {why}")
        answer = json.loads(done.stdout)
        names = Stats.__dataclass_fields__
        return answer["text"], Stats(**{k: v for k, v in answer["stats"].items() if k in names})

    def _in_chat(self, result: ChatResult, round_: str) -> None:
        """Measure one answer without typing, then the keys in another conversation."""
        name = self._next_chat()
        self._progress(f"in the chat, {round_}")
        with chat_terminal(self._chat_command(), self._environment(name)) as terminal:
            terminal.type_keys(_IDLE_KEYS, result.keys[IDLE], while_answering=False)
            terminal.ask(self._options.prompt)
            terminal.wait_for_end()
            self._progress(f"keys, {round_}")
            keys = self._options.keys
            type_while_answering(terminal, self._options.prompt, keys, result.keys[DECODING])
            terminal.quit()
        result.chat.append(self._answers(name)[0])

    def _in_long_chat(self, result: ChatResult) -> None:
        self._progress("keys, in a long chat")
        name = self._type_in(_long_tree(), _LONG_END, result.keys.setdefault(LONG, KeyTimes()))
        result.history = self._answers(name)[1][1].prompt_tokens

    def _in_heavy_chat(self, result: ChatResult) -> None:
        self._progress("keys, in a heavy chat")
        end = "more characters"  # the prompt is folded
        self._type_in(_heavy_tree(), end, result.keys.setdefault(HEAVY, KeyTimes()))

    def _type_in(self, tree: ConversationTree, end: str, into: KeyTimes) -> str:
        """Open an earlier conversation, and type while the model answers there.

        end: the last text of the conversation. Returns the name of the data directory.
        """
        name = self._next_chat()
        path = self._conversations(name)
        path.parent.mkdir(parents=True)
        with contextlib.closing(ConversationStore.open(path)) as store:
            store.save_tree(tree)
        with chat_terminal(self._chat_command(), self._environment(name)) as terminal:
            terminal.open_chat(tree.title, end)
            keys = self._options.keys * min(2, self._options.repeats)
            type_while_answering(terminal, self._options.prompt, keys, into)
            terminal.quit()
        return name

    def _chat_command(self) -> list[str]:
        limit = ["--max-tokens", str(self._options.max_tokens)]
        return [*self._program, "chat", str(self._options.model), *self._common, *limit]

    def _next_chat(self) -> str:
        self._chats += 1
        return f"chat-{self._chats}"

    def _environment(self, data: str) -> dict[str, str]:
        """Return the environment. data: the name of the data directory."""
        places = {"DATA": data, "CACHE": "cache", "CONFIG": "config"}
        return {
            **os.environ,
            **{f"XDG_{name}_HOME": str(self._directory / at) for name, at in places.items()},
            "TERM": "xterm-256color",
            "COLORTERM": "truecolor",
            "PYTHONUTF8": "1",
        }

    def _conversations(self, name: str) -> Path:
        return self._directory / name / "akunu" / "conversations.db"

    def _answers(self, name: str) -> list[tuple[str, Stats]]:
        """Return the saved answers in order. Raises AkunuError for an unfinished one."""
        with contextlib.closing(ConversationStore.open(self._conversations(name))) as store:
            (saved,) = store.list()
            messages = store.load(saved.id).messages
        answers = [each for each in messages if each.role == "assistant"]
        if unfinished := [each for each in answers if each.finish_reason not in ("stop", "length")]:
            raise AkunuError(
                f"an answer in the chat ended with {unfinished[0].finish_reason}, expected its end"
            )
        return [(each.text, each.stats or Stats()) for each in answers]


class ChatTerminal:
    """A pseudo-terminal of 80 x 24 with a program and a simulated user."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, SCREEN)
        self._process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
        )
        os.close(slave)
        self._output = bytearray()  # since the last `write`
        self._searched = 0  # bytes of it
        self._status = ""  # the last one
        self._gaps = random.Random(0)

    def wait_for(self, pattern: str, seconds: float = _TIMEOUT_S, start: int = 0) -> str:
        """Return the first match of `pattern` in the output since the last `write`.

        start: bytes of that output to ignore. Raises AkunuError on timeout.
        """
        wanted = re.compile(pattern.encode())
        end = time.perf_counter() + seconds
        while not (found := wanted.search(self._output, start)):
            start = max(start, len(self._output) - _OVERLAP)  # searching takes time from the chat
            if not self._read(end):
                raise AkunuError(
                    f"the chat did not show {pattern!r} within {seconds:.0f} s; {self._last_text()}"
                )
        return found[0].decode()

    def write(self, keys: bytes) -> None:
        self._has_new_status()
        self._output.clear()
        self._searched = 0
        os.write(self._master, keys)

    def ask(self, prompt: str) -> None:
        """Paste and send a prompt, and wait for the beginning of the answer."""
        self.write(b"\x1b[200~%b\x1b[201~" % prompt.encode())
        self.wait_for(re.escape(prompt.split()[-1]))
        self.write(_ENTER)
        self._wait(self._has_new_status, "begin")

    def wait_for_end(self) -> None:
        """Wait for the end of the answer. Raises AkunuError if it fails or stops."""
        self._wait(self._has_ended, "end")
        if not self._status.startswith(_READY):
            raise AkunuError(f"an answer in the chat {self._status[2:]}; {self._last_text()}")

    def type_keys(self, count: int, into: KeyTimes, *, while_answering: bool) -> int:
        """Type up to `count` letters, clear them, and return their number.

        while_answering: stop early at the end of the answer.
        """
        typed = 0
        for letter in LETTERS[:count]:
            self._read_for(self._gaps.uniform(*_GAPS_S))
            if while_answering and self._has_ended():
                break
            self._type(letter, into)
            typed += 1
        if typed:
            before = len(self._output)
            os.write(
                self._master, _CLEAR
            )  # keeps the output, which may contain the end of the answer
            self.wait_for(_EMPTY, start=before)
        return typed

    def open_chat(self, title: str, end: str) -> None:
        """Open the earlier conversation `title`; `end` is in its last line."""
        self.write(_CHATS)
        self.wait_for(re.escape(title))
        self._read_for(1.0)
        self.write(_ENTER)
        self.wait_for(re.escape(end))
        self._read_for(1.0)

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
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(3.0)
            self._process.kill()
            self._process.wait()
        os.close(self._master)

    def _type(self, letter: str, into: KeyTimes) -> None:
        key, before = letter.encode(), len(self._output)
        started = time.perf_counter()
        os.write(self._master, key)
        while self._output.find(key, before) < 0:
            if not self._read(started + _LOST_S):
                into.lost += 1
                return
        into.seconds.append(time.perf_counter() - started)

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        end = time.perf_counter() + _TIMEOUT_S
        while not condition():
            if not self._read(end):
                raise AkunuError(f"an answer in the chat did not {what}; {self._last_text()}")

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

    def _read_for(self, seconds: float) -> None:
        """Read for `seconds`: a full terminal buffer would stop the program."""
        end = time.perf_counter() + seconds
        while self._read(end):
            pass

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


def _long_tree() -> ConversationTree:
    """Return a conversation with a long answer, made of the workloads' prompts."""
    prompts = [turn.user for each in load_workloads(["summary", "question"]) for turn in each.turns]
    part = "\n\n".join([*prompts, _CODE])
    parts = [f"## Part {number}\n\n{part}" for number in range(1, _LONG_LENGTH // len(part) + 2)]
    answer = "\n\n".join(parts)[:_LONG_LENGTH] + f"\n```\n\n{_LONG_END}"
    tree = ConversationTree(title=_LONG_CHAT)
    _add_turn(tree, "Tell me all of it.", answer)
    return tree


def _heavy_tree() -> ConversationTree:
    """Return a conversation of many turns, the last ones with a table and a very long prompt.

    The prompts without an answer are drawn, but no model prefills them.
    """
    tree, parent = ConversationTree(title=_HEAVY_CHAT), None
    for number in range(_HEAVY_TURNS):
        parent = _add_turn(tree, f"Prompt {number}.", "", parent)
    rows = "".join(f"|{number}|a|\n" for number in range(_HEAVY_ROWS))  # five tokens each
    parent = _add_turn(tree, "All of them.", f"|n|x|\n|--:|---|\n{rows}", parent)
    line = "What a log says, a line of it.\n"
    _add_turn(tree, line * (_HEAVY_PROMPT // len(line)), "", parent)
    return tree


def _add_turn(tree: ConversationTree, prompt: str, answer: str, parent: str | None = None) -> str:
    """Add a turn and return the id of the reply; an empty answer is unfinished."""
    asked = ChatMessage("user", prompt, parent)
    reply = ChatMessage(
        "assistant", answer, asked.id, model="bench", finish_reason="stop" if answer else None
    )
    tree.add(asked)
    tree.add(reply)
    return reply.id


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


def type_while_answering(terminal: ChatTerminal, prompt: str, count: int, into: KeyTimes) -> None:
    """Type while the model answers; repeat the prompt until `count` keys are typed."""
    for _ in range(_MOST_ANSWERS):
        terminal.ask(prompt)
        count -= terminal.type_keys(count, into, while_answering=True)
        terminal.wait_for_end()
        if count <= 0:
            return


def print_chat(model: str, draft: str, result: ChatResult) -> None:
    print(f"{model}, drafting {draft}, in a terminal of 80 x 24\n")
    cells = [
        [name, str(len(keys.seconds)), str(keys.lost)]
        + [
            f"{1e3 * each:.1f}" if keys.seconds else "–"
            for each in (keys.median, keys.p95, keys.worst)
        ]
        for name, keys in result.keys.items()
    ]
    print(to_text((["ms from key to letter", "keys", "lost", "median", "95 %", "worst"], cells)))
    sides = (("without the chat", result.alone), ("in the chat", result.chat))
    cells = [[name, *_speed_cells([stats for _, stats in answers])] for name, answers in sides]
    print(to_text((["decoding", "answers", "tokens", "t/s", "±", "tokens/pass"], cells)))
    if result.ratio:
        same = "the same answer" if result.identical else "NOT the same answer each time"
        print(f"in the chat: x{result.ratio:.3f} ± {result.spread:.3f}; {same}")
    goals = f"a median of {GOAL_MS} ms and {GOAL_WORST_MS} ms at worst while decoding"
    print(f"goals: {goals}, at least x{GOAL_RATIO}")
    if result.history:
        print(f"the long chat: {result.history} tokens before the answer")


def _speed_cells(answers: Sequence[Stats]) -> list[str]:
    if not answers:
        return ["0", "–", "–", "–", "–"]
    rates = [stats.tokens_per_s for stats in answers]
    per_pass = median([stats.tokens_per_pass for stats in answers])
    tokens = median([stats.generated_tokens for stats in answers])
    return [str(len(answers)), f"{tokens:.0f}", f"{median(rates):.1f}", f"{half_range(rates):.1f}",
            f"{per_pass:.2f}"]  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    add_repeats(parser, 4)
    parser.add_argument(
        "--max-tokens", type=positive, default=96, metavar="N", help="Maximum tokens of an answer"
    )
    parser.add_argument(
        "--keys", type=positive, default=24, metavar="N", help="Keys to type during each answer"
    )
    parser.add_argument(
        "--long",
        action="store_true",
        help="Also type in a chat with a long answer, and in one of 300 turns with a table of "
        "200 rows and a prompt of 250,000 characters",
    )
    parser.add_argument(
        "--workload", default="chat", metavar="NAME", help="Workload whose last turn is the prompt"
    )
    parser.add_argument("--draft", choices=DRAFT_MODES, default="auto")
    parser.add_argument("--force", action="store_true", help="Load a model that does not fit")
    add_model(parser)
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    (workload,) = load_workloads([options.workload])
    model = model_store.resolve(options.model)
    model_store.check(model)
    chat_options = ChatOptions(
        model.path.absolute(),
        workload.turns[-1].user,
        options.repeats,
        options.max_tokens,
        options.keys,
        options.long,
        options.draft,
        options.weights,
        options.force,
    )
    result = ChatResult()
    with tempfile.TemporaryDirectory(prefix="akunu-bench-") as directory:
        bench = ChatBench(chat_options, Path(directory), progress)
        interrupted = was_interrupted(lambda: bench.measure(result))
    as_json = {
        "command": options.command_line,
        "date": today(),
        "model": model.name,
        "draft": options.draft,
        "machine": describe_machine(),
    }
    as_json |= result.as_dict()
    show(options, as_json, lambda: print_chat(model.name, options.draft, result))
    return exit_code(interrupted)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    return run_tool("chat", SUMMARY, add_options, run, argv)


if __name__ == "__main__":
    sys.exit(main())
