"""Draw the README's animation: one answer of the starter, decoded plainly and with drafts.

`python docs/race.py [DIRECTORY]` writes race.svg. Both answers are generated here, one after the
other, and shown at the speed at which their tokens arrived. CSS animates the picture; where it
stands still, all text is visible.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from akunu_py.bench.workloads import load_workloads
from akunu_py.engine.answer import prompt_rewrites
from akunu_py.engine.engine import Engine
from akunu_py.engine.loop import StepLoop
from akunu_py.models.store import model_store
from akunu_py.types import DEFAULT_MODEL, DraftMode, GenerateOptions, Message, TextPiece

WORKLOAD = "edit"
MAX_TOKENS = 192
COLUMNS, LINES = 54, 25
WIDTH, HEIGHT = 7.2, 17.0  # of a character, in pixels
MARGIN, HEADER = 16.0, 50.0
_PAUSE_S = 2.5  # between the end of the slower answer and the next turn of the animation
_STYLE = """
text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #d8dee9; }
.title { font-weight: bold; }
.drafted { fill: #a3d9a5; }
.line { stroke: #5fae62; stroke-width: 1.5; }
@media (prefers-reduced-motion: no-preference) {
  g { animation: shown SECONDSs backwards infinite; }
}
@keyframes shown { 0%, 96% { opacity: 1; } 96.1%, 100% { opacity: 0; } }
"""


@dataclass(frozen=True)
class Recording:
    """An answer with the second at which each of its pieces arrived."""

    pieces: list[tuple[float, TextPiece]]
    tokens: tuple[int, ...]
    tokens_per_s: float


def record(engine: Engine, messages: Sequence[Message], draft: DraftMode) -> Recording:
    """Generate an answer in a new loop. Time starts with the first token."""
    options = GenerateOptions(max_tokens=MAX_TOKENS, draft=draft)
    prompt = engine.tokens.encode_chat(list(messages))
    loop = StepLoop(engine)
    request = loop.request(prompt, options, prompt_rewrites(engine, prompt, options))
    pieces = [
        (time.perf_counter(), step) for step in loop.stream(request) if isinstance(step, TextPiece)
    ]
    start = pieces[0][0]
    return Recording(
        [(seconds - start, piece) for seconds, piece in pieces],
        tuple(request.tokens),
        request.stats.tokens_per_s,
    )


def panel(recording: Recording, title: str, left: float) -> list[str]:
    """Return the SVG elements of an answer whose first column is at `left` pixels."""
    drawn = [f'<text class="title" x="{left}" y="{MARGIN + 10}">{escape(title)}</text>']
    row = column = 0
    for seconds, piece in recording.pieces:
        drafted = {at for first, last in piece.drafted for at in range(first, last)}
        parts: list[tuple[int, int, str, bool]] = []  # row, column, text, from a draft
        for at, character in enumerate(piece.text):
            if character == "\n" or column == COLUMNS:
                row, column = row + 1, 0
            if character == "\n":
                continue
            mark = at in drafted
            if parts and parts[-1][0] == row and parts[-1][3] == mark:
                first = parts[-1]
                parts[-1] = (row, first[1], first[2] + character, mark)
            else:
                parts.append((row, column, character, mark))
            column += 1
        shown = "".join(_draw(left, *part) for part in parts if part[0] < LINES)
        if shown.strip():
            drawn.append(f'<g style="animation-delay:{seconds:.3f}s">{shown}</g>')
    end = recording.pieces[-1][0]
    foot = f"{len(recording.tokens)} tokens, {recording.tokens_per_s:.0f} tokens/s"
    drawn.append(
        f'<g style="animation-delay:{end:.3f}s"><text class="title" x="{left}" '
        f'y="{HEADER + HEIGHT * LINES + 14}">{foot}</text></g>'
    )
    return drawn


def _draw(left: float, row: int, column: int, text: str, drafted: bool) -> str:
    if not text.strip():
        return ""
    x, y, length = left + column * WIDTH, HEADER + row * HEIGHT, len(text) * WIDTH
    kind = ' class="drafted"' if drafted else ""
    element = (
        f'<text{kind} x="{x:.1f}" y="{y:.0f}" textLength="{length:.1f}" '
        f'lengthAdjust="spacingAndGlyphs" xml:space="preserve">{escape(text)}</text>'
    )
    if drafted:
        line = f'x1="{x:.1f}" x2="{x + length:.1f}" y1="{y + 3.5:.1f}" y2="{y + 3.5:.1f}"'
        element += f'<line class="line" {line}/>'
    return element


def draw(plain: Recording, drafted: Recording) -> str:
    """Return the SVG of two answers next to each other. Raises ValueError if they differ."""
    if plain.tokens != drafted.tokens:
        raise ValueError("the answers differ")
    seconds = max(each.pieces[-1][0] for each in (plain, drafted)) + _PAUSE_S
    half = 2 * MARGIN + COLUMNS * WIDTH
    width, height = 2 * half, HEADER + HEIGHT * (LINES + 1) + MARGIN
    elements = [
        *panel(plain, "plain decoding", MARGIN),
        *panel(drafted, "akunu (accepted draft tokens underlined)", half + MARGIN),
    ]
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}">',
        f"<style>{_STYLE.replace('SECONDS', f'{seconds:.2f}')}</style>",
        f'<rect width="{width:.0f}" height="{height:.0f}" rx="8" fill="#1e222a"/>',
        f'<line x1="{half:.0f}" x2="{half:.0f}" y1="{MARGIN}" y2="{height - MARGIN:.0f}" '
        'stroke="#3b4252"/>',
        *elements,
        "</svg>\n",
    ])  # fmt: skip


def main(directory: Path) -> Path:
    """Record both answers, and write the picture. Returns its path."""
    engine = Engine.load(model_store.get(DEFAULT_MODEL).path, name=DEFAULT_MODEL)
    (workload,) = load_workloads([WORKLOAD])
    messages = []
    for turn in workload.turns:
        messages.append(Message("user", turn.user))
        if turn.assistant is not None:
            messages.append(Message("assistant", turn.assistant))
    record(engine, messages, "auto")  # warm up
    picture = directory / "race.svg"
    plain, drafted = record(engine, messages, "off"), record(engine, messages, "auto")
    picture.write_text(draw(plain, drafted), encoding="utf-8")
    return picture


if __name__ == "__main__":
    print(main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")))
