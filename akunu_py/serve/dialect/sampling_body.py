"""From the fields of a request to the options of generation."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from pydantic import AliasChoices, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from akunu_py.decoding.constraint.matcher import MAX_CONSTRAINT
from akunu_py.errors import one_line
from akunu_py.serve.dialect.bodies import Body, Ignored
from akunu_py.serve.dialect.fields import (
    GenerationFields,
    SamplingFields,
    StructuredOutputs,
    TokenLimit,
)
from akunu_py.serve.dialect.request_errors import invalid
from akunu_py.serve.dialect.service import Service
from akunu_py.types import Constraint, ConstraintKind, GenerateOptions

_MAX_SEED = 2**32
_NEVER = -1e9  # added to a logit; a constraint can still force the token
_NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
# OpenAI's `json_object`
JSON_OBJECT = Constraint("json_schema", '{"type": "object"}')


class StreamOptions(Body):
    include_usage: bool | None = None  # in a last chunk
    include_obfuscation: Ignored = None


class SamplingBody(GenerationFields):
    """Fields of Chat Completions and Completions."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=16)
    # The other names are those of llama.cpp, Ollama and transformers.
    max_tokens: TokenLimit | None = Field(
        default=None,
        validation_alias=AliasChoices("max_tokens", "n_predict", "num_predict", "max_new_tokens"),
    )

    @field_validator("stream_options")
    @classmethod
    def _check_stream(cls, value: StreamOptions | None, info: ValidationInfo) -> Any:
        if value is not None and not info.data.get("stream"):
            raise PydanticCustomError("stream_options", "Requires stream")
        return value

    @property
    def includes_usage(self) -> bool:
        """Whether a last chunk has the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def generate_options(
    body: SamplingFields,
    service: Service,
    max_tokens: int,
    constraint: Constraint | None = None,
    logprobs: int | None = None,
    thinking_budget: int | None = None,
) -> GenerateOptions:
    """Return the service's default options, overridden by the request's.

    constraint: a constraint from fields outside `body`. logprobs, thinking_budget: as in
    `SamplingOptions` and `GenerateOptions`. Raises RequestError for two constraints, or a token
    that the model does not have.
    """
    stop_tokens, vocabulary = tuple(body.stop_token_ids or ()), service.engine.tokens.vocabulary
    if not all(0 <= token < vocabulary for token in stop_tokens):
        raise invalid("stop_token_ids", f"expected token ids from 0 to {vocabulary - 1}")
    constraint = _only_constraint(body, constraint)
    ends = service.engine.tokens.stop_tokens if body.ignore_eos else ()
    bias = {int(token): bias for token, bias in (body.logit_bias or {}).items()}
    bias |= dict.fromkeys(sorted(ends), _NEVER)
    parameters: dict[str, Any] = {
        "temperature": 0.0 if body.do_sample is False else body.temperature,
        "top_p": body.top_p,
        "top_k": None if body.top_k is None else max(0, body.top_k),  # vLLM writes -1 for none
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "seed": None if body.seed is None else body.seed % _MAX_SEED,
        "logit_bias": tuple(bias.items()),
        "constraint": constraint,
        "logprobs": logprobs,
    }
    if body.repeat_last_n == 0:
        parameters |= _NO_PENALTIES
    elif body.repeat_last_n is not None:
        all_tokens = service.engine.plan.context_length
        parameters["penalty_window"] = all_tokens if body.repeat_last_n < 0 else body.repeat_last_n
    sampling = replace(
        service.defaults.sampling, **{name: v for name, v in parameters.items() if v is not None}
    )
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return replace(
        service.defaults,
        max_tokens=max_tokens,
        sampling=sampling,
        stop=tuple(filter(None, stop)),
        stop_tokens=stop_tokens,
        thinking_budget=thinking_budget,
        min_tokens=body.min_tokens or 0,
    )


def token_limit(requested: int | None, service: Service, default: int | None = None) -> int:
    """Return the maximum number of tokens; -1 requests no limit. default: if none is requested."""
    if requested == -1:
        return service.engine.plan.context_length
    return requested or default or service.token_limit


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


def _only_constraint(body: SamplingFields, other: Constraint | None) -> Constraint | None:
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
        "json_schema": body.json_schema,
        "grammar": _as_lark(body.grammar) if body.grammar else None,
        "format": {"type": "object"} if body.format == "json" else body.format or None,
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


def _as_lark(grammar: str) -> str:
    """Return llama.cpp's GBNF as Lark. Raises RequestError."""
    from llguidance.gbnf_to_lark import any_to_lark

    if len(grammar) > MAX_CONSTRAINT:
        raise invalid("grammar", f"expected {MAX_CONSTRAINT:,} characters at most")
    try:
        return any_to_lark(grammar)
    except Exception as error:  # the converter raises any exception, such as RecursionError
        raise invalid("grammar", one_line(error)) from error
