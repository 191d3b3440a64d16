"""Warm the answer cache: let the model answer built-in prompts before its first use."""

from __future__ import annotations

import contextlib
import json
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from akunu_py.decoding.generate.session import Generation, Session
from akunu_py.decoding.learned import LearnedState
from akunu_py.files import read_bounded, read_json, write_atomically
from akunu_py.types import GenerateOptions, Message, SamplingOptions

TOKENS = 100_000  # target size; docs/log.md has the gains of more
ANSWER = 400  # maximum tokens per answer
_TRIAL = 32  # tokens to measure the speed
_TEMPERATURE = 0.7  # that of the chat
_PROMPTS = Path(__file__).with_name("warm.toml")
_MAX_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Progress:
    """Answers in the cache, and their tokens."""

    answers: int = 0
    tokens: int = 0


def progress(learned: LearnedState) -> Progress:
    """Return the progress of earlier runs, zero if its file is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
        noted = read_json(learned.warmed, _MAX_BYTES)
        found = Progress(int(noted["answers"]), int(noted["tokens"]))
        if min(found.answers, found.tokens) >= 0:
            return found
    return Progress()


def tokens_per_s(session: Session) -> float:
    """Measure how fast the model answers, without storing the answer."""
    options = GenerateOptions(_TRIAL, remember=False)
    return _generation(session, _prompts()[0], options).answer().stats.tokens_per_s


def answers(session: Session, learned: LearnedState, tokens: int) -> Iterator[Generation]:
    """Yield answers until `tokens` are stored; run each to its end before the next."""
    prompts, done = _prompts(), progress(learned)
    while done.tokens < tokens:
        turn = done.answers
        sampling = SamplingOptions(temperature=_TEMPERATURE, seed=turn)
        options = GenerateOptions(ANSWER, sampling=sampling)
        generation = _generation(session, prompts[turn % len(prompts)], options)
        yield generation
        if generation.finish_reason in ("cancelled", None):
            return
        done = Progress(turn + 1, done.tokens + max(1, len(generation.tokens)))
        with contextlib.suppress(OSError):  # the prompt is answered again then
            write_atomically(learned.warmed, json.dumps(asdict(done)).encode())


def _prompts() -> list[str]:
    content = tomllib.loads(read_bounded(_PROMPTS, _MAX_BYTES).decode())
    return [str(prompt) for prompt in content["prompts"]]


def _generation(session: Session, prompt: str, options: GenerateOptions) -> Generation:
    if session.engine.tokens.tokenizer.has_chat_template:
        return session.chat([Message("user", prompt)], options)
    return session.generate(session.engine.tokens.encode(prompt), options)
