"""Themes and motion: dark, light and the terminal's own colors.

`auto` is light on a light background, and the terminal's own 16 colors where it has no more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from textual.app import App
from textual.theme import BUILTIN_THEMES, Theme

Background = Literal["dark", "light"]

AUTO = "auto"
TERMINAL = "terminal"

DARK = Theme(
    name="dark",
    primary="#6cb6ff",
    secondary="#4f93d2",
    accent="#e3b341",
    success="#6bc46d",
    warning="#e3b341",
    error="#f47067",
    foreground="#d7dce5",
    background="#15181e",
    surface="#1b1f27",
    panel="#262b36",
    dark=True,
    variables={
        "foreground-muted": "#a4acb8",  # contrast of 4.5 : 1 on each background
        "block-cursor-background": "#24405f",
        "block-cursor-foreground": "#ffffff",
        "block-cursor-text-style": "none",
        "block-cursor-blurred-background": "#262b36",
        "border": "#6cb6ff",
        "border-blurred": "#414a5b",
        "input-selection-background": "#6cb6ff 30%",
        "footer-key-foreground": "#6cb6ff",
        "button-focus-text-style": "bold",
    },
)
LIGHT = Theme(
    name="light",
    primary="#0b5cad",
    secondary="#3a7bc8",
    accent="#7d5200",
    success="#1a7034",
    warning="#7d5200",
    error="#b3232b",
    foreground="#1f2328",
    background="#fbfbfa",
    surface="#f2f2f0",
    panel="#e5e5e1",
    dark=False,
    variables={
        "foreground-muted": "#4f565f",
        "block-cursor-background": "#cfe3f8",
        "block-cursor-foreground": "#0b2545",
        "block-cursor-text-style": "none",
        "block-cursor-blurred-background": "#e5e5e1",
        "border": "#0b5cad",
        "border-blurred": "#b9bec6",
        "input-selection-background": "#0b5cad 20%",
        "footer-key-foreground": "#0b5cad",
        "button-focus-text-style": "bold",
    },
)


def _terminal_theme(name: Background, cursor: str, cursor_text: str) -> Theme:
    """Return a theme of the terminal's own colors with a legible cursor color."""
    theme = BUILTIN_THEMES[f"ansi-{name}"]
    marked = {
        "block-cursor-background": cursor,
        "block-cursor-foreground": cursor_text,
        "block-cursor-blurred-background": cursor,
        "block-cursor-blurred-foreground": cursor_text,
        "block-cursor-text-style": "none",
    }
    return replace(theme, name=f"{TERMINAL}-{name}", variables=theme.variables | marked)


TERMINAL_DARK = _terminal_theme("dark", "ansi_blue", "ansi_bright_white")
TERMINAL_LIGHT = _terminal_theme("light", "ansi_blue", "ansi_bright_white")
_EXCLUDED = ("textual-dark", "textual-light", "textual-ansi", "ansi-dark", "ansi-light")


def choices() -> list[str]:
    """Return the values of the setting `theme`, with `auto` and our own themes first."""
    others = sorted(name for name in BUILTIN_THEMES if name not in _EXCLUDED)
    return [AUTO, DARK.name, LIGHT.name, TERMINAL, *others]


def install(app: App[Any]) -> None:
    """Register our themes with `app`."""
    for theme in (DARK, LIGHT, TERMINAL_DARK, TERMINAL_LIGHT):
        app.register_theme(theme)


def theme_name(setting: str, background: Background | None, colors: str | None) -> str:
    """Return the registered theme for `setting` on this terminal; an unknown setting is `auto`.

    background: of the terminal, None if unknown. colors: Rich's color system of the terminal:
    None, "standard" (16 colors), "256" or "truecolor".
    """
    if setting not in choices():
        setting = AUTO
    if setting == TERMINAL or (setting == AUTO and colors not in ("256", "truecolor")):
        return TERMINAL_LIGHT.name if background == "light" else TERMINAL_DARK.name
    if setting == AUTO:
        return LIGHT.name if background == "light" else DARK.name
    return setting


def apply(app: App[Any], setting: str, background: Background | None) -> None:
    """Apply the theme `setting` to `app`. Call after `install`."""
    app.theme = theme_name(setting, background, app.console.color_system)


def set_motion(app: App[Any], *, reduced: bool) -> None:
    """Turn animations and blinking cursors on or off."""
    app.animation_level = "none" if reduced else "full"
    for widget in app.screen.query("Input, TextArea").results():
        widget.cursor_blink = not reduced  # type: ignore[attr-defined]
