"""Themes and motion: dark, light and the terminal's own colors.

`auto` is light on a light background, and the terminal's own 16 colors where it has no more. With
256 colors, dark and light use a palette of their own: rounding would turn dark grays black or blue.
"""

import re
from dataclasses import replace
from typing import Any, Literal

from textual.app import App
from textual.color import Color
from textual.theme import BUILTIN_THEMES, Theme

Background = Literal["dark", "light"]

AUTO = "auto"
TERMINAL = "terminal"

# A row per color or CSS variable. The columns: dark, light, and both in entries of the 256-color
# palette. "-" is the value of Textual or of `with_derived_colors`.
_COLORS = """
primary                          #6cb6ff      #0b5cad      75   25
secondary                        #4f93d2      #3a7bc8      68   31
accent                           #e3b341      #7d5200      179  94
success                          #6bc46d      #1a7034      114  22
warning                          #e3b341      #7d5200      179  94
error                            #f47067      #b3232b      210  124
foreground                       #d7dce5      #1f2328      253  235
background                       #15181e      #fbfbfa      234  231
surface                          #1b1f27      #f2f2f0      235  255
panel                            #262b36      #e5e5e1      236  254
foreground-muted                 #a4acb8      #4f565f      248  240
block-cursor-background          #24405f      #cfe3f8      17   153
block-cursor-foreground          #ffffff      #0b2545      231  235
block-cursor-blurred-background  #262b36      #e5e5e1      236  254
border                           #6cb6ff      #0b5cad      75   25
border-blurred                   #414a5b      #b9bec6      240  250
input-selection-background       #6cb6ff 30%  #0b5cad 20%  24   153
text-primary                     -            -            111  25
text-secondary                   -            -            110  24
text-accent                      -            -            222  94
text-success                     -            -            114  22
text-warning                     -            -            222  94
text-error                       -            -            210  124
prompt-background                -            -            235  255
accepted-background              -            -            22   194
error-background                 -            -            52   224
code-keyword                     #c99bff      #7a3ec8      177  91
code-function                    #6cb6ff      #0b5cad      75   25
code-type                        #56d1c6      #0b6b6b      80   23
code-number                      #f0a868      #944a00      215  94
code-string                      #8ddb8c      #1a7034      114  22
code-comment                     #8f98a6      #5b636c      247  240
"""  # foreground-muted: a contrast of 4.5 : 1 on each background
_FIELDS = 10  # The first rows are fields of `Theme`, the others variables.


def _xterm(number: int) -> str:
    """Return a color that Rich maps to entry `number` (16-255) of the palette of 256."""
    if number >= 232:  # Rich takes the gray at `lightness * 25`
        return "#" + 3 * f"{round((number - 231) * 10.2):02x}"
    levels, place = (0, 95, 135, 175, 215, 255), number - 16
    return "#{:02x}{:02x}{:02x}".format(*(levels[place // size % 6] for size in (36, 6, 1)))


def _theme(name: str, column: int) -> Theme:
    rows = [re.split(" {2,}", line) for line in _COLORS.strip().splitlines()]
    values = [(row[0], row[column]) for row in rows if row[column] != "-"]
    colors = [(key, _xterm(int(each)) if each.isdecimal() else each) for key, each in values]
    fields: Any = dict(colors[:_FIELDS])
    variables = dict(colors[_FIELDS:]) | {"block-cursor-text-style": "none"}
    return Theme(name, **fields, dark=name.startswith("dark"), variables=variables)


DARK, LIGHT = _theme("dark", 1), _theme("light", 2)
DARK_256, LIGHT_256 = _theme("dark-256", 3), _theme("light-256", 4)


def with_derived_colors(variables: dict[str, str]) -> dict[str, str]:
    """Return the CSS variables of a theme, with our own ones where the theme has none."""
    derived = {
        "prompt-background": f"{variables['panel']} 60%",
        # Not transparent, because styles in a text cannot be.
        "accepted-background": Color.parse(variables["background"])
        .blend(Color.parse(variables["success"]), 0.2)
        .hex,
        "error-background": f"{variables['error']} 10%",
        "code-keyword": variables["text-accent"],
        "code-function": variables["text-primary"],
        "code-type": variables["text-secondary"],
        "code-number": variables["text-warning"],
        "code-string": variables["text-success"],
        "code-comment": variables["foreground-muted"],
    }
    legible = {}
    if "code-keyword" not in variables:  # a theme of Textual
        legible["block-cursor-background"] = f"{variables['primary']} 15%"
        legible["block-cursor-foreground"] = variables["foreground"]
        legible["foreground-muted"] = f"{variables['foreground']} 90%"
    return derived | variables | legible


def _terminal_theme(name: Background, function: str, number: str) -> Theme:
    theme = BUILTIN_THEMES[f"ansi-{name}"]
    tints = ("prompt", "accepted", "error")  # a tint of 16 colors would be a solid color
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
OURS = (DARK, LIGHT, DARK_256, LIGHT_256, TERMINAL_DARK, TERMINAL_LIGHT)
_EXCLUDED = ("textual-dark", "textual-light", "textual-ansi", "ansi-dark", "ansi-light")


def choices() -> list[str]:
    """Return the values of the setting `theme`, with `auto` and our own themes first."""
    others = sorted(name for name in BUILTIN_THEMES if name not in _EXCLUDED)
    return [AUTO, DARK.name, LIGHT.name, TERMINAL, *others]


def describe(name: str) -> str:
    follows = {AUTO: "auto: like the terminal", TERMINAL: "terminal: its own colors"}
    return follows.get(name, name)


def theme_name(setting: str, background: Background | None, colors: str | None) -> str:
    """Return the registered theme for `setting`; an unknown setting is `auto`.

    background: of the terminal, None if unknown. colors: Rich's color system: None, "standard"
    (16 colors), "256" or "truecolor". With 16 colors or fewer, every theme is the terminal's own,
    because tints would become one color.
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


def set_motion(app: App[Any], *, reduced: bool) -> None:
    app.animation_level = "none" if reduced else "full"
    for widget in app.screen.query("Input, TextArea").results():
        widget.cursor_blink = not reduced  # type: ignore[attr-defined]
