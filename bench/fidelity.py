"""`akunu bench fidelity`: count the answers that drafts or batches change, with the margins.

A pass over several rows rounds differently than a pass over one row, which can decide a near-tie.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple, cast

import mlx.core as mx

from akunu_py.arguments import parse_temperature
from akunu_py.bench import command
from akunu_py.bench.curve import FixedCosts
from akunu_py.bench.result import describe_machine, median, today
from akunu_py.bench.runners import Passes
from akunu_py.bench.runners.akunu import record_passes
from akunu_py.bench.tables import to_text
from akunu_py.decoding import kv_cache
from akunu_py.decoding.device import on_metal
from akunu_py.decoding.drafting.drafter import Drafting
from akunu_py.decoding.events import Failed, Finished
from akunu_py.decoding.generate.answer_jobs import text_job
from akunu_py.decoding.generate.job import BeginJob, JobHandle, RunningJob
from akunu_py.decoding.generate.session import Request, Session
from akunu_py.decoding.generate.step_loop import StepLoop
from akunu_py.decoding.learned_state import UnsavedState
from akunu_py.decoding.load import load_engine
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.sampling import filtered, race
from akunu_py.decoding.token_ids import common_prefix
from akunu_py.errors import StoreError, UsageError
from akunu_py.ngram.cost import PRIOR_SHAPE, CostCurve
from akunu_py.parser import add_format, add_values
from akunu_py.types import (
    DraftMode,
    GenerateOptions,
    LoadOptions,
    Message,
    SamplingOptions,
    WeightMode,
)

PRECISIONS: tuple[WeightMode, ...] = ("float32", "bfloat16", "keep")
_NOTE = """\
Answers with drafts compared with answers without. Differences occur at near-ties, because a pass
over several rows rounds differently than a pass over one row. Margin: the difference of the two
highest logits where an answer first differs; the largest and the median.
"""
_DIVERGENCES = 5  # printed for each precision and mode; --format json prints all
MODES: tuple[DraftMode, ...] = ("fixed", "auto")

_GREEDY = SamplingOptions()

Turns = Sequence[tuple[list[int], list[int]]]
"""The (prompt, output) of each turn of a conversation, as token ids."""


def add_options(parser: argparse.ArgumentParser, precisions: Sequence[str] = PRECISIONS) -> None:
    command.add_model(parser, weights=False)
    parser.add_argument(
        "--weights",
        action="append",
        choices=precisions,
        help="Weight format; repeatable (default: all on a GPU, float32 and bfloat16 on a CPU)",
    )
    parser.add_argument(
        "--kv-bits", type=int, choices=(4, 8), help="Bits of the KV cache (default: unquantized)"
    )
    add_values(parser, ("--temperature", "T", parse_temperature, 0.0, "Sampling temperature"))
    command.add_count(parser, "--answers", 100, "Number of answers, up to 300")
    command.add_count(parser, "--max-tokens", 64, "Maximum tokens of an answer")
    command.add_count(parser, "--clients", 1, "Concurrent requests; several share their passes")
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="File of comparisons to resume and extend"
    )
    add_format(parser)


def run(options: argparse.Namespace, load: Callable[[str], Engine] | None = None) -> int:
    """Run the action. load: loads the model in a precision (default: as a weight format)."""

    def load_weights(name: str) -> Engine:
        return load_engine(options.model, LoadOptions(cast(WeightMode, name), options.kv_bits))

    prompts = load_prompts(options.answers)
    comparisons = load_comparisons(options.keep) if options.keep else []
    # With a CPU's kernels for half precision and stored weights, a token takes seconds.
    precisions = options.weights or PRECISIONS[: 3 if on_metal() else 2]
    engines = map(load or load_weights, precisions)
    interrupted = command.was_interrupted(
        lambda: compare_engines(options, engines, prompts, comparisons)
    )
    summaries = summarize(comparisons)
    as_json = {
        "command": options.command_line,
        "date": today(),
        "machine": describe_machine(),
        "fidelity": [each.as_dict() for each in summaries],
    }
    command.show(options, as_json, lambda: print_fidelity(summaries))
    return command.exit_code(interrupted, "compared")


def compare_engines(
    options: argparse.Namespace,
    engines: Iterable[Engine],
    prompts: Sequence[str],
    comparisons: list[AnswerComparison],
) -> None:
    """Append the missing comparisons to `comparisons` and to the file --keep, one by one."""
    for engine in engines:
        for each in compare_answers(
            engine,
            prompts,
            options.max_tokens,
            options.clients,
            done=tuple(comparisons),
            temperature=options.temperature,
        ):
            comparisons.append(each)
            if options.keep:
                append_comparison(options.keep, each)


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference of two conversations."""

    turn: int
    position: int  # in the answer of this turn, in tokens
    expected: int  # token id, -1 for the end of an answer
    found: int
    margin: float | None  # of the two highest logits; None without a model or if prompts differ


def first_divergence(
    engine: Engine | None, expected: Turns, found: Turns, sampling: SamplingOptions = _GREEDY
) -> Divergence | None:
    """Return the first difference of two conversations, None if all tokens are equal.

    engine: computes the margin. sampling: needs a seed if the temperature is above 0.
    """
    for turn, ((prompt, left), (other, right)) in enumerate(zip(expected, found, strict=True)):
        if prompt != other:
            return Divergence(turn, 0, -1, -1, None)
        if left != right:
            at = common_prefix(left, right)
            margin = top_two_margin(engine, [*prompt, *left[:at]], sampling) if engine else None
            ours, theirs = (side[at] if at < len(side) else -1 for side in (left, right))
            return Divergence(turn, at, ours, theirs, margin)
    return None


def top_two_margin(engine: Engine, tokens: Sequence[int], sampling: SamplingOptions) -> float:
    """Return the difference between the two highest `scores` of the next token."""
    second, first = mx.sort(scores(engine, tokens, sampling))[-2:].tolist()
    return float(first - second)


def scores(engine: Engine, tokens: Sequence[int], sampling: SamplingOptions) -> mx.array:
    """Return the next token's logits, [vocab], with the noise of a seeded sample."""
    cache = kv_cache.new_cache(engine.model, engine.plan.kv_bits)
    logits = engine.model(mx.array(tokens)[None], cache=cache)[0, -1].astype(mx.float32)
    if sampling.temperature:
        assert sampling.seed is not None
        raced = race(filtered(logits[None], sampling), sampling.seed, len(tokens))[0]
        logits = mx.log(raced) * sampling.temperature
    return logits


@dataclass(frozen=True, slots=True)
class AnswerComparison:
    """An answer with drafts compared with the answer without."""

    model: str
    weights: str  # the precision, in words
    mode: DraftMode
    prompt: str
    max_tokens: int
    tokens: int  # of the answer without drafts
    drafted: int
    drafting_passes: int  # passes over more than one row
    difference: Divergence | None

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """Model and request."""
        return self.model, self.weights, self.mode, self.prompt, self.max_tokens


class Generated(NamedTuple):
    """An answer to compare; see `AnswerComparison`."""

    tokens: list[int]
    drafted: int
    drafting_passes: int


@dataclass(slots=True)
class FidelitySummary:
    """Totals of one precision and draft mode; see `AnswerComparison`."""

    weights: str
    mode: DraftMode
    answers: int = 0
    tokens: int = 0
    drafted: int = 0
    drafting_passes: int = 0
    differences: list[tuple[str, Divergence]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        differences = [{"prompt": prompt} | asdict(each) for prompt, each in self.differences]
        return asdict(self) | {"differences": differences}


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
    engine: Engine,
    prompts: Sequence[str],
    max_tokens: int,
    clients: int = 1,
    *,
    done: Collection[AnswerComparison] = (),
    temperature: float = 0.0,
) -> Iterator[AnswerComparison]:
    """Compare the answers to each prompt with those without drafts, in the modes not `done`.

    clients: requests that share their passes; if there are several, the answers without drafts are
    compared too, with those of each request alone. The prompt's number is the seed.
    """
    known = {each.key for each in done}
    weights, modes = _precision(engine, temperature), MODES
    if clients > 1:
        weights, modes = f"{weights}, {clients} clients", ("off", *MODES)
    for start in range(0, len(prompts), clients):
        batch = prompts[start : start + clients]
        requests = [
            (
                engine.tokens.encode_chat([Message("user", prompt)]),
                GenerateOptions(
                    max_tokens, "off", sampling=SamplingOptions(temperature, seed=seed)
                ),
            )
            for seed, prompt in enumerate(batch, start)
        ]
        session, plain = Session(engine, UnsavedState(CostCurve())), list[Generated]()
        for mode in modes:
            new = [(engine.name, weights, mode, each, max_tokens) not in known for each in batch]
            if not any(new):
                continue
            command.progress(f"{weights}, {mode}: {start + len(batch)} of {len(prompts)} answers")
            plain = plain or [_generate(session, *request) for request in requests]
            drafting = [(prompt, replace(options, draft=mode)) for prompt, options in requests]
            if clients > 1:
                answers = _generate_together(engine, drafting)
            else:
                answers = [_generate(session, *request) for request in drafting]
            for text, request, alone, answer in compress(
                zip(batch, requests, plain, answers, strict=True), new
            ):
                prompt, options = request
                turns = [(prompt, alone.tokens)], [(prompt, answer.tokens)]
                yield AnswerComparison(
                    engine.name,
                    weights,
                    mode,
                    text,
                    max_tokens,
                    tokens=len(alone.tokens),
                    drafted=answer.drafted,
                    drafting_passes=answer.drafting_passes,
                    difference=first_divergence(engine, *turns, options.sampling),
                )


def _precision(engine: Engine, temperature: float) -> str:
    bits, weights = engine.plan.kv_bits, engine.plan.weights
    weights += f", KV cache of {bits} bits" if bits else ""
    return weights + (f", temperature {temperature:g}" if temperature else "")


def summarize(comparisons: Sequence[AnswerComparison]) -> list[FidelitySummary]:
    """Return one row for each precision and mode, in order of appearance."""
    rows: dict[tuple[str, DraftMode], FidelitySummary] = {}
    for each in comparisons:
        row = rows.setdefault((each.weights, each.mode), FidelitySummary(each.weights, each.mode))
        row.answers += 1
        row.tokens += each.tokens
        row.drafted += each.drafted
        row.drafting_passes += each.drafting_passes
        if each.difference is not None:
            row.differences.append((each.prompt, each.difference))
    return list(rows.values())


def load_comparisons(path: Path) -> list[AnswerComparison]:
    """Load the comparisons in `path`, if it exists; ignore a truncated last line.

    Raises StoreError for any other invalid line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"cannot read {path}: {error}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            break
        try:
            fields = json.loads(line)
            if fields["difference"]:
                fields["difference"] = Divergence(**fields["difference"])
            found.append(AnswerComparison(**fields))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StoreError(
                f"{path}, line {number}: expected a comparison of akunu bench fidelity, "
                f"found {line!r:.60}"
            ) from error
    return found


def append_comparison(path: Path, comparison: AnswerComparison) -> None:
    """Append a line to `path`. Raises StoreError."""
    try:
        with path.open("a+b") as file:
            file.seek(0)
            lines = file.read().rpartition(b"\n")
            file.truncate(len(lines[0]) + len(lines[1]))  # drops a truncated line
            file.write(json.dumps(asdict(comparison)).encode() + b"\n")
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error}") from error


def _generate(session: Session, prompt: list[int], options: GenerateOptions) -> Generated:
    """Generate an answer with a new drafter that has learned nothing."""
    passes, state = Passes(), UnsavedState(FixedCosts(PRIOR_SHAPE))
    session.drafting = Drafting(session.engine, session.target, state)
    record_passes(session, passes)
    tokens = list(session.generate(prompt, options).answer().tokens)
    return Generated(tokens, sum(passes.drafted), sum(count > 0 for count in passes.drafted))


def _generate_together(
    engine: Engine, requests: Sequence[tuple[list[int], GenerateOptions]]
) -> list[Generated]:
    """Return answers that are generated at the same time."""
    loop = StepLoop(Session(engine, UnsavedState(FixedCosts(PRIOR_SHAPE))), len(requests))
    begun: dict[int, Request] = {}
    running = len(requests)

    def job(index: int) -> BeginJob:
        begin = text_job(*requests[index])

        def begin_and_keep(session: Session) -> RunningJob:
            answering = begin(session)
            assert answering.request is not None
            begun[index] = answering.request
            return answering

        return begin_and_keep

    for index in range(len(requests)):
        loop.begin(JobHandle(job(index), lambda event: None, "", lambda: None, short=False))
    while running:
        for event in (event for _, events in loop.step() for event in events):
            if isinstance(event, Failed):
                raise event.error
            running -= isinstance(event, Finished)
    return [
        Generated(list(each.tokens), each.stats.drafted, each.stats.target_passes)
        for _, each in sorted(begun.items())
    ]


def print_fidelity(summaries: Sequence[FidelitySummary]) -> None:
    """Print a table of the comparisons, and the differences below it."""
    print(_NOTE)
    headings = ["weights", "drafts", "answers", "tokens", "drafted", "drafting passes",
                "differing", "largest margin", "median"]  # fmt: skip
    cells = []
    for each in summaries:
        margins = [m for _, divergence in each.differences if (m := divergence.margin) is not None]
        cells.append(
            [each.weights, each.mode, str(each.answers), str(each.tokens), str(each.drafted),
             str(each.drafting_passes), str(len(each.differences)),
             f"{max(margins):.2g}" if margins else "-",
             f"{median(margins):.2g}" if margins else "-"]
        )  # fmt: skip
    print(to_text((headings, cells)), end="")
    for each in summaries:
        for prompt, divergence in each.differences[:_DIVERGENCES]:
            margin = "?" if divergence.margin is None else f"{divergence.margin:.2g}"
            where = f"token {divergence.position} of the answer to {prompt!r}"
            print(f"{each.weights}, {each.mode}: {where}, margin {margin}")
