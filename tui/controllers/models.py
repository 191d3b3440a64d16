"""Switching models by name, and what downloads mean for the one that answers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from akunu_py.errors import AkunuError
from akunu_py.models import store
from akunu_py.tui.controllers.answering import AnswerController
from akunu_py.tui.models.downloads import DownloadEnded, DownloadMoved, Downloads
from akunu_py.tui.view import ChatView


@dataclass(eq=False)
class ModelController:
    """Switches models, and shows what becomes of downloads while the list of models is closed."""

    _answering: AnswerController
    _downloads: Downloads
    _view: ChatView

    async def use(self, name: str | None) -> None:
        """Has that model answer from here on; an answer under way is finished first. None changes
        nothing."""
        if name is None:
            return
        try:
            model = await asyncio.to_thread(store.resolve, name)
        except AkunuError as error:
            is_coming = name in self._downloads.all
            self._view.warn(f"{name} is still being fetched" if is_coming else str(error))
            return
        if model.name == self._answering.model and self._answering.is_loaded:
            self._view.inform(f"{model.name} is in use.")
        else:
            await self._answering.switch_model(model.name)

    def on_download_moved(self, message: DownloadMoved) -> None:
        download = self._downloads.all.get(message.name)
        if download is not None and self._answering.waits_for(message.name):
            self._view.status.phase = "fetching"
            self._view.status.progress = download.progress.share
            self._view.show_download(download.progress.describe())

    async def on_download_ended(self, message: DownloadEnded, *, is_listed: bool) -> None:
        """is_listed: the list of models is open, and shows it."""
        if self._answering.waits_for(message.name):
            self._view.show_download("")
            if message.model:
                await self.use(message.model)
            else:
                why = message.error or f"{message.name} was not fetched; fetch it to chat with it"
                await self._answering.fail(f"{why}. A prompt does so; F4 has other models")
        elif is_listed:
            pass
        elif message.error:
            self._view.warn(message.error)
        elif message.model:
            self._view.inform(f"{message.model} is here: /model {message.model}")
