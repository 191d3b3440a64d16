"""The options of one conversation, which replace those of the settings."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from akunu_py.types import (
    MAX_TEMPERATURE,
    NO_TOKEN_LIMIT,
    THINKING_MODES,
    GenerateOptions,
    ThinkingMode,
)

MAX_SEED = (1 << 63) - 1  # SQLite and JSON keep such numbers
# The smallest and largest value of each number.
BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, MAX_TEMPERATURE),
    "max_tokens": (0, NO_TOKEN_LIMIT),
    "top_p": (0.0, 1.0),
    "seed": (0, MAX_SEED),
    "thinking_budget": (-1, NO_TOKEN_LIMIT),
}
FRACTIONS = ("temperature", "top_p")  # All other numbers are integers.


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a conversation is answered; None: as in the settings."""

    temperature: float | None = None
    max_tokens: int | None = None  # 0: the room left in the context
    top_p: float | None = None
    seed: int | None = None  # None: random
    thinking: ThinkingMode = "default"
    thinking_budget: int | None = None  # maximum thinking tokens; -1: no limit

    def apply(self, options: GenerateOptions) -> GenerateOptions:
        """Return `options` with the values of this conversation."""
        sampling = {
            name: value
            for name in ("temperature", "top_p", "seed")
            if (value := getattr(self, name)) is not None
        }
        changed: dict[str, Any] = {"sampling": replace(options.sampling, **sampling)}
        if self.max_tokens is not None:
            changed["max_tokens"] = self.max_tokens or NO_TOKEN_LIMIT
        if self.thinking_budget is not None:
            changed["thinking_budget"] = None if self.thinking_budget < 0 else self.thinking_budget
        return replace(options, thinking=self.thinking, **changed)

    def as_dict(self) -> dict[str, Any]:
        """Return the values that differ from the defaults."""
        defaults = asdict(ChatOptions())
        return {name: value for name, value in asdict(self).items() if value != defaults[name]}


def options_of(values: object) -> ChatOptions:
    """Return the options in a stored object; ignore unknown names and invalid values."""
    if not isinstance(values, Mapping):
        return ChatOptions()
    names = {field.name for field in fields(ChatOptions)} & values.keys()
    return ChatOptions(**{name: values[name] for name in names if is_in_bounds(name, values[name])})


def is_in_bounds(name: str, value: object) -> bool:
    if name == "thinking":
        return value in THINKING_MODES
    kinds = (int, float) if name in FRACTIONS else (int,)
    least, most = BOUNDS[name]
    return type(value) in kinds and least <= value <= most  # type: ignore[operator]
