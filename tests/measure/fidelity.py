"""Count the answers that drafts change, with the margins.

A pass over several rows rounds differently than a pass over one row, which can decide a near-tie.
MLX's CPU kernels for half precision sum each row alone, in one order, so drafts change nothing
there. GPU kernels sum in float32, in an order that depends on the number of rows, and round the sum
to the format.
"""

import argparse
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.resources import files
from typing import Any

import mlx.core as mx

from akunu_py.arguments import parse_temperature
from akunu_py.bench import command
from akunu_py.bench.result import describe_machine, median, today
from akunu_py.bench.runners import Run, record_passes
from akunu_py.bench.speed import first_divergence, next_logits, top_two_margin
from akunu_py.bench.tables import to_text
from akunu_py.engine.drafters.learned_state import UnsavedState
from akunu_py.engine.engine import Engine
from akunu_py.engine.load import load_engine
from akunu_py.engine.loop import StepLoop
from akunu_py.engine.model.device import on_metal
from akunu_py.engine.sampling import filtered, race
from akunu_py.errors import INTERRUPTED, UsageError
from akunu_py.ngram.cost import PRIOR_SHAPE
from akunu_py.parser import add_format, add_values
from akunu_py.types import (
    WEIGHT_MODES,
    DraftMode,
    GenerateOptions,
    LoadOptions,
    Message,
    SamplingOptions,
)
from tests.measure.tool import run_tool, was_interrupted
from tests.support.drafters import FixedCosts

MODES: tuple[DraftMode, ...] = ("fixed", "auto")
_NOTE = """\
Answers with drafts compared with answers without. Differences occur at near-ties, because a pass
over several rows rounds differently than a pass over one row. Margin: the difference of the two
highest logits where an answer first differs; the largest and the median.
"""
_DIVERGENCES = 5  # printed for each precision and mode; --format json prints all


def add_options(parser: argparse.ArgumentParser) -> None:
    command.add_model(parser, weights=False)
    add = parser.add_argument
    add("--weights", action="append", choices=WEIGHT_MODES,
        help="Weight precision; repeatable (default: all that are quick here)")  # fmt: skip
    add("--kv-bits", type=int, choices=(4, 8),
        help="Bits of the KV cache (default: unquantized)")  # fmt: skip
    add_values(parser, ("--temperature", "T", parse_temperature, 0.0, "Sampling temperature"))
    command.add_count(parser, "--answers", 100, "Number of answers, up to 300")
    command.add_count(parser, "--max-tokens", 64, "Maximum tokens of an answer")
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    prompts, rows = load_prompts(options.answers), list[dict[str, Any]]()
    # "keep" takes seconds a token with a CPU's kernels.
    quick = WEIGHT_MODES if on_metal() else ("float32", "bfloat16")

    def compare() -> None:
        for weights in options.weights or quick:
            engine = load_engine(options.model, LoadOptions(weights, options.kv_bits))
            compare_answers(engine, prompts, options.max_tokens, options.temperature, rows)

    interrupted = was_interrupted(compare)
    as_json = {
        "command": options.command_line, "date": today(), "machine": describe_machine(),
        "fidelity": rows,
    }  # fmt: skip
    command.show(options, as_json, lambda: print_fidelity(rows))
    return INTERRUPTED if interrupted else 0


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
    engine: Engine, prompts: Sequence[str], max_tokens: int, temperature: float,
    rows: list[dict[str, Any]],
) -> None:  # fmt: skip
    """Compare the answers to each prompt with those without drafts, in all modes.

    Appends a row for each mode, ready for JSON. The prompt's number is the seed.
    """
    bits, weights = engine.plan.kv_bits, engine.plan.weights
    weights += f", KV cache of {bits} bits" if bits else ""
    weights += f", temperature {temperature:g}" if temperature else ""
    totals = dict.fromkeys(("answers", "tokens", "drafted", "drafting_passes"), 0)
    new: list[dict[str, Any]] = [
        {"weights": weights, "mode": mode, **totals, "differences": []} for mode in MODES
    ]
    rows += new
    for seed, text in enumerate(prompts):
        command.progress(f"{weights}: {seed + 1} of {len(prompts)} answers")
        prompt = engine.tokens.encode_chat([Message("user", text)])
        sampling = SamplingOptions(temperature, seed=seed)
        options = GenerateOptions(max_tokens, "off", sampling=sampling)
        alone, _ = _generate(engine, prompt, options)
        for row in new:
            answer, drafted = _generate(engine, prompt, replace(options, draft=row["mode"]))
            row["answers"] += 1
            row["tokens"] += len(alone)
            row["drafted"] += sum(drafted)
            row["drafting_passes"] += sum(count > 0 for count in drafted)
            found = first_divergence(None, [(prompt, alone)], [(prompt, answer)])
            if found is not None:
                logits = scores(engine, [*prompt, *alone[: found.position]], sampling)
                found = replace(found, margin=top_two_margin(logits))
                row["differences"].append({"prompt": text} | asdict(found))


def scores(engine: Engine, tokens: Sequence[int], sampling: SamplingOptions) -> mx.array:
    """Return the next token's logits, [vocab], with the noise of a seeded sample."""
    logits = next_logits(engine, tokens)
    if sampling.temperature:
        assert sampling.seed is not None
        raced = race(filtered(logits[None], sampling), [(sampling.seed, len(tokens))])[0]
        logits = mx.log(raced) * sampling.temperature
    return logits


def _generate(
    engine: Engine, prompt: list[int], options: GenerateOptions
) -> tuple[list[int], list[int]]:
    """Return an answer by a drafter that has learned nothing, and the drafted tokens by pass."""
    run, state = Run(), UnsavedState(FixedCosts(PRIOR_SHAPE))
    loop = StepLoop(engine, state)
    record_passes(loop, run)
    return list(loop.answer(prompt, options).tokens), run.drafted


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


main = partial(run_tool, "fidelity", __doc__, add_options, run)

if __name__ == "__main__":
    sys.exit(main())
