"""A read-only view of a token list, so that drafting needs no copy of a long history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload


class TokenView(Sequence[int]):
    """The tokens [start, end) of a sequence and some tokens after them."""

    def __init__(
        self,
        tokens: Sequence[int],
        start: int = 0,
        end: int | None = None,
        after: Sequence[int] = (),
        unchanged: int = 0,
    ) -> None:
        """unchanged: tokens at the start that are the same as in the drafter's previous view."""
        self.unchanged = unchanged
        self._tokens, self._start = tokens, start
        self._size = (len(tokens) if end is None else end) - start
        self._after = list(after)

    @classmethod
    def of(cls, tokens: Sequence[int], after: Sequence[int] = ()) -> TokenView:
        """Return a view of `tokens`, which may be a view, and the tokens `after` them."""
        unchanged = tokens.unchanged if isinstance(tokens, TokenView) else 0
        return cls(tokens, after=after, unchanged=unchanged)

    def __len__(self) -> int:
        return self._size + len(self._after)

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> list[int]: ...

    def __getitem__(self, at: int | slice) -> int | list[int]:
        size, first = self._size, self._start
        if isinstance(at, slice):
            start, end, _ = at.indices(len(self))
            before = self._tokens[first + start : first + min(end, size)] if start < size else ()
            return [*before, *self._after[max(0, start - size) : max(0, end - size)]]
        at += len(self) if at < 0 else 0
        return self._tokens[first + at] if at < size else self._after[at - size]

    def __setitem__(self, at: int, token: int) -> None:
        """Replace an appended token."""
        self._after[at if at < 0 else at - self._size] = token

    def append(self, token: int) -> None:
        """Add a token to the view, but not to the viewed sequence."""
        self._after.append(token)
