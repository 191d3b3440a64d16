"""`akunu bench replay`: count the passes over recorded answers, without a model.

The engine's drafters run on a trace with a cost curve instead of measured times. The score is
tokens per unit of cost; plain decoding scores 1.

A trace file has prompts and recorded outputs as token ids, in JSON or gzipped JSON:
`{"tokenizer": ..., "workloads": {name: [{"prompt": [ids], "output": [ids]}, ...]}}`
"""

from __future__ import annotations

import argparse
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from akunu_py.bench import command
from akunu_py.bench.curve import CURVES, Curve, parse_curve
from akunu_py.bench.workloads import Workload, WorkloadTurn, load_workloads
from akunu_py.engine.model.token_ids import common_prefix
from akunu_py.engine.text.prompt_rewrites import PromptRewrites
from akunu_py.errors import UnsupportedModel, UsageError
from akunu_py.files import disk_errors
from akunu_py.models.catalog import load_catalog
from akunu_py.models.load.model_files import as_error
from akunu_py.models.store.model_store import list_models
from akunu_py.ngram.acceptance_model import SharedWeights
from akunu_py.ngram.answer_cache import AnswerCache
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.cost import CostCurve
from akunu_py.ngram.fixed import FixedDrafter, NoDrafter
from akunu_py.parser import add_flags, add_format, add_values, number
from akunu_py.text import first_problem
from akunu_py.types import DEFAULT_DRAFT_TOKENS, Drafter, GenerateOptions, LoadOptions, Message

if TYPE_CHECKING:
    from akunu_py.engine.engine import Engine

GZIP_MAGIC = b"\x1f\x8b"
COMPARED_DRAFTERS = ("fixed 4", "prompt lookup", "auto")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", metavar="TRACES", help="Trace file, gzipped or not")
    points = "points such as 1:1,3:1.11,5:1.42, or both as in m5max,33:7"
    curve = f"Cost of passes: {', '.join(CURVES)}, {points}"
    add_values(parser, ("--curve", "CURVE", str, "m5max", curve))
    memory = "Learn from each answer for the next ones, as the answer cache does"
    latency = "Network latency of each pass, for a model on several hosts"
    prompts = "Prompts for --record, one a line (default: the bench's workloads)"
    draft_modes = ("auto", "ngram", "fixed", "off")
    add_values(parser, ("--draft", None, draft_modes, "auto", "Draft mode"))
    draft_tokens = "Draft length of --draft fixed"
    command.add_count(parser, "--draft-tokens", DEFAULT_DRAFT_TOKENS, draft_tokens)
    add_flags(parser, ("--memory", memory))
    workload = "Workload; repeatable (default: all)"
    add_values(parser, ("--workload", "NAME", str, None, workload), action="append")
    add_flags(parser, ("--compare", "Compare auto with fixed drafts and prompt lookup"))
    add_values(
        parser,
        ("--latency", "MS", _milliseconds, 0.0, latency),
        ("--step", "MS", _milliseconds, 25.0, "Duration of a plain step without --latency"),
        ("--record", "OUT", str, None, "Answer prompts and write a trace file"),
        ("--prompts", "FILE", Path, None, prompts),
    )
    command.add_count(parser, "--max-tokens", 256, "Maximum tokens of each recorded answer")
    command.add_model(parser)
    add_format(parser)


def _milliseconds(text: str) -> float:
    return number(text, lambda value: 0 < value < 1e6, "milliseconds above 0")


def run(options: argparse.Namespace) -> int:
    if options.record:
        return _record(options)
    if not options.file:
        raise UsageError("expected a trace file: akunu bench replay TRACES (make one: --record)")
    curve, name = parse_curve(options.curve), options.curve
    if options.latency:
        curve = curve.with_latency(options.latency / options.step)
        name += f" + {options.latency:g} ms network latency per step of {options.step:g} ms"
    trace = load_trace(options.file)
    if unknown := sorted(set(options.workload or ()) - trace.workloads.keys()):
        known = ", ".join(trace.workloads)
        raise UsageError(f"no workload {', '.join(unknown)} in the trace; workloads: {known}")
    chosen = options.workload or trace.workloads
    trace = replace(trace, workloads={name: trace.workloads[name] for name in chosen})
    rewrites = trace_rewrites(trace)
    if rewrites is None:
        command.print_line(
            f"No installed model has the tokenizer {trace.tokenizer}; auto drafts no rewritten text"
        )
    found = {
        drafter: replay_trace(
            trace,
            curve,
            drafter,
            draft_tokens=options.draft_tokens,
            memory=options.memory,
            rewrites=rewrites,
        )
        for drafter in (COMPARED_DRAFTERS if options.compare else (options.draft,))
    }
    draft = options.draft
    if options.compare:
        as_json = {"curve": name, "drafters": found}
        command.show(options, as_json, lambda: print_replays(name, found))
    else:
        as_json = {"curve": name, "draft": draft, "workloads": found[draft]}
        command.show(options, as_json, lambda: print_replay(name, draft, found[draft]))
    return 0


def _record(options: argparse.Namespace) -> int:
    from akunu_py.engine.load import load_engine

    prompts = read_prompts(options.prompts) if options.prompts else load_workloads()
    engine = load_engine(options.model, LoadOptions(options.weights))
    count = record(engine, prompts, Path(options.record), options.max_tokens, command.print_line)
    print(f"{options.record}: {count} tokens in answers to {len(prompts)} prompts")
    return 0


@dataclass(frozen=True, slots=True)
class TraceItem:
    """A recorded answer, as token ids."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace file."""

    tokenizer: str  # the name of the model whose token ids it holds
    workloads: dict[str, tuple[TraceItem, ...]]


def load_trace(path: str | Path) -> Trace:
    """Load a trace file. Raises UsageError."""
    from pydantic import TypeAdapter, ValidationError

    try:
        with disk_errors(f"cannot read the trace file {path}", UsageError):
            data = Path(path).read_bytes()
        if data.startswith(GZIP_MAGIC):
            data = gzip.decompress(data)
        trace = TypeAdapter(Trace).validate_json(data, strict=True)
        for name, items in trace.workloads.items():
            if any(not item.output or min((*item.prompt, *item.output)) < 0 for item in items):
                raise ValueError(f"expected token ids from 0, and outputs, in workload {name!r}")
    except (OSError, ValueError, EOFError, zlib.error) as err:
        why = first_problem(err) if isinstance(err, ValidationError) else err
        raise UsageError(
            f"expected a trace file (JSON, optionally gzipped), got {path}: {why}"
        ) from err
    return trace


def find_tokenizer(name: str) -> Any | None:
    """Return the `tokenizers.Tokenizer` of an installed model by its name or hub repository."""
    from tokenizers import Tokenizer

    entries = load_catalog()
    for model in list_models():
        original = entries[model.name].homepage if model.name in entries else ""
        names = model.name, model.repository, original.removeprefix("https://huggingface.co/")
        file = model.path / "tokenizer.json"
        if name in names and file.is_file():
            with as_error(f"the tokenizer in {model.path} cannot be loaded", UnsupportedModel):
                return Tokenizer.from_file(str(file))
    return None


def read_prompts(path: Path) -> list[Workload]:
    """Load prompts from a text file, one a line. Raises UsageError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read prompts from {path}: {error}") from error
    prompts = [Workload("prompts", (WorkloadTurn(line),)) for line in lines if line]
    if not prompts:
        raise UsageError(f"no prompts in {path}: expected one per line")
    return prompts


def record(
    engine: Engine,
    prompts: Iterable[Workload],
    path: Path,
    max_tokens: int,
    progress: Callable[[str], None],
) -> int:
    """Record greedy answers in a trace file; return the number of tokens. Raises StoreError."""
    from akunu_py.engine.loop import StepLoop

    workloads: dict[str, list[dict[str, list[int]]]] = {}
    loop = StepLoop(engine)

    def answer(messages: list[Message]) -> str:
        prompt = engine.tokens.encode_chat(messages)
        done = loop.answer(prompt, GenerateOptions(max_tokens=max_tokens))
        items.append({"prompt": prompt, "output": list(done.tokens)})
        return done.text

    for position, workload in enumerate(prompts, 1):
        progress(f"{workload.name}: prompt {position}")
        items = workloads.setdefault(workload.name, [])
        workload.run_turns(answer)
    count = sum(len(item["output"]) for items in workloads.values() for item in items)
    data = json.dumps({"tokenizer": engine.name, "workloads": workloads}).encode()
    with disk_errors(f"cannot write {path}"):
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return count


def replay_trace(
    trace: Trace,
    curve: Curve,
    drafter: str,
    *,
    draft_tokens: int = DEFAULT_DRAFT_TOKENS,
    memory: bool = False,
    rewrites: PromptRewrites | None = None,
) -> dict[str, dict[str, Any]]:
    """Return counts and rates by workload.

    drafter: a draft mode, or one of COMPARED. memory: `auto` learns the outputs of the workload.
    rewrites: by the trace's tokenizer, if it is known.
    """
    if drafter not in ("auto", "ngram"):
        rewrites = None
    found = {}

    def make() -> Drafter:
        return drafter_named(drafter, CostCurve(curve.points), learned, draft_tokens)

    for name, items in trace.workloads.items():
        learned = AnswerCache() if memory else None
        found[name] = replay(items, make, curve, learned, rewrites)
    return found


def trace_rewrites(trace: Trace) -> PromptRewrites | None:
    """Return the rewrites of prompts by the trace's tokenizer; None if it is not installed."""
    tokenizer = find_tokenizer(trace.tokenizer)
    if tokenizer is None:
        return None
    return PromptRewrites(
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False),
    )


def drafter_named(
    name: str,
    costs: CostCurve,
    memory: AnswerCache | None = None,
    draft_tokens: int = DEFAULT_DRAFT_TOKENS,
) -> Drafter:
    """Return a new drafter: a draft mode without neural drafters, or one of COMPARED."""
    match name:
        case "auto" | "ngram":
            return AutoDrafter(costs, answer_cache=memory)
        case "fixed":
            return FixedDrafter(draft_tokens)
        case "fixed 4":
            return FixedDrafter(4)
        case "prompt lookup":
            return PromptLookupDrafter()
    return NoDrafter()


def replay(
    items: Iterable[TraceItem],
    make_drafter: Callable[[], Drafter],
    curve: Callable[[int], float],
    memory: AnswerCache | None = None,
    rewrites: PromptRewrites | None = None,
) -> dict[str, Any]:
    """Return the counts of all items, each with a new drafter; `memory` learns the outputs.

    As in the engine, `auto` keeps the weights of its acceptance model from item to item.
    """
    counts, weights = ReplayCounts(), SharedWeights()
    for item in items:
        drafter = make_drafter()
        model = drafter.model if isinstance(drafter, AutoDrafter) else None
        if model is not None:
            weights.load_into(model)
        replay_item(item, drafter, curve, counts, rewrites)
        if model is not None:
            weights.learn(model)
        if memory is not None:
            memory.learn(item.output)
    return counts.as_dict()


@dataclass(slots=True)
class ReplayCounts:
    """Totals over the passes of some items."""

    items: int = 0
    tokens: int = 0  # without the first token of each item, which its prefill yields
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    cost: float = 0.0  # of all passes, in plain steps
    draft_s: float = 0.0  # time in the drafter, without the prompts
    prompt_tokens: int = 0
    prompt_s: float = 0.0  # time to learn the prompts, which the engine does during the prefill

    def as_dict(self) -> dict[str, Any]:
        """Return the counts and the derived rates, ready for JSON."""
        draft_us = 1e6 * self.draft_s / max(1, self.tokens)
        prompt_us = 1e6 * self.prompt_s / max(1, self.prompt_tokens)
        counts = ("items", "tokens", "passes", "drafted", "accepted")
        return {name: getattr(self, name) for name in counts} | {
            "tokens_per_pass": round(self.tokens / self.passes, 4) if self.passes else 0.0,
            "score": round(self.tokens / self.cost, 4) if self.cost else 0.0,
            "draft_us_per_token": round(draft_us, 2),
            "learn_us_per_prompt_token": round(prompt_us, 2),
        }


def replay_item(
    item: TraceItem,
    drafter: Drafter,
    curve: Callable[[int], float],
    counts: ReplayCounts,
    rewrites: PromptRewrites | None = None,
) -> None:
    """Add the passes over one item to `counts`.

    As in the engine, the prefill yields the first token, and no pass drafts past the end.
    Raises ValueError if the drafter exceeds its limit.
    """
    output = item.output
    clock = perf_counter()
    context = rewrites.of(item.prompt) if rewrites is not None else []
    drafter.extend([*chain.from_iterable(context), *item.prompt])
    counts.prompt_s += perf_counter() - clock
    counts.prompt_tokens += len(item.prompt)
    drafter.extend(output[:1])
    counts.items += 1
    done = 1
    while done < len(output):
        limit = len(output) - done - 1
        clock = perf_counter()
        draft = drafter.propose(limit)
        counts.draft_s += perf_counter() - clock
        if len(draft) > limit:
            raise ValueError(f"expected at most {limit} drafted tokens, got {len(draft)}")
        accepted = common_prefix(draft, output[done : done + len(draft)])
        cost = curve(1 + len(draft))
        yielded = output[done : done + accepted + 1]
        clock = perf_counter()
        drafter.observe(len(draft), accepted, 1 + len(draft), cost)
        drafter.extend(yielded)
        counts.draft_s += perf_counter() - clock
        done += len(yielded)
        counts.tokens += len(yielded)
        counts.passes += 1
        counts.drafted += len(draft)
        counts.accepted += accepted
        counts.cost += cost


class PromptLookupDrafter(NoDrafter):
    """Prompt lookup with the defaults of transformers' `PromptLookupCandidateGenerator`.

    Drafts the tokens after the first occurrence of the last n tokens, n as large as possible.
    Source: Saxena, Prompt Lookup Decoding (2023). For comparison only.
    """

    pipelines = False
    DRAFT_TOKENS = 10
    MAX_NGRAM = 3

    def __init__(self) -> None:
        self.history: list[int] = []
        self._first: dict[tuple[int, ...], int] = {}  # end of the first occurrence by n-gram

    def extend(self, tokens: Sequence[int]) -> None:
        history = self.history
        for token in tokens:
            end = len(history)
            for n in range(1, min(self.MAX_NGRAM, end) + 1):
                self._first.setdefault(tuple(history[end - n : end]), end)
            history.append(token)

    def propose(self, limit: int, *, ahead: bool = False) -> list[int]:
        end = len(self.history)
        for n in range(min(self.MAX_NGRAM, end), 0, -1):
            start = self._first.get(tuple(self.history[end - n : end]))
            if start is not None:
                return self.history[start : start + min(limit, self.DRAFT_TOKENS)]
        return []


def print_replay(curve: str, draft: str, workloads: Mapping[str, Any]) -> None:
    print(f"curve {curve}, draft {draft}; score: tokens per cost, plain decoding is 1.00\n")
    print(f"{'workload':<10}{'items':>6}{'tokens':>8}{'passes':>8}{'tokens/pass':>13}"
          f"{'accepted':>10}{'score':>8}{'us/token':>10}")  # fmt: skip
    for name, row in workloads.items():
        accepted = row["accepted"] / row["drafted"] if row["drafted"] else 0.0
        print(f"{name:<10}{row['items']:>6}{row['tokens']:>8}{row['passes']:>8}"
              f"{row['tokens_per_pass']:>13.2f}{accepted:>10.0%}{row['score']:>8.2f}"
              f"{row.get('draft_us_per_token', '–'):>10}")  # fmt: skip


def print_replays(curve: str, drafters: Mapping[str, Mapping[str, Any]]) -> None:
    print(f"curve {curve}: tokens per pass, and score (tokens per cost, plain decoding is 1.00)\n")
    print(f"{'workload':<10}" + "".join(f"{drafter:>20}" for drafter in drafters))
    for name in next(iter(drafters.values())):
        cells = [workloads[name] for workloads in drafters.values()]
        line = "".join(f"{cell['tokens_per_pass']:>12.2f}{cell['score']:>8.3f}" for cell in cells)
        print(f"{name:<10}{line}")
