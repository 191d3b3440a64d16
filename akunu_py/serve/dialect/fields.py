"""Fields that requests of all dialects share, under the names of many servers."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, AliasChoices, Field
from pydantic_core import PydanticCustomError

from akunu_py.engine.constraint.answer_limits import can_limit_thinking
from akunu_py.engine.constraint.matcher import MAX_CONSTRAINT
from akunu_py.engine.template.effort import Effort, choose_thinking, thinking_variables
from akunu_py.errors import one_line
from akunu_py.serve.dialect.bodies import Body, ListEntry, known_only
from akunu_py.serve.dialect.request_errors import RequestError, invalid
from akunu_py.serve.dialect.service import Service
from akunu_py.types import Constraint, ConstraintKind, GenerateOptions, ToolChoice

# How much to think; "auto" is the model's default.
EffortField = Annotated[Effort | None, known_only(auto=None, default=None)]
TokenId = Annotated[str, Field(pattern="^[0-9]{1,9}$")]


def _check_limit(value: int) -> int:
    if value < 1 and value != -1:
        raise PydanticCustomError("limit", "Expected 1 or more, or -1 for no limit")
    return value


# The maximum number of tokens; -1: no limit.
TokenLimit = Annotated[int, AfterValidator(_check_limit)]


# Ollama's: any JSON object, or a schema.
FormatField = Annotated[Literal["", "json"] | dict[str, Any] | None, known_only()]


class StructuredOutputs(Body):
    """vLLM's replacement of `guided_*` from 0.12 on."""

    json_schema: dict[str, Any] | str | bool | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    # These apply to `response_format`, too.
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None  # False: `Constraint.open_objects`


class ThinkingBody(Body):
    """Anthropic's, GLM's and DeepSeek's switch."""

    type: Annotated[
        Literal["enabled", "disabled", "adaptive", "between_tools"] | None,
        known_only(auto="adaptive"),
    ] = None
    budget_tokens: int | None = Field(default=None, ge=0)
    display: Annotated[Literal["summarized", "omitted"] | None, known_only()] = None


class ReasoningBody(Body):
    """The switch of Responses and OpenRouter."""

    effort: EffortField = None
    enabled: bool | None = None
    max_tokens: int | None = Field(default=None, ge=0)
    exclude: bool | None = None  # leave thinking out of the reply
    summary: Any = None  # repeated in the response


class ThinkingFields(Body):
    """How much a model thinks; see `plan_thinking`."""

    thinking: ThinkingBody | None = None
    reasoning: ReasoningBody | None = None
    reasoning_effort: EffortField = None
    enable_thinking: bool | None = None  # Qwen's and SGLang's switch
    think: bool | EffortField = None  # Ollama's switch
    # Maximum thinking tokens; -1: no limit. The other names are llama.cpp's and vLLM's.
    thinking_budget: int | None = Field(
        default=None,
        ge=-1,
        validation_alias=AliasChoices(
            "thinking_budget", "thinking_budget_tokens", "thinking_token_budget", "reasoning_budget"
        ),
    )
    include_reasoning: bool | None = None  # False: leave thinking out of the reply
    chat_template_kwargs: dict[str, Any] | None = None  # variables of the chat template


class SamplingFields(Body):
    """How tokens are sampled, and how the answer ends."""

    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    do_sample: bool | None = None  # False: greedy, as in transformers
    seed: int | None = None
    presence_penalty: float | None = Field(default=None, ge=-100, le=100)
    frequency_penalty: float | None = Field(default=None, ge=-100, le=100)
    repetition_penalty: float | None = Field(
        default=None,
        ge=0.01,
        le=100,
        validation_alias=AliasChoices("repetition_penalty", "repeat_penalty"),
    )
    repeat_last_n: int | None = Field(default=None, ge=-1)  # penalized tokens; -1: all, 0: none
    logit_bias: dict[TokenId, float] | None = None
    stop: str | list[str] | None = Field(
        default=None, validation_alias=AliasChoices("stop", "stop_sequences")
    )
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = Field(
        default=None, ge=0, validation_alias=AliasChoices("min_tokens", "min_new_tokens")
    )
    ignore_eos: bool | None = None  # continue after the end of the answer, up to the limit
    # Structured output: the names of vLLM, llama.cpp (`grammar`, `json_schema`) and Ollama.
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    grammar: str | None = None  # GBNF, or llguidance's dialect of Lark
    json_schema: dict[str, Any] | bool | None = None
    format: FormatField = None


class GenerationFields(SamplingFields, ThinkingFields):
    """All of these fields."""


_MAX_SEED = 2**32
_NEVER = -1e9  # added to a logit; a constraint can still force the token
_NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
# OpenAI's `json_object`
JSON_OBJECT = Constraint("json_schema", '{"type": "object"}')


class StreamOptions(Body):
    include_usage: bool | None = None  # in a last chunk


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


def generate_options(
    body: SamplingFields,
    service: Service,
    max_tokens: int | None,
    constraint: Constraint | None = None,
    logprobs: int | None = None,
    thinking_budget: int | None = None,
) -> GenerateOptions:
    """Return the service's default options, overridden by the request's.

    max_tokens: as requested; -1 for no limit. constraint: a constraint from fields outside `body`.
    logprobs, thinking_budget: as in `SamplingOptions` and `GenerateOptions`. Raises RequestError
    for two constraints, or a token that the model does not have.
    """
    context_length = service.engine.plan.context_length
    limit = max_tokens or service.max_tokens or context_length
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
        "seed": None if body.seed is None or body.seed == -1 else body.seed % _MAX_SEED,
        "logit_bias": tuple(bias.items()),
        "constraint": constraint,
        "logprobs": logprobs,
    }
    if body.repeat_last_n == 0:
        parameters |= _NO_PENALTIES
    elif body.repeat_last_n is not None:
        window = body.repeat_last_n
        parameters["penalty_window"] = context_length if window < 0 else window
    sampling = replace(
        service.defaults.sampling, **{name: v for name, v in parameters.items() if v is not None}
    )
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return replace(
        service.defaults,
        max_tokens=context_length if limit == -1 else limit,
        sampling=sampling,
        stop=tuple(filter(None, stop)),
        stop_tokens=stop_tokens,
        thinking_budget=thinking_budget,
        min_tokens=body.min_tokens or 0,
    )


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


def format_constraint(kind: str, schema: Any, param: str) -> Constraint | None:
    """Return the constraint for a `response_format`. param: the parameter with its schema."""
    if kind == "text":
        return None
    if kind == "json_object":
        return JSON_OBJECT
    if schema is None:
        raise invalid(param, "field required")
    return schema_constraint(schema)


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
    if constraint is None or constraint.kind != "json_schema":
        if outputs.disable_any_whitespace:
            raise invalid("structured_outputs.disable_any_whitespace", "requires a JSON schema")
        return constraint
    opens = outputs.disable_additional_properties is False
    return replace(constraint, compact=bool(outputs.disable_any_whitespace), open_objects=opens)


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


_Value = TypeVar("_Value")

# Arguments of the renderer, which are no variables of a template.
_RESERVED = (
    "messages", "conversation", "tools", "documents", "chat_template", "tokenize",
    "add_generation_prompt", "continue_final_message", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "padding", "truncation", "max_length", "tokenizer_kwargs",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ThinkingPlan:
    """How a request's answer thinks."""

    variables: dict[str, Any]  # of the chat template
    budget: int | None  # maximum thinking tokens
    shown: bool  # the reply includes thinking
    possible: bool  # the model can think


def plan_thinking(
    body: ThinkingFields, service: Service, output_effort: Effort | None = None
) -> ThinkingPlan:
    """Return the plan for a request; name an effort that has no effect.

    output_effort: Anthropic's effort, which clients send to every model. Raises RequestError.
    """
    tokenizer = service.engine.tokens.tokenizer
    template, limits = thinking_variables(tokenizer), can_limit_thinking(tokenizer)
    thinking, reasoning = body.thinking, body.reasoning
    efforts = {
        "reasoning_effort": body.reasoning_effort,
        "reasoning.effort": reasoning.effort if reasoning else None,
        "think": body.think if isinstance(body.think, str) else None,
    }
    name, effort = next(((k, v) for k, v in efforts.items() if v), ("", output_effort))
    enabled = _first(
        [
            thinking.type != "disabled" if thinking and thinking.type else None,
            body.enable_thinking,
            body.think if isinstance(body.think, bool) else None,
            reasoning.enabled if reasoning else None,
        ]
    )
    budget = _first(
        [
            body.thinking_budget,
            thinking.budget_tokens if thinking else None,
            reasoning.max_tokens if reasoning else None,
        ]
    )
    choice = choose_thinking(
        template, enabled=enabled, effort=effort, budget=budget, has_budget=limits
    )
    if name and not choice.has_effect:
        body.ignore(name)
    budget = service.defaults.thinking_budget if choice.budget is None else choice.budget
    variables = body.chat_template_kwargs or {}
    for variable in variables:
        if variable in _RESERVED:
            raise invalid(f"chat_template_kwargs.{variable}", "not a variable of a chat template")
    return ThinkingPlan(
        {**choice.variables, **variables},
        None if budget == -1 else budget,
        shows_thinking(body),
        template.thinks and budget != 0,
    )


def _first(values: Iterable[_Value | None]) -> _Value | None:
    return next((value for value in values if value is not None), None)


def shows_thinking(body: ThinkingFields) -> bool:
    """Return whether the reply includes thinking; some models think even if it is disabled."""
    if body.thinking and (body.thinking.type == "disabled" or body.thinking.display == "omitted"):
        return False
    return body.include_reasoning is not False and not (body.reasoning and body.reasoning.exclude)


_SEPARATOR = "__"


class FunctionName(Body):
    name: str


class AllowedTools(Body):
    mode: Annotated[Literal["auto", "required"] | None, known_only(any="required")] = None
    tools: list[dict[str, Any]] | None = None


class ToolChoiceBody(AllowedTools, ListEntry):
    """A choice as an object: a mode, one tool, or a list of allowed tools."""

    known_types = "auto|none|any|required|tool|function|custom|allowed_tools"

    type: str = "function"
    name: str | None = None
    namespace: str | None = None
    function: FunctionName | None = None  # Chat Completions' form of `name`
    allowed_tools: AllowedTools | None = None  # Chat Completions' form of `mode` and `tools`
    disable_parallel_tool_use: bool | None = None


ToolChoiceField = Annotated[
    Literal["none", "auto", "required"] | ToolChoiceBody | None, known_only(any="required")
]


def function_name(name: str, namespace: str | None) -> str:
    """Return the name under which the model calls a tool."""
    return f"{namespace}{_SEPARATOR}{name}" if namespace else name


def choose_tools(
    choice: str | ToolChoiceBody | None, offered: Mapping[str, _Value], param: str = "tool_choice"
) -> tuple[dict[str, _Value], ToolChoice]:
    """Return the allowed tools of the offered ones, and the choice among them.

    offered: by name. param: the parameter with the name of a tool. Raises RequestError if a chosen
    tool is not offered.
    """
    body = ToolChoiceBody(type=choice) if isinstance(choice, str) else choice
    if body is None or body.type == "auto":
        return dict(offered), ToolChoice()
    if body.type == "none":
        return dict(offered), ToolChoice("none")
    names = list(offered)
    mode: Literal["auto", "required", "named"] = "required"
    if body.type == "allowed_tools":
        allowed = body.allowed_tools or body
        names = [_name_of(each) for each in allowed.tools or ()]
        mode = allowed.mode or "auto"
    elif body.type not in ("any", "required"):
        name = body.function.name if body.function else body.name or ""
        names, mode = [function_name(name, body.namespace)], "named"
    for name in names:
        if name not in offered:
            raise RequestError(f"tool_choice: unknown tool {name[:100]!r}", param=param)
    if mode == "required" and not names:
        raise invalid("tool_choice", "requires tools")
    if mode == "named":
        return dict(offered), ToolChoice("named", names[0])
    return {name: offered[name] for name in names}, ToolChoice(mode)


def _name_of(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    inner = function if isinstance(function, dict) else tool
    return function_name(str(inner.get("name", "")), tool.get("namespace"))
