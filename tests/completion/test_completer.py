"""Completing at a cursor: cached completions, limits, cancelling, Markdown fences, and power."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from akunu_py.commands import complete as complete_module
from akunu_py.commands.complete import add_options, load_completer, on_battery
from akunu_py.completion import completer as completer_module
from akunu_py.completion.completer import Completer
from akunu_py.completion.completion_cache import CompletionCache
from akunu_py.completion.completion_request import (
    CompleteOptions,
    Completion,
    CompletionReason,
    CompletionRequest,
    SourceFile,
)
from akunu_py.completion.prompt.layout import load_families
from akunu_py.completion.stops import strip_fence
from akunu_py.engine.engine import Engine
from akunu_py.engine.loop import StepLoop
from akunu_py.engine.model import device
from akunu_py.engine.target import Target
from akunu_py.errors import UsageError
from akunu_py.parser import Parser
from akunu_py.types import FinishReason, GenerateOptions, Piece, Stats, TextPiece
from tests.support.complete import complete
from tests.support.jobs import ScriptedRequest
from tests.support.targets import last_tokens
from tests.support.tiny_fim import byte_level, load_tiny, sentence_piece, write_model

END = "<|endoftext|>"
BUFFER = Path("tests/golden/completion_buffer.txt").read_text(encoding="utf-8")
CURSOR = BUFFER.index("        self._window = self._window[self._given :]") + len("        self._w")
PREFIX, SUFFIX = BUFFER[BUFFER.index("    def __init__(") : CURSOR], BUFFER[CURSOR:]


def answering(
    engine: Engine, answer: str, reason: FinishReason = "stop", fim: str = "auto"
) -> Completer:
    """Return a completer whose model generates `answer`."""
    completer = Completer(engine, CompleteOptions(fim=fim))
    loop: Any = completer.loop
    steps = [TextPiece(letter, Piece(())) for letter in answer]
    loop.request = lambda *_: ScriptedRequest(steps, reason)
    loop.advance = lambda requests: {each: each.step() for each in requests}
    loop.runner.close = lambda request: request.close()
    return completer


@pytest.fixture
def tiny(tmp_path: Path) -> Completer:
    """Its tokens are printable characters, chosen at random."""
    return Completer(Engine.load(write_model(tmp_path, sentence_piece([END]), end=END)))


@pytest.mark.long
def test_typed_text_costs_only_its_tokens(shallow_starter: Engine) -> None:
    completer = Completer(shallow_starter)
    first = complete(completer, CompletionRequest(PREFIX, SUFFIX))
    assert first.text
    assert first.finish_reason == "stop"
    assert first.stats.prompt_tokens > 100
    assert first.draft_context_tokens == len(completer.code.encode(SUFFIX))
    assert complete(completer, CompletionRequest(PREFIX, SUFFIX)).text == first.text
    other = "a" if not first.text.startswith("a") else "b"
    changed = complete(completer, CompletionRequest(PREFIX + other, SUFFIX))
    assert changed.stats.prompt_tokens - changed.stats.cached_tokens <= 4


def test_parts_join_to_the_whole_which_has_the_newlines_of_the_buffer(tiny: Completer) -> None:
    for newline in ("\n", "\r\n"):
        completer = answering(tiny.engine, "1,\n    2)\nprint(x)\n")
        prefix, suffix = f"# Numbers{newline}x = (", f"{newline * 2}print(x){newline}"
        parts: list[str] = []
        done = complete(completer, CompletionRequest(prefix, suffix), on_text=parts.append)
        assert len(parts) > 1
        assert "".join(parts) == done.text == f"1,{newline}    2)"


def test_an_empty_buffer_is_not_completed(tiny: Completer) -> None:
    assert complete(tiny, CompletionRequest("", "x = 1\n")).text == ""
    assert complete(tiny, CompletionRequest(" \n\n")).stats.prompt_tokens == 0


def test_cancelling_takes_effect_within_one_pass(tiny: Completer) -> None:
    for limit in range(1, 8):
        answers: list[CompletionReason | None] = [None] * limit
        answers += ["cancelled"]  # a further poll would raise
        done = complete(tiny, CompletionRequest("a = ("), ended=partial(answers.pop, 0))
        tiny.loop.runner.caches.spare = None
        assert done.finish_reason in ("cancelled", "stop")
        # Polled twice before the first token, then once a pass.
        assert done.stats.target_passes <= limit
        assert not (done.finish_reason == "cancelled" and answers)


def test_the_time_limit_ends_with_the_text_so_far(
    tiny: Completer, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = complete(tiny, CompletionRequest("x = [[[["))
    clock = iter(range(10_000))
    monkeypatch.setattr("tests.support.complete.time.monotonic", lambda: next(clock))
    cut = complete(tiny, CompletionRequest("x = [[[[", seconds=10, max_tokens=127))
    assert cut.finish_reason == "time"
    assert 0 < cut.stats.generated_tokens < whole.stats.generated_tokens
    assert whole.text.startswith(cut.text)
    none = complete(tiny, CompletionRequest("y = [[[[", seconds=0.5))
    assert (none.text, none.finish_reason) == ("", "time")
    full = complete(tiny, CompletionRequest("x = [[[[", max_tokens=3))
    assert (full.finish_reason, full.stats.generated_tokens) == ("length", 3)


@pytest.mark.long
@pytest.mark.parametrize("seconds", [0.1, 2.0])
def test_a_prefill_ends_in_time_and_the_next_one_continues_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """On a device that prefills 400 tokens a second and takes 20 ms a pass."""
    slow = Completer(load_tiny(tmp_path, [END]))
    now = [0.0]
    forward = Target.forward

    def timed(target: Target, tokens: mx.array) -> mx.array:
        now[0] += max(0.02, tokens.size / 400)
        return forward(target, tokens)

    monkeypatch.setattr(Target, "forward", timed)
    monkeypatch.setattr("akunu_py.engine.target.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("tests.support.complete.time.monotonic", lambda: now[0])
    requested = CompletionRequest("x = [1, 2]\n" * 120 + "y = ", seconds=seconds, max_tokens=2)
    tokens = len(slow.prompt(requested).tokens)
    prefilled = 0
    for _ in range(100):
        before = now[0]
        done = complete(slow, requested)
        assert done.stats.cached_tokens >= min(prefilled, tokens - 1)  # the last one runs again
        if done.finish_reason != "time":
            break
        # While the speed is unknown, the first slice has a fixed length.
        assert now[0] - before <= seconds + (0.1 if prefilled else 0.16) + 0.021
        prefilled = len(last_tokens(slow.loop))
    assert done.finish_reason != "time"
    assert now[0] <= tokens / 400 + 1  # no token was prefilled twice


@pytest.mark.parametrize(("limits", "words"), [
    ({"max_tokens": -1}, "max_tokens"), ({"max_tokens": 10**9}, "max_tokens"),
    ({"max_lines": -1}, "max_lines"), ({"seconds": 0}, "time"),
    ({"temperature": -1}, "temperature"),
])  # fmt: skip
def test_invalid_limits_are_refused(tiny: Completer, limits: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        complete(tiny, CompletionRequest("x", **limits))


@pytest.mark.long
def test_samples_differ_and_never_have_half_a_character(tmp_path: Path) -> None:
    """The tiny model's tokens are bytes, and random ones are hardly ever whole characters."""
    tiny = Completer(load_tiny(tmp_path, [END]))
    for seed, prefix in enumerate(["é = '", '日本 = "', "x = '😀"]):
        for tokens in range(1, 12):
            requested = CompletionRequest(prefix, max_tokens=tokens, temperature=1.0 + seed)
            assert "\ufffd" not in complete(tiny, requested).text
    assert len({complete(tiny, requested).text for _ in range(64)}) > 1


def test_the_prompt_caches_of_completion_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_model(tmp_path / "tiny", sentence_piece([END]), end=END)
    monkeypatch.setattr(completer_module, "_CACHES_DIVISOR", device.total_memory() >> 20)

    def load(*options: str) -> Completer:
        parser = Parser()
        add_options(parser)
        args = parser.parse_args(["--model", str(directory), "--no-answer-cache", *options])
        completer = load_completer(args, str(directory), "off")
        assert isinstance(completer, Completer)
        return completer

    chosen = load("--prompt-cache-memory", "5MB")
    assert chosen.loop.runner.caches.limit == 5_000_000
    assert load().loop.runner.caches.limit in range(1 << 20, 1 << 21)


# Markdown fences


@pytest.mark.parametrize(("answer", "code", "closed"), [
    ("```python\nx = 1\ny = 2\n```", "x = 1\ny = 2", True),
    ("```\nx\n```\nThis is why.", "x", True),
    ("```c++ \nx = '`'\n", "x = '`'\n", False),  # cut off by max_tokens
    ("x = 1\n```\n", "x = 1\n```\n", False),
    ("`${name}`", "`${name}`", False),
    ("`", "`", False),
    ("```pyth", "", False),
    ("", "", False),
])  # fmt: skip
def test_a_fence_around_an_answer_is_removed(answer: str, code: str, closed: bool) -> None:
    assert strip_fence(answer, final=True) == (code, closed)
    given = ""
    for end in range(len(answer) + 1):  # streamed text stays
        now, _ = strip_fence(answer[:end], final=False)
        assert now.startswith(given)
        given = now
    assert code.startswith(given)


def test_an_answer_in_a_fence_is_its_code(tmp_path: Path) -> None:
    family = load_families()["qwen3-coder-chat"]
    engine = Engine.load(write_model(tmp_path, byte_level([*family.markers]), end="<|im_end|>"))
    for path, language, answer, text in [
        ("a.py", "", "```python\nreturn a + b\n```\nIt adds them.", "return a + b"),
        ("b.py", "python", "return a + b", "return a + b"),
        ("docs/C.MD", "", "```python\nreturn a + b\n```", "```python"),  # the line
        ("untitled", "markdown", "```python\nreturn a + b\n```", "```python"),
    ]:
        completer = answering(engine, answer, fim=family.name)
        parts: list[str] = []
        request = CompletionRequest("def add(a, b):\n    ", "\n", path, language)
        done = complete(completer, request, on_text=parts.append)
        assert (done.text, done.finish_reason) == (text, "stop")
        assert "".join(parts) == text


# Draft context: texts to draft from that are never prefilled


def test_only_what_changed_is_learned_again(tmp_path: Path) -> None:
    engine = load_tiny(tmp_path, [END])
    loop = StepLoop(engine)
    calls: list[Sequence[int]] = []  # tokens that the session's drafters observe

    def watched(drafter: Any, target: Target) -> Any:
        extend = drafter.extend

        def record(tokens: Sequence[int]) -> None:
            calls.append(list(tokens))
            extend(tokens)

        drafter.extend = record
        return drafter

    loop.runner.drafters.wrap = watched
    options = GenerateOptions(max_tokens=8)
    draft_context = [tuple(range(10, 60)), tuple(range(60, 90))]
    prompt = engine.tokens.encode("def compute(first, second):\n    return fir")
    loop.answer(prompt, options, draft_context)
    assert sum(map(len, calls)) >= 82 + len(prompt)
    calls.clear()
    typed = [*prompt, *engine.tokens.encode("s")]
    answer = loop.answer(typed, options, draft_context)
    # The letter, unless the model had sampled it anyhow, and the answer.
    assert sum(map(len, calls)) <= 1 + len(answer.tokens) + 1
    calls.clear()
    loop.answer(typed, options, [draft_context[0], (1, 2, 3)])
    assert 4 + len(typed) <= sum(map(len, calls)) <= 4 + len(typed) + 9


# The cache of completions


REQUESTED = CompletionRequest("def f(items):\n    return ", "\n\nprint(f([1]))\n", path="a.py")
TEXT = 'sorted(items, key=lambda item: (item[0], {"a": item["b"]}))'


def cache(text: str = TEXT, requested: CompletionRequest = REQUESTED) -> CompletionCache:
    made = CompletionCache()
    made.add(requested, Completion(text, "stop", Stats()))
    return made


def text_of(known: CompletionCache, request: CompletionRequest) -> str | None:
    """Return the cached completion of a request."""
    found = known.find(request)
    assert found is None or found.reused
    return found.text if found else None


def test_the_cache_returns_the_rest_after_any_typed_part_of_it_only() -> None:
    known = cache()
    files = (SourceFile("b.py", "x = 1\n"),)  # edits in other files do not matter
    for at in range(len(TEXT)):
        request = replace(REQUESTED, prefix=REQUESTED.prefix + TEXT[:at])
        for same in (request, replace(request, files=files)):
            assert text_of(known, same) == TEXT[at:]
        wrong = "?" if TEXT[at] != "?" else "!"
        assert known.find(replace(request, prefix=request.prefix + wrong)) is None
        assert known.find(replace(request, suffix="\n")) is None
        assert known.find(replace(request, path="b.py")) is None
        assert known.find(replace(request, max_tokens=7)) is None


@pytest.mark.parametrize(("typed", "closed", "rest"), [
    ("call(", ")", "f([a], 'b'), 1"), ("call(f(", "))", "[a], 'b'"), ("call(f([", "]))", "a"),
    ("call(f([a], ", "))", "'b'"), ("call(f([a], 'b'), ", ")", "1"), ("call(f([a], '", "'))", "b"),
])  # fmt: skip
def test_brackets_that_the_editor_closed_are_not_repeated(
    typed: str, closed: str, rest: str
) -> None:
    """The rest ends before the bracket after the cursor."""
    known = cache("call(f([a], 'b'), 1)")
    prefix, suffix = REQUESTED.prefix + typed, closed + REQUESTED.suffix
    assert text_of(known, replace(REQUESTED, prefix=prefix, suffix=suffix)) == rest
    assert known.find(replace(REQUESTED, suffix="x" + REQUESTED.suffix)) is None


def test_a_block_that_the_editor_closed() -> None:
    known = cache("{\n    return 1\n}", replace(REQUESTED, prefix="int f() "))
    request = replace(REQUESTED, prefix="int f() {\n    ", suffix="\n}" + REQUESTED.suffix)
    assert text_of(known, request) == "return 1"


def test_a_cached_completion_has_the_newlines_of_each_request() -> None:
    windows = replace(REQUESTED, prefix=REQUESTED.prefix.replace("\n", "\r\n"))
    windows = replace(windows, suffix=windows.suffix.replace("\n", "\r\n"))
    for known in (cache("(\n1)"), cache("(\r\n1)", windows)):
        for request, newline in ((REQUESTED, "\n"), (windows, "\r\n")):
            after = replace(request, prefix=request.prefix + "(")
            assert text_of(known, after) == f"{newline}1)"


def test_cancelled_and_empty_completions_are_not_cached() -> None:
    known = CompletionCache()
    known.add(REQUESTED, Completion("a", "cancelled", Stats()))
    known.add(replace(REQUESTED, max_tokens=0), Completion("", "length", Stats()))
    assert known.find(REQUESTED) is None
    known.add(REQUESTED, Completion("ab", "time", Stats()))
    assert known.find(REQUESTED) is None  # the model may generate more
    found = known.find(replace(REQUESTED, prefix=REQUESTED.prefix + "a"))
    assert found
    assert (found.text, found.finish_reason) == ("b", "time")


# The power source


@pytest.fixture
def unchecked() -> Iterator[None]:
    complete_module._is_on_battery.cache_clear()
    yield
    complete_module._is_on_battery.cache_clear()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("files", "expected"), [
    ({}, False),
    ({"type": "Mains", "online": "1"}, False),
    ({"type": "Battery", "status": "Discharging"}, True),
    ({"type": "Battery", "status": "Charging"}, False),
    ({"type": "Battery", "status": "Discharging", "scope": "Device"}, False),  # of a mouse
    ({"type": "Battery"}, False),
])  # fmt: skip
def test_a_discharging_battery_on_linux(
    files: dict[str, str], expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(complete_module, "_SUPPLIES", tmp_path)
    (tmp_path / "BAT0").mkdir()
    for name, text in files.items():
        (tmp_path / "BAT0" / name).write_text(text + "\n")
    assert on_battery() == expected


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("source", ["AC Power", "Battery Power"])
def test_the_source_on_macos_is_checked_once_a_minute(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        calls.append(command)
        return SimpleNamespace(stdout=f"Now drawing from '{source}'\n -InternalBattery-0")

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(subprocess, "run", run)
    assert on_battery() == on_battery() == (source == "Battery Power")
    assert len(calls) == 1
