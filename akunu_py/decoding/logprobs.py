"""Log-probabilities of the tokens of an answer, for those who ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from akunu_py.decoding.sampling import Sampler
from akunu_py.types import SamplingOptions, TokenLogprobs

_LEAST = -9999.0  # for what a constraint forbids: JSON has no infinity, and OpenAI says this


@dataclass(frozen=True, slots=True)
class _Row:
    """What a pass found for one position: arrays of the pass, and the row of it."""

    sampled: mx.array  # [rows]
    logprobs: mx.array  # [rows], of what was sampled
    top: mx.array  # [rows, count] of token ids
    top_logprobs: mx.array  # [rows, count]
    index: int


class LogprobSampler(Sampler):
    """Samples as `Sampler` does, and keeps the logprobs by position: a later pass over a position,
    where a draft was rejected, takes the place of an earlier one."""

    def __init__(self, options: SamplingOptions, tokenizer: Any) -> None:
        super().__init__(options)
        self._tokenizer = tokenizer
        self._rows: dict[int, _Row] = {}

    def sample(self, logits: mx.array, before: mx.array, position: int) -> mx.array:
        """See `Sampler`."""
        sampled = super().sample(logits, before, position)
        wide = logits.astype(mx.float32)
        logprobs = wide - mx.logsumexp(wide, axis=-1, keepdims=True)  # [rows, vocab]
        count = min(self.options.logprobs or 0, logits.shape[-1])
        top = mx.argpartition(-logprobs, max(0, count - 1), axis=-1)[:, :count]
        top_logprobs = mx.take_along_axis(logprobs, top, axis=-1)
        chosen = mx.take_along_axis(logprobs, sampled[:, None].astype(mx.uint32), axis=-1)[:, 0]
        mx.async_eval(chosen, top, top_logprobs)
        for index in range(logits.shape[0]):
            row = _Row(sampled, chosen, top, top_logprobs, index)
            self._rows[position + index] = row
        return sampled

    def take(self, position: int, tokens: Sequence[int], last: int) -> list[TokenLogprobs]:
        """Of `tokens`, the first of which is at `position` and follows the token `last`."""
        found = []
        for number, token in enumerate(tokens):
            row = self._rows.pop(position + number)
            top = row.top[row.index].tolist(), row.top_logprobs[row.index].tolist()
            ranked = sorted(zip(*top, strict=True), key=lambda pair: -pair[1])
            found.append(
                TokenLogprobs(
                    self._text(last, token),
                    max(_LEAST, float(row.logprobs[row.index].item())),
                    tuple((self._text(last, each), max(_LEAST, value)) for each, value in ranked),
                )
            )
            last = token
        return found

    def _text(self, last: int, token: int) -> str:
        """Of a token behind another: SentencePiece's have a space only there."""
        before = self._tokenizer.decode([last])
        return str(self._tokenizer.decode([last, token]))[len(before) :]
