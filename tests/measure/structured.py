"""Count the tokens per pass of structured output, by drafter: grammar, n-grams, or both.

The model answers each case of the workload once, greedily; drafts do not change the tokens. Then
the passes over each answer are counted. With a fixed cost curve, no count depends on the machine.
With a file of schemas, their valid instances are the answers, and no model runs.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tomllib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from akunu_py.bench.command import add_model, progress, show
from akunu_py.bench.curve import Curve, FixedCosts, add_curve_option, parse_curve
from akunu_py.bench.replay import ReplayCounts, replay_item
from akunu_py.bench.tables import to_text
from akunu_py.bench.trace import TraceItem
from akunu_py.decoding.constraint.matcher import ConstraintMatcher
from akunu_py.decoding.constraint.tool_calls import constrained
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.load import load_engine
from akunu_py.decoding.model.engine import Engine
from akunu_py.errors import UsageError
from akunu_py.files import parse_json
from akunu_py.ngram.auto import MAX_DRAFT, AutoDrafter
from akunu_py.parser import add_format, positive
from akunu_py.types import (
    Constraint,
    Drafter,
    DraftGuide,
    GenerateOptions,
    LoadOptions,
    Message,
    SamplingOptions,
    Tool,
    ToolChoice,
)
from tests.measure.tool import run_tool
from tests.support.drafters import OffersAll

SUMMARY = "Count the tokens of each pass of JSON answers, by drafter"
BOTH, NGRAMS, FORCED = "both", "n-grams", "forced"
_GZIP = b"\x1f\x8b"
_QUESTION = (
    "Answer with JSON that fits this JSON schema, and with nothing else.\n\n{schema}\n\n{prompt}"
)


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt and the schema of its answer."""

    source: str
    prompt: str
    schema: str
    instance: Any = None  # the answer, if it exists already


def load_cases() -> list[Case]:
    """Return the cases of structured.toml."""
    text = resources.files(__package__).joinpath("structured.toml").read_text(encoding="utf-8")
    return [
        Case(row["source"], row["prompt"], row["schema"].strip())
        for row in tomllib.loads(text)["case"]
    ]


def measure_structured(
    engine: Engine,
    cases: Sequence[Case],
    curve: Curve,
    max_tokens: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Return the counts by source of the cases, layout and drafter.

    Layouts: free JSON, compact JSON, and tool calls in the model's own format.
    """
    counts: dict[str, dict[str, dict[str, ReplayCounts]]] = {}
    for number, case in enumerate(cases, start=1):
        for layout in ("free", "compact", "calls"):
            progress(f"{case.source}: {layout}, {number}/{len(cases)}")
            constraint = Constraint("json_schema", case.schema, compact=layout == "compact")
            tools = list(tools_of(json.loads(case.schema))) if layout == "calls" else []
            if tools:
                constraint = call_constraint(engine, tools)
            elif layout == "calls":
                continue
            item = generate_item(engine, case, constraint, curve, max_tokens, tools)
            by_drafter = counts.setdefault(case.source, {}).setdefault(layout, {})
            count_passes(engine, constraint, item, curve, by_drafter)
    return _as_dict(counts)


def load_instances(path: Path) -> list[Case]:
    """Return the valid instances of a list of schemas, in the format of JSONSchemaBench.

    {"schemas": [{"name", "schema", "tests": [{"valid", "data"}]}]}, gzipped or not. The source of a
    case is the beginning of the name. Raises UsageError.
    """
    expected = f"expected a list of JSON schemas with instances in {path}"
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if data.startswith(_GZIP) else data
        return [
            Case(
                entry["name"].split("---")[0].split("_")[0],
                "",
                json.dumps(entry["schema"]),
                test["data"],
            )
            for entry in parse_json(text.decode())["schemas"]
            for test in entry["tests"]
            if test["valid"]
        ]
    except OSError as error:
        raise UsageError(f"{expected}: {error.strerror or error}") from error
    except (ValueError, LookupError, TypeError, AttributeError, EOFError, zlib.error) as error:
        raise UsageError(f"{expected}: it is no such file") from error


def replay_instances(
    engine: Engine,
    cases: Sequence[Case],
    curve: Curve,
    max_tokens: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Return counts like `measure_structured`, with the instances of the cases as answers.

    Skips unsupported schemas and prompts that exceed the context.
    """
    counts: dict[str, dict[str, dict[str, ReplayCounts]]] = {}
    for number, case in enumerate(cases, start=1):
        progress(f"{case.source}: {number}/{len(cases)}")
        prompt = _prompt(engine, case)
        if len(prompt) >= engine.plan.context_length:
            continue
        for layout, separators in (("free", (", ", ": ")), ("compact", (",", ":"))):
            text = json.dumps(case.instance, ensure_ascii=False, separators=separators)
            tokens = engine.tokens.tokenizer.encode(text, add_special_tokens=False)[:max_tokens]
            constraint = Constraint("json_schema", case.schema, compact=layout == "compact")
            by_drafter = counts.setdefault(case.source, {}).setdefault(layout, {})
            try:
                count_passes(
                    engine, constraint, TraceItem(prompt, tuple(tokens)), curve, by_drafter
                )
            except UsageError:
                continue
    return _as_dict(counts)


def _as_dict(counts: dict[str, dict[str, dict[str, ReplayCounts]]]) -> dict[str, Any]:
    return {
        source: {
            layout: {name: total.as_dict() for name, total in by_drafter.items()}
            for layout, by_drafter in layouts.items()
            if any(total.items for total in by_drafter.values())
        }
        for source, layouts in counts.items()
    }


def tools_of(schema: Any) -> Iterator[Tool]:
    """Yield the tools whose calls `schema` describes as objects with a name and arguments."""
    if isinstance(schema, dict):
        properties = schema.get("properties", {})
        if {"name", "arguments"} <= properties.keys() and "const" in properties["name"]:
            yield Tool(properties["name"]["const"], "", properties["arguments"], strict=True)
            return
    for inner in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(inner, dict | list):
            yield from tools_of(inner)


def call_constraint(engine: Engine, tools: Sequence[Tool]) -> Constraint:
    """Return a constraint that allows only one call of `tools`."""
    choice = ToolChoice("required")
    options = constrained(engine.tokens, SamplingOptions(), tools, choice, parallel=False)
    assert options.constraint is not None
    return options.constraint


def generate_item(
    engine: Engine,
    case: Case,
    constraint: Constraint,
    curve: Curve,
    max_tokens: int,
    tools: Sequence[Tool],
) -> TraceItem:
    """Return the answer of the model as a trace item."""
    prompt = _prompt(engine, case, tools)
    session = Session(engine)
    session.drafting.curve = FixedCosts(curve.points)
    sampling = SamplingOptions(constraint=constraint)
    answer = session.generate(prompt, GenerateOptions(max_tokens, sampling=sampling)).answer()
    return TraceItem(prompt, answer.tokens)


def _prompt(engine: Engine, case: Case, tools: Sequence[Tool] = ()) -> tuple[int, ...]:
    question = case.prompt if tools else _QUESTION.format(schema=case.schema, prompt=case.prompt)
    return tuple(engine.tokens.encode_chat([Message("user", question)], tools))


def count_passes(
    engine: Engine,
    constraint: Constraint,
    item: TraceItem,
    curve: Curve,
    into: dict[str, ReplayCounts],
) -> None:
    """Add the passes over `item` to `into`, by drafter."""
    for name in (BOTH, NGRAMS, FORCED):
        drafter = _Guided(engine, constraint, name, curve)
        replay_item(item, drafter, curve, into.setdefault(name, ReplayCounts()))


class _Guided(OffersAll):
    """A drafter guided by the grammar of the answer. `extend` gets the prompt first."""

    pipelines = False

    def __init__(self, engine: Engine, constraint: Constraint, name: str, curve: Curve) -> None:
        self._engine, self._constraint, self._name = engine, constraint, name
        self._matcher: ConstraintMatcher | None = None
        self._inner: Drafter = AutoDrafter(
            FixedCosts(curve.points), stop_tokens=engine.tokens.stop_tokens
        )

    def extend(self, tokens: Sequence[int]) -> None:
        if self._matcher is None:
            matcher = ConstraintMatcher(self._engine.tokens, self._constraint, tokens)
            self._matcher = matcher
            if self._name == FORCED:
                self._inner = _ForcedDrafter(matcher)
            elif isinstance(self._inner, AutoDrafter):
                self._inner.guide = matcher if self._name == BOTH else _Unforced(matcher)
        else:
            self._matcher.consume(tokens)
        self._inner.extend(tokens)

    def propose(self, limit: int, *, ahead: bool = False) -> list[int]:
        return self._inner.propose(limit, ahead=ahead)

    def observe(
        self, drafted: int, accepted: int, rows: int, seconds: float, *, pipelined: bool = False
    ) -> None:
        self._inner.observe(drafted, accepted, rows, seconds, pipelined=pipelined)


class _Unforced:
    """A guide that rejects tokens and never proposes any."""

    def __init__(self, guide: DraftGuide) -> None:
        self.begin_draft, self.end_draft, self.advance = (
            guide.begin_draft,
            guide.end_draft,
            guide.advance,
        )

    def forced(self) -> tuple[list[int], bool]:
        return [], True

    def ending(self) -> tuple[list[int], int]:
        return [], 0


class _ForcedDrafter(OffersAll):
    """Drafts the tokens that the grammar forces, up to the first choice."""

    pipelines = False

    def __init__(self, guide: DraftGuide) -> None:
        self._guide = guide

    def extend(self, tokens: Sequence[int]) -> None:
        """Do nothing."""

    def propose(self, limit: int, *, ahead: bool = False) -> list[int]:
        draft: list[int] = []
        self._guide.begin_draft()
        while len(draft) < min(limit, MAX_DRAFT) and (forced := self._guide.forced()[0]):
            for token in forced:
                if len(draft) == min(limit, MAX_DRAFT) or not self._guide.advance(token):
                    self._guide.end_draft()
                    return draft
                draft.append(token)
        self._guide.end_draft()
        return draft

    def observe(
        self, drafted: int, accepted: int, rows: int, seconds: float, *, pipelined: bool = False
    ) -> None:
        """Do nothing."""


def print_structured(found: dict[str, Any]) -> None:
    """Print the counts. found: as in JSON."""
    print(f"{found['model']}, tokens a pass, planned for {found['curve']}\n")
    cells = [
        [source, layout, str(by_drafter["both"]["items"]), str(by_drafter["both"]["tokens"])]
        + [f"{counts['tokens_per_pass']:.2f}" for counts in by_drafter.values()]
        for source, layouts in found["sources"].items()
        for layout, by_drafter in layouts.items()
    ]
    names = ["both", "n-grams", "forced"]
    print(to_text((["source", "whitespace", "answers", "tokens", *names], cells)))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        metavar="SCHEMAS",
        help="JSON schemas with valid instances, which become the answers; in the format of "
        "JSONSchemaBench, gzipped or not",
    )
    add_curve_option(parser)
    parser.add_argument(
        "--max-tokens", type=positive, default=96, metavar="N", help="Maximum tokens of an answer"
    )
    add_model(parser)
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    curve = parse_curve(options.curve)
    cases = load_instances(options.file) if options.file else load_cases()
    measure = replay_instances if options.file else measure_structured
    engine = load_engine(options.model, LoadOptions(options.weights))
    sources = measure(engine, cases, curve, options.max_tokens, progress)
    progress("")
    found = {"model": engine.name, "curve": options.curve, "sources": sources}
    show(options, found, lambda: print_structured(found))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    return run_tool("structured", SUMMARY, add_options, run, argv)


if __name__ == "__main__":
    sys.exit(main())
