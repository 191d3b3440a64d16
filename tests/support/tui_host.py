"""An app that shows one screen of the chat by itself, for tests that need no conversation."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from textual.app import App
from textual.pilot import Pilot
from textual.screen import Screen
from textual.widgets import Input, TextArea

from akunu_py import paths
from akunu_py.errors import Cancelled
from akunu_py.models.store.model_store import StoredModel
from akunu_py.models.store.progress import Progress
from akunu_py.tui import themes
from akunu_py.tui.screens.model_picker import ModelsScreen
from akunu_py.tui.workers.downloads import DownloadEnded, DownloadUpdate


class Compare(Protocol):
    """The fixture `snap_compare`."""

    def __call__(
        self,
        app: App[None],
        *,
        terminal_size: tuple[int, int],
        run_before: Callable[[Pilot[None]], Awaitable[None]],
    ) -> bool: ...


class Pulled:
    """A replacement for `pull` that waits for `proceed`."""

    def __init__(self, *steps: Progress) -> None:
        self.requested: list[str] = []
        self.steps = [*steps]
        self.error: Exception | None = None
        self.proceed = threading.Event()

    def __call__(
        self, name: str, report: Callable[[Progress], None], cancelled: Callable[[], bool]
    ) -> StoredModel:
        self.requested.append(name)
        for step in self.steps:
            report(step)
        while not self.proceed.wait(0.01):
            if cancelled():
                raise Cancelled("cancelled")
        if self.error:
            raise self.error
        return StoredModel(name.rpartition("/")[2], paths.models_dir())


class Host(App[None]):
    """Shows `shown` and collects its results."""

    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (60, "-normal")]  # noqa: RUF012 - the chat's
    VERTICAL_BREAKPOINTS = [(0, "-low"), (16, "-high"), (32, "-tall")]  # noqa: RUF012

    def __init__(self, shown: Screen[Any], theme: str = "dark") -> None:
        super().__init__()
        self.shown = shown
        self.results: list[object] = []
        self.themes: list[str] = []
        themes.install(self)
        self.theme = theme

    def get_css_variables(self) -> dict[str, str]:
        self.theme_variables = themes.with_derived_colors(super().get_css_variables())
        return self.theme_variables

    async def on_mount(self) -> None:
        await self.push_screen(self.shown, self.results.append)
        for field in self.shown.query(Input):
            field.cursor_blink = False
        for box in self.shown.query(TextArea):
            box.cursor_blink = False

    def show_theme(self, name: str) -> None:
        self.themes.append(name)

    def on_download_update(self, message: DownloadUpdate) -> None:
        if isinstance(self.screen, ModelsScreen):
            self.screen.show_download_update(message)

    def on_download_ended(self, message: DownloadEnded) -> None:
        if isinstance(self.screen, ModelsScreen):
            self.screen.show_download_ended(message)
