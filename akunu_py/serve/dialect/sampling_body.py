"""Sampling parameters under OpenAI's names; other dialects convert theirs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from akunu_py.decoding.chat_format.effort import Effort, thinking_variables
from akunu_py.serve.dialect.bodies import Body, Ignored
from akunu_py.serve.dialect.request_errors import invalid
from akunu_py.serve.dialect.service import Service
from akunu_py.types import Constraint, ConstraintKind, GenerateOptions

_MAX_SEED = 2**32
# OpenAI's `json_object`
JSON_OBJECT = Constraint("json_schema", '{"type": "object"}')

TokenId = Annotated[str, Field(pattern="^[0-9]{1,9}$")]


class StreamOptions(Body):
    include_usage: bool | None = None  # in a last chunk
    include_obfuscation: Ignored = None


class StructuredOutputs(Body):
    """vLLM's replacement of `guided_*` from 0.12 on."""

    model_config = ConfigDict(extra="forbid", strict=True, serialize_by_alias=True)

    json_schema: dict[str, Any] | str | bool | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None  # applies to `response_format`, too


class SamplingBody(Body):
    """Parameters of Chat Completions and Completions."""

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
    # These describe the caller, not the answer.
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
    """Return the service's default options, overridden by the request's.

    constraint: a constraint from fields outside `body`. logprobs: as in `SamplingOptions`.
    Raises RequestError for two constraints.
    """
    constraint = _only_constraint(body, constraint)
    parameters: dict[str, Any] = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": None if body.top_k is None else max(0, body.top_k),  # vLLM writes -1 for none
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
        service.defaults.sampling, **{name: v for name, v in parameters.items() if v is not None}
    )
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return replace(
        service.defaults, max_tokens=max_tokens, sampling=sampling, stop=tuple(filter(None, stop))
    )


def includes_usage(body: SamplingBody) -> bool:
    """Return True if a last chunk has the usage. Raises RequestError if nothing is streamed."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "requires stream")
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def choice_options(options: GenerateOptions, count: int) -> list[GenerateOptions]:
    """Return the options of several answers to one prompt, with different seeds."""
    seed = options.sampling.seed
    if seed is None:
        return [options] * count
    return [
        replace(options, sampling=replace(options.sampling, seed=(seed + number) % _MAX_SEED))
        for number in range(count)
    ]


def schema_constraint(schema: Any) -> Constraint:
    """Return the constraint for a JSON Schema."""
    return Constraint("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


def _only_constraint(body: SamplingBody, other: Constraint | None) -> Constraint | None:
    """Return the constraint of the body, or `other`. Raises RequestError for several."""
    outputs = body.structured_outputs or StructuredOutputs(json=None)
    values = {
        "guided_json": body.guided_json,
        "guided_regex": body.guided_regex,
        "guided_choice": body.guided_choice,
        "guided_grammar": body.guided_grammar,
        "structured_outputs.json": outputs.json_schema,
        "structured_outputs.regex": outputs.regex,
        "structured_outputs.choice": outputs.choice,
        "structured_outputs.grammar": outputs.grammar,
    }
    constraints = {name: _constraint(name, v) for name, v in values.items() if v is not None}
    if outputs.json_object:
        constraints["structured_outputs.json_object"] = JSON_OBJECT
    if len(constraints) + (other is not None) > 1:
        raise invalid([*constraints][-1], "only one constraint is allowed")
    constraint = next(iter(constraints.values()), other)
    if not outputs.disable_any_whitespace:
        return constraint
    if constraint is None or constraint.kind != "json_schema":
        raise invalid("structured_outputs.disable_any_whitespace", "requires a JSON schema")
    return replace(constraint, compact=True)


def _constraint(name: str, value: Any) -> Constraint:
    kinds: tuple[ConstraintKind, ...] = ("regex", "choice", "grammar")
    kind = next((kind for kind in kinds if name.endswith(kind)), None)
    if kind is None:
        return schema_constraint(value)
    return Constraint(kind, choices=tuple(value)) if kind == "choice" else Constraint(kind, value)


def effort_variables(service: Service, effort: Effort | None, param: str) -> dict[str, Any]:
    """Return the chat template's variables for an effort. Raises RequestError if it has none."""
    variables = thinking_variables(service.engine.tokens.tokenizer).for_effort(effort)
    if variables is None:
        raise invalid(param, f"{service.name} does not support {effort!r}; leave it out")
    return variables
