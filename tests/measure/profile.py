"""Measure the stages of a pass: drafting, graph, device, sampling, detokenizing; and drawing.

MLX evaluates lazily, so the tool separates the stages by evaluating between them. Nothing runs
ahead then, and a plain step takes longer than in use. The profile includes that difference.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import mlx.core as mx

from akunu_py.bench.command import (
    add_model,
    add_repeats,
    exit_code,
    progress,
    show,
    was_interrupted,
)
from akunu_py.bench.result import describe_machine, describe_model, median, today
from akunu_py.bench.runners import Passes
from akunu_py.bench.runners.akunu import record_passes
from akunu_py.bench.tables import to_text
from akunu_py.bench.workloads import Workload, load_workloads
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.learned_state import UnsavedState
from akunu_py.decoding.load import load_engine
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.target import Target
from akunu_py.decoding.text.stream_decoder import StreamDecoder
from akunu_py.ngram.cost import CostCurve
from akunu_py.parser import add_format, positive
from akunu_py.text import displayable
from akunu_py.types import DRAFT_MODES, DraftMode, GenerateOptions, LoadOptions, Message, TextPiece
from tests.measure.tool import run_tool

SUMMARY = "Measure where the time of a pass goes"
_PROFILE_NOTE = """\
Milliseconds per pass, medians. Separating the stages prevents plain steps from running ahead;
"in use" is the time without separation. Drawing is that of the chat on a screen of 80 x 24, with
one update per pass. It runs in parallel and is not part of the sum.
"""
STAGES = ("drafting", "building the graph", "device", "sampling", "detokenising", "the rest")
"""The rest: the loop, checkpoints, roll-backs, statistics."""
_SCREEN = (80, 24)


@dataclass(slots=True)
class Profile:
    """Medians over the repetitions, in seconds over all passes of the answers."""

    workload: str
    passes: int
    tokens: int
    stages_s: dict[str, float]  # by `STAGES`
    staged_s: float  # the sum of the stages
    unstaged_s: float  # the same answers without separated stages
    drawing_s: float  # see `seconds_to_draw`


class _StagedTarget(Target):
    """A target that times each stage of decode steps, not of the prefill."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.model, engine.plan.kv_bits)
        self.graph_s = self.device_s = self.sampling_s = 0.0
        self._in_pass = False

    def forward(self, tokens: mx.array, wanted: int | None = None) -> mx.array:
        started = time.perf_counter()
        logits = super().forward(tokens, wanted)
        if self._in_pass:
            built = time.perf_counter()
            mx.eval(logits)
            self.graph_s += built - started
            self.device_s += time.perf_counter() - built
        return logits

    def launch(self, rows: Sequence[int], wanted: int, after: mx.array | None = None) -> mx.array:
        before = self.graph_s + self.device_s
        started = time.perf_counter()
        self._in_pass = True
        sampled = super().launch(rows, wanted, after)
        self._in_pass = False
        mx.eval(sampled)
        elapsed = time.perf_counter() - started
        self.sampling_s += elapsed - (self.graph_s + self.device_s - before)
        return sampled

    def reset_times(self) -> None:
        self.graph_s = self.device_s = self.sampling_s = 0.0


def profile_workload(
    engine: Engine,
    workload: Workload,
    mode: DraftMode,
    max_tokens: int,
    repeats: int,
    progress: Callable[[str], None],
) -> Profile:
    """Answer the first open turn of `workload`, `repeats` times with stages and without."""
    messages = first_question(workload)
    prompt = engine.tokens.encode_chat(messages)
    limit = min(max_tokens, workload.max_tokens)
    options = GenerateOptions(max_tokens=limit, draft=mode)
    curve = CostCurve()
    staged: list[dict[str, float]] = []
    unstaged_times: list[float] = []
    passes, pieces = Passes(), list[TextPiece]()
    for repeat in range(-1, repeats):  # the first round warms up
        progress(f"{workload.name}: {'warming up' if repeat < 0 else f'{repeat + 1}/{repeats}'}")
        unstaged = (
            Session(engine, UnsavedState(curve)).generate(prompt, options).answer().stats.decode_s
        )
        stages, passes, pieces = _staged(engine, curve, prompt, options)
        if repeat >= 0:
            unstaged_times.append(unstaged)
            staged.append(stages)
    medians = {stage: median([stages[stage] for stages in staged]) for stage in STAGES}
    return Profile(
        workload.name,
        len(passes.drafted),
        sum(len(piece.piece.tokens) for piece in pieces[1:]),
        medians,
        sum(medians.values()),
        median(unstaged_times),
        asyncio.run(seconds_to_draw([piece.text for piece in pieces])),
    )


def first_question(workload: Workload) -> list[Message]:
    """Return the conversation up to the first turn without a given answer."""
    messages: list[Message] = []
    for turn in workload.turns:
        messages.append(Message("user", turn.user))
        if turn.assistant is None:
            return messages
        messages.append(Message("assistant", turn.assistant))
    return messages


def _staged(
    engine: Engine, curve: CostCurve, prompt: list[int], options: GenerateOptions
) -> tuple[dict[str, float], Passes, list[TextPiece]]:
    passes = Passes()
    session = Session(engine, UnsavedState(curve))
    record_passes(session, passes)
    target = session.target = _StagedTarget(engine)
    generation = session.generate(prompt, options)
    pieces: list[TextPiece] = []
    for piece in generation:
        if not pieces:  # the first piece comes from the prefill
            target.reset_times()
        pieces.append(piece)
    decoder = StreamDecoder(engine.tokens.tokenizer, engine.tokens.stop_tokens, prompt, ())
    decoder.add(pieces[0].piece)
    started = time.perf_counter()
    for piece in pieces[1:]:
        decoder.add(piece.piece)
    detokenising = time.perf_counter() - started
    named = (passes.draft_s, target.graph_s, target.device_s, target.sampling_s, detokenising)
    rest = max(0.0, generation.stats.decode_s - sum(named))
    return dict(zip(STAGES, (*named, rest), strict=True)), passes, pieces


async def seconds_to_draw(texts: Sequence[str]) -> float:
    """Return the CPU time of drawing an answer that grows by each of `texts`.

    Uses the chat's widget on a hidden screen of 80 x 24.
    """
    from textual.app import App, ComposeResult
    from textual.containers import VerticalScroll
    from textual.widgets import Markdown

    from akunu_py.tui.transcript.markdown_parser import markdown_parser

    class Page(App[None]):
        def compose(self) -> ComposeResult:
            with VerticalScroll() as scroll:
                yield Markdown(parser_factory=markdown_parser, open_links=False)
            scroll.anchor()

    page = Page()
    async with page.run_test(size=_SCREEN) as pilot:
        answer = page.query_one(Markdown)
        started = time.thread_time()
        for text in texts:
            await answer.append(displayable(text))
            await pilot.pause()
        return time.thread_time() - started


def print_profiles(profiles: Sequence[Profile], stages: Sequence[str]) -> None:
    print(_PROFILE_NOTE)
    cells = []
    for profile in profiles:
        passes = max(1, profile.passes)
        times = [profile.stages_s[stage] for stage in stages]
        each = [*times, profile.staged_s, profile.unstaged_s, profile.drawing_s]
        cells.append([profile.workload, str(profile.passes), str(profile.tokens)]
                     + [f"{1e3 * seconds / passes:.2f}" for seconds in each])  # fmt: skip
        cells.append(["", "", ""] + [f"{seconds / profile.staged_s:.1%}" for seconds in times])
        cells[-1] += ["", "", ""]
    headings = ["workload", "passes", "tokens", *stages, "sum", "in use", "drawing"]
    print(to_text((headings, cells)), end="")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workload", action="append", metavar="NAME", help="Workload; repeatable (default: all)"
    )
    parser.add_argument("--draft", choices=DRAFT_MODES, default="auto")
    parser.add_argument("--max-tokens", type=positive, default=128, metavar="N")
    add_repeats(parser, 3)
    add_model(parser)
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    workloads = load_workloads(options.workload)
    engine = load_engine(options.model, LoadOptions(options.weights))
    profiles: list[Profile] = []

    def measure() -> None:
        for workload in workloads:
            profile = profile_workload(
                engine, workload, options.draft, options.max_tokens, options.repeats, progress
            )
            profiles.append(profile)

    interrupted = was_interrupted(measure)
    as_json = {
        "command": options.command_line,
        "date": today(),
        "model": describe_model(engine),
        "machine": describe_machine(),
        "draft": options.draft,
        "profiles": [asdict(each) for each in profiles],
    }
    show(options, as_json, lambda: print_profiles(profiles, STAGES))
    return exit_code(interrupted)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    return run_tool("profile", SUMMARY, add_options, run, argv)


if __name__ == "__main__":
    sys.exit(main())
