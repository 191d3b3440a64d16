"""Whether a model thinks before it answers, and how much, as its chat template can be told.

Templates have a switch (`enable_thinking` of Qwen 3, GLM 4.5 and others; `thinking` of DeepSeek
V3.1 and Granite), degrees (`reasoning_effort` of gpt-oss), both or neither. What one has is found
out by rendering a short conversation with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

from akunu_py.decoding.chat_format import chat_template
from akunu_py.errors import UnsupportedModel

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

_SWITCHES = ("enable_thinking", "thinking")
_DEGREES = "reasoning_effort"
# Of those that clients know, what templates do.
_NEAREST = {"minimal": "low", "xhigh": "high", "max": "high"}
_PROBE = [{"role": "user", "content": "probe"}]


@dataclass(frozen=True, slots=True)
class ThinkingVariables:
    """What a template can be told. thinks: whether its model does. switch: the name of
    the variable that is true or false, "" for none. degrees: whether it has some."""

    thinks: bool = False
    switch: str = ""
    degrees: bool = False

    def off(self) -> dict[str, Any] | None:
        """The variables for no thinking; None where that cannot be had."""
        if self.switch:
            return {self.switch: False}
        return None if self.thinks or self.degrees else {}

    def on(self, effort: Effort | None = None) -> dict[str, Any] | None:
        """Those for thinking, to a degree where one is given; None where nothing comes of it."""
        found: dict[str, Any] = {self.switch: True} if self.switch else {}
        if self.degrees and effort:
            found[_DEGREES] = _NEAREST.get(effort, effort)
        return found or None

    def of(self, effort: Effort | None) -> dict[str, Any] | None:
        """Those for what a request says; none for nothing. None where it cannot be honoured."""
        if effort is None:
            return {}
        return self.off() if effort == "none" else self.on(effort)


_known: WeakKeyDictionary[Any, ThinkingVariables] = WeakKeyDictionary()


def thinking_variables(tokenizer: Any) -> ThinkingVariables:
    """Found out once for a tokenizer."""
    if tokenizer not in _known:
        _known[tokenizer] = _found(tokenizer)
    return _known[tokenizer]


def _found(tokenizer: Any) -> ThinkingVariables:
    thinks = bool(tokenizer.has_thinking)
    if not tokenizer.has_chat_template:
        return ThinkingVariables(thinks)
    own = tokenizer.has_own_renderer
    template = "" if own else str(tokenizer.get_chat_template())

    def matters(name: str, one: Any, other: Any) -> bool:
        if not own and name not in template:
            return False
        try:
            texts = {
                chat_template.render(tokenizer, _PROBE, "", variables={name: value})
                for value in (one, other)
            }
        except UnsupportedModel:
            return False
        return len(texts) == 2

    switch = next((name for name in _SWITCHES if matters(name, True, False)), "")
    return ThinkingVariables(thinks, switch, matters(_DEGREES, "low", "high"))
