"""The settings of the running chat, and the form for them and for its options."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Checkbox, Input, Label, Select, Static, TextArea

from akunu_py.chats.options import BOUNDS, FRACTIONS, ChatOptions, is_in_bounds
from akunu_py.settings import Settings, save_settings, settings_file
from akunu_py.text import displayable, typeable
from akunu_py.tui import themes
from akunu_py.tui.prompt.slash_commands import argument_choices
from akunu_py.tui.screens.dialog import DIALOG_STYLE, Dialog
from akunu_py.tui.screens.main import ChatView
from akunu_py.tui.status import report_errors
from akunu_py.types import NO_TOKEN_LIMIT, THINKING_MODES, GenerateOptions

_NO_PERSONA = ""  # the name of the plain system prompt
_NEW_PERSONA = "\n"  # no persona has this name
_NUMBERS = {  # labels and notes
    "temperature": ("Temperature", "0 to 5; higher is freer"),
    "top_p": ("Top-p", "0 to 1; 1 keeps all words"),
    "seed": ("Seed", "same seed, same answer"),
    "max_tokens": ("Answer limit", "tokens; 0: the room left"),
    "thinking_budget": ("Thinking limit", "tokens; -1: no limit"),
}
_THINKING = {
    "default": "as the model does",
    "on": "on",
    "off": "off",
    "low": "low effort",
    "medium": "medium effort",
    "high": "high effort",
}
_CHECKBOXES = (  # rows of labels, by setting
    {"answer_cache": "Learn from answers, for faster drafts (from the next start)"},
    {"model_titles": "Let the model title chats", "reduced_motion": "Reduce motion"},
    {"bell": "Ring when a long answer finishes in the background"},
)


@dataclass(eq=False)
class SettingsController:
    """Changes the settings of this run; the settings screen and themes write the file."""

    current: Settings  # for the next answer, like `options`
    options: GenerateOptions
    _view: ChatView
    _show_theme: Callable[[str], None]

    def apply(self, settings: Settings) -> None:
        before = self.current
        if settings.temperature != before.temperature:
            sampling = replace(self.options.sampling, temperature=settings.temperature)
            self.options = replace(self.options, sampling=sampling)
        if settings.max_tokens != before.max_tokens:
            self.options = replace(self.options, max_tokens=settings.token_limit)
        if settings.thinking_budget != before.thinking_budget:
            self.options = replace(self.options, thinking_budget=settings.thinking_limit)
        self.current = settings
        self._view.show_state()

    def use_theme(self, name: str) -> None:
        names = themes.choices()
        if name in names:
            self.apply(replace(self.current, theme=name))
            self._show_theme(name)
            with report_errors(self._view.show_error):
                save_settings({"theme": name})
        else:
            self._view.show_error(f"no theme {name!r}; themes: {', '.join(names)}")


class SettingsScreen(Dialog[tuple[ChatOptions, Settings]]):
    """The form. The result: the chat's options and saved settings; None if not saved."""

    CSS_PATH = [DIALOG_STYLE, "settings_form.tcss"]  # noqa: RUF012 - as in Textual
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", "Close without saving"),
        Binding("ctrl+s", "save", "Save", priority=True),
    ]

    def __init__(self, chat: ChatOptions, settings: Settings, defaults: GenerateOptions) -> None:
        super().__init__()
        self._chat = chat
        self._settings = settings
        self._defaults = defaults  # of the command line and the settings, shown in empty fields
        self._prompts = {_NO_PERSONA: settings.system_prompt} | settings.personas
        self._persona = settings.persona

    def compose(self) -> ComposeResult:
        now = self._settings
        with self.frame("Settings", "Ctrl+S save · Esc close"):
            with VerticalScroll(id="form", can_focus=False):
                heads = (Label(words, classes="head") for words in ("this chat", "all chats"))
                yield Horizontal(Label(), *heads, classes="row")
                for name, (label, note) in _NUMBERS.items():
                    field = _number(f"chat-{name}", name, getattr(self._chat, name))
                    field.placeholder = self._default(name)
                    other: Widget = Label(classes="head")
                    if hasattr(now, name):
                        other = _number(name, name, getattr(now, name))
                    yield _row(label, field, other, note=note)
                modes = [(_THINKING[mode], mode) for mode in THINKING_MODES]
                yield _row("Thinking", _select(modes, self._chat.thinking, "thinking"), gap=True)
                yield _row("Model", _select(_models(now.model), now.model, "model"))
                drafters = [("akunu alone", ""), *_models(now.draft_model, "draft_model")]
                yield _row("Draft model", _select(drafters, now.draft_model, "draft_model"))
                personas = [(name or "none", name) for name in self._prompts]
                personas.append(("a new one", _NEW_PERSONA))
                yield _row("Persona", _select(personas, self._persona, "persona"))
                yield Input(id="name", placeholder="Name of the new persona", compact=True)
                yield Label("System prompt; an empty one deletes its persona", classes="note")
                prompt = TextArea(self._prompts[self._persona], id="system", compact=True)
                prompt.placeholder = "None: the model's default"
                yield prompt
                colors = dict.fromkeys([*themes.choices(), now.theme])
                described = [(themes.describe(name), name) for name in colors]
                yield _row("Theme", _select(described, now.theme, "theme"))
                server = Input(now.server, id="server", compact=True)
                server.placeholder = "auto, off or http://HOST:PORT"
                yield _row("Server", server, note="auto, off or http://...", gap=True)
                for row in _CHECKBOXES:
                    boxes = (
                        PlainCheckbox(label, getattr(now, name), id=name, compact=True)
                        for name, label in row.items()
                    )
                    yield Horizontal(*boxes, classes="checks")
            yield Static(id="say")  # a hint, or what is wrong

    def on_mount(self) -> None:
        self.query_one("#name").display = False
        self.query_one("#system", TextArea).cursor_blink = self.app.animation_level == "full"
        self._say(f"Empty fields of this chat follow those of all chats.\n{settings_file()}")

    @on(Input.Submitted)
    async def action_save(self) -> None:
        """Save the changed settings and close, or show the first error."""
        try:
            options = {name: self._parse(f"chat-{name}", name) for name in _NUMBERS}
            changes = self._changes()
        except ValueError as error:
            self._say(str(error), wrong=True)
            return
        chat: Any = options | {"thinking": self.query_one("#thinking", Select).value}
        with report_errors(lambda error: self._say(error, wrong=True)):
            # In a thread: a slow disk must not delay an incoming answer.
            settings = await asyncio.to_thread(save_settings, changes) if changes else None
            self.dismiss((ChatOptions(**chat), settings or self._settings))

    @on(Select.Changed, "#persona")
    def _show_persona(self, event: Select.Changed) -> None:
        if event.value != self._persona:
            prompt, name = self.query_one("#system", TextArea), self.query_one("#name", Input)
            self._prompts[self._persona] = typeable(prompt.text)
            self._persona = str(event.value)
            prompt.text = self._prompts.get(self._persona, "")
            name.display = self._persona == _NEW_PERSONA
            if name.display:
                name.focus()

    def _changes(self) -> dict[str, Any]:
        """Return the changed settings. Raises ValueError with what is wrong."""
        values: dict[str, Any] = {"server": self.query_one("#server", Input).value.strip()}
        for name in ("temperature", "max_tokens", "thinking_budget"):
            number = self._parse(name, name)
            values[name] = getattr(Settings(), name) if number is None else number
        for name in ("model", "draft_model", "theme"):
            values[name] = str(self.query_one(f"#{name}", Select).value)
        values |= {each.id: each.value for each in self.query(PlainCheckbox) if each.id}
        text = typeable(self.query_one("#system", TextArea).text)
        prompts, persona = self._prompts | {self._persona: text}, self._persona
        prompts.pop(_NEW_PERSONA, None)
        if persona == _NEW_PERSONA:
            persona = typeable(self.query_one("#name", Input).value).strip()
            if persona in self._settings.personas:
                raise ValueError(f"Persona {persona!r} already exists.")
            if not (persona and text):
                raise ValueError("Enter a name and a system prompt for the new persona.")
            prompts[persona] = text
        values["system_prompt"] = prompts.pop(_NO_PERSONA)
        values["personas"] = {name: text for name, text in prompts.items() if text}
        values["persona"] = persona if persona in values["personas"] else _NO_PERSONA
        before = self._settings
        return {name: new for name, new in values.items() if new != getattr(before, name)}

    def _parse(self, field_id: str, name: str) -> float | int | None:
        field = self.query_one(f"#{field_id}", Input)
        try:
            return parse_option(name, field.value)
        except ValueError as error:
            field.focus()
            raise ValueError(f"{_NUMBERS[name][0]}: {error}") from error

    def _default(self, name: str) -> str:
        of_sampling = name in ("temperature", "top_p", "seed")
        value = getattr(self._defaults.sampling if of_sampling else self._defaults, name)
        if value is None or value == NO_TOKEN_LIMIT:
            return "random" if name == "seed" else "none"
        return f"{value:g}" if name in FRACTIONS else str(value)

    def _say(self, text: str, *, wrong: bool = False) -> None:
        line = self.query_one("#say", Static)
        line.set_class(wrong, "wrong")
        line.update(Content(displayable(text)))


class PlainCheckbox(Checkbox):
    """A checkbox that is empty when off; Textual's differs only in color."""

    def render(self) -> Content:
        style = self.get_visual_style("toggle--button", partial=True)
        words = self.get_visual_style("toggle--label", partial=True)
        mark = "[x]" if self.value else "[ ]"
        return Content.assemble((mark, style), " ", self.label.stylize_before(words))


def parse_option(name: str, text: str) -> float | int | None:
    """Return the number in a field, None if empty. Raises ValueError with the reason."""
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


def _number(field_id: str, name: str, value: float | int | None) -> Input:
    return Input(
        "" if value is None else f"{value:g}" if name in FRACTIONS else str(value),
        restrict=r"[0-9.,]*" if name in FRACTIONS else r"-?[0-9]*",
        max_length=20,
        id=field_id,
        classes="number",
        compact=True,
    )


def _row(label: str, *fields: Widget, note: str = "", gap: bool = False) -> Horizontal:
    notes = [Label(note, classes="note")] if note else []
    return Horizontal(Label(label), *fields, *notes, classes="row gap" if gap else "row")


def _select(options: Iterable[tuple[str, str]], value: str, name: str) -> Select[str]:
    return Select(options, value=value, allow_blank=False, compact=True, id=name)


def _models(current: str, setting: str = "model") -> list[tuple[str, str]]:
    return [(name, name) for name in dict.fromkeys([current, *argument_choices(setting)]) if name]
