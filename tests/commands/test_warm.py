"""`akunu models warm`: it says what it takes, can be stopped, goes on, and what it remembers is the
model's own answers."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from akunu_py.commands import models as command
from akunu_py.commands import run
from akunu_py.decoding.generate import warm
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.learned import LearnedState, forget
from akunu_py.decoding.load import load_learned
from akunu_py.decoding.model.engine import Engine
from akunu_py.settings import settings_file
from tests.support.command import run_here
from tests.support.tiny_fim import write_chat_model

TOKENS = 60


@pytest.fixture
def model(tmp_path: Path, own_directories: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(warm, "ANSWER", 20)
    return write_chat_model(tmp_path / "tiny")


def learned_of(model: Path) -> LearnedState:
    return load_learned(Engine.load(model), no_memory=False)


def test_it_answers_until_enough_is_remembered(model: Path) -> None:
    words = ("models", "warm", "--now", str(model), "--tokens")
    first = run_here(*words, str(TOKENS))
    assert first.returncode == 0
    assert f"generates {TOKENS} more tokens for its answer cache: about 1 s at " in first.stderr
    learned = learned_of(model)
    done = warm.progress(learned)
    assert TOKENS <= done.tokens < TOKENS + 20
    assert learned.memory is not None
    assert len(learned.memory) == done.tokens + done.answers  # each is closed by a separator
    assert "tokens in its answer cache" in run_here(*words, str(TOKENS)).stdout
    assert warm.progress(learned) == done
    assert run_here(*words, str(3 * TOKENS)).returncode == 0
    assert warm.progress(learned).tokens >= 3 * TOKENS
    forget(model)
    assert warm.progress(learned) == warm.Progress()
    settings_file().parent.mkdir(parents=True, exist_ok=True)
    settings_file().write_text("memory = false\n")
    refused = run_here(*words, str(TOKENS))
    assert refused.returncode == 2
    assert "memory = false" in refused.stderr


def test_the_prompts_are_answered_in_turn_and_what_was_stopped_again(model: Path) -> None:
    learned = learned_of(model)
    session = Session(Engine.load(model), learned)
    asked: list[tuple[Any, Any]] = []
    for stopped in (2, 1, None):  # the answer that is cancelled
        for turn, generation in enumerate(warm.answers(session, learned, 5 * TOKENS)):
            asked.append((tuple(generation._prompt), generation._options.sampling.seed))
            if turn == stopped:
                generation.cancel()
            generation.answer()
    seeds = [seed for _, seed in asked]
    assert seeds[:5] == [0, 1, 2, 2, 3]
    assert seeds[5:] == [*range(3, seeds[-1] + 1)]
    assert len({prompt for prompt, _ in asked}) == seeds[-1] + 1
    assert warm.progress(learned).answers == seeds[-1] + 1
    learned.warmed.write_text("{}")
    assert warm.progress(learned) == warm.Progress()


def test_an_interrupt_ends_it_and_says_how_to_go_on(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Ctrl-C cancels the answer that is under way."""
    started: list[Any] = []

    @contextlib.contextmanager
    def interrupted(generation: Any) -> Iterator[None]:
        started.append(generation)
        if len(started) == 2:
            generation.cancel()
        yield

    monkeypatch.setattr(run, "cancelled_by_interrupt", interrupted)
    with pytest.raises(KeyboardInterrupt):
        command.warm(argparse.Namespace(name=str(model), tokens=TOKENS, now=True))
    assert f"to resume, run: akunu models warm {model}" in capsys.readouterr().err
    assert warm.progress(learned_of(model)).answers == 1
