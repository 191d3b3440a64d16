"""Masks of the tokens allowed in each row of a pass, after that row's draft tokens."""

from collections.abc import Collection, Sequence

import mlx.core as mx

from akunu_py.errors import UsageError
from akunu_py.ngram.token_tree import TokenTree

_MASK_WORD = 32  # tokens in a word of a mask


class TokenMasks:
    """The rules for an answer's tokens, at a position in the answer. These allow every token."""

    def __init__(self, vocabulary: int, stop_tokens: Collection[int]) -> None:
        """vocabulary: width of the logits."""
        self._stop_tokens = stop_tokens
        self._every_token = b"\xff" * (4 * -(-vocabulary // _MASK_WORD))

    @property
    def complete(self) -> bool:
        """Whether the answer must end here."""
        return False

    @property
    def free(self) -> bool:
        """Whether no mask is needed for this pass and one launched behind it."""
        return True

    def begin_draft(self) -> None:
        """Save the position for `end_draft`."""

    def end_draft(self) -> None:
        """Return to the position of `begin_draft`."""

    def mask(self) -> bytes:
        """Return a bit for each token, the lowest first."""
        return self._every_token

    def step(self, token: int) -> bool:
        """Consume a token; if it is forbidden, change nothing and return False."""
        return True

    def failure(self) -> str:
        """Return why a sampled token could not be consumed."""
        return ""

    # For drafts; see `DraftGuide`.

    def forced(self) -> tuple[list[int], bool]:
        return [], True

    def ending(self) -> tuple[list[int], int]:
        return [], 0

    def choices(self) -> list[int]:
        return []

    def advance(self, token: int) -> bool:
        return not self.complete and self.step(token)

    def masked(self, logits: mx.array, draft: Sequence[int]) -> mx.array:
        """Return logits [1 + draft, vocab] with minus infinity for forbidden tokens.

        Row n follows the answer and the path to the draft's token n. Rows behind a forbidden draft
        token stay unchanged, because that token is never accepted.
        """
        if self.free:
            return logits
        tree = TokenTree.of(draft)
        masks = [self.mask(), *[self._every_token] * len(tree)]
        for leaf in tree.leaves:
            self.begin_draft()
            for each in tree.path(leaf):
                if not self.step(tree[each]) or self.complete:
                    break
                if masks[each + 1] is self._every_token:
                    masks[each + 1] = self.mask()
            self.end_draft()
        return _masked(logits, masks)

    def masked_ahead(self, logits: mx.array) -> mx.array:
        """Mask a drafter's logits [1, vocab] for the position after the accepted draft tokens."""
        return logits if self.free or self.complete else _masked(logits, [self.mask()])

    def consume(self, tokens: Sequence[int]) -> list[int]:
        """Consume sampled tokens; return them up to the end of the answer."""
        for index, token in enumerate(tokens):
            if not self.step(token):
                raise UsageError(self.failure())
            if self.complete:
                return list(tokens[: index + 1])
        return list(tokens)

    def _without(self, mask: bytes, tokens: Collection[int]) -> bytes:
        changed = bytearray(mask)
        for token in tokens:
            changed[token // 8] &= ~(1 << token % 8)
        return bytes(changed)

    def _with(self, mask: bytes, tokens: Collection[int]) -> bytes:
        changed = bytearray(mask)
        for token in tokens:
            changed[token // 8] |= 1 << token % 8
        return bytes(changed)


def _masked(logits: mx.array, masks: Sequence[bytes]) -> mx.array:
    """Return logits [rows, vocab] with minus infinity where a row's mask has no bit."""
    words = mx.array(memoryview(b"".join(masks)).cast("I")).reshape(len(masks), -1)
    bits = (words[:, :, None] >> mx.arange(_MASK_WORD, dtype=mx.uint32)) & 1
    allowed = bits.reshape(len(masks), -1)[:, : logits.shape[-1]] != 0
    return mx.where(allowed, logits, -mx.inf)
