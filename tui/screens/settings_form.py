"""The settings of the running chat, and the form that edits the settings file."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.widgets import Checkbox, Input, Label, Select, Static, TextArea

from akunu_py.settings import Settings, save_settings, settings_file
from akunu_py.text import typeable
from akunu_py.tui import themes
from akunu_py.tui.prompt.slash_commands import argument_choices
from akunu_py.tui.screens.dialog import DIALOG_STYLE, FormDialog, form_row, form_select
from akunu_py.tui.screens.main import ChatView
from akunu_py.tui.status import report_errors
from akunu_py.types import MAX_TEMPERATURE, GenerateOptions

_NO_PERSONA = ""  # the name of the plain system prompt
_SERVER = "auto, off or http://HOST:PORT"
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

    @property
    def persona_label(self) -> str:
        """The persona or "system prompt"; "" for neither."""
        return self.current.persona or ("system prompt" if self.current.system_prompt else "")

    def apply(self, settings: Settings) -> None:
        """Use `settings` from now on."""
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

    def use_persona(self, name: str = "") -> None:
        """Use a persona; "none" is the plain system prompt, and "" lists the personas."""
        names = ", ".join(self.current.personas) or "none (/settings adds them)"
        if not name:
            self._view.inform(f"Personas: {names}")
        elif name != "none" and name not in self.current.personas:
            self._view.show_error(f"no persona {name!r}; personas: {names}")
        else:
            self.apply(replace(self.current, persona="" if name == "none" else name))
            self._view.inform(f"Persona from now on: {name}")

    def use_system_prompt(self, text: str = "") -> None:
        self.apply(replace(self.current, persona="", system_prompt=text))
        self._view.inform("System prompt set." if text else "System prompt removed.")

    def use_theme(self, name: str) -> None:
        """Use and save a theme."""
        names = themes.choices()
        if name in names:
            self.apply(replace(self.current, theme=name))
            self._show_theme(name)
            with report_errors(self._view.show_error):
                save_settings({"theme": name})
        else:
            self._view.show_error(f"no theme {name!r}; themes: {', '.join(names)}")


class SettingsScreen(FormDialog[Settings]):
    """The settings form. The result is the saved settings, None if Ctrl+S was not pressed."""

    CSS_PATH = [DIALOG_STYLE, "settings_form.tcss"]  # noqa: RUF012 - as in Textual
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", "Close without saving"),
        Binding("ctrl+s", "save", "Save", priority=True),
        Binding("ctrl+n", "new_persona", "New persona", priority=True),
        Binding("ctrl+d", "delete_persona", "Delete the persona", priority=True),
    ]

    def __init__(self, settings: Settings, show_theme: Callable[[str], None]) -> None:
        super().__init__()
        self._settings = settings
        self._show_theme = show_theme  # previews a theme, undone without Ctrl+S
        self._personas = {_NO_PERSONA: settings.system_prompt} | settings.personas
        self._persona = settings.persona

    def compose(self) -> ComposeResult:
        now = self._settings
        with self.frame("Settings", "Ctrl+S save · Esc close"):
            with VerticalScroll(id="form", can_focus=False):
                yield form_row(
                    "Model", form_select(_models(now.model), now.model, "model"), joined=True
                )
                small = now.draft_model
                choices = [("akunu alone", ""), *_models(small)]
                yield form_row("Draft model", form_select(choices, small, "draft-model"))
                temperature = Input(
                    f"{now.temperature:g}",
                    id="temperature",
                    compact=True,
                    restrict=r"[0-9.,]*",
                    max_length=6,
                )
                note = f"0 to {MAX_TEMPERATURE:g}; higher is more varied"
                yield form_row("Temperature", temperature, note, joined=True)
                yield Horizontal(
                    Label("Answer limit"),
                    _number(now.max_tokens, "max-tokens"),
                    Label("0: none   Thinking ", classes="note"),
                    _number(now.thinking_budget, "thinking-budget"),
                    Label("-1: none", classes="note"),
                    classes="row joined",
                )
                yield form_row("Persona", form_select(self._names(), self._persona, "persona"))
                yield Input(
                    id="name", placeholder="Name of the new persona, then Enter", compact=True
                )
                yield Label("System prompt", classes="above")
                prompt = TextArea(self._personas[self._persona], id="system", compact=True)
                prompt.placeholder = "None: the model's default"
                yield prompt
                yield form_row("Theme", form_select(_themes(now.theme), now.theme, "theme"))
                server = Input(now.server, placeholder=_SERVER, id="server", compact=True)
                yield form_row("Server", server, "at start: auto, off, http://...", joined=True)
                for row in _CHECKBOXES:
                    boxes = (
                        PlainCheckbox(label, getattr(now, name), id=name, compact=True)
                        for name, label in row.items()
                    )
                    yield Horizontal(*boxes, classes="checks")
            yield Static(id="say")

    def on_mount(self) -> None:
        self.query_one("#name", Input).display = False
        self.query_one("#system", TextArea).cursor_blink = self.app.animation_level == "full"
        self.say(f"Ctrl+N new persona · Ctrl+D delete persona\n{settings_file()}")

    # Keys

    def action_close(self) -> None:
        name = self.query_one("#name", Input)
        if name.display:
            name.display = False
            self.query_one("#persona").focus()
            return
        self._show_theme(self._settings.theme)
        self.dismiss(None)

    async def action_save(self) -> None:
        """Save the changed settings and close, or show the first error."""
        if self.query_one("#name", Input).display and not self._add_persona():
            return
        self._store_prompt()
        text = self.query_one("#temperature", Input).value
        temperature: float | str = text  # `save_settings` rejects text.
        with contextlib.suppress(ValueError):
            temperature = float(text.replace(",", "."))
        personas = {name: text for name, text in self._personas.items() if name != _NO_PERSONA}
        changes = {
            "model": self._value("#model"),
            "draft_model": self._value("#draft-model"),
            "temperature": temperature,
            "max_tokens": self._integer("#max-tokens"),
            "thinking_budget": self._integer("#thinking-budget"),
            "system_prompt": self._personas[_NO_PERSONA],
            "personas": personas,
            "persona": self._persona,
            "theme": self._value("#theme"),
            "server": self.query_one("#server", Input).value.strip(),
            **{each.id: each.value for each in self.query(PlainCheckbox) if each.id},
        }
        changed = {
            name: new for name, new in changes.items() if new != getattr(self._settings, name)
        }
        with report_errors(lambda error: self.say(error, wrong=True)):
            # In a thread: a slow disk must not delay an incoming answer.
            self.dismiss(await asyncio.to_thread(save_settings, changed))

    def action_new_persona(self) -> None:
        name = self.query_one("#name", Input)
        name.value = ""
        name.display = True
        name.focus()

    def action_delete_persona(self) -> None:
        if self._persona == _NO_PERSONA:
            self.say("The plain system prompt cannot be deleted; clear it instead.", wrong=True)
            return
        del self._personas[self._persona]
        self._persona = _NO_PERSONA
        self._offer_personas()

    # Changes

    @on(Input.Submitted, "#name")
    def _name_persona(self) -> None:
        if self._add_persona():
            self.query_one("#system").focus()

    @on(Input.Blurred, "#name")
    def _name_persona_on_tab(self, event: Input.Blurred) -> None:
        if event.input.display and event.value.strip():
            self._add_persona()

    def _add_persona(self) -> bool:
        """Add and select the persona named in the form; return False if the name is wrong."""
        field = self.query_one("#name", Input)
        name = typeable(field.value).strip()
        if not name or name in self._personas:
            problem = f"Persona {name!r} already exists." if name else "Enter a name."
            self.say(problem, wrong=True)
            return False
        self._store_prompt()
        self._personas[name] = ""
        self._persona = name
        field.display = False
        self._offer_personas()
        return True

    @on(Select.Changed, "#persona")
    def _use_persona(self, event: Select.Changed) -> None:
        if event.value != self._persona and event.value in self._personas:
            self._store_prompt()
            self._persona = str(event.value)
            self.query_one("#system", TextArea).text = self._personas[self._persona]

    @on(Select.Changed, "#theme")
    def _preview(self, event: Select.Changed) -> None:
        self._show_theme(str(event.value))

    @on(Input.Submitted, "#temperature")
    @on(Input.Submitted, "#max-tokens")
    @on(Input.Submitted, "#thinking-budget")
    @on(Input.Submitted, "#server")
    async def _save_on_enter(self) -> None:
        await self.action_save()

    def _offer_personas(self) -> None:
        select = self.query_one("#persona", Select)
        with self.prevent(Select.Changed):
            select.set_options(self._names())
            select.value = self._persona
        self.query_one("#system", TextArea).text = self._personas[self._persona]

    def _store_prompt(self) -> None:
        """Store the edited text in the selected persona."""
        self._personas[self._persona] = typeable(self.query_one("#system", TextArea).text)

    def _names(self) -> list[tuple[str, str]]:
        return [(name or "none", name) for name in self._personas]

    def _value(self, selector: str) -> str:
        return str(self.query_one(selector, Select).value)

    def _integer(self, selector: str) -> int | str:
        """Return the number in a field, or its text, which `save_settings` rejects."""
        text = self.query_one(selector, Input).value
        with contextlib.suppress(ValueError):
            return int(text)
        return text


class PlainCheckbox(Checkbox):
    """A checkbox that is empty when off; Textual's differs only in color."""

    def render(self) -> Content:
        style = self.get_visual_style("toggle--button", partial=True)
        words = self.get_visual_style("toggle--label", partial=True)
        mark = "[x]" if self.value else "[ ]"
        return Content.assemble((mark, style), " ", self.label.stylize_before(words))


def _number(value: int, name: str) -> Input:
    return Input(str(value), id=name, compact=True, restrict=r"-?[0-9]*", max_length=9)


def _models(current: str) -> list[tuple[str, str]]:
    """Return the stored models, and the configured one."""
    return [(name, name) for name in dict.fromkeys([current, *argument_choices("model")]) if name]


def _themes(current: str) -> list[tuple[str, str]]:
    names = dict.fromkeys([*themes.choices(), current])
    return [(themes.describe(name), name) for name in names]
