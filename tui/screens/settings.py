"""The settings of the running chat, and the form that writes settings.toml."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.widgets import Checkbox, Input, Label, Select, Static, TextArea

from akunu_py.errors import AkunuError
from akunu_py.settings import MAX_TEMPERATURE, Settings, save_settings, settings_file
from akunu_py.text import displayable, typeable
from akunu_py.tui import themes
from akunu_py.tui.prompt.slash_commands import choices_of
from akunu_py.tui.screens.dialog import DIALOG_STYLE, Dialog
from akunu_py.tui.screens.main import ChatView
from akunu_py.types import GenerateOptions

_NO_PERSONA = ""  # its text is the plain system prompt
_SERVER = "auto, off or http://HOST:PORT"


@dataclass(eq=False)
class SettingsController:
    """The commands change the settings for this run of the program; the file belongs to the
    settings screen."""

    current: Settings  # from the next answer on, like `options`
    options: GenerateOptions
    _view: ChatView
    _show_theme: Callable[[str], None]  # puts the colours that a setting means on the screen

    @property
    def told(self) -> str:
        """What the model is told first, in a word or two; "" for nothing."""
        return self.current.persona or ("system prompt" if self.current.system_prompt else "")

    def apply(self, settings: Settings) -> None:
        """Makes `settings` the current ones."""
        if settings.temperature != self.current.temperature:
            sampling = replace(self.options.sampling, temperature=settings.temperature)
            self.options = replace(self.options, sampling=sampling)
        self.current = settings
        self._view.show_state()

    def use_persona(self, name: str = "") -> None:
        """Takes another system prompt; "none" takes the plain one, and "" lists what there is."""
        personas = self.current.personas
        if name in ("", "none"):
            there = ", ".join(personas) or "none; /settings makes them"
            self._view.inform("No persona from here on." if name else f"Personas: {there}")
            if name:
                self.apply(replace(self.current, persona=""))
        elif name not in personas:
            there = ", ".join(personas) or "none"
            self._view.refuse(f"no persona {name!r}; there are: {there}")
        else:
            self.apply(replace(self.current, persona=name))
            self._view.inform(f"{name} answers from here on.")

    def use_system_prompt(self, text: str = "") -> None:
        self.apply(replace(self.current, persona="", system_prompt=text))
        self._view.inform("The model is told that from here on." if text else "No system prompt.")

    def use_temperature(self, number: str = "") -> None:
        try:
            temperature = float(number.replace(",", "."))
        except ValueError:
            temperature = -1.0
        if not 0 <= temperature <= MAX_TEMPERATURE:
            self._view.refuse(f"expected a number from 0 to {MAX_TEMPERATURE:g}, found {number!r}")
            return
        self.apply(replace(self.current, temperature=temperature))
        self._view.inform(f"Temperature {temperature:g} from here on.")

    def use_theme(self, name: str = "") -> None:
        """Takes another theme; "" lists what there is."""
        names = themes.choices()
        if name in names:
            self.apply(replace(self.current, theme=name))
            self._show_theme(name)
        elif name:
            self._view.refuse(f"no theme {name!r}; there are: {', '.join(names)}")
        else:
            self._view.inform(f"Themes: {', '.join(names)}")


class SettingsScreen(Dialog[Settings]):
    """A form for model, persona, temperature, theme, server, memory and motion. The result is the
    settings as saved, None where nothing was: only Ctrl+S saves.

    show_theme: applies a theme at once, as a preview, which leaving the form undoes.
    """

    CSS_PATH = [DIALOG_STYLE, "settings.tcss"]  # noqa: RUF012 - declared so there
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", "Close without saving"),
        Binding("ctrl+s", "save", "Save", priority=True),
        Binding("ctrl+n", "new_persona", "New persona", priority=True),
        Binding("ctrl+d", "delete_persona", "Delete the persona", priority=True),
    ]

    def __init__(self, settings: Settings, show_theme: Callable[[str], None]) -> None:
        super().__init__()
        self._settings = settings
        self._show_theme = show_theme
        self._personas = {_NO_PERSONA: settings.system_prompt} | settings.personas
        self._persona = settings.persona

    def compose(self) -> ComposeResult:
        now = self._settings
        with self.frame("Settings", "Ctrl+S save · Esc close"):
            with VerticalScroll(id="form", can_focus=False):
                models = _select(_models(now.model), now.model, "model")
                yield from _row("Model", models, classes="row joined")
                small = now.draft_model
                choices = [("akunu alone", ""), *_models(small)]
                yield from _row("Guesses ahead", _select(choices, small, "draft-model"))
                yield from _row(
                    "Temperature",
                    _temperature(now.temperature),
                    f"0 to {MAX_TEMPERATURE:g}; the higher, the more varied",
                )
                yield from _row("Persona", _select(self._names(), self._persona, "persona"))
                yield Input(
                    id="name", placeholder="Name of the new persona, then Enter", compact=True
                )
                yield Label("What the model is told first", classes="above")
                prompt = TextArea(self._personas[self._persona], id="system", compact=True)
                prompt.placeholder = "Nothing: the model is as it was made"
                yield prompt
                yield from _row("Theme", _select(_themes(now.theme), now.theme, "theme"))
                yield from _row(
                    "Server",
                    Input(now.server, placeholder=_SERVER, id="server", compact=True),
                    "at start: auto, off, http://...",
                    "row joined",
                )
                yield Tick(
                    "Remember answers, to guess ahead better (from the next start)",
                    now.memory,
                    id="memory",
                    compact=True,
                )
                yield Tick(
                    "Nothing glides or blinks", now.reduced_motion, id="motion", compact=True
                )
                yield Tick(
                    "Ring when a long answer ends that you do not watch",
                    now.bell,
                    id="bell",
                    compact=True,
                )
            yield Static(id="say")

    def on_mount(self) -> None:
        self.query_one("#name", Input).display = False
        self.query_one("#system", TextArea).cursor_blink = self.app.animation_level == "full"
        self._say(f"Ctrl+N new persona · Ctrl+D delete it · {settings_file()}")

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
        self._store_prompt()
        personas = {name: text for name, text in self._personas.items() if name != _NO_PERSONA}
        changes = {
            "model": self._value("#model"),
            "draft_model": self._value("#draft-model"),
            "temperature": self._temperature(),
            "system_prompt": self._personas[_NO_PERSONA],
            "personas": personas,
            "persona": self._persona,
            "theme": self._value("#theme"),
            "server": self.query_one("#server", Input).value.strip(),
            "memory": self.query_one("#memory", Checkbox).value,
            "reduced_motion": self.query_one("#motion", Checkbox).value,
            "bell": self.query_one("#bell", Checkbox).value,
        }
        try:
            # In a thread: an answer that comes in must not wait for a slow disk.
            saved = await asyncio.to_thread(save_settings, _changed(self._settings, changes))
        except AkunuError as error:
            self._say(str(error), wrong=True)
            return
        self.dismiss(saved)

    def action_new_persona(self) -> None:
        name = self.query_one("#name", Input)
        name.value = ""
        name.display = True
        name.focus()

    def action_delete_persona(self) -> None:
        if self._persona == _NO_PERSONA:
            self._say("The plain system prompt stays; empty it instead.", wrong=True)
            return
        del self._personas[self._persona]
        self._persona = _NO_PERSONA
        self._offer_personas()

    # Changes

    @on(Input.Submitted, "#name")
    def _add_persona(self, event: Input.Submitted) -> None:
        name = typeable(event.value).strip()
        if not name or name in self._personas:
            self._say(f"There is a persona {name!r}." if name else "A name, please.", wrong=True)
            return
        self._store_prompt()
        self._personas[name] = ""
        self._persona = name
        event.input.display = False
        self._offer_personas()
        self.query_one("#system").focus()

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
    @on(Input.Submitted, "#server")
    async def _enter(self) -> None:
        await self.action_save()

    def _offer_personas(self) -> None:
        select = self.query_one("#persona", Select)
        with self.prevent(Select.Changed):
            select.set_options(self._names())
            select.value = self._persona
        self.query_one("#system", TextArea).text = self._personas[self._persona]

    def _store_prompt(self) -> None:
        """Takes the text over into the persona that is chosen."""
        self._personas[self._persona] = typeable(self.query_one("#system", TextArea).text)

    def _names(self) -> list[tuple[str, str]]:
        return [(name or "none", name) for name in self._personas]

    def _value(self, selector: str) -> str:
        return str(self.query_one(selector, Select).value)

    def _temperature(self) -> Any:
        """The number, or the text that is none, which `save_settings` then refuses."""
        text = self.query_one("#temperature", Input).value
        try:
            return float(text.replace(",", "."))
        except ValueError:
            return text

    def _say(self, text: str, *, wrong: bool = False) -> None:
        line = self.query_one("#say", Static)
        line.set_class(wrong, "wrong")
        line.update(Content(displayable(text)))


class Tick(Checkbox):
    """A checkbox that is empty when off: Textual's own differs in colour alone."""

    def render(self) -> Content:
        style = self.get_visual_style("toggle--button", partial=True)
        words = self.get_visual_style("toggle--label", partial=True)
        mark = "[x]" if self.value else "[ ]"
        return Content.assemble((mark, style), " ", self.label.stylize_before(words))


def _row(label: str, widget: Any, note: str = "", classes: str = "row") -> Iterable[Any]:
    row = Horizontal(Label(label), widget, classes=classes)
    if note:
        row.compose_add_child(Label(note, classes="note"))
    yield row


def _select(options: Iterable[tuple[str, str]], value: str, name: str) -> Select[str]:
    return Select(options, value=value, allow_blank=False, compact=True, id=name)


def _temperature(value: float) -> Input:
    return Input(f"{value:g}", id="temperature", compact=True, restrict=r"[0-9.,]*", max_length=6)


def _models(current: str) -> list[tuple[str, str]]:
    """The models in the store, and the one that is set, wherever it is."""
    return [(name, name) for name in dict.fromkeys([current, *choices_of("model")]) if name]


def _themes(current: str) -> list[tuple[str, str]]:
    words = {themes.AUTO: "auto: as the terminal", themes.TERMINAL: "terminal: its own colours"}
    return [(words.get(name, name), name) for name in dict.fromkeys([*themes.choices(), current])]


def _changed(settings: Settings, changes: dict[str, Any]) -> dict[str, Any]:
    """What differs, so that the file has only what the user set."""
    return {name: value for name, value in changes.items() if value != getattr(settings, name)}
