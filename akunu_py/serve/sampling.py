"""How an answer is generated, as requests ask for it: by OpenAI's names, into which the other
dialects turn theirs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from akunu_py.serve.bodies import Body, Ignored
from akunu_py.serve.errors import RequestError
from akunu_py.serve.service import Service
from akunu_py.types import Constraint, GenerateOptions

_MAX_SEED = 2**32

TokenId = Annotated[str, Field(pattern="^[0-9]{1,9}$")]


class StreamOptions(Body):
    """include_usage: a last chunk tells how many tokens it was."""

    include_usage: bool | None = None
    include_obfuscation: Ignored = None


class SamplingBody(Body):
    """Parameters of both; those in the last two groups are not OpenAI's own."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=16)
    max_tokens: int | None = Field(default=None, ge=1)
    stop: str | list[str] | None = None
    seed: int | None = None
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-100, le=100)
    frequency_penalty: float | None = Field(default=None, ge=-100, le=100)
    logit_bias: dict[TokenId, float] | None = None
    # They say who asks and what for; nothing about the answer.
    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    # llama.cpp's, vLLM's and mlx-lm's names.
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


def generate_options(
    body: SamplingBody,
    service: Service,
    max_tokens: int,
    constraint: Constraint | None = None,
    logprobs: int | None = None,
) -> GenerateOptions:
    """How to answer; what the body leaves open is as the service has it. constraint: beside
    `guided_*`. logprobs: see `SamplingOptions`. Raises RequestError."""
    constraint = _guided(body, constraint)
    given: dict[str, Any] = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": None if body.top_k is None else max(0, body.top_k),  # vLLM's -1 is none, too
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "seed": None if body.seed is None else body.seed % _MAX_SEED,
        "logit_bias": tuple((int(token), bias) for token, bias in (body.logit_bias or {}).items()),
        "constraint": constraint,
        "logprobs": logprobs,
    }
    sampling = replace(
        service.defaults.sampling, **{name: v for name, v in given.items() if v is not None}
    )
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return replace(
        service.defaults, max_tokens=max_tokens, sampling=sampling, stop=tuple(filter(None, stop))
    )


def includes_usage(body: SamplingBody) -> bool:
    """Whether a last chunk shall tell the usage. Raises RequestError where there are no chunks."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options: only with stream", param="stream_options")
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def choices(options: GenerateOptions, count: int) -> list[GenerateOptions]:
    """The options of each of several answers to one prompt: seeded ones differ in their seeds."""
    seed = options.sampling.seed
    if seed is None:
        return [options] * count
    return [
        replace(options, sampling=replace(options.sampling, seed=(seed + number) % _MAX_SEED))
        for number in range(count)
    ]


def schema_constraint(schema: Any) -> Constraint:
    """What fits a JSON Schema."""
    return Constraint("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


def _guided(body: SamplingBody, other: Constraint | None) -> Constraint | None:
    found = {}
    if body.guided_json is not None:
        found["guided_json"] = schema_constraint(body.guided_json)
    if body.guided_regex is not None:
        found["guided_regex"] = Constraint("regex", body.guided_regex)
    if body.guided_choice is not None:
        found["guided_choice"] = Constraint("choice", choices=tuple(body.guided_choice))
    if body.guided_grammar is not None:
        found["guided_grammar"] = Constraint("grammar", body.guided_grammar)
    if len(found) + (other is not None) > 1:
        name = [*found][-1]
        raise RequestError(f"{name}: an answer can match one constraint only", param=name)
    return next(iter(found.values()), other)
