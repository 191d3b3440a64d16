"""How soon the chat answers a key, and what drawing takes from decoding.

`akunu chat` runs in a pseudo-terminal, and keys are typed into it. A key is answered when the
terminal is sent the letter: nothing is read but what a terminal would. `akunu run` gives the same
answers without a screen. Every program has a data directory of its own, in a temporary one; nothing
of the user's is read or written but the model.
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

from akunu_py.arguments import positive
from akunu_py.bench.command import (
    add_format,
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
from akunu_py.chats.tree import ChatMessage, Tree
from akunu_py.errors import AkunuError
from akunu_py.models.store import model_store
from akunu_py.types import DRAFT_MODES, DraftMode, Stats, WeightMode
from tests.measure.tool import run_tool

SUMMARY = "Measure the key latency of the chat and what drawing costs decoding"
SCREEN = (24, 80)  # lines, columns
GOAL_MS, GOAL_RATIO = 50, 0.95  # the median of a key while decoding, at most; the ratio, at least
GOAL_WORST_MS = 150
IDLE, DECODING, LONG = "idle", "decoding", "decoding, long chat"
HEAVY = "decoding, heavy chat"
# Letters that no answer is likely to have, a column wide, a new one for each key. There are fewer
# than fit into a line of the box, which is cleared in between.
LETTERS = "".join(map(chr, range(0x13A0, 0x13A0 + 64)))  # Cherokee
_GAPS_S = (0.08, 0.18)  # between an echo and the next key: a fast typist's
_LOST_S = 3.0  # a user would not wait longer for a letter
_TIMEOUT_S = 120.0
_OVERLAP = 64  # bytes; more than the longest text that is looked for
_CLEAR, _QUIT, _ENTER, _CHATS = b"\x15", b"\x11", b"\r", b"\x0f"  # Ctrl+U, Ctrl+Q, Enter, Ctrl+O
_ATTRIBUTES_QUERY, _ATTRIBUTES = b"\x1b[c", b"\x1b[?62;22c"  # what kind of terminal we are
_READY, _ENDED = "● ready", "● ready|■ stopped|× failed"
_BEGUN = f" answering|{_ENDED}"
_EMPTY = "Ask something"  # what an empty box shows
_WARM_UP_TOKENS = 32
_IDLE_KEYS = 8
_MOST_ANSWERS = 6  # that keys are typed into, where answers are short
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
    """Seconds from a key to its letter on the terminal. lost: keys with no letter after 3 s."""

    seconds: list[float] = field(default_factory=list)
    lost: int = 0

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def worst(self) -> float:
        """The slowest, 0 for none."""
        return max(self.seconds, default=0.0)

    @property
    def p95(self) -> float:
        """95 in 100 are as fast (nearest rank), 0 for none."""
        rank = math.ceil(0.95 * len(self.seconds)) - 1
        return sorted(self.seconds)[rank] if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """In milliseconds, ready for JSON."""
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
    """All figures, as far as they go: keys by what went on meanwhile, and the answers without the
    chat and in it, as (text, statistics). history: tokens of the long chat before its answer."""

    keys: dict[str, KeyTimes] = field(
        default_factory=lambda: {IDLE: KeyTimes(), DECODING: KeyTimes()}
    )
    alone: list[tuple[str, Stats]] = field(default_factory=list)
    chat: list[tuple[str, Stats]] = field(default_factory=list)
    history: int = 0

    @property
    def ratio(self) -> float:
        """Tokens/s in the chat over those without it, of the medians; 0 where one is missing."""
        alone = median(speeds(self.alone))
        return median(speeds(self.chat)) / alone if alone else 0.0

    @property
    def identical(self) -> bool:
        """Whether all answers are the same."""
        return len({text for text, _ in (*self.alone, *self.chat)}) == 1

    @property
    def spread(self) -> float:
        """Half the way from the least to the greatest ratio of neighbours."""
        both = zip(speeds(self.chat), speeds(self.alone), strict=False)
        return half_range([chat / alone for chat, alone in both if alone])

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
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
    """Tokens/s of each answer."""
    return [stats.tokens_per_s for _, stats in answers]


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """model: its directory. keys: typed while it decodes, a repetition.
    long: whether keys are also typed in a chat that has a long answer already."""

    model: Path
    prompt: str
    repeats: int
    max_tokens: int
    keys: int
    long: bool
    draft: DraftMode
    weights: WeightMode
    force: bool


class ChatBench:
    """Programs that are started one after the other, each with a data directory of its own.
    directory: a temporary one, for all of them."""

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
        """The answer without the chat and in it, in turn, and each chat is typed into after that;
        every round starts with the other one."""
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
        """The answer of `akunu run`, in a process of its own."""
        model = str(self._options.model)
        command = [*self._program, "run", self._options.prompt, "--model", model, *self._common]
        command += ["--max-tokens", str(max_tokens), "--format", "json"]
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=self._environment("run"),
            start_new_session=True,  # Ctrl-C is for us
        )
        if done.returncode:
            why = done.stderr.decode(errors="replace").strip()
            raise AkunuError(f"akunu run ended with {done.returncode}: {why}")
        answer = json.loads(done.stdout)
        names = Stats.__dataclass_fields__
        return answer["text"], Stats(**{k: v for k, v in answer["stats"].items() if k in names})

    def _in_chat(self, result: ChatResult, round_: str) -> None:
        """One answer without typing, for its speed; then another chat, and keys."""
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

    def _type_in(self, tree: Tree, end: str, into: KeyTimes) -> str:
        """Opens an earlier chat, which ends with `end`, and types while it answers there. Returns
        the name of its data directory."""
        name = self._next_chat()
        path = self._conversations(name)
        path.parent.mkdir(parents=True)
        with contextlib.closing(ConversationStore.open(path)) as model_store:
            model_store.save_tree(tree)
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
        """data: the directory for conversations. The settings are the built-in ones."""
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
        """The answers that the chat saved, the first one first. Raises AkunuError where one did not
        come to its end."""
        with contextlib.closing(ConversationStore.open(self._conversations(name))) as model_store:
            (saved,) = model_store.list()
            messages = model_store.load(saved.id).messages
        answers = [each for each in messages if each.role == "assistant"]
        if unfinished := [each for each in answers if each.finish_reason not in ("stop", "length")]:
            raise AkunuError(
                f"an answer in the chat ended with {unfinished[0].finish_reason}, expected its end"
            )
        return [(each.text, each.stats or Stats()) for each in answers]


class ChatTerminal:
    """A terminal of 80 x 24 with a program in it, and the user who types."""

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
        self._shown = bytearray()  # since the last `write`
        self._gaps = random.Random(0)

    def wait_for(self, pattern: str, seconds: float = _TIMEOUT_S, start: int = 0) -> str:
        """What of `pattern` was sent to the terminal since the last `write`, as soon as it was.
        start: how many bytes since then do not count.

        Raises AkunuError where it does not come.
        """
        wanted = re.compile(pattern.encode())
        end = time.perf_counter() + seconds
        while not (found := wanted.search(self._shown, start)):
            start = max(start, len(self._shown) - _OVERLAP)  # to search takes time from the chat
            if not self._read(end):
                last = _visible_text(bytes(self._shown))[-300:]
                raise AkunuError(
                    f"the chat did not come to show {pattern!r} within {seconds:.0f} s; the end of "
                    f"what it showed: {last}"
                )
        return found[0].decode()

    def write(self, keys: bytes) -> None:
        self._shown.clear()
        os.write(self._master, keys)

    def ask(self, prompt: str) -> None:
        """Pastes a prompt, sends it, and waits until the answer has begun."""
        self.write(b"\x1b[200~%b\x1b[201~" % prompt.encode())
        self.wait_for(re.escape(prompt.split()[-1]))
        self.write(_ENTER)
        self.wait_for(_BEGUN)

    def wait_for_end(self) -> None:
        """Raises AkunuError where the answer does not come to its end."""
        if (end := self.wait_for(_ENDED)) != _READY:
            shown = _visible_text(bytes(self._shown))[-300:]
            raise AkunuError(f"an answer in the chat {end[2:]}; the end of what it showed: {shown}")

    def type_keys(self, count: int, into: KeyTimes, *, while_answering: bool) -> int:
        """Types up to `count` letters and clears them; fewer where an answer ends before. Returns
        how many."""
        ended = re.compile(_ENDED.encode())
        typed = start = 0
        for letter in LETTERS[:count]:
            self._read_for(self._gaps.uniform(*_GAPS_S))
            if while_answering and ended.search(self._shown, start):
                break
            start = max(0, len(self._shown) - _OVERLAP)
            self._type(letter, into)
            typed += 1
        if typed:
            before = len(self._shown)
            os.write(self._master, _CLEAR)  # the end of an answer is still to be found
            self.wait_for(_EMPTY, start=before)
        return typed

    def open_chat(self, title: str, end: str) -> None:
        """Opens the earlier chat of that title; `end` is what its last line has."""
        self.write(_CHATS)
        self.wait_for(re.escape(title))
        self._read_for(1.0)
        self.write(_ENTER)
        self.wait_for(re.escape(end))
        self._read_for(1.0)

    def quit(self) -> None:
        """Leaves the chat, so that all is saved. Raises AkunuError where it does not end well."""
        self.write(_QUIT)
        end = time.perf_counter() + _TIMEOUT_S
        while self._process.poll() is None and time.perf_counter() < end:
            self._read(time.perf_counter() + 0.05)
        if self._process.poll() != 0:
            raise AkunuError(f"the chat ended with {self._process.poll()}, expected 0")

    def close(self) -> None:
        """Ends what is left."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(3.0)
            self._process.kill()
            self._process.wait()
        os.close(self._master)

    def _type(self, letter: str, into: KeyTimes) -> None:
        key, before = letter.encode(), len(self._shown)
        started = time.perf_counter()
        os.write(self._master, key)
        while self._shown.find(key, before) < 0:
            if not self._read(started + _LOST_S):
                into.lost += 1
                return
        into.seconds.append(time.perf_counter() - started)

    def _read_for(self, seconds: float) -> None:
        """Reads what comes meanwhile: a terminal that does not read stops the program."""
        end = time.perf_counter() + seconds
        while self._read(end):
            pass

    def _read(self, end: float) -> bool:
        """Reads once what comes before `end`; False where nothing did."""
        left = end - time.perf_counter()
        if left <= 0 or not select.select([self._master], [], [], left)[0]:
            return False
        try:
            read = os.read(self._master, 1 << 16)
        except OSError:  # what Linux raises when the program has gone
            read = b""
        self._shown += read
        if _ATTRIBUTES_QUERY in read:
            os.write(self._master, _ATTRIBUTES)
        return bool(read)


def _long_tree() -> Tree:
    """A chat with an answer made of the workloads' prompts, which are ours."""
    prompts = [turn.user for each in load_workloads(["summary", "question"]) for turn in each.turns]
    part = "\n\n".join([*prompts, _CODE])
    parts = [f"## Part {number}\n\n{part}" for number in range(1, _LONG_LENGTH // len(part) + 2)]
    answer = "\n\n".join(parts)[:_LONG_LENGTH] + f"\n```\n\n{_LONG_END}"
    tree = Tree(title=_LONG_CHAT)
    _add_turn(tree, "Tell me all of it.", answer)
    return tree


def _heavy_tree() -> Tree:
    """A chat of many turns, the last ones with a table and a very long prompt. What was not
    answered is seen, and no model reads it again."""
    tree, parent = Tree(title=_HEAVY_CHAT), None
    for number in range(_HEAVY_TURNS):
        parent = _add_turn(tree, f"Prompt {number}.", "", parent)
    rows = "".join(f"|{number}|a|\n" for number in range(_HEAVY_ROWS))  # five tokens each
    parent = _add_turn(tree, "All of them.", f"|n|x|\n|--:|---|\n{rows}", parent)
    line = "What a log says, a line of it.\n"
    _add_turn(tree, line * (_HEAVY_PROMPT // len(line)), "", parent)
    return tree


def _add_turn(tree: Tree, prompt: str, answer: str, parent: str | None = None) -> str:
    """Adds a turn, without an end where it has no answer; returns the id of the reply."""
    asked = ChatMessage("user", prompt, parent)
    reply = ChatMessage(
        "assistant", answer, asked.id, model="bench", finish_reason="stop" if answer else None
    )
    tree.add(asked)
    tree.add(reply)
    return reply.id


def _visible_text(shown: bytes) -> str:
    """What was sent to a terminal, without escape sequences."""
    return " ".join(_SEQUENCE.sub(b" ", shown).decode(errors="replace").split())


@contextlib.contextmanager
def chat_terminal(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[ChatTerminal]:
    """A chat whose model is loaded; it is ended whatever happens."""
    terminal = ChatTerminal(command, environment)
    try:
        terminal.wait_for(_READY)
        yield terminal
    finally:
        terminal.close()


def type_while_answering(terminal: ChatTerminal, prompt: str, count: int, into: KeyTimes) -> None:
    """Asks, and types while the answer comes; asks again until `count` keys were typed."""
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
    print(f"goals: {goals}, x{GOAL_RATIO} at least")
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
    parser.add_argument("--max-tokens", type=positive, default=96, metavar="N", help="an answer")
    parser.add_argument(
        "--keys", type=positive, default=24, metavar="N", help="typed while it decodes, a repeat"
    )
    parser.add_argument(
        "--long",
        action="store_true",
        help="also type in a chat that has a long answer, and in one of 300 turns, with a table of "
        "200 rows and a prompt of 250,000 characters",
    )
    parser.add_argument("--workload", default="chat", metavar="NAME", help="its last turn is asked")
    parser.add_argument("--draft", choices=DRAFT_MODES, default="auto")
    parser.add_argument("--force", action="store_true", help="load a model that will not fit")
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
