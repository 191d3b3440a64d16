"""`akunu bench chat`: how soon the chat answers a key, and what drawing takes from decoding.

Owns the order of the runs, the folder that they keep their files in, and how results are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from akunu_py.arguments import positive
from akunu_py.bench.workloads import load_workloads
from akunu_py.commands.bench_common import add_format, add_model, progress
from akunu_py.errors import INTERRUPTED, AkunuError
from akunu_py.models import store
from akunu_py.types import DRAFT_MODES, Stats

if TYPE_CHECKING:
    from akunu_py.bench.chat import Keys, Measured

_GOAL_MS, _GOAL_RATIO = 50, 0.95
_WARM_UP_TOKENS = 32
_IDLE_KEYS = 8
_LONG_CHAT = "An earlier chat with a long answer"
_LONG_END = "So ends the long answer."
_LONG_LENGTH = 6500  # characters: about 1,500 tokens
_CODE = """
```python
def weighted_mean(values, weights):
    total = sum(weights)
    return sum(v * w for v, w in zip(values, weights)) / total
```

- one value for each weight,
- **no** weight below zero.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=positive, default=4, metavar="N")
    parser.add_argument("--max-tokens", type=positive, default=96, metavar="N", help="an answer")
    parser.add_argument(
        "--keys", type=positive, default=24, metavar="N", help="typed while it decodes, a repeat"
    )
    parser.add_argument(
        "--long",
        action="store_true",
        help="also type where an answer of some 1,500 tokens is in the chat already",
    )
    parser.add_argument("--workload", default="chat", metavar="NAME", help="its last turn is asked")
    parser.add_argument("--draft", choices=DRAFT_MODES, default="auto")
    parser.add_argument("--force", action="store_true", help="load a model that will not fit")
    add_model(parser)
    add_format(parser)


def chat(options: argparse.Namespace) -> int:
    from akunu_py.bench.chat import Measured

    (workload,) = load_workloads([options.workload])
    model = store.resolve(options.model)
    store.check(model)
    measured = Measured()
    interrupted = False
    with tempfile.TemporaryDirectory(prefix="akunu-bench-") as folder:
        try:
            _Runs(options, model.path, workload.turns[-1].user, Path(folder)).measure(measured)
        except KeyboardInterrupt:
            interrupted = True
    progress("")
    result = _as_dict(options, model.name, measured)
    if options.format == "json":
        print(json.dumps(result, indent=1))
    else:
        _print(options, model.name, measured)
    if interrupted:
        print("interrupted: this is what was measured so far", file=sys.stderr)
        return INTERRUPTED
    return 0


class _Runs:
    """Programs that are started one after the other, each with a data folder of its own; nothing
    of the user's is read or written but the model."""

    def __init__(self, options: argparse.Namespace, model: Path, prompt: str, folder: Path) -> None:
        self._options, self._prompt, self._folder = options, prompt, folder
        self._program = [sys.executable, "-m", "akunu_py"]
        self._common = [
            *("--draft", options.draft, "--weights", options.weights),
            *("--temperature", "0", "--no-memory"),
            *(["--force"] if options.force else []),
        ]
        self._model = str(model.absolute())
        self._chats = 0

    def measure(self, measured: Measured) -> None:
        """The answer without the chat and in it, in turn, and each chat is typed into after that;
        every round starts with the other one."""
        repeats = self._options.repeats
        progress("warm-up")
        self._run(min(_WARM_UP_TOKENS, self._options.max_tokens))
        for number in range(1, repeats + 1):
            sides = [self._alone, self._in_chat]
            for side in sides if number % 2 else reversed(sides):
                side(measured, f"{number}/{repeats}")
        if self._options.long:
            self._in_long_chat(measured)

    def _alone(self, measured: Measured, place: str) -> None:
        progress(f"without the chat, {place}")
        measured.alone.append(self._run(self._options.max_tokens))

    def _run(self, max_tokens: int) -> tuple[str, Stats]:
        command = [*self._program, "run", self._prompt, "--model", self._model, *self._common]
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
        said = json.loads(done.stdout)
        names = Stats.__dataclass_fields__
        return said["text"], Stats(**{k: v for k, v in said["stats"].items() if k in names})

    def _in_chat(self, measured: Measured, place: str) -> None:
        """One answer that nobody disturbs, for its speed; then another chat, and keys."""
        from akunu_py.bench.chat import DECODING, IDLE, chat_terminal, type_while_answering

        name = self._next_chat()
        progress(f"in the chat, {place}")
        with chat_terminal(self._chat_command(), self._environment(name)) as terminal:
            terminal.type_keys(_IDLE_KEYS, measured.keys[IDLE], while_answering=False)
            terminal.ask(self._prompt)
            terminal.wait_for_end()
            progress(f"keys, {place}")
            keys = self._options.keys
            type_while_answering(terminal, self._prompt, keys, measured.keys[DECODING])
            terminal.quit()
        measured.chat.append(self._answers(name)[0])

    def _in_long_chat(self, measured: Measured) -> None:
        from akunu_py.bench.chat import LONG, Keys, chat_terminal, type_while_answering

        name = self._next_chat()
        progress("keys, in a long chat")
        measured.keys[LONG] = Keys()
        self._keep_long_chat(name)
        with chat_terminal(self._chat_command(), self._environment(name)) as terminal:
            terminal.open_chat(_LONG_CHAT, _LONG_END)
            keys = self._options.keys * min(2, self._options.repeats)
            type_while_answering(terminal, self._prompt, keys, measured.keys[LONG])
            terminal.quit()
        measured.history = self._answers(name)[1][1].prompt_tokens

    def _chat_command(self) -> list[str]:
        limit = ["--max-tokens", str(self._options.max_tokens)]
        return [*self._program, "chat", self._model, *self._common, *limit]

    def _next_chat(self) -> str:
        self._chats += 1
        return f"chat-{self._chats}"

    def _environment(self, data: str) -> dict[str, str]:
        """data: the folder for what is kept. The settings are the built-in ones."""
        folders = {"DATA": data, "CACHE": "cache", "CONFIG": "config"}
        return {
            **os.environ,
            **{f"XDG_{name}_HOME": str(self._folder / at) for name, at in folders.items()},
            "TERM": "xterm-256color",
            "COLORTERM": "truecolor",
            "PYTHONUTF8": "1",
        }

    def _conversations(self, name: str) -> Path:
        return self._folder / name / "akunu" / "conversations.db"

    def _keep_long_chat(self, name: str) -> None:
        """An earlier chat with an answer made of what the workloads ask, which is ours."""
        from akunu_py.chats.store import ConversationStore
        from akunu_py.chats.tree import ChatMessage, Tree

        texts = [
            turn.user for each in load_workloads(["summary", "question"]) for turn in each.turns
        ]
        part = "\n\n".join([*texts, _CODE])
        parts = [
            f"## Part {number}\n\n{part}" for number in range(1, _LONG_LENGTH // len(part) + 2)
        ]
        said = "\n\n".join(parts)[:_LONG_LENGTH] + f"\n```\n\n{_LONG_END}"
        tree = Tree(title=_LONG_CHAT)
        prompt = ChatMessage("user", "Tell me all of it.")
        tree.add(prompt)
        tree.add(ChatMessage("assistant", said, prompt.id, model="bench", finish_reason="stop"))
        path = self._conversations(name)
        path.parent.mkdir(parents=True)
        conversations = ConversationStore.open(path)
        try:
            conversations.save_tree(tree)
        finally:
            conversations.close()

    def _answers(self, name: str) -> list[tuple[str, Stats]]:
        """What the chat kept of its answers, the first one first. Raises AkunuError where one did
        not come to its end."""
        from akunu_py.chats.store import ConversationStore

        conversations = ConversationStore.open(self._conversations(name))
        try:
            (kept,) = conversations.list()
            said = [
                each for each in conversations.load(kept.id).messages if each.role == "assistant"
            ]
        finally:
            conversations.close()
        if unfinished := [each for each in said if each.finish_reason not in ("stop", "length")]:
            raise AkunuError(
                f"an answer in the chat ended with {unfinished[0].finish_reason}, expected its end"
            )
        return [(each.text, each.stats or Stats()) for each in said]


def _as_dict(options: argparse.Namespace, model: str, measured: Measured) -> dict[str, Any]:
    from akunu_py.bench import machine

    return {
        "command": options.command_line,
        "date": machine.today(),
        "model": model,
        "draft": options.draft,
        "machine": machine.describe_machine(),
        "keys": {name: _keys_as_dict(keys) for name, keys in measured.keys.items()},
        "long_chat_tokens": measured.history,
        "ratio": round(measured.ratio, 4),
        "ratio_spread": round(measured.spread, 4),
        "identical": measured.identical,
        "alone": [asdict(stats) for _, stats in measured.alone],
        "chat": [asdict(stats) for _, stats in measured.chat],
    }


def _keys_as_dict(keys: Keys) -> dict[str, Any]:
    return {
        "count": len(keys.seconds),
        "lost": keys.lost,
        "median_ms": round(1e3 * keys.median, 2),
        "p95_ms": round(1e3 * keys.p95, 2),
        "ms": [round(1e3 * seconds, 2) for seconds in keys.seconds],
    }


def _print(options: argparse.Namespace, model: str, measured: Measured) -> None:
    from akunu_py.bench.report.tables import to_text

    print(f"{model}, drafting {options.draft}, in a terminal of 80 x 24\n")
    cells = [
        [name, str(len(keys.seconds)), str(keys.lost), *_times(keys)]
        for name, keys in measured.keys.items()
    ]
    print(to_text((["ms from key to letter", "keys", "lost", "median", "95 %"], cells)))
    sides = (("without the chat", measured.alone), ("in the chat", measured.chat))
    cells = [[name, *_speed_cells(answers)] for name, answers in sides]
    print(to_text((["decoding", "answers", "tokens", "t/s", "±", "tokens/pass"], cells)))
    if measured.ratio:
        said = "the same answer" if measured.identical else "NOT the same answer each time"
        print(f"in the chat: x{measured.ratio:.3f} ± {measured.spread:.3f}; {said}")
    print(f"goals: a median of {_GOAL_MS} ms at most while decoding, x{_GOAL_RATIO} at least")
    if measured.history:
        print(f"the long chat: {measured.history} tokens before the answer")


def _times(keys: Keys) -> list[str]:
    return [f"{1e3 * keys.median:.1f}", f"{1e3 * keys.p95:.1f}"] if keys.seconds else ["–", "–"]


def _speed_cells(answers: Sequence[tuple[str, Stats]]) -> list[str]:
    from akunu_py.bench.chat import speeds
    from akunu_py.bench.statistics import half_range, median

    if not answers:
        return ["0", "–", "–", "–", "–"]
    per_pass = median([stats.tokens_per_pass for _, stats in answers])
    tokens = median([stats.generated_tokens for _, stats in answers])
    rates = speeds(answers)
    return [str(len(answers)), f"{tokens:.0f}", f"{median(rates):.1f}", f"{half_range(rates):.1f}",
            f"{per_pass:.2f}"]  # fmt: skip
