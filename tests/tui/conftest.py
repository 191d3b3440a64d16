"""What all tests of the chat share."""

from __future__ import annotations

from typing import Any

import pytest
from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet

from akunu_py.tui.status import StatusLine

_PARSE = Stylesheet._parse_rules
_RULES: dict[Any, list[RuleSet]] = {}


@pytest.fixture(autouse=True)
def _no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the status line: pictures must not depend on how busy the machine is."""
    monkeypatch.setattr(StatusLine, "clock", lambda: 0.0)


@pytest.fixture(autouse=True)
def _styles_are_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not anew for each app: the same text with the same colours gives the same rules."""

    def parse_once(self: Stylesheet, css: str, **options: Any) -> list[RuleSet]:
        key = (css, *options.values(), *self._variables.items())
        if key not in _RULES:
            _RULES[key] = _PARSE(self, css, **options)
        return _RULES[key]

    monkeypatch.setattr(Stylesheet, "_parse_rules", parse_once)
