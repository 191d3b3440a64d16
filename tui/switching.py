"""Models and settings: which model answers, how it samples, who it is, and how things look."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from akunu_py.errors import AkunuError
from akunu_py.models import store
from akunu_py.settings import MAX_TEMPERATURE, Settings
from akunu_py.tui.base import ChatBase
from akunu_py.tui.models.downloads import DownloadEnded, DownloadMoved
from akunu_py.tui.models.screen import ModelsScreen
from akunu_py.tui.session.messages import Failed
from akunu_py.tui.settings.screen import SettingsScreen
from akunu_py.tui.terminal import themes
from akunu_py.tui.transcript.welcome import Welcome

_WAYS_ON = "A prompt does so; F4 has other models"


class Switching(ChatBase):
    """Actions that change how the chat goes on."""

    # Models

    def action_models(self) -> None:
        self.push_screen(ModelsScreen(self._model, self._downloads), self._take_model)

    async def action_use_model(self, name: str = "") -> None:
        """Answers come from that model from here on; one that is being made is finished first."""
        if not name:
            self.action_models()
            return
        try:
            model = await asyncio.to_thread(store.resolve, name)
        except AkunuError as error:
            is_coming = name in self._downloads.all
            self._warn(f"{name} is still being fetched" if is_coming else str(error))
            return
        if model.name == self._model and self._context_length:
            self._say(f"{model.name} is in use.")
            return
        self._model = model.name
        self._absent = False
        self._context_length = 0
        if self._active is None:
            self._status.phase = "loading"
        if self._session is not None:
            self._session.switch(model.name)
        if not self._conversation.turns:
            await self._transcript.open(self._conversation)
            await self._transcript.add(self._welcome())
        self._show_hints()

    def on_download_moved(self, message: DownloadMoved) -> None:
        download = self._downloads.all.get(message.name)
        if download is not None and self._awaits(message.name):
            self._status.phase = "fetching"
            self._status.progress = download.progress.share
            self._tell_of_download(download.progress.describe())
        if screen := self._models_screen():
            screen.download_moved(message)

    async def on_download_ended(self, message: DownloadEnded) -> None:
        screen = self._models_screen()
        if screen is not None:
            screen.download_ended(message)
        if self._awaits(message.name):
            self._tell_of_download("")
            if message.model:
                await self.action_use_model(message.model)
            else:
                why = message.error or f"{message.name} was not fetched; fetch it to chat with it"
                self.post_message(Failed(None, f"{why}. {_WAYS_ON}"))
        elif screen is not None:
            pass  # it tells
        elif message.error:
            self._warn(message.error)
        elif message.model:
            self._say(f"{message.model} is here: /model {message.model}")

    def close_downloads(self, timeout: float) -> bool:
        """Ends all downloads; False where one still runs after `timeout` seconds."""
        return self._downloads.close(timeout)

    # Settings

    def action_settings(self) -> None:
        self.push_screen(SettingsScreen(self._settings, self.show_theme), self._take_settings)

    def action_use_persona(self, name: str = "") -> None:
        """Another system prompt for this run of the program; the settings keep theirs."""
        personas = self._settings.personas
        if name in ("", "none"):
            there = ", ".join(personas) or "none; /settings makes them"
            self._say("No persona from here on." if name else f"Personas: {there}")
            if name:
                self._change(replace(self._settings, persona=""))
        elif name not in personas:
            self._warn(f"no persona {name!r}; there are: {', '.join(personas) or 'none'}")
        else:
            self._change(replace(self._settings, persona=name))
            self._say(f"{name} answers from here on.")

    def action_use_system_prompt(self, text: str = "") -> None:
        self._change(replace(self._settings, persona="", system_prompt=text))
        self._say("The model is told that from here on." if text else "No system prompt.")

    def action_use_temperature(self, number: str = "") -> None:
        try:
            temperature = float(number.replace(",", "."))
        except ValueError:
            temperature = -1.0
        if not 0 <= temperature <= MAX_TEMPERATURE:
            self._warn(f"expected a number from 0 to {MAX_TEMPERATURE:g}, found {number!r}")
            return
        self._change(replace(self._settings, temperature=temperature))
        self._say(f"Temperature {temperature:g} from here on.")

    def action_use_theme(self, name: str = "") -> None:
        if name in themes.choices():
            self._change(replace(self._settings, theme=name))
            self.show_theme(name)
        elif name:
            self._warn(f"no theme {name!r}; there are: {', '.join(themes.choices())}")
        else:
            self._say(f"Themes: {', '.join(themes.choices())}")

    def show_theme(self, setting: str) -> None:
        """Puts the colours that a setting means on the screen."""
        themes.apply(self, setting, self._setup.background)

    # In between

    def _awaits(self, model: str) -> bool:
        """Whether that one is to answer as soon as it is here."""
        return self._absent and model == self._model

    def _tell_of_download(self, words: str) -> None:
        for welcome in self.screen_stack[0].query(Welcome):
            welcome.show_download(words)

    def _models_screen(self) -> ModelsScreen | None:
        return next((each for each in self.screen_stack if isinstance(each, ModelsScreen)), None)

    async def _take_model(self, name: str | None) -> None:
        if name is not None:
            await self.action_use_model(name)

    async def _take_settings(self, settings: Settings | None) -> None:
        if settings is None:
            return
        model = self._settings.model
        self._change(settings)
        self.show_theme(settings.theme)
        themes.set_motion(self, reduced=settings.reduced_motion)
        if settings.model != model:
            await self.action_use_model(settings.model)

    def _change(self, settings: Settings) -> None:
        """What counts from the next answer on."""
        if settings.temperature != self._settings.temperature:
            sampling = replace(self._options.sampling, temperature=settings.temperature)
            self._options = replace(self._options, sampling=sampling)
        self._settings = settings
        self._show_hints()
