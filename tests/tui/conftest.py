"""Fixtures of the chat tests: true color, a frozen clock, cached style sheets, short pauses."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from textual._context import active_app
from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet
from textual.pilot import Pilot

from akunu_py.tui.status import StatusLine
from tests.support.tui_chat import Chat, chat

_PARSE, _WAIT_FOR_SCREEN = Stylesheet._parse_rules, Pilot._wait_for_screen
_RULES: dict[Any, list[RuleSet]] = {}


def _parse_once(self: Stylesheet, css: str, **options: Any) -> list[RuleSet]:
    """Cache parsed style sheets across apps, by text and colors."""
    key = (css, *options.values(), *self._variables.items())
    if key not in _RULES:
        _RULES[key] = _PARSE(self, css, **options)
    return _RULES[key]


@pytest.fixture(autouse=True)
def _same_everywhere_and_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use true color and a frozen clock; pause until the screen is drawn, and delay little.

    Textual's own pause sleeps 20 ms at a time, until the process used no processor for 20 ms.
    """
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setattr(StatusLine, "clock", lambda: 0.0)  # snapshots must not depend on load
    monkeypatch.setattr(Stylesheet, "_parse_rules", _parse_once)
    monkeypatch.setattr("akunu_py.tui.transcript.view._UPDATE_DELAY_S", 0.005)
    monkeypatch.setattr("akunu_py.tui.transcript.view._LAYOUT_CHECKS", 10_000)
    limits = ("terminal._CLIPBOARD_TIMEOUT_S", "app._QUIT_WINDOW_S")
    for limit in (*limits, "status._SHORTEST_S", "status._LONGEST_S"):  # of messages
        monkeypatch.setattr(f"akunu_py.tui.{limit}", 600.0)  # on a busy machine
    monkeypatch.setattr("akunu_py.tui.screens.conversation_list._PREVIEW_DELAY_S", 0.005)
    monkeypatch.setattr("textual.pilot.wait_for_idle", until_idle)
    monkeypatch.setattr("textual.app.wait_for_idle", until_idle)
    monkeypatch.setattr(Pilot, "_wait_for_screen", until_processed)
    monkeypatch.setattr(RuleSet, "__hash__", object.__hash__)  # identity, in C


@pytest.fixture
async def it() -> AsyncIterator[Chat]:
    """A running chat with a loaded model."""
    async with chat() as running:
        yield running


async def until_idle(min_sleep: float = 0, max_sleep: float = 60) -> None:
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


async def until_processed(pilot: Pilot[Any], timeout: float = 60.0) -> bool:
    """Send callbacks to all widgets, as Textual does, only if one waits, such as for a thread."""
    await until_idle()
    widgets = (pilot.app, *pilot.app.screen.walk_children(with_self=True))
    are_idle = all(each._message_queue.ready_event._waiters for each in widgets)
    return are_idle or await _WAIT_FOR_SCREEN(pilot, timeout)
