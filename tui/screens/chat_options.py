"""The options of the open chat: sampling, limits and thinking, in one dialog."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import Input, Select, Static

from akunu_py.chats.options import BOUNDS, FRACTIONS, ChatOptions, is_in_bounds
from akunu_py.tui.screens.dialog import DIALOG_STYLE, FormDialog, form_row, form_select
from akunu_py.types import NO_TOKEN_LIMIT, THINKING_MODES, GenerateOptions


@dataclass(frozen=True, slots=True)
class _Number:
    """A number in the form."""

    label: str
    note: str
    default: str = ""  # shown for an empty field without a default value


_NUMBERS = {
    "temperature": _Number("Temperature", "0 to 5; higher is more varied"),
    "top_p": _Number("Top-p", "0 to 1; lower drops unlikely words"),
    "seed": _Number("Seed", "same seed, same answer", "random"),
    "max_tokens": _Number("Answer limit", "tokens; 0: the room left", "none"),
    "thinking_budget": _Number("Thinking limit", "tokens; -1: no limit", "none"),
}
_THINKING = {
    "default": "as the model does",
    "on": "on",
    "off": "off",
    "low": "low effort",
    "medium": "medium effort",
    "high": "high effort",
}


class ChatOptionsScreen(FormDialog[ChatOptions]):
    """The form. The result is the new options, None if Ctrl+S or Enter was not pressed."""

    CSS_PATH = [DIALOG_STYLE, "chat_options.tcss"]  # noqa: RUF012 - as in Textual
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+s", "save", "Use these options", priority=True),
        Binding("ctrl+d", "reset", "Empty all fields", priority=True),
    ]

    def __init__(self, options: ChatOptions, defaults: GenerateOptions) -> None:
        super().__init__()
        self._options = options
        self._defaults = _as_texts(defaults)  # shown in empty fields

    def compose(self) -> ComposeResult:
        with self.frame("Options of this chat", "Enter use · Ctrl+D reset all · Esc close"):
            with VerticalScroll(id="form", can_focus=False):
                for name in ("temperature", "top_p", "seed", "max_tokens"):
                    yield self._row(name)
                modes = [(_THINKING[mode], mode) for mode in THINKING_MODES]
                select = form_select(modes, self._options.thinking, "thinking")
                yield form_row("Thinking", select)
                yield self._row("thinking_budget")
            yield Static("Empty fields follow the settings (Ctrl+S in the chat).", id="say")

    def _row(self, name: str) -> Horizontal:
        number = _NUMBERS[name]
        value = getattr(self._options, name)
        field = Input(
            "" if value is None else f"{value:g}" if name in FRACTIONS else str(value),
            placeholder=self._defaults.get(name) or number.default,
            restrict=r"[0-9.,]*" if name in FRACTIONS else r"-?[0-9]*",
            max_length=20,
            id=name,
            compact=True,
        )
        return form_row(number.label, field, number.note)

    @on(Input.Submitted)
    def action_save(self) -> None:
        values: dict[str, Any] = {"thinking": self.query_one("#thinking", Select).value}
        for name in _NUMBERS:
            field = self.query_one(f"#{name}", Input)
            try:
                values[name] = parse_option(name, field.value)
            except ValueError as error:
                field.focus()
                self.say(f"{_NUMBERS[name].label}: {error}", wrong=True)
                return
        self.dismiss(ChatOptions(**values))

    def action_reset(self) -> None:
        for field in self.query(Input):
            field.value = ""
        self.query_one("#thinking", Select).value = "default"


def parse_option(name: str, text: str) -> float | int | None:
    """Return the number in a field; None if it is empty. Raises ValueError with the reason."""
    text = text.strip().replace(",", ".")
    if not text:
        return None
    least, most = BOUNDS[name]
    kind = "a number" if name in FRACTIONS else "an integer"
    try:
        value = float(text) if name in FRACTIONS else int(text)
    except ValueError:
        value = None
    if not is_in_bounds(name, value):
        bounds = f"from {least:g} to {most:g}" if most <= 10 else f"of {least:g} or more"
        if most > 10 and value is not None and value > most:
            bounds = f"of at most {most}"
        raise ValueError(f"expected {kind} {bounds}, found {text!r}")
    return value


def _as_texts(options: GenerateOptions) -> Mapping[str, str]:
    """Return the values of the settings and the command line, as shown in empty fields."""
    sampling = options.sampling
    limit, budget = options.max_tokens, options.thinking_budget
    return {
        "temperature": f"{sampling.temperature:g}",
        "top_p": f"{sampling.top_p:g}",
        "seed": "" if sampling.seed is None else str(sampling.seed),
        "max_tokens": "" if limit == NO_TOKEN_LIMIT else str(limit),
        "thinking_budget": "" if budget is None else str(budget),
    }
