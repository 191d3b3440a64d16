"""Completion, counted: what drafting from the buffer is worth, and what a keystroke costs.

The kept workload (completion.toml) is small projects with every function body held out once. A
replay counts the passes over what really stands there, in the model's tokens, and needs no model:
it is exact, and the same everywhere. `live` counts what the model itself says at the same places.
The planner is given a published cost curve, so that no count depends on how busy the machine is.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from importlib import resources

from akunu_py.bench.replay.curves import Curve, FixedCosts
from akunu_py.bench.replay.trace import ReplayCounts, TraceItem, replay_item
from akunu_py.completion.completer import CompleteOptions, Completer
from akunu_py.completion.prompt import Prompt
from akunu_py.completion.tokens import CodeTokens
from akunu_py.completion.types import Completion, CompletionRequest, SourceFile
from akunu_py.decoding.engine import Engine
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.cost import MAX_ROWS

PREFIX, BUFFER, FILES = "prefix", "buffer", "files"
EVIDENCE = (PREFIX, BUFFER, FILES)  # each beside those before it
TOGETHER = "all"
_SHORTEST = 60  # characters of a body that is worth completing
_LONGEST = 128  # tokens counted of one


@dataclass(frozen=True, slots=True)
class Place:
    """One held-out function body. request: up to its first word, and from its end on."""

    project: str
    request: CompletionRequest
    body: str


@dataclass(frozen=True, slots=True)
class Keystrokes:
    """What keystrokes cost, in tokens read and passes run.

    first: read of the buffer when it is opened. typed: read again after a letter that was not
    predicted. predicted: passes after one that was. superseded: passes that were begun after the
    request was given up.
    """

    first: int
    typed: int
    predicted: int
    superseded: int


def load_places() -> list[Place]:
    """All places of the workload, in the order of its files."""
    rows = tomllib.loads(
        resources.files("akunu_py.bench").joinpath("completion.toml").read_text(encoding="utf-8")
    )["file"]
    places = []
    for row in rows:
        others = tuple(
            SourceFile(other["path"], other["text"])
            for other in rows
            if other["project"] == row["project"] and other is not row
        )
        for before, body, after in _bodies(row["text"]):
            request = CompletionRequest(before, after, row["path"], "python", others)
            places.append(Place(row["project"], request, body))
    return places


def _bodies(text: str) -> Iterator[tuple[str, str, str]]:
    """(before, body, after) of every function whose head fits a line: before ends where the
    body's first word begins."""
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if not (line.lstrip().startswith("def ") and line.rstrip().endswith(":")):
            continue
        end = number + 1
        while end < len(lines) and (not lines[end].strip() or _width(lines[end]) > _width(line)):
            end += 1
        whole = "".join(lines[number + 1 : end])
        body = whole.strip()
        if len(body) >= _SHORTEST:
            indent = whole[: len(whole) - len(whole.lstrip())]
            before = "".join(lines[: number + 1]) + indent
            yield before, body, whole[len(whole.rstrip()) :] + "".join(lines[end:])


def _width(line: str) -> int:
    return len(line) - len(line.lstrip())


def replay_places(
    completer: Completer, places: Sequence[Place], curve: Curve
) -> dict[str, dict[str, ReplayCounts]]:
    """Passes over what really stands there, by project (and all of them) and by draft context."""
    counts: dict[str, dict[str, ReplayCounts]] = {}
    for place in places:
        made = completer.prompt(place.request)
        output = _tokens_after(completer.code, place, made)
        for kind, draft_context in _kinds(made).items():
            drafter = AutoDrafter(_given(curve), stop_tokens=completer.engine.stop_tokens)
            end = sorted(completer.engine.stop_tokens)[:1]
            unread = [token for tokens in draft_context for token in (*tokens, *end)]
            drafter.extend(unread)
            drafter.unread = len(unread)
            item = TraceItem(tuple(made.tokens), output)
            total = counts.setdefault(place.project, {}).setdefault(kind, ReplayCounts())
            replay_item(item, drafter, curve, total)
    together = {kind: _sum([kinds[kind] for kinds in counts.values()]) for kind in EVIDENCE}
    return {TOGETHER: together, **counts}


def _sum(counts: Sequence[ReplayCounts]) -> ReplayCounts:
    names = [field.name for field in fields(ReplayCounts)]
    return ReplayCounts(**{name: sum(getattr(each, name) for each in counts) for name in names})


def _tokens_after(code: CodeTokens, place: Place, made: Prompt) -> tuple[int, ...]:
    """The tokens that follow the prompt: those of the held-out text where it begins."""
    return code.encode(made.healed + place.body)[:_LONGEST]


def _kinds(made: Prompt) -> dict[str, list[tuple[int, ...]]]:
    """The draft context by what it is from. Of a prompt it begins with the files."""
    return {PREFIX: [], BUFFER: made.draft_context[made.files :], FILES: made.draft_context}


def _given(curve: Curve) -> FixedCosts:
    return FixedCosts(curve.table(MAX_ROWS))


def run_live(
    engine: Engine,
    options: CompleteOptions,
    places: Sequence[Place],
    curve: Curve,
    progress: Callable[[str], None],
) -> dict[str, list[Completion]]:
    """What the model itself completes at `places`, by draft context."""
    done: dict[str, list[Completion]] = {kind: [] for kind in EVIDENCE}
    for number, place in enumerate(places, start=1):
        for kind in EVIDENCE:
            progress(f"{place.request.path}: {kind}, {number}/{len(places)}")
            completer = _Limited(engine, options, kind)
            completer.session.drafting.curve = _given(curve)
            done[kind].append(completer.complete(place.request))
    return done


class _Limited(Completer):
    """A completer that drafts from some kinds of draft context only."""

    def __init__(self, engine: Engine, options: CompleteOptions, kind: str) -> None:
        super().__init__(engine, options)
        self._kind = kind

    def prompt(self, request: CompletionRequest) -> Prompt:
        made = super().prompt(request)
        return replace(made, draft_context=_kinds(made)[self._kind])


def count_keystrokes(engine: Engine, options: CompleteOptions, place: Place) -> Keystrokes:
    """Opens a buffer, types a letter that was predicted and one that was not, and gives a request
    up while it runs."""
    completer = Completer(engine, options)
    request = place.request
    first = completer.complete(request)
    predicted = completer.complete(replace(request, prefix=request.prefix + first.text[:1]))
    other = next(letter for letter in "xyz" if not first.text.startswith(letter))
    typed = completer.complete(replace(request, prefix=request.prefix + other))
    return Keystrokes(
        _read(first), _read(typed), predicted.stats.target_passes, _passes_after(completer, request)
    )


def _read(done: Completion) -> int:
    return done.stats.prompt_tokens - done.stats.cached_tokens


def _passes_after(completer: Completer, request: CompletionRequest) -> int:
    """Passes that are begun after a request was given up, which is when its first text came."""
    target = completer.session.target
    forward = target.forward
    passes = 0
    given_up: list[int] = []

    def counted(rows: object) -> object:
        nonlocal passes
        passes += 1
        return forward(rows)

    target.forward = counted  # type: ignore[assignment, method-assign]
    try:
        completer.complete(
            replace(request, prefix=request.prefix + "w"),
            cancelled=lambda: bool(given_up),
            on_text=lambda text: given_up.append(passes),
        )
    finally:
        target.forward = forward  # type: ignore[method-assign]
    return passes - given_up[0] if given_up else 0
