"""Count the answers that drafts change, with the margins.

A pass over several rows rounds differently than a pass over one row, which can decide a near-tie.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.resources import files
from typing import Any, NamedTuple, cast

import mlx.core as mx

from akunu_py.arguments import parse_temperature
from akunu_py.bench import command
from akunu_py.bench.curve import FixedCosts
from akunu_py.bench.divergence import Divergence, first_divergence, next_logits, top_two_margin
from akunu_py.bench.result import describe_machine, median, today
from akunu_py.bench.runners import Passes
from akunu_py.bench.runners.akunu import record_passes
from akunu_py.bench.tables import to_text
from akunu_py.decoding.device import on_metal
from akunu_py.decoding.drafting.drafter import Drafting
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.learned_state import UnsavedState
from akunu_py.decoding.load import load_engine
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.sampling import filtered, race
from akunu_py.errors import INTERRUPTED, UsageError
from akunu_py.ngram.cost import PRIOR_SHAPE, CostCurve
from akunu_py.parser import add_format, add_values
from akunu_py.types import DraftMode, GenerateOptions, LoadOptions, Message, SamplingOptions
from akunu_py.types import WeightMode as Precision
from tests.measure.tool import run_tool, was_interrupted

PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "keep")
MODES: tuple[DraftMode, ...] = ("fixed", "auto")
_NOTE = """\
Answers with drafts compared with answers without. Differences occur at near-ties, because a pass
over several rows rounds differently than a pass over one row. Margin: the difference of the two
highest logits where an answer first differs; the largest and the median.
"""
_DIVERGENCES = 5  # printed for each precision and mode; --format json prints all


def add_options(parser: argparse.ArgumentParser, precisions: Sequence[str] = PRECISIONS) -> None:
    command.add_model(parser, weights=False)
    add = parser.add_argument
    add("--weights", action="append", choices=precisions,
        help="Weight format; repeatable (default: all that are quick here)")  # fmt: skip
    add("--kv-bits", type=int, choices=(4, 8),
        help="Bits of the KV cache (default: unquantized)")  # fmt: skip
    add_values(parser, ("--temperature", "T", parse_temperature, 0.0, "Sampling temperature"))
    command.add_count(parser, "--answers", 100, "Number of answers, up to 300")
    command.add_count(parser, "--max-tokens", 64, "Maximum tokens of an answer")
    add_format(parser)


def run(options: argparse.Namespace, load: Callable[[str], Engine] | None = None) -> int:
    """Run the tool. load: loads the model in a precision (default: as a weight format)."""

    def load_weights(name: str) -> Engine:
        return load_engine(options.model, LoadOptions(cast(Precision, name), options.kv_bits))

    prompts, found = load_prompts(options.answers), list[AnswerComparison]()
    # With a CPU's kernels for half precision and stored weights, a token takes seconds.
    precisions = options.weights or PRECISIONS[: 3 if on_metal() else 2]

    def compare() -> None:
        for engine in map(load or load_weights, precisions):
            for each in compare_answers(engine, prompts, options.max_tokens, options.temperature):
                found.append(each)

    interrupted = was_interrupted(compare)
    rows = summarize(found)
    as_json = {
        "command": options.command_line,
        "date": today(),
        "machine": describe_machine(),
        "fidelity": rows,
    }
    command.show(options, as_json, lambda: print_fidelity(rows))
    return INTERRUPTED if interrupted else 0


@dataclass(frozen=True, slots=True)
class AnswerComparison:
    """An answer with drafts compared with the answer without."""

    weights: str  # the precision, in words
    mode: DraftMode
    prompt: str
    tokens: int  # of the answer without drafts
    drafted: int
    drafting_passes: int  # passes over more than one row
    difference: Divergence | None


class Generated(NamedTuple):
    """An answer to compare; see `AnswerComparison`."""

    tokens: list[int]
    drafted: int
    drafting_passes: int


def load_prompts(count: int) -> list[str]:
    """Return the first `count` of 300 prompts; neighbors have different tasks and topics."""
    text = files(__package__).joinpath("fidelity.toml").read_text(encoding="utf-8")
    tasks, topics = (tomllib.loads(text)[name] for name in ("tasks", "topics"))
    if count > (most := len(tasks) * len(topics)):
        raise UsageError(f"--answers: there are {most} prompts, got {count}")
    # The topics shift by one in each round of tasks, so that no pair repeats.
    pairs = (
        (tasks[at % len(tasks)], topics[(at + at // len(tasks)) % len(topics)])
        for at in range(count)
    )
    return [task.format(topic) for task, topic in pairs]


def compare_answers(
    engine: Engine, prompts: Sequence[str], max_tokens: int, temperature: float = 0.0
) -> Iterator[AnswerComparison]:
    """Compare the answers to each prompt with those without drafts, in all modes.

    The prompt's number is the seed.
    """
    bits, weights = engine.plan.kv_bits, engine.plan.weights
    weights += f", KV cache of {bits} bits" if bits else ""
    weights += f", temperature {temperature:g}" if temperature else ""
    session = Session(engine, UnsavedState(CostCurve()))
    for seed, text in enumerate(prompts):
        command.progress(f"{weights}: {seed + 1} of {len(prompts)} answers")
        prompt = engine.tokens.encode_chat([Message("user", text)])
        sampling = SamplingOptions(temperature, seed=seed)
        options = GenerateOptions(max_tokens, "off", sampling=sampling)
        alone = _generate(session, prompt, options)
        for mode in MODES:
            answer = _generate(session, prompt, replace(options, draft=mode))
            difference = compare(engine, prompt, sampling, alone, answer)
            count = len(alone.tokens)
            yield AnswerComparison(weights, mode, text, count, *answer[1:], difference)


def compare(
    engine: Engine,
    prompt: list[int],
    sampling: SamplingOptions,
    alone: Generated,
    answer: Generated,
) -> Divergence | None:
    """Return the first difference of two answers, with the margin of the scores there."""
    found = first_divergence(None, [(prompt, alone.tokens)], [(prompt, answer.tokens)])
    if found is not None:
        tokens = [*prompt, *alone.tokens[: found.position]]
        found = replace(found, margin=top_two_margin(scores(engine, tokens, sampling)))
    return found


def scores(engine: Engine, tokens: Sequence[int], sampling: SamplingOptions) -> mx.array:
    """Return the next token's logits, [vocab], with the noise of a seeded sample."""
    logits = next_logits(engine, tokens)
    if sampling.temperature:
        assert sampling.seed is not None
        raced = race(filtered(logits[None], sampling), sampling.seed, len(tokens))[0]
        logits = mx.log(raced) * sampling.temperature
    return logits


def _generate(session: Session, prompt: list[int], options: GenerateOptions) -> Generated:
    """Generate an answer with a new drafter that has learned nothing."""
    passes, state = Passes(), UnsavedState(FixedCosts(PRIOR_SHAPE))
    session.drafting = Drafting(session.engine, session.target, state)
    record_passes(session, passes)
    tokens = list(session.generate(prompt, options).answer().tokens)
    return Generated(tokens, sum(passes.drafted), sum(count > 0 for count in passes.drafted))


def summarize(comparisons: Sequence[AnswerComparison]) -> list[dict[str, Any]]:
    """Return the totals of each precision and mode, in order of appearance, ready for JSON."""
    rows: dict[tuple[str, DraftMode], dict[str, Any]] = {}
    totals = ("tokens", "drafted", "drafting_passes")
    for each in comparisons:
        new = {"weights": each.weights, "mode": each.mode, "answers": 0, **dict.fromkeys(totals, 0)}
        row = rows.setdefault((each.weights, each.mode), new | {"differences": []})
        row["answers"] += 1
        for name in totals:
            row[name] += getattr(each, name)
        if each.difference is not None:
            row["differences"].append({"prompt": each.prompt} | asdict(each.difference))
    return list(rows.values())


def print_fidelity(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table of the comparisons, and the differences below it."""
    print(_NOTE)
    headings = ["weights", "drafts", "answers", "tokens", "drafted", "drafting passes",
                "differing", "largest margin", "median"]  # fmt: skip
    cells = []
    for row in rows:
        *counts, differences = row.values()
        margins = [each["margin"] for each in differences]
        shown = [f"{max(margins):.2g}", f"{median(margins):.2g}"] if margins else ["-", "-"]
        cells.append([*map(str, counts), str(len(differences)), *shown])
    print(to_text((headings, cells)), end="")
    for row in rows:
        for each in row["differences"][:_DIVERGENCES]:
            where = f"token {each['position']} of the answer to {each['prompt']!r}"
            print(f"{row['weights']}, {row['mode']}: {where}, margin {each['margin']:.2g}")


main = partial(run_tool, "fidelity", "Compare answers with and without drafting, and rate the "
               "differences", add_options, run)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
