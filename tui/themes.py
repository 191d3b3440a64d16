"""Themes and motion: dark, light and the terminal's own colors.

`auto` is light on a light background, and the terminal's own 16 colors where it has no more. With
256 colors, dark and light use a palette of their own: rounding would turn dark grays black or blue.
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
        "code-keyword": "#c99bff",
        "code-function": "#6cb6ff",
        "code-type": "#56d1c6",
        "code-number": "#f0a868",
        "code-string": "#8ddb8c",
        "code-comment": "#8f98a6",
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
        "code-keyword": "#7a3ec8",
        "code-function": "#0b5cad",
        "code-type": "#0b6b6b",
        "code-number": "#944a00",
        "code-string": "#1a7034",
        "code-comment": "#5b636c",
    },
)


def _xterm(number: int) -> str:
    """Return a color that Rich maps to entry `number` (16 to 255) of the 256-color palette."""
    if number >= 232:  # Rich takes the gray at `lightness * 25`
        return "#" + 3 * f"{round((number - 231) * 10.2):02x}"
    levels, place = (0, 95, 135, 175, 215, 255), number - 16
    return "#{:02x}{:02x}{:02x}".format(*(levels[place // size % 6] for size in (36, 6, 1)))


def _with_256_colors(theme: Theme, colors: str, variables: str) -> Theme:
    """Return `theme` in the colors of the 256-color palette, as lines of names and numbers."""

    def parse(text: str) -> dict[str, str]:
        words = text.split()
        return {name: _xterm(int(at)) for name, at in zip(words[::2], words[1::2], strict=True)}

    changed: dict[str, Any] = parse(colors)
    name = f"{theme.name}-256"
    return replace(theme, name=name, variables=theme.variables | parse(variables), **changed)


DARK_256 = _with_256_colors(
    DARK,
    """primary 75 secondary 68 accent 179 success 114 warning 179 error 210
    foreground 253 background 234 surface 235 panel 236""",
    """foreground-muted 248 block-cursor-background 17 block-cursor-foreground 231
    block-cursor-blurred-background 236 border 75 border-blurred 240 input-selection-background 24
    text-primary 111 text-secondary 110 text-accent 222 text-success 114
    text-warning 222 text-error 210 prompt-background 235 chosen-background 236
    accepted-background 22 error-background 52 code-keyword 177 code-function 75 code-type 80
    code-number 215 code-string 114 code-comment 247""",
)
LIGHT_256 = _with_256_colors(
    LIGHT,
    """primary 25 secondary 31 accent 94 success 22 warning 94 error 124
    foreground 235 background 231 surface 255 panel 254""",
    """foreground-muted 240 block-cursor-background 153 block-cursor-foreground 235
    block-cursor-blurred-background 254 border 25 border-blurred 250 input-selection-background 153
    text-primary 25 text-secondary 24 text-accent 94 text-success 22
    text-warning 94 text-error 124 prompt-background 255 chosen-background 254
    accepted-background 194 error-background 224 code-keyword 91 code-function 25 code-type 23
    code-number 94 code-string 22 code-comment 240""",
)


def with_derived_colors(variables: dict[str, str]) -> dict[str, str]:
    """Return the CSS variables of a theme, with our own ones where the theme has none."""
    derived = {
        "prompt-background": f"{variables['panel']} 60%",
        "chosen-background": f"{variables['primary']} 12%",
        "accepted-background": f"{variables['success']} 20%",
        "error-background": f"{variables['error']} 10%",
        "code-keyword": variables["text-accent"],
        "code-function": variables["text-primary"],
        "code-type": variables["text-secondary"],
        "code-number": variables["text-warning"],
        "code-string": variables["text-success"],
        "code-comment": variables["foreground-muted"],
    }
    return derived | variables


def _terminal_theme(name: Background, function: str, number: str) -> Theme:
    """Return a theme of the terminal's own colors, with legible colors of cursor and code."""
    theme = BUILTIN_THEMES[f"ansi-{name}"]
    tints = ("prompt", "chosen", "accepted", "error")  # a tint of 16 colors would be a solid color
    variables = {f"{tint}-background": "transparent" for tint in tints} | {
        "block-cursor-background": "ansi_blue",
        "block-cursor-foreground": "ansi_bright_white",
        "block-cursor-blurred-background": "ansi_blue",
        "block-cursor-blurred-foreground": "ansi_bright_white",
        "block-cursor-text-style": "none",
        "code-keyword": "ansi_magenta",
        "code-function": function,
        "code-type": "ansi_cyan",
        "code-number": number,
        "code-string": "ansi_green",
        "code-comment": "ansi_bright_black",
    }
    return replace(theme, name=f"{TERMINAL}-{name}", variables=theme.variables | variables)


TERMINAL_DARK = _terminal_theme("dark", "ansi_bright_blue", "ansi_yellow")
TERMINAL_LIGHT = _terminal_theme("light", "ansi_blue", "ansi_red")
_OURS = (DARK, LIGHT, DARK_256, LIGHT_256, TERMINAL_DARK, TERMINAL_LIGHT)
_EXCLUDED = ("textual-dark", "textual-light", "textual-ansi", "ansi-dark", "ansi-light")


def choices() -> list[str]:
    """Return the values of the setting `theme`, with `auto` and our own themes first."""
    others = sorted(name for name in BUILTIN_THEMES if name not in _EXCLUDED)
    return [AUTO, DARK.name, LIGHT.name, TERMINAL, *others]


def describe(name: str) -> str:
    """Return the name of a theme, with what it follows."""
    follows = {AUTO: "auto: like the terminal", TERMINAL: "terminal: its own colors"}
    return follows.get(name, name)


def install(app: App[Any]) -> None:
    """Register our themes with `app`."""
    for theme in _OURS:
        app.register_theme(theme)


def theme_name(setting: str, background: Background | None, colors: str | None) -> str:
    """Return the registered theme for `setting` on this terminal; an unknown setting is `auto`.

    With 16 colors, every theme is the terminal's own: tints of a theme would become one color.
    background: of the terminal, None if unknown. colors: Rich's color system of the terminal:
    None, "standard" (16 colors), "256" or "truecolor".
    """
    if setting not in choices():
        setting = AUTO
    background = background or ("light" if setting == LIGHT.name else "dark")
    if setting == TERMINAL or colors not in ("256", "truecolor"):
        return f"{TERMINAL}-{background}"
    if setting == AUTO:
        setting = background
    own = {DARK.name: DARK_256.name, LIGHT.name: LIGHT_256.name}
    return own.get(setting, setting) if colors == "256" else setting


def apply(app: App[Any], setting: str, background: Background | None) -> None:
    """Apply the theme `setting` to `app`. Call after `install`."""
    app.theme = theme_name(setting, background, app.console.color_system)


def set_motion(app: App[Any], *, reduced: bool) -> None:
    """Turn animations and blinking cursors on or off."""
    app.animation_level = "none" if reduced else "full"
    for widget in app.screen.query("Input, TextArea").results():
        widget.cursor_blink = not reduced  # type: ignore[attr-defined]
