"""The colours of the dark theme, which exported pictures share with the screen."""

from __future__ import annotations

PRIMARY = "#6cb6ff"
ACCENT = "#e3b341"
FOREGROUND = "#d7dce5"
BACKGROUND = "#15181e"
SURFACE = "#1b1f27"
PANEL = "#262b36"
