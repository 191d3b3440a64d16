"""The colours of the dark theme, which the chat and exported SVGs share."""

from __future__ import annotations

PRIMARY = "#6cb6ff"
ACCENT = "#e3b341"
FOREGROUND = "#d7dce5"
FOREGROUND_MUTED = "#a4acb8"  # 4.5 : 1 on all of the others
BACKGROUND = "#15181e"
SURFACE = "#1b1f27"
PANEL = "#262b36"
