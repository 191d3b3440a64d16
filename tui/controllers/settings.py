"""The settings of the running chat: how it samples, who the model is, and the theme."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from akunu_py.settings import MAX_TEMPERATURE, Settings
from akunu_py.tui import themes
from akunu_py.tui.view import ChatView
from akunu_py.types import GenerateOptions


@dataclass(eq=False)
class SettingsController:
    """The commands change the settings for this run of the program; the file belongs to the
    settings screen."""

    current: Settings  # from the next answer on, like `options`
    options: GenerateOptions
    _view: ChatView
    _show_theme: Callable[[str], None]  # puts the colours that a setting means on the screen

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
            self._view.warn(f"no persona {name!r}; there are: {there}")
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
            self._view.warn(f"expected a number from 0 to {MAX_TEMPERATURE:g}, found {number!r}")
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
            self._view.warn(f"no theme {name!r}; there are: {', '.join(names)}")
        else:
            self._view.inform(f"Themes: {', '.join(names)}")
