"""What is drawn stays in its columns, whatever a terminal thinks that emoji take."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from akunu_py.tui.terminal import ChatDriver, pin_columns

CLUSTERS = [
    *("👩\u200d👩\u200d👧\u200d👦", "❤\ufe0f", "👍🏽", "🇩🇪", "1\ufe0f\u20e3", "☺", "☰", "Ⅷ", "中"),
    *("สวัสดี", "น้ำ", "ที่นี่", "हिन्दी", "தமிழ்", "\u1100\u1161\u11a8", "a\u0301", "\u00ad", "\u200d."),
]
TEXTS = st.lists(st.sampled_from([*CLUSTERS, "word", " ", "│", "中文", "é"]), max_size=12).map(
    "".join
)
# A letter that no cluster has, after each text: it is where Textual laid it out, or it is not.
MARKS = "abcdefgh"
_TOKEN = re.compile(r"\x1b\[(\d+);(\d+)H|\x1b\[[0-9;]*m|(.)", re.DOTALL)


class Terminal:
    """One that measures each code point with `width`, and overwrites what it writes on."""

    def __init__(self, width: Callable[[str], int]) -> None:
        self.width = width
        self.cells: dict[tuple[int, int], str] = {}

    def write(self, data: str) -> None:
        row = column = 1
        for to_row, to_column, letter in _TOKEN.findall(data):
            if to_row:
                row, column = int(to_row), int(to_column)
            elif letter:
                for place in range(self.width(letter)):
                    self.cells[row, column + place] = letter if not place else ""
                column += self.width(letter)


def agreed(letter: str) -> int | None:
    """Return the width of a letter that `pin_columns` does not change, or None if it does."""
    data = f"\x1b[1;1H{letter}"
    return cell_len(letter) if pin_columns(data) == data else None


@settings(max_examples=24, deadline=None)
@given(
    texts=st.lists(TEXTS, min_size=1, max_size=8),
    widths=st.dictionaries(st.characters(), st.integers(0, 2)),
    rest=st.integers(0, 2),
    styled=st.booleans(),
)
def test_what_follows_a_cluster_is_where_it_was_laid_out(
    texts: list[str], widths: dict[str, int], rest: int, styled: bool
) -> None:
    """Whatever the widths of everything but plain letters are."""

    def width(letter: str) -> int:
        plain = agreed(letter)
        return widths.get(letter, rest) if plain is None else plain

    style = "\x1b[1;31m" if styled else ""
    line = "".join(f"{text}{style}<{mark}>" for text, mark in zip(texts, MARKS, strict=False))
    terminal = Terminal(width)
    terminal.write(pin_columns(f"\x1b[3;5H{line}\x1b[4;1Hend"))
    column = 5
    for text, mark in zip(texts, MARKS, strict=False):
        column += cell_len(text)
        shown = "".join(terminal.cells.get((3, column + place), "?") for place in range(3))
        assert shown == f"<{mark}>"
        column += 3
    assert terminal.cells[4, 1] == "e"


def test_what_stays_as_it_is_has_one_width_everywhere() -> None:
    """Every character that is left alone measures the same by the rule of glibc (wide and full
    width: two columns; marks: none) as where the screen is laid out."""
    left_alone = 0
    for code in (*range(0x20, 0x7F), *range(0xA0, 0x4E00), *range(0xE000, 0x30000, 5)):
        letter = chr(code)
        data = f"\x1b[1;1H{letter}"
        category = unicodedata.category(letter)
        if category in ("Cn", "Zl", "Zp") or pin_columns(data) != data:
            continue
        wide = unicodedata.east_asian_width(letter) in "WF"
        expected = 0 if category in ("Mn", "Me", "Cf") else 2 if wide else 1
        assert cell_len(letter) == expected, hex(code)
        left_alone += 1
    assert left_alone > 20_000


def test_a_flag_is_drawn_in_one() -> None:
    drawn = pin_columns("\x1b[1;1Hx🇩🇪🇫🇷🇪y")
    for flag in ("🇩🇪", "🇫🇷"):
        assert flag in drawn
    assert drawn.endswith("🇪\x1b[1;7Hy")


def test_plain_text_and_what_is_no_drawing_is_left_alone() -> None:
    for data in ("\x1b[1;1Hplain │ 中文", "\x1b]2;👩‍👩‍👧 title\x07", "👩‍👩‍👧 where nobody knows"):
        assert pin_columns(data) == data


def test_the_driver_writes_nothing_else() -> None:
    written: list[str] = []

    class Recorder(ChatDriver):
        def __init__(self) -> None:
            self._writer_thread = self  # type: ignore[assignment]

    recorder = Recorder()
    recorder._writer_thread = type("W", (), {"write": staticmethod(written.append)})()
    recorder.write("\x1b[1;1H👩‍👧x")
    assert written == [pin_columns("\x1b[1;1H👩‍👧x")] != ["\x1b[1;1H👩‍👧x"]
