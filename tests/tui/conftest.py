"""Fixtures for all chat tests: true color, a frozen clock, cached style sheets, short pauses."""

import asyncio
from typing import Any

import pytest
from textual._context import active_app
from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet

from akunu_py.tui.status import StatusLine

_PARSE = Stylesheet._parse_rules
_RULES: dict[Any, list[RuleSet]] = {}


@pytest.fixture(autouse=True)
def _true_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLORTERM", "truecolor")


@pytest.fixture(autouse=True)
def _frozen_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeze the status line's clock: snapshots must not depend on load."""
    monkeypatch.setattr(StatusLine, "clock", lambda: 0.0)


@pytest.fixture(autouse=True)
def _cached_styles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache parsed style sheets across apps, by text and colors."""

    def parse_once(self: Stylesheet, css: str, **options: Any) -> list[RuleSet]:
        key = (css, *options.values(), *self._variables.items())
        if key not in _RULES:
            _RULES[key] = _PARSE(self, css, **options)
        return _RULES[key]

    monkeypatch.setattr(Stylesheet, "_parse_rules", parse_once)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pause until the event loop is idle and the screen is drawn, and delay little.

    Textual's own pause sleeps 20 ms at a time, until the process used no processor for 20 ms.
    """
    monkeypatch.setattr("akunu_py.tui.transcript.view._UPDATE_DELAY_S", 0.005)
    monkeypatch.setattr("akunu_py.tui.transcript.view._LAYOUT_S", 60.0)  # on a busy machine
    monkeypatch.setattr("akunu_py.tui.screens.conversation_list._PREVIEW_DELAY_S", 0.005)
    monkeypatch.setattr("textual.pilot.wait_for_idle", until_idle)
    monkeypatch.setattr("textual.app.wait_for_idle", until_idle)


async def until_idle(min_sleep: float = 0, max_sleep: float = 10) -> None:
    """Wait, at most `max_sleep` seconds; resize and draw without waiting for Textual's timers."""
    loop: Any = asyncio.get_running_loop()
    app: Any = active_app.get()
    end, idle_rounds = loop.time() + max_sleep, 0
    while idle_rounds < 3 and loop.time() < end:
        await asyncio.sleep(0)
        idle_rounds = 0 if loop._ready else idle_rounds + 1
        if idle_rounds == 2 and app._resize_timer is not None:
            app._check_resize()
            idle_rounds = 0
        elif idle_rounds == 2 and app.screen._update_timer._active.is_set():
            app.screen._on_timer_update()
            idle_rounds = 0
