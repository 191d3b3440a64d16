"""Completions: texts in, their continuations out; with a suffix, what belongs between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic import Field

from akunu_py.decoding.scheduling.job import Job, text_job
from akunu_py.serve.dialect import Prepared
from akunu_py.serve.errors import RequestError
from akunu_py.serve.openai.completions_encoder import CompletionsEncoder, Head, whole_completions
from akunu_py.serve.sampling import (
    SamplingBody,
    choices,
    generate_options,
    includes_usage,
)
from akunu_py.serve.service import Service
from akunu_py.types import GenerateOptions

_MAX_TOKENS = 16  # OpenAI's default here
_MAX_CHOICES = 128
_SHORT = 64, 4096  # tokens of an answer, and of its prompt, that others may wait for


class CompletionsBody(SamplingBody):
    """The body of /v1/completions. echo: the text begins with the prompt."""

    prompt: str | list[str] | list[int] | list[list[int]]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=20)


@dataclass(frozen=True, slots=True)
class _Asked:
    """One prompt. text: what `echo` repeats."""

    tokens: list[int]
    text: str
    stop_tokens: tuple[int, ...] = ()
    draft_context: Sequence[Sequence[int]] = ()


def prepare_completions(body: CompletionsBody, service: Service) -> Prepared:
    """Raises RequestError for what cannot be honoured."""
    service.check_model(body.model)
    count = body.n or 1
    prompts = _prompts(body, service)
    if len(prompts) * count > _MAX_CHOICES:
        raise RequestError(f"prompt: {_MAX_CHOICES} choices at most", param="prompt")
    if body.logprobs is not None and body.echo:
        raise RequestError("echo: not with logprobs", param="echo")
    limit = body.max_tokens or _MAX_TOKENS
    options = generate_options(body, service, limit, logprobs=body.logprobs)
    jobs = [_job(asked, each) for asked in prompts for each in choices(options, count)]
    echoed = [asked.text if body.echo else "" for asked in prompts for _ in range(count)]
    head = Head(service.name)
    usage = includes_usage(body)
    tokens, read = _SHORT
    return Prepared(
        jobs,
        lambda answers: whole_completions(head, answers, echoed, count),
        CompletionsEncoder(head, echoed, count, usage=usage) if body.stream else None,
        short=options.max_tokens <= tokens and sum(len(each.tokens) for each in prompts) <= read,
    )


def _job(asked: _Asked, options: GenerateOptions) -> Job:
    options = replace(options, stop_tokens=asked.stop_tokens)
    return text_job(asked.tokens, options, asked.draft_context)


def _prompts(body: CompletionsBody, service: Service) -> list[_Asked]:
    given = body.prompt
    several: Sequence[str | list[int]]
    if isinstance(given, str):
        several = [given]
    elif given and isinstance(given[0], int):
        several = [[token for token in given if isinstance(token, int)]]
    else:
        several = [each for each in given if not isinstance(each, int)]
    if not several:
        raise RequestError("prompt: expected at least one", param="prompt")
    return [_asked(each, body.suffix, service) for each in several]


def _asked(prompt: str | list[int], suffix: str | None, service: Service) -> _Asked:
    engine = service.engine
    if suffix:
        if not isinstance(prompt, str):
            raise RequestError("suffix: expected a text as prompt", param="suffix")
        if service.infill.family is None:
            raise RequestError(
                f"suffix: {service.name} is not known to fill in the middle", param="suffix"
            )
        made = service.infill.prompt(prompt, suffix)
        return _Asked(made.tokens, prompt, made.stop_tokens, made.draft_context)
    if isinstance(prompt, str):
        return _Asked(engine.tokens.encode(prompt), prompt)
    if any(not 0 <= token < engine.tokens.vocabulary for token in prompt):
        raise RequestError(
            f"prompt: {service.name} has {engine.tokens.vocabulary} tokens, from 0 on",
            param="prompt",
        )
    return _Asked(prompt, str(engine.tokens.tokenizer.decode(prompt)))
