"""`akunu bench profile`: where the time of a pass goes, as a target for the next optimisation."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from akunu_py.arguments import positive
from akunu_py.bench.workloads import load_workloads
from akunu_py.commands.bench_common import add_format, add_model, progress
from akunu_py.errors import INTERRUPTED
from akunu_py.types import DRAFT_MODES

if TYPE_CHECKING:
    from akunu_py.bench.profile import Profile

DRAWING = "drawing"
_SCREEN = (80, 24)
_NOTE = """\
Milliseconds a pass, medians. The stages are told apart by waiting for each, which costs the head
start of plain steps; "in use" is the same without. Drawing is the chat's, in characters of 80 x 24,
each pass drawn for itself; it goes on beside the passes, and is not in the sum.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workload", action="append", metavar="NAME", help="may be repeated")
    parser.add_argument("--draft", choices=DRAFT_MODES, default="auto")
    parser.add_argument("--max-tokens", type=positive, default=128, metavar="N")
    parser.add_argument("--repeats", type=positive, default=3, metavar="N")
    add_model(parser)
    add_format(parser)


def profile(options: argparse.Namespace) -> int:
    from akunu_py.bench import machine
    from akunu_py.bench.profile import profile as profile_workload
    from akunu_py.decoding.load import load_engine

    workloads = load_workloads(options.workload)
    engine = load_engine(options.model, options.weights)
    found: list[tuple[Profile, float]] = []
    interrupted = False
    try:
        for workload in workloads:
            one = profile_workload(
                engine, workload, options.draft, options.max_tokens, options.repeats, progress
            )
            found.append((one, asyncio.run(seconds_to_draw(one.texts))))
    except KeyboardInterrupt:
        interrupted = True
    progress("")
    if options.format == "json":
        about = {
            "command": options.command_line,
            "date": machine.today(),
            "model": machine.describe_model(engine),
            "machine": machine.describe_machine(),
        }
        whole = [_as_dict(one, drawing) for one, drawing in found]
        print(json.dumps(about | {"draft": options.draft, "profiles": whole}, indent=1))
    else:
        _print(found)
    if interrupted:
        print("interrupted: this is what was measured so far", file=sys.stderr)
        return INTERRUPTED
    return 0


def _as_dict(one: Profile, drawing: float) -> dict[str, Any]:
    return {
        "workload": one.workload,
        "passes": one.passes,
        "tokens": one.tokens,
        "stages_s": one.stages,
        "staged_s": one.staged_s,
        "unstaged_s": one.unstaged_s,
        "drawing_s": drawing,
    }


def _print(found: Sequence[tuple[Profile, float]]) -> None:
    from akunu_py.bench.profile import STAGES
    from akunu_py.bench.report.tables import to_text

    print(_NOTE)
    cells = []
    for one, drawing in found:
        passes = max(1, one.passes)
        times = [one.stages[stage] for stage in STAGES]
        each = [*times, one.staged_s, one.unstaged_s, drawing]
        cells.append([one.workload, str(one.passes), str(one.tokens)]
                     + [f"{1e3 * seconds / passes:.2f}" for seconds in each])  # fmt: skip
        cells.append(["", "", ""] + [f"{seconds / one.staged_s:.1%}" for seconds in times])
        cells[-1] += ["", "", ""]
    headings = ["workload", "passes", "tokens", *STAGES, "sum", "in use", DRAWING]
    print(to_text((headings, cells)), end="")


async def seconds_to_draw(texts: Sequence[str]) -> float:
    """Processor time that it takes to draw an answer that grows by each of `texts` in turn, with
    the widget that the chat draws answers with, on a screen of 80 x 24 that nobody sees."""
    from textual.app import App, ComposeResult
    from textual.containers import VerticalScroll
    from textual.widgets import Markdown

    from akunu_py.text import displayable
    from akunu_py.tui.transcript.markdown import markdown_parser

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
