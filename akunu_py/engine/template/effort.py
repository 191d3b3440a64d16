"""Reasoning effort: the variables of chat templates that control thinking.

Templates have a switch (`enable_thinking` of Qwen 3, GLM 4.5 and others; `thinking` of DeepSeek
V3.1 and Granite), degrees (`reasoning_effort` of gpt-oss), both or neither. Rendering a short
conversation with different values shows which.
"""

from dataclasses import dataclass
from typing import Any, Literal

from akunu_py.engine.template import chat_template
from akunu_py.errors import UnsupportedModel
from akunu_py.weak_cache import cached_weakly

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra"]

_SWITCHES = ("enable_thinking", "thinking")
_EFFORT = "reasoning_effort"
# Efforts that templates accept, by the efforts in requests.
_NEAREST_EFFORT = {"minimal": "low", "xhigh": "high", "max": "high", "ultra": "high"}
# Thinking tokens where the template has no efforts; Google's values for low, medium and high.
EFFORT_BUDGETS: dict[Effort, int] = {
    "none": 0,
    "minimal": 512,
    "low": 1024,
    "medium": 8192,
    "high": 24_576,
}
_PROBE = [{"role": "user", "content": "probe"}]


@dataclass(frozen=True, slots=True)
class ThinkingVariables:
    """The variables of a chat template that control thinking."""

    thinks: bool = False  # whether the model thinks
    switch: str = ""  # name of the variable that turns thinking on and off, "" for none
    degrees: bool = False  # whether it has `reasoning_effort`


@dataclass(frozen=True, slots=True)
class ThinkingChoice:
    """How one answer thinks."""

    variables: dict[str, Any]  # of the chat template
    budget: int | None  # maximum thinking tokens
    has_effect: bool  # the model can do as requested


def choose_thinking(
    template: ThinkingVariables,
    *,
    enabled: bool | None,
    effort: Effort | None,
    budget: int | None,
    has_budget: bool,
) -> ThinkingChoice:
    """Return how an answer thinks. None: not requested. has_budget: its thinking can be ended."""
    wanted = enabled is not False and effort != "none"
    variables: dict[str, Any] = {}
    if template.switch and (enabled or effort or not wanted):
        variables[template.switch] = wanted
    if not wanted:
        always = not template.switch and (template.thinks or template.degrees)
        cut = always and has_budget
        return ThinkingChoice(variables, 0 if cut else budget, not always or has_budget)
    if template.degrees and effort:
        variables[_EFFORT] = _NEAREST_EFFORT.get(effort, effort)
    if not effort or template.degrees:
        return ThinkingChoice(variables, budget, has_effect=True)
    if has_budget and budget is None:
        budget = EFFORT_BUDGETS.get(effort)
    return ThinkingChoice(variables, budget, bool(variables) or has_budget)


@cached_weakly
def thinking_variables(tokenizer: Any) -> ThinkingVariables:
    """Return the variables that control thinking in a tokenizer's chat template."""
    thinks = bool(tokenizer.has_thinking)
    if not tokenizer.has_chat_template:
        return ThinkingVariables(thinks)
    own_renderer = tokenizer.has_own_renderer
    template = "" if own_renderer else str(tokenizer.get_chat_template())

    def has_effect(name: str, first: Any, second: Any) -> bool:
        if not own_renderer and name not in template:
            return False
        try:
            texts = {
                chat_template.render(tokenizer, _PROBE, "", variables={name: value})
                for value in (first, second)
            }
        except UnsupportedModel:
            return False
        return len(texts) == 2

    switch = next((name for name in _SWITCHES if has_effect(name, True, False)), "")
    return ThinkingVariables(thinks, switch, has_effect(_EFFORT, "low", "high"))
