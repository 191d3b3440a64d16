"""Tool calls in an answer, and their form in the database and in exports."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from akunu_py.types import Message, ToolCall

Outcome = Literal["waiting", "running", "done", "failed", "denied", "stopped"]

_NO_RESULT = "The call was stopped before it had a result."
_RESULTS: dict[Outcome, str] = {  # for the model, instead of a result
    "denied": "The user did not allow this call.",
    "waiting": _NO_RESULT,
    "running": _NO_RESULT,
    "stopped": _NO_RESULT,
}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A call that a model made, and its outcome."""

    call: ToolCall
    server: str = ""  # that has the tool; "" if there is no such tool
    outcome: Outcome = "waiting"
    result: str = ""  # or the error

    @property
    def has_ended(self) -> bool:
        return self.outcome not in ("waiting", "running")

    @property
    def shown_result(self) -> str:
        """The result for the model."""
        return _RESULTS.get(self.outcome, self.result)


@dataclass(frozen=True, slots=True)
class ToolRound:
    """The part of an answer up to its next tool calls, and these calls."""

    text: str
    uses: tuple[ToolUse, ...]
    thinking: str = ""


def stopped(tool_round: ToolRound) -> ToolRound:
    """Return the round with its unfinished calls stopped, as after a kill or a cancellation."""
    uses = (use if use.has_ended else replace(use, outcome="stopped") for use in tool_round.uses)
    return replace(tool_round, uses=tuple(uses))


def messages_of(rounds: Iterable[ToolRound], *, thinking: bool = False) -> list[Message]:
    """Return the messages of the rounds for a model. thinking: include the thinking."""
    messages = []
    for each in rounds:
        calls = tuple(use.call for use in each.uses)
        thought = each.thinking if thinking else ""
        messages.append(Message("assistant", each.text, thought, calls))
        messages += [
            Message("tool", use.shown_result, tool_call_id=use.call.id, name=use.call.name)
            for use in each.uses
        ]
    return messages


def as_values(rounds: Iterable[ToolRound]) -> list[dict[str, Any]]:
    """Return the rounds as JSON values for `rounds_of`."""
    return [
        {
            "text": each.text,
            "thinking": each.thinking,
            "calls": [
                asdict(use.call)
                | {"server": use.server, "outcome": use.outcome, "result": use.result}
                for use in each.uses
            ],
        }
        for each in rounds
    ]


def rounds_of(values: Any) -> tuple[ToolRound, ...]:
    """Parse the values of `as_values`. Raises ValueError if they are invalid."""
    return tuple(_round_of(each) for each in _checked(values, list))


def _round_of(values: Any) -> ToolRound:
    text, thinking = (_text(values, name) for name in ("text", "thinking"))
    calls = _checked(values.get("calls"), list)
    return ToolRound(text, tuple(map(_use_of, calls)), thinking)


def _use_of(values: Any) -> ToolUse:
    names = ("name", "arguments", "id", "server", "result")
    name, arguments, call_id, server, result = (_text(values, each) for each in names)
    outcome = values.get("outcome")
    if outcome not in get_args(Outcome):
        raise ValueError(f"expected an outcome, found {str(outcome)[:40]!r}")
    return ToolUse(ToolCall(name, arguments, call_id), server, outcome, result)


def _text(values: Any, name: str) -> str:
    return str(_checked(_checked(values, dict).get(name), str))


def _checked(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"expected a {kind.__name__} in rounds, found {str(value)[:40]!r}")
    return value
