"""How values are written: the notation, the whitespace, and the order of properties."""

from __future__ import annotations

from dataclasses import dataclass, replace

from akunu_py.json_schema.regex import STRING, Expr, quoted
from akunu_py.json_schema.rules import Symbol


class Notation:
    """The spelling of words, strings and keys: JSON, unless a subclass has another one."""

    def word(self, value: bool | None) -> Expr:
        """Return True, False or None."""
        return Expr({None: "null", True: "true", False: "false"}[value])

    def string(self, content: Expr | None) -> tuple[Symbol, ...]:
        """Return a string with this content, or any string for None."""
        return (STRING if content is None else quoted(content),)

    def key(self, name: str | None, content: Expr | None) -> tuple[Symbol, ...]:
        """Return the key of a member: this name, or any with this content."""
        return self.string(content)

    def has_key(self, name: str) -> bool:
        return True


JSON = Notation()
# Without blank lines, which small models repeat without end.
_SPACE = r"([\x{20}\x{9}]{0,8}(\x{d}?\x{a}[\x{20}\x{9}]{0,99})?)"


@dataclass(frozen=True, slots=True)
class Layout:
    """The notation, the punctuation, and the order of properties."""

    open_array: Expr
    close_array: Expr
    open_object: Expr
    close_object: Expr
    comma: Expr
    colon: Expr
    ordered: bool  # properties are in the order of the schema
    closed: bool = False  # an object with named properties has no others
    open_objects: bool = False  # `properties` alone allows others, as the standard says
    notation: Notation = JSON
    outermost: Layout | None = None  # of the outermost object, if it is another


def _uniform_layout(space: str, *, ordered: bool) -> Layout:
    """Return a layout with the regex `space` inside brackets and around commas and colons."""
    return Layout(
        open_array=Expr(rf"\[{space}"),
        close_array=Expr(rf"{space}\]"),
        open_object=Expr(rf"\{{{space}"),
        close_object=Expr(rf"{space}\}}"),
        comma=Expr(f"{space},{space}"),
        colon=Expr(f"{space}:{space}"),
        ordered=ordered,
    )


FREE = _uniform_layout(_SPACE, ordered=False)
COMPACT = _uniform_layout("", ordered=True)
LIKELY = replace(COMPACT, closed=True)  # for drafts
UNORDERED = replace(COMPACT, ordered=False)
# As Python's json module writes it on one line.
ONE_LINE = replace(UNORDERED, comma=Expr(r",\x{20}"), colon=Expr(r":\x{20}"))
