"""What DFlash2 adds to DFlash: convolutions in the block, and a selector of candidates.

Source: z-lab's `dflash` 0.1.0, `model_mlx.py`.
"""

import mlx.core as mx
import mlx.nn as nn


class BlockConvolution(nn.Module):
    """Causal convolutions over the rows of a block, before and after a sublayer.

    A kernel is a learned base for each channel plus a dynamic part for each group of channels,
    projected from the sublayer's input.
    """

    def __init__(self, width: int, taps: int, group: int) -> None:
        super().__init__()
        self.base_kernel = mx.zeros((2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // group), bias=False)
        self._group = group

    def before(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Return the convolved input [1, rows, width], and the dynamic kernel for `after`."""
        _, taps, width = self.base_kernel.shape
        shape = (*x.shape[:-1], 2, taps, width // self._group)
        dynamic = self.kernel_projection(x).reshape(shape)
        return self._convolve(x, dynamic[..., 0, :, :], self.base_kernel[0]), dynamic[..., 1, :, :]

    def after(self, x: mx.array, dynamic: mx.array) -> mx.array:
        """Return the convolved output of the sublayer."""
        return self._convolve(x, dynamic, self.base_kernel[1])

    def _convolve(self, x: mx.array, dynamic: mx.array, base: mx.array) -> mx.array:
        rows = x.shape[1]
        kernel = mx.repeat(dynamic, self._group, axis=-1) + base.astype(x.dtype)
        padded = mx.pad(x, ((0, 0), (len(base) - 1, 0), (0, 0)))
        shifted = [padded[:, len(base) - 1 - tap :][:, :rows] for tap in range(len(base))]
        return sum(
            (kernel[..., tap, :] * values for tap, values in enumerate(shifted)), mx.zeros_like(x)
        )


class CandidateSelector(nn.Module):
    """Scores the best tokens of a row by the token before and the row's hidden state."""

    def __init__(self, vocabulary: int, width: int, rank: int, top: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Embedding(vocabulary, rank)
        self.successor_codebook = nn.Embedding(vocabulary, rank)
        self.hidden_projection = nn.Linear(width, rank, bias=False)
        self._top = min(top, vocabulary)

    def __call__(self, logits: mx.array, hidden: mx.array, previous: mx.array) -> mx.array:
        """Return the scores of a row's candidates in logits [vocabulary], -inf elsewhere.

        logits: [vocabulary] of the row. hidden: [width]. previous: [1], the token before.
        """
        known = logits[: self.predecessor_codebook.weight.shape[0]]
        candidates = mx.argpartition(known, -self._top)[-self._top :]
        pair = self.predecessor_codebook(previous)[0] * self.hidden_projection(hidden[None])[0]
        scores = known[candidates] + self.successor_codebook(candidates) @ pair
        return mx.put_along_axis(
            mx.full(logits.shape, -mx.inf, scores.dtype), candidates, scores, 0
        )
