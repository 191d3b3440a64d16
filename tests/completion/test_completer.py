"""Completing at a cursor: what is reused from keystroke to keystroke, limits, cancelling."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import mlx.core as mx
import pytest

from akunu_py.commands.complete import add_options, load_completer
from akunu_py.completion import completer as completer_module
from akunu_py.completion.completer import Completer
from akunu_py.completion.request import CompleteOptions, CompletionReason, CompletionRequest
from akunu_py.decoding import device
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.target import Target
from akunu_py.errors import UsageError
from akunu_py.parser import Parser
from tests.support.complete import complete
from tests.support.tiny_fim import load_tiny, sentence_piece, write_model

END = "<|endoftext|>"
BUFFER = Path("tests/golden/completion_buffer.txt").read_text(encoding="utf-8")
CURSOR = BUFFER.index("        self._window = self._window[self._given :]") + len("        self._w")
PREFIX, SUFFIX = BUFFER[BUFFER.index("    def __init__(") : CURSOR], BUFFER[CURSOR:]


@pytest.fixture(scope="module")
def completer(starter_engine: Engine) -> Completer:
    return Completer(starter_engine)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Completer:
    """Its tokens are printable characters, chosen at random."""
    directory = Path(tmp_path_factory.mktemp("tiny"))
    return Completer(Engine.load(write_model(directory, sentence_piece([END]), end=END)))


def test_from_keystroke_to_keystroke(completer: Completer) -> None:
    """Typing what was predicted costs nothing; anything else costs what is new."""
    first = complete(completer, CompletionRequest(PREFIX, SUFFIX))
    assert first.text
    assert first.finish_reason == "stop"
    assert first.stats.prompt_tokens > 100
    assert first.draft_context_tokens == len(completer.code.encode(SUFFIX))
    typed = complete(completer, CompletionRequest(PREFIX + first.text[:2], SUFFIX))
    assert typed.text == first.text[2:]
    assert typed.reused
    assert (typed.stats.prompt_tokens, typed.stats.target_passes) == (0, 0)
    taken_back = complete(completer, CompletionRequest(PREFIX, SUFFIX))
    assert taken_back.text == first.text
    other = "a" if not first.text.startswith("a") else "b"
    changed = complete(completer, CompletionRequest(PREFIX + other, SUFFIX))
    assert not changed.reused
    assert changed.stats.prompt_tokens - changed.stats.cached_tokens <= 4
    elsewhere = complete(
        completer, CompletionRequest(PREFIX + first.text[:2], SUFFIX + "# changed\n")
    )
    assert not elsewhere.reused


def test_the_prefix_is_healed(completer: Completer) -> None:
    """A cursor inside a token, or behind the spaces that belong to the next one."""
    assert complete(completer, CompletionRequest("import numpy as n")).text == "p"
    done = complete(completer, CompletionRequest("def add(first, second):\n    "))
    assert done.text.startswith("return first + second")
    assert done.stats.generated_tokens > done.stats.target_passes >= 1


def test_parts_join_to_the_whole(completer: Completer) -> None:
    parts: list[str] = []
    asked = CompletionRequest(
        "def fibonacci(n):\n    ", "\n\nprint(fibonacci(10))\n", max_tokens=32
    )
    done = complete(completer, asked, on_text=parts.append)
    assert "".join(parts) == done.text
    assert len(parts) > 1
    again: list[str] = []
    assert complete(completer, asked, on_text=again.append).reused
    assert again == [done.text]


def test_windows_line_ends(completer: Completer) -> None:
    unix = CompletionRequest("def fibonacci(n):\n    ", "\n\nprint(fibonacci(10))\n", max_tokens=32)
    windows = CompletionRequest(
        unix.prefix.replace("\n", "\r\n"), unix.suffix.replace("\n", "\r\n"), max_tokens=32
    )
    parts: list[str] = []
    done = complete(completer, windows, on_text=parts.append)
    assert done.text == complete(completer, unix).text.replace("\n", "\r\n")
    assert "\r\n" in done.text
    assert "".join(parts) == done.text


def test_nothing_is_made_up_of_nothing(tiny: Completer) -> None:
    assert complete(tiny, CompletionRequest("", "x = 1\n")).text == ""
    assert complete(tiny, CompletionRequest(" \n\n")).stats.prompt_tokens == 0


def test_cancelling_takes_effect_within_one_pass(tiny: Completer) -> None:
    for limit in range(1, 8):
        answers: list[CompletionReason | None] = [None] * limit
        answers += ["cancelled"]  # a further question finds none

        done = complete(tiny, CompletionRequest("a = ("), ended=partial(answers.pop, 0))
        tiny.session.target.reset()
        assert done.finish_reason in ("cancelled", "stop")
        # Asked twice before the first token, then once a pass.
        assert done.stats.target_passes <= limit
        assert not (done.finish_reason == "cancelled" and answers)


def test_a_time_budget_gives_the_best_so_far(
    tiny: Completer, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = complete(tiny, CompletionRequest("x = [[[["))
    clock = iter(range(10_000))
    monkeypatch.setattr("akunu_py.completion.request.time.monotonic", lambda: next(clock))
    cut = complete(tiny, CompletionRequest("x = [[[[", seconds=10, max_tokens=127))
    assert cut.finish_reason == "time"
    assert 0 < cut.stats.generated_tokens < whole.stats.generated_tokens
    assert whole.text.startswith(cut.text)
    none = complete(tiny, CompletionRequest("y = [[[[", seconds=0.5))
    assert (none.text, none.finish_reason) == ("", "time")


@pytest.mark.parametrize("seconds", [0.1, 0.3, 1.0, 2.0])
def test_a_time_budget_is_kept_within_one_slice_and_what_was_read_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """On a device that reads 400 tokens a second and takes 20 ms a pass."""
    slow = Completer(load_tiny(tmp_path, [END]))
    now = [0.0]
    forward = Target.forward

    def timed(target: Target, tokens: mx.array, wanted: int | None = None) -> mx.array:
        now[0] += max(0.02, tokens.size / 400)
        return forward(target, tokens, wanted)

    monkeypatch.setattr(Target, "forward", timed)
    monkeypatch.setattr("akunu_py.decoding.target.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("akunu_py.completion.request.time.monotonic", lambda: now[0])
    asked = CompletionRequest("x = [1, 2]\n" * 120 + "y = ", seconds=seconds, max_tokens=2)
    tokens = len(slow.prompt(asked).tokens)
    read = 0
    for _ in range(100):
        before = now[0]
        done = complete(slow, asked)
        assert done.stats.cached_tokens >= min(read, tokens - 1)  # the last one is read again
        if done.finish_reason != "time":
            break
        # The first slice is as long as it is while the speed is not known.
        assert now[0] - before <= seconds + (0.1 if read else 0.16) + 0.021
        read = len(slow.session.target.tokens)
    assert done.finish_reason != "time"
    assert now[0] <= tokens / 400 + 1  # nothing was read twice


def test_limits(tiny: Completer) -> None:
    done = complete(tiny, CompletionRequest("x = [[[[", max_tokens=3))
    assert done.finish_reason == "length"
    assert done.stats.generated_tokens == 3
    for bad, words in [
        (CompletionRequest("x", max_tokens=-1), "max_tokens"),
        (CompletionRequest("x", max_tokens=10**9), "max_tokens"),
        (CompletionRequest("x", max_lines=-1), "max_lines"),
        (CompletionRequest("x", seconds=0), "time"),
        (CompletionRequest("x", temperature=-1), "temperature"),
    ]:
        with pytest.raises(UsageError, match=words):
            complete(tiny, bad)


@pytest.mark.long
def test_never_half_a_character(tmp_path: Path) -> None:
    """The tiny model's tokens are bytes, and random ones are hardly ever whole characters."""
    tiny = Completer(load_tiny(tmp_path, [END]))
    for seed, prefix in enumerate(["é = '", '日本 = "', "x = '😀"]):
        for tokens in range(1, 12):
            asked = CompletionRequest(prefix, max_tokens=tokens, temperature=1.0 + seed)
            assert not complete(tiny, asked).text.count("\ufffd")


@pytest.mark.long
def test_sampling_gives_another_sample(tiny: Completer) -> None:
    samples = {
        complete(tiny, CompletionRequest("value = (", temperature=2.0)).text for _ in range(8)
    }
    assert len(samples) > 1


def test_fim_reads_the_suffix_and_draws_on_the_rest(tmp_path: Path) -> None:
    markers = ["<|endoftext|>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
    engine = load_tiny(tmp_path, [*markers, "<repo_name>", "<file_sep>"])
    completer = Completer(engine, CompleteOptions("starcoder2", suffix_tokens=20))
    assert completer.family is not None
    suffix = "\n" + "line()\n" * 50
    done = complete(completer, CompletionRequest("x = ", suffix, max_tokens=5))
    assert done.stats.prompt_tokens == 3 + len("x = ") + len("\nline()\nline()\n")
    assert done.draft_context_tokens == len(suffix) - len("\nline()\nline()\n")


def test_the_caches_of_a_helper_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 40 files too; an option sets another limit."""
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
    assert chosen.session.target.caches.limit == 5_000_000
    completer = load()
    caches = completer.session.target.caches
    assert caches.limit in range(1 << 20, 1 << 21)
    for number in range(40):
        text = "".join(f"x{line} = {number * line}\n" for line in range(20))
        complete(completer, CompletionRequest(text, max_tokens=1))
    assert 0 < caches.nbytes <= caches.limit
