"""What a request says about thinking: the chat template's variables, and a budget of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from akunu_py.decoding.chat_format.effort import Effort, choose_thinking, thinking_variables
from akunu_py.decoding.constraint.answer_limits import can_limit_thinking
from akunu_py.serve.dialect.fields import ThinkingFields
from akunu_py.serve.dialect.request_errors import invalid
from akunu_py.serve.dialect.service import Service

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
            thinking.type != "disabled" if thinking else None,
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
    return ThinkingPlan(
        {**choice.variables, **_template_variables(body)},
        None if budget == -1 else budget,
        shows_thinking(body),
        template.thinks and budget != 0,
    )


def _first(values: Iterable[_Value | None]) -> _Value | None:
    """Return the first value that is not None."""
    return next((value for value in values if value is not None), None)


def _template_variables(body: ThinkingFields) -> dict[str, Any]:
    variables = body.chat_template_kwargs or {}
    for name in variables:
        if name in _RESERVED:
            raise invalid(f"chat_template_kwargs.{name}", "not a variable of a chat template")
    return variables


def shows_thinking(body: ThinkingFields) -> bool:
    """Return whether the reply includes thinking; some models think even if it is disabled."""
    if body.thinking and (body.thinking.type == "disabled" or body.thinking.display == "omitted"):
        return False
    return body.include_reasoning is not False and not (body.reasoning and body.reasoning.exclude)
