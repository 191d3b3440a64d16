"""Text whose width terminals disagree on: the cursor is put where it belongs around each of it.

Emoji joined by a zero-width joiner, skin tones, variation selectors and the vowel signs of Indic
scripts take one, two or many columns, as the terminal likes. Textual lays the screen out with one
opinion; a terminal with another would shift the rest of the line. All that is drawn passes
`keep_columns`, so that nothing but such a cluster itself can look different.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.cells import cell_len, split_graphemes

# What every terminal gives the same width: the scripts and symbols that stand in the tables of all
# of them for years. Whatever is not here costs some bytes, and is as right.
_AGREED = (
    "\x20-\x7e\xa0-\xac\xae-\u05ff\u0606-\u061b\u061d-\u06dc\u06de-\u06ff"
    "\u0e00-\u0e32\u0e34-\u0e7f\u10a0-\u10ff\u1e00-\u1fff"
    "\u2010-\u2027\u202f-\u205e\u2070-\u209c\u20a0-\u20bf\u2100-\u262f\u2638-\u2689\u2690-\u2bff"
    "\u2c60-\u2c7f\u2e80-\u3029\u3030-\u3098\u309b-\u3163\u3165-\u3247\u3250-\u4dbf\u4e00-\ua4cf"
    "\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff01-\uff9f\uffe0-\uffe6\ufffc-\ufffd"
    "\U00020000-\U0002fffd"
)
_DISPUTED = re.compile(f"[^{_AGREED}\\s\x00-\x1f]")
_TOKEN = re.compile(
    r"\x1b\[(?P<row>\d+);(?P<column>\d+)H"
    r"|\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]P_^X][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])"
    r"|(?P<text>[^\x00-\x1f]+)"
    r"|(?P<control>[\x00-\x1f])"
)


def keep_columns(data: str) -> str:
    """`data` for a terminal, with the cursor put in its place around each disputed cluster.

    Only what follows a move to a row and column (CUP) is changed, as all does that Textual draws.
    A cluster is drawn over spaces, since it may be narrower than its place.
    """
    if not _DISPUTED.search(data):
        return data
    parts: list[str] = []
    place: tuple[int, int] | None = None  # row and column from 1, where they are known
    for token in _TOKEN.finditer(data):
        if token["row"]:
            place = int(token["row"]), int(token["column"])
        elif token["control"]:
            place = None
        elif token["text"] and place is not None:
            row, column = place
            place = row, column + cell_len(token["text"])
            parts.append(_kept(token["text"], row, column))
            continue
        parts.append(token[0])
    return "".join(parts)


def _kept(text: str, row: int, column: int) -> str:
    if not _DISPUTED.search(text):
        return text
    parts: list[str] = []
    for cluster, width in _clusters(text):
        after = column + width
        if not _DISPUTED.search(cluster):
            parts.append(cluster)
        elif width:  # else nothing of it would be seen
            blank = f"{' ' * width}\x1b[{row};{column}H"
            parts.append(f"{blank}{cluster}\x1b[{row};{after}H")
        column = after
    return "".join(parts)


def _clusters(text: str) -> Iterator[tuple[str, int]]:
    """What is drawn as one, with its columns; two regional indicators are a flag."""
    half: tuple[str, int] | None = None
    while text.startswith("\u200d"):
        text = text[2:]  # laid out as nothing: a joiner hides what follows it
    for start, end, width in split_graphemes(text)[0]:
        cluster = text[start:end]
        is_half = len(cluster) == 1 and "\U0001f1e6" <= cluster <= "\U0001f1ff"
        if half and is_half:
            yield half[0] + cluster, half[1] + width
            half = None
            continue
        if half:
            yield half
        half = (cluster, width) if is_half else None
        if not is_half:
            yield cluster, width
    if half:
        yield half
