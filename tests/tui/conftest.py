"""Fixtures for all chat tests: a frozen status clock and cached style sheets."""

from __future__ import annotations

from typing import Any

import pytest
from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet

from akunu_py.tui.status import StatusLine

_PARSE = Stylesheet._parse_rules
_RULES: dict[Any, list[RuleSet]] = {}


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
