"""Shorter terminal output: only the attributes that change between two pieces of text.

Rich resets all attributes behind each piece and sets them all again: 40 bytes for one green word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

_SEQUENCE = re.compile(r"(\x1b\[[\d;]*[mH])")  # a style (SGR), or a move of the cursor
_SWITCHES = {  # attribute: codes that set it, and the code that resets it
    "weight": (("1", "2"), "22"),
    "italic": (("3",), "23"),
    "underline": (("4", "21"), "24"),
    "blink": (("5", "6"), "25"),
    "reverse": (("7",), "27"),
    "conceal": (("8",), "28"),
    "strike": (("9",), "29"),
}
_ATTRIBUTES = {code: name for name, (codes, _) in _SWITCHES.items() for code in codes}
_RESETS = {name: reset for name, (_, reset) in _SWITCHES.items()} | {"ink": "39", "paper": "49"}


def shorten_styles(data: str) -> str:
    """Return terminal output that looks the same, with shorter style sequences.

    `data` starts and ends without attributes, as Rich and Textual write it.
    """
    parts: list[str] = []
    wanted = actual = ""  # parameters of a style
    for place, part in enumerate(_SEQUENCE.split(data)):
        is_sequence = place % 2 == 1  # between two texts
        if is_sequence and part.endswith("m"):
            style = part[2:-1]
            wanted = "" if style in ("", "0") else f"{wanted};{style}" if wanted else style
            continue
        if wanted != actual and part and not is_sequence:  # a move needs no style
            parts.append(transition(actual, wanted))
            actual = wanted
        parts.append(part)
    if wanted != actual:
        parts.append(transition(actual, wanted))
    return "".join(parts)


@lru_cache(maxsize=4096)
def transition(before: str, after: str) -> str:
    """Return the shortest sequence that changes style `before` into `after`."""
    whole = f"\x1b[0;{after}m" if before and after else f"\x1b[{after}m"
    old, new = _parse(before), _parse(after)
    if not after or old is None or new is None:
        return whole
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    if "weight" in changed and "weight" in old and "weight" in new:
        return whole  # bold and dim have the same reset
    changes = [new.get(name, _RESETS[name]) for name in changed]
    short = f"\x1b[{';'.join(changes)}m" if changes else ""
    return min(short, whole, key=len)


def _parse(style: str) -> dict[str, str] | None:
    """Return the codes of a style by attribute, None if one is unknown."""
    found: dict[str, str] = {}
    codes = iter(style.split(";") if style else ())
    for code in codes:
        if code in ("38", "48"):
            found["ink" if code == "38" else "paper"] = ";".join((code, *_color(codes)))
        elif code in _ATTRIBUTES:
            if found.get(_ATTRIBUTES[code], code) != code:
                return None  # bold and dim at once
            found[_ATTRIBUTES[code]] = code
        elif code.isdecimal() and (30 <= int(code) <= 39 or 90 <= int(code) <= 97):
            found["ink"] = code
        elif code.isdecimal() and (40 <= int(code) <= 49 or 100 <= int(code) <= 107):
            found["paper"] = code
        else:
            return None
    return found


def _color(codes: Iterator[str]) -> list[str]:
    """Consume the codes of a color behind 38 or 48."""
    kind = next(codes, "")
    return [kind, *(next(codes, "0") for _ in range(3 if kind == "2" else 1))]
