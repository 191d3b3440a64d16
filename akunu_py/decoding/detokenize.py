"""Token ids to text, one token at a time, never half a character."""

from __future__ import annotations

from typing import Any

_INCOMPLETE = "\ufffd"
_LONGEST_CHARACTER = 4  # bytes in UTF-8, so at most as many tokens


class Detokenizer:
    """Turns a stream of tokens into a stream of text whose pieces join to the whole.

    Each step decodes a short window twice, without and with the new tokens, and gives out the
    difference: tokenizers that decode a token differently at the start of a text (SentencePiece's
    leading space) then agree with decoding everything at once. A window that ends in an incomplete
    character is held back until the rest of the character is there.
    """

    def __init__(self, tokenizer: Any, prompt_tail: int | None = None) -> None:
        """`prompt_tail`: the last token of the prompt, as context for the first one decoded."""
        self._tokenizer = tokenizer
        self._window: list[int] = [] if prompt_tail is None else [prompt_tail]
        self._given = len(self._window)  # how many tokens of the window were given out

    def add(self, token: int) -> str:
        """The text that became complete with `token`, often that of this token, or nothing."""
        self._window.append(token)
        return self._release(force=False)

    def finish(self) -> str:
        """What is still held back; an incomplete character comes out as U+FFFD."""
        return self._release(force=True)

    def _release(self, *, force: bool) -> str:
        held = len(self._window) - self._given
        if not held:
            return ""
        whole = self._decode(self._window)
        if whole.endswith(_INCOMPLETE) and not force and held < _LONGEST_CHARACTER:
            return ""
        text = whole[len(self._decode(self._window[: self._given])) :]
        self._window = self._window[self._given :]
        self._given = len(self._window)
        return text

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)
