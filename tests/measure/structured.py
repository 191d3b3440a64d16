"""Count the tokens per pass of structured output, by drafter: grammar, n-grams, or both.

The model answers each case of the workload once, greedily; drafts do not change the tokens. Then
the passes over each answer are counted. With a fixed cost curve, no count depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any

from akunu_py.bench.command import add_count, add_model, progress, show
from akunu_py.bench.curve import Curve, FixedCosts, add_curve_option, parse_curve
from akunu_py.bench.replay import ReplayCounts, replay_item
from akunu_py.bench.tables import to_text
from akunu_py.bench.trace import TraceItem
from akunu_py.decoding.constraint.matcher import ConstraintMatcher
from akunu_py.decoding.constraint.tool_calls import constrained
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.load import load_engine
from akunu_py.decoding.model.engine import Engine
from akunu_py.ngram.auto import MAX_DRAFT, AutoDrafter
from akunu_py.parser import add_format
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

BOTH, NGRAMS, FORCED = "both", "n-grams", "forced"
_QUESTION = (
    "Answer with JSON that fits this JSON schema, and with nothing else.\n\n{schema}\n\n{prompt}"
)


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt and the schema of its answer."""

    source: str
    prompt: str
    schema: str


def load_cases() -> list[Case]:
    """Return the cases of structured.toml."""
    text = resources.files(__package__).joinpath("structured.toml").read_text(encoding="utf-8")
    return [Case(**row | {"schema": row["schema"].strip()}) for row in tomllib.loads(text)["case"]]


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


def generate_item(
    engine: Engine, case: Case, layout: str, curve: Curve, max_tokens: int
) -> tuple[TraceItem, Constraint] | None:
    """Return the model's answer and its constraint, None for calls if the schema has no tool.

    layout: free JSON, compact JSON, or calls of tools in the model's own format.
    """
    constraint = Constraint("json_schema", case.schema, compact=layout == "compact")
    question, tools = _QUESTION.format(schema=case.schema, prompt=case.prompt), list[Tool]()
    if layout == "calls":
        question, tools = case.prompt, list(tools_of(json.loads(case.schema)))
        if not tools:
            return None
        choice = ToolChoice("required")
        options = constrained(engine.tokens, SamplingOptions(), tools, choice, parallel=False)
        assert options.constraint is not None
        constraint = options.constraint
    prompt = tuple(engine.tokens.encode_chat([Message("user", question)], tools))
    session = Session(engine)
    session.drafting.curve = FixedCosts(curve.points)
    sampling = SamplingOptions(constraint=constraint)
    answer = session.generate(prompt, GenerateOptions(max_tokens, sampling=sampling)).answer()
    return TraceItem(prompt, answer.tokens), constraint


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
        self.begin_draft, self.end_draft = guide.begin_draft, guide.end_draft
        self.advance = guide.advance

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


def add_options(parser: argparse.ArgumentParser) -> None:
    add_curve_option(parser)
    add_count(parser, "--max-tokens", 96, "Maximum tokens of an answer")
    add_count(parser, "--every", 1, "Use every Nth case of the workload")
    add_model(parser)
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    curve, cases = parse_curve(options.curve), load_cases()[:: options.every]
    engine = load_engine(options.model, LoadOptions(options.weights))
    counts: dict[str, dict[str, dict[str, ReplayCounts]]] = {}
    for number, case in enumerate(cases, start=1):
        for layout in ("free", "compact", "calls"):
            progress(f"{case.source}: {layout}, {number}/{len(cases)}")
            if found := generate_item(engine, case, layout, curve, options.max_tokens):
                into = counts.setdefault(case.source, {}).setdefault(layout, {})
                count_passes(engine, found[1], found[0], curve, into)
    progress("")
    sources = {
        source: {
            layout: {name: total.as_dict() for name, total in by_drafter.items()}
            for layout, by_drafter in layouts.items()
        }
        for source, layouts in counts.items()
    }
    as_json = {"model": engine.name, "curve": options.curve, "sources": sources}
    show(options, as_json, lambda: print_structured(as_json))
    return 0


def print_structured(found: dict[str, Any]) -> None:
    """Print the counts. found: as in JSON."""
    print(f"{found['model']}, tokens a pass, planned for {found['curve']}\n")
    cells = [
        [source, layout, str(by_drafter[BOTH]["items"]), str(by_drafter[BOTH]["tokens"])]
        + [f"{counts['tokens_per_pass']:.2f}" for counts in by_drafter.values()]
        for source, layouts in found["sources"].items()
        for layout, by_drafter in layouts.items()
    ]
    headings = ["source", "whitespace", "answers", "tokens", BOTH, NGRAMS, FORCED]
    print(to_text((headings, cells)))


main = partial(run_tool, "structured", "Count the tokens of each pass of JSON answers, by drafter",
               add_options, run)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
