"""Sessions: passes that fail, and where the next turn begins."""

from __future__ import annotations

import mlx.core as mx
import pytest

from akunu_py.decoding import device
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.model.engine import Engine
from akunu_py.types import DraftMode, GenerateOptions, Message
from tests.support.targets import some
from tests.support.tiny_fim import load_tiny

PROMPT = [1, 2, 3, 4, 1, 2, 3]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load_tiny(tmp_path_factory.mktemp("model"), ["<|end|>"])


@pytest.mark.parametrize("draft", ["off", "fixed", "auto"])
@pytest.mark.parametrize("failing", [1, 2, 5])
def test_a_pass_that_fails_leaves_no_history(
    failing: int, draft: DraftMode, monkeypatch: pytest.MonkeyPatch, tiny: Engine
) -> None:
    """Whatever it had put into the cache: the next answer is that of a new session."""
    options = GenerateOptions(max_tokens=12, draft=draft)
    session = Session(tiny)
    expected = Session(tiny).generate(PROMPT, options).answer().tokens
    forward = session.target.forward
    passes = 0

    def broken(tokens: mx.array, wanted: int | None = None) -> mx.array:
        nonlocal passes
        passes += 1
        logits = forward(tokens, wanted)
        if passes == failing:
            raise RuntimeError("out of memory")
        return logits

    monkeypatch.setattr(session.target, "forward", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        session.generate(PROMPT, options).answer()
    assert session.target.tokens == []
    assert session.generate(PROMPT, options).answer().tokens == expected


def test_what_is_not_booked_is_noticed_before_the_next_prompt(tiny: Engine) -> None:
    session = Session(tiny)
    session.generate(PROMPT, GenerateOptions(max_tokens=3)).answer()
    mx.eval(session.target.forward(mx.array([5])))
    with pytest.raises(AssertionError, match="booked"):
        session.generate(PROMPT, GenerateOptions(max_tokens=3)).answer()
    session.generate(PROMPT, GenerateOptions(max_tokens=3)).answer()


ASKS = "<|assistant|><think>at length, and a little more of that</think>"


@pytest.mark.parametrize(
    ("template", "dropped"),
    [
        ("{{ turns }}{% if add_generation_prompt %}<|assistant|>{% endif %}", 0),
        ("{{ turns }}{% if add_generation_prompt %}" + ASKS + "{% endif %}", len(ASKS) - 13),
        ("{{ turns }}{% if messages | length < 2 %}(short){% endif %}", len("(short)")),
        ("{% if messages | length > 1 %}{{ raise_exception('no') }}{% endif %}Hello", 5),
    ],
)
def test_what_the_next_turn_begins_with_is_found_by_rendering_one(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch, template: str, dropped: int
) -> None:
    turns = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    monkeypatch.setattr(
        tiny.tokens.tokenizer, "chat_template", template.replace("{{ turns }}", turns)
    )
    monkeypatch.setattr(tiny.tokens.tokenizer, "has_chat_template", True)
    messages = [Message("user", "Hello there")]
    prompt = tiny.tokens.encode_chat(messages)
    assert tiny.tokens.stable_prefix(messages, prompt) == len(prompt) - dropped


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize(("pressure", "kept"), [("normal", 1), ("warning", 1), ("critical", 0)])
def test_where_the_system_is_short_of_memory_caches_go(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch, pressure: str, kept: int, idle: bool
) -> None:
    session, options = Session(tiny), GenerateOptions(max_tokens=4)
    first, second = [5] * 100, [6] * 100
    session.generate(first, options).answer()
    session.generate(second, options).answer()
    assert len(session.target.caches.histories()) == 1
    monkeypatch.setattr(device, "memory_pressure", lambda: pressure)
    if idle:
        session.save_idle()
        assert len(session.target.caches.histories()) == kept
    generation = session.generate([*second, 7], options)
    assert generation.answer().tokens
    assert generation.stats.cached_tokens >= len(second)
    assert len(session.target.caches.histories()) == kept
    again = session.generate(first, options).answer().stats
    assert (again.cached_tokens > 0, again.not_cached) == (kept > 0, "" if kept else "evicted")


def test_an_idle_session_keeps_no_free_buffers(tiny: Engine) -> None:
    """MLX keeps those of every prompt length, and an editor asks about many files."""
    session = Session(tiny)
    for length in range(20, 220, 20):
        session.generate(some(length, length), GenerateOptions(2)).answer()
    assert mx.get_cache_memory() > 0
    session.save_idle()
    assert mx.get_cache_memory() == 0
