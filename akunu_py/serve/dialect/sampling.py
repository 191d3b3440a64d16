"""How an answer is generated, as requests ask for it: by OpenAI's names, into which the other
dialects turn theirs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from akunu_py.serve.dialect.bodies import Body, Ignored
from akunu_py.serve.dialect.errors import RequestError
from akunu_py.serve.dialect.service import Service
from akunu_py.types import Constraint, ConstraintKind, GenerateOptions

_MAX_SEED = 2**32
# What `json_object` asks for: of all JSON an object, as OpenAI has it.
JSON_OBJECT = Constraint("json_schema", '{"type": "object"}')

TokenId = Annotated[str, Field(pattern="^[0-9]{1,9}$")]


class StreamOptions(Body):
    """include_usage: a last chunk tells how many tokens it was."""

    include_usage: bool | None = None
    include_obfuscation: Ignored = None


class StructuredOutputs(Body):
    """What vLLM has in the place of `guided_*` from 0.12 on. disable_any_whitespace: JSON is
    compact, that of a `response_format` too."""

    model_config = ConfigDict(extra="forbid", strict=True, serialize_by_alias=True)

    json_schema: dict[str, Any] | str | bool | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None


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
    structured_outputs: StructuredOutputs | None = None


def generate_options(
    body: SamplingBody,
    service: Service,
    max_tokens: int,
    constraint: Constraint | None = None,
    logprobs: int | None = None,
) -> GenerateOptions:
    """How to answer; what the body leaves open is as the service has it. constraint: beside those
    in the body. logprobs: see `SamplingOptions`. Raises RequestError."""
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
    """The one that there is. other: beside those in the body. Raises RequestError."""
    outputs = body.structured_outputs or StructuredOutputs(json=None)
    given = {
        "guided_json": _schema(body.guided_json),
        "guided_regex": _text("regex", body.guided_regex),
        "guided_choice": _choice(body.guided_choice),
        "guided_grammar": _text("grammar", body.guided_grammar),
        "structured_outputs.json": _schema(outputs.json_schema),
        "structured_outputs.regex": _text("regex", outputs.regex),
        "structured_outputs.choice": _choice(outputs.choice),
        "structured_outputs.grammar": _text("grammar", outputs.grammar),
        "structured_outputs.json_object": JSON_OBJECT if outputs.json_object else None,
    }
    found = {name: constraint for name, constraint in given.items() if constraint is not None}
    if len(found) + (other is not None) > 1:
        name = [*found][-1]
        raise RequestError(f"{name}: an answer can match one constraint only", param=name)
    constraint = next(iter(found.values()), other)
    if not outputs.disable_any_whitespace:
        return constraint
    if constraint is None or constraint.kind != "json_schema":
        name = "structured_outputs.disable_any_whitespace"
        raise RequestError(f"{name}: only for an answer in JSON", param=name)
    return replace(constraint, compact=True)


def _schema(schema: Any) -> Constraint | None:
    return None if schema is None else schema_constraint(schema)


def _text(kind: ConstraintKind, text: str | None) -> Constraint | None:
    return None if text is None else Constraint(kind, text)


def _choice(choices: list[str] | None) -> Constraint | None:
    return None if choices is None else Constraint("choice", choices=tuple(choices))
