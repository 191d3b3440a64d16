"""Measure the key latency of the chat, and what drawing costs decoding.

`akunu chat` runs in a pseudo-terminal, which the tool types into. The latency ends when the
terminal receives the letter. `akunu run` gives the same answers without a screen. Each program has
its own temporary data directory; of the user's files, only the model is read.
"""

import argparse
import contextlib
import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
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
from tests.support.chat_terminal import READY, ChatTerminal, Keys

GOALS = "goals: a median of 50 ms and 150 ms at worst while decoding, at least x0.95"
_IDLE_KEYS = 8
_MOST_ANSWERS = 6  # to type into, if answers are short

Answer = tuple[str, dict[str, Any]]
"""Text and statistics."""


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
        terminal = ChatTerminal(words, with_data_in(data))
        with contextlib.closing(terminal):
            terminal.wait_for(READY)
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


main = partial(run_tool, "chat", __doc__, add_options, run)

if __name__ == "__main__":
    sys.exit(main())
