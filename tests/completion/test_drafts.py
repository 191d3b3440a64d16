"""Drafting from the buffer and from other files saves passes in completion.

The workload is the functions of one wing of this project, whose bodies are held out. A replay
counts the passes over the held-out text in the model's tokens. It runs no model, so it is exact.
"""

from collections.abc import Iterator

from akunu_py.bench.curve import parse_curve
from akunu_py.bench.replay import ReplayCounts, replay_item
from akunu_py.bench.trace import TraceItem
from akunu_py.completion.completer import Completer
from akunu_py.completion.completion_request import CompletionRequest, SourceFile
from akunu_py.engine.engine import Engine
from akunu_py.ngram.auto import AutoDrafter
from tests.support.drafters import FixedCosts
from tests.support.paths import ROOT

WING = ROOT / "akunu_py" / "commands"

_SHORTEST = 60  # characters of a held-out body
_LONGEST = 128  # tokens of a body that are counted


def held_out_bodies() -> Iterator[tuple[CompletionRequest, str]]:
    """Yield each function body of a wing with the request that ends before its first word."""
    files = [SourceFile(each.name, each.read_text("utf-8")) for each in sorted(WING.glob("*.py"))]
    for file in files:
        others = tuple(other for other in files if other is not file)
        for before, body, after in bodies(file.text):
            yield CompletionRequest(before, after, file.path, "python", others), body


def bodies(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield (before, body, after) of each function with a one-line head."""
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if not (line.lstrip().startswith("def ") and line.rstrip().endswith(":")):
            continue
        end = number + 1
        while end < len(lines) and (not lines[end].strip() or width(lines[end]) > width(line)):
            end += 1
        whole = "".join(lines[number + 1 : end])
        body = whole.strip()
        if len(body) >= _SHORTEST:
            before, _, after = whole.partition(body)
            yield "".join(lines[: number + 1]) + before, body, after + "".join(lines[end:])


def width(line: str) -> int:
    return len(line) - len(line.lstrip())


def test_buffer_and_other_files_each_raise_tokens_per_pass(starter_engine: Engine) -> None:
    places = list(held_out_bodies())
    assert len(places) > 60
    completer, curve = Completer(starter_engine), parse_curve("m5max")
    stop_tokens = starter_engine.tokens.stop_tokens
    counts = [ReplayCounts() for _ in range(3)]  # the prompt alone, + buffer, + other files
    for request, body in places[::8]:
        assert all(file.path != request.path for file in request.files)
        compile(request.prefix + body + request.suffix, request.path, "exec")
        prompt = completer.prompt(request)
        # The prompt may end within a token: the output starts with the healed part.
        output = completer.code.encode(prompt.healed + body)[:_LONGEST]
        whole = prompt.draft_context  # begins with the files
        for context, count in zip(([], whole[prompt.files :], whole), counts, strict=True):
            drafter = AutoDrafter(FixedCosts(curve.points), stop_tokens=stop_tokens)
            unread = [token for tokens in context for token in (*tokens, *sorted(stop_tokens)[:1])]
            drafter.extend(unread)
            drafter.draft_only_tokens = len(unread)
            replay_item(TraceItem(tuple(prompt.tokens), output), drafter, curve, count)
    alone, buffer, files = (each.tokens / each.passes for each in counts)
    assert files > 1.05 * buffer
    assert buffer > 1.05 * alone
