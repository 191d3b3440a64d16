"""Where the time of a pass goes: drafting, building the graph, the device, sampling, detokenising;
and what drawing the answer takes beside it.

MLX builds a graph first and computes it when a value is needed, so the stages are separated by
evaluating between them. Nothing runs ahead then: a plain step takes longer than in use, and how
much longer is in the profile too.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import mlx.core as mx

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
from akunu_py.bench.result import describe_machine, describe_model, median, today
from akunu_py.bench.runners import Passes
from akunu_py.bench.runners.akunu import UnsavedState, record_passes
from akunu_py.bench.tables import to_text
from akunu_py.bench.workloads import Workload, load_workloads
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.load import load_engine
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.target import Target
from akunu_py.decoding.text.stream_decoder import StreamDecoder
from akunu_py.ngram.cost import CostCurve
from akunu_py.text import displayable
from akunu_py.types import DRAFT_MODES, DraftMode, GenerateOptions, LoadOptions, Message, TextPiece
from tests.measure.tool import run_tool

SUMMARY = "Measure where the time of a pass goes"
_PROFILE_NOTE = """\
Milliseconds a pass, medians. The stages are told apart by waiting for each, which costs the head
start of plain steps; "in use" is the same without. Drawing is the chat's, in characters of 80 x 24,
each pass drawn for itself; it goes on beside the passes, and is not in the sum.
"""
STAGES = ("drafting", "building the graph", "device", "sampling", "detokenising", "the rest")
"""The rest: the loop itself, checkpoints and roll-backs, statistics."""
_SCREEN = (80, 24)


@dataclass(slots=True)
class Profile:
    """Medians over the repetitions, in seconds over all passes of the workload's answers.

    stages_s: by `STAGES`; their sum is `staged_s`. unstaged_s: the same answers without separating
    the stages. drawing_s: see `seconds_to_draw`.
    """

    workload: str
    passes: int
    tokens: int
    stages_s: dict[str, float]
    staged_s: float
    unstaged_s: float
    drawing_s: float


class _StagedTarget(Target):
    """A target that takes the time of each stage. Only passes count, not reading a prompt."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.model, engine.plan.kv_bits)
        self.graph_s = self.device_s = self.sampling_s = 0.0
        self._in_pass = False

    def forward(self, tokens: mx.array) -> mx.array:
        started = time.perf_counter()
        logits = super().forward(tokens)
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
    """Answers the first turn of `workload` to be answered, `repeats` times of either kind."""
    messages = first_question(workload)
    prompt = engine.tokens.encode_chat(messages)
    limit = min(max_tokens, workload.max_tokens)
    options = GenerateOptions(max_tokens=limit, draft=mode)
    curve = CostCurve()
    staged: list[dict[str, float]] = []
    plain: list[float] = []
    passes, pieces = Passes(), list[TextPiece]()
    for repeat in range(-1, repeats):  # the first round warms up
        progress(f"{workload.name}: {'warming up' if repeat < 0 else f'{repeat + 1}/{repeats}'}")
        unstaged = (
            Session(engine, UnsavedState(curve)).generate(prompt, options).answer().stats.decode_s
        )
        stages, passes, pieces = _staged(engine, curve, prompt, options)
        if repeat >= 0:
            plain.append(unstaged)
            staged.append(stages)
    medians = {stage: median([stages[stage] for stages in staged]) for stage in STAGES}
    return Profile(
        workload.name,
        len(passes.drafted),
        sum(len(piece.piece.tokens) for piece in pieces[1:]),
        medians,
        sum(medians.values()),
        median(plain),
        asyncio.run(seconds_to_draw([piece.text for piece in pieces])),
    )


def first_question(workload: Workload) -> list[Message]:
    """The conversation up to the first answer that is not given."""
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
        if not pieces:  # it came from reading the prompt
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
    """Processor time that it takes to draw an answer that grows by each of `texts` in turn, with
    the widget that the chat draws answers with, on a hidden screen of 80 x 24."""
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
    for one in profiles:
        passes = max(1, one.passes)
        times = [one.stages_s[stage] for stage in stages]
        each = [*times, one.staged_s, one.unstaged_s, one.drawing_s]
        cells.append([one.workload, str(one.passes), str(one.tokens)]
                     + [f"{1e3 * seconds / passes:.2f}" for seconds in each])  # fmt: skip
        cells.append(["", "", ""] + [f"{seconds / one.staged_s:.1%}" for seconds in times])
        cells[-1] += ["", "", ""]
    headings = ["workload", "passes", "tokens", *stages, "sum", "in use", "drawing"]
    print(to_text((headings, cells)), end="")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workload", action="append", metavar="NAME", help="may be repeated")
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
            one = profile_workload(
                engine, workload, options.draft, options.max_tokens, options.repeats, progress
            )
            profiles.append(one)

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
