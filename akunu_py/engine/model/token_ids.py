"""Functions on sequences of token ids.

MLX reads and writes out of bounds without an error. So ids from tokenizers, files and users are
checked here before they index an array.
"""

from collections.abc import Sequence

_BLOCK = 256  # tokens compared at once


def first_invalid(tokens: Sequence[int], vocabulary: int) -> int | None:
    """Return the position of the first token that is not in the vocabulary, None if all are."""
    if not tokens or 0 <= min(tokens) <= max(tokens) < vocabulary:
        return None
    return next(at for at, token in enumerate(tokens) if not 0 <= token < vocabulary)


def common_prefix(left: Sequence[int], right: Sequence[int], known: int = 0) -> int:
    """Return the length of the common prefix of two sequences, at least `known`."""
    length = min(len(left), len(right))
    same = known
    while same < length and left[same : same + _BLOCK] == right[same : same + _BLOCK]:
        same += _BLOCK  # comparing lists is ten times as fast as comparing tokens
    while same < length and left[same] == right[same]:
        same += 1
    return min(same, length)


def shared_prefix(tokens: Sequence[int], prompt: Sequence[int]) -> int:
    """Return the length of the prefix shared with `prompt`, without the prompt's last token."""
    return min(common_prefix(tokens, prompt), len(prompt) - 1)


def reusable_prefix(shared: int, checkpoints: Sequence[int], *, trims: bool) -> int:
    """Return how many of `shared` tokens are reusable: all, or those up to a checkpoint."""
    return shared if trims else max((each for each in checkpoints if each <= shared), default=0)
