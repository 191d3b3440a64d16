"""Sampling: greedy, or from the filtered distribution, in a way that drafts do not change.

Pure functions on logits. A draft is a point mass, so the speculative sampling rule (accept x with
min(1, p(x) / q(x)), else sample from norm(max(0, p - q)); Leviathan et al. 2023, section 2.3)
becomes: accept x with probability p(x), else sample from p without x, renormalized. Drawing y from
p and accepting where y = x is the same thing: y = x has probability p(x), and a y that is not x is
distributed as p without x. So every row is sampled as plain decoding would sample it, and drafts
are compared with the result, whatever the temperature.

A row is drawn by Gumbel-max (Gumbel 1954; as exponential races: the largest of p / E, where E is
exponential noise), and the noise of each token depends on the seed, the row's position in the
history and the token only. So with the same seed sampling with drafts gives the tokens of plain
sampling, and logits that a pass over more rows rounds differently give another token only where
the race was that close. One draw over the inverse of the cumulated distribution, as MLX's
`categorical`, would shift all tokens behind the difference.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from akunu_py.decoding.token_ids import inside
from akunu_py.errors import UsageError
from akunu_py.types import SamplingOptions, TokenLogprobs

_MAX_SEED = 2**32 - 1
_LARGEST = 1e30  # 1 / temperature; more would be infinite, and infinity times 0 is no number


class Sampler:
    """Samples a token for each row of logits. Repeatable: it keeps no state.

    Raises UsageError for options that cannot be honoured. seed: the one in use, also where the
    options left it to chance.
    """

    def __init__(self, options: SamplingOptions) -> None:
        _check(options)
        self.options = options
        self.seed = secrets.randbits(32) if options.seed is None else options.seed
        self._penalizes = (
            options.repetition_penalty != 1
            or options.presence_penalty != 0
            or options.frequency_penalty != 0
        )
        self._offsets: mx.array | None = None  # [vocab]; see `_offset`

    @property
    def window(self) -> int:
        """How many of the tokens before a row it looks at."""
        return self.options.penalty_window if self._penalizes else 0

    def sample(self, logits: mx.array, before: mx.array, position: int) -> mx.array:
        """The token sampled after each row, [rows], not yet evaluated.

        logits: [rows, vocab], the last rows of a pass. before: the tokens up to the last row's,
        or the last of them, at least `window` + rows - 1 where there are as many. position: that
        of the first row's token in the history.
        """
        rows, options = logits.shape[0], self.options
        logits, sampled = self._drawn(logits, before, position)
        if rows > 1 and (options.lenience < 1 or options.typical > 0):
            draft = before[-(rows - 1) :]
            key = mx.random.split(_keys(self.seed, position, 1)[0])[1]
            accepted = accepted_leniently(logits[:-1], draft, options, key)
            sampled = mx.concatenate([mx.where(accepted, draft, sampled[:-1]), sampled[-1:]])
        return sampled

    def guess(self, logits: mx.array, before: mx.array, position: int) -> tuple[int, float]:
        """The token that `sample` would give after a row of another model's logits, [1, vocab], and
        how likely that model has it."""
        logits, sampled = self._drawn(logits, before, position)
        chances = mx.softmax(logits.astype(mx.float32), axis=-1)
        chance = mx.take_along_axis(chances, sampled[:, None].astype(mx.uint32), axis=-1)
        mx.eval(sampled, chance)
        return int(sampled.item()), float(chance.item())

    def _drawn(
        self, logits: mx.array, before: mx.array, position: int
    ) -> tuple[mx.array, mx.array]:
        """The logits that rows are sampled from, and the tokens, [rows]; see `sample`."""
        options = self.options
        if options.logit_bias or options.allowed_tokens:
            logits = logits + self._offset(logits.shape[-1])
        if self._penalizes:
            logits = penalized(logits, before, options)
        if options.temperature == 0:
            return logits, mx.argmax(logits, axis=-1)
        logits = filtered(logits, options)
        return logits, draw(logits, self.seed, position)

    def _offset(self, vocabulary: int) -> mx.array:
        """What is added to each logit, [vocab]: the bias, and minus infinity where tokens are not
        allowed. Tokens that the vocabulary lacks are left out."""
        if self._offsets is None or self._offsets.shape[0] != vocabulary:
            bias, allowed = dict(self.options.logit_bias), self.options.allowed_tokens
            offsets = [-math.inf if allowed else 0.0] * vocabulary
            for token in inside(allowed, vocabulary):
                offsets[token] = 0.0
            for token in inside(list(bias), vocabulary):
                offsets[token] += bias[token]
            self._offsets = mx.array(offsets)
        return self._offsets


def penalized(logits: mx.array, before: mx.array, options: SamplingOptions) -> mx.array:
    """Logits [rows, vocab] after the penalties for the tokens before each row, with the formulas of
    mlx-lm's processors. before: as for `Sampler.sample`."""
    rows = logits.shape[0]
    window = min(options.penalty_window, before.shape[0])
    ends = mx.arange(before.shape[0] - rows + 1, before.shape[0] + 1)
    columns = ends[:, None] + mx.arange(-window, 0)  # [rows, window]
    # Before the first token there is none: the first again, which is in that row's window anyway.
    tokens = before[mx.maximum(columns, 0)]
    chosen = mx.take_along_axis(logits, tokens, axis=-1)
    factor = options.repetition_penalty
    chosen = mx.where(chosen < 0, chosen * factor, chosen / factor) - options.presence_penalty
    logits = mx.put_along_axis(logits, tokens, chosen.astype(logits.dtype), axis=-1)
    if options.frequency_penalty:
        each = mx.where(columns < 0, 0.0, options.frequency_penalty).astype(logits.dtype)
        logits = logits.at[mx.arange(rows)[:, None], tokens].subtract(each)
    return logits


def filtered(logits: mx.array, options: SamplingOptions) -> mx.array:
    """Log-probabilities, up to a constant, after top-p, min-p, top-k and temperature, in the order
    of mlx-lm's sampler: [rows, vocab] -> [rows, vocab] of float32, minus infinity for what they
    remove. The highest is 0."""
    logits = logits.astype(mx.float32)
    # The maximum is the same in whichever order it is computed; a sum is not.
    logprobs = logits - logits.max(axis=-1, keepdims=True)
    if 0 < options.top_p < 1:
        logprobs = apply_top_p(logprobs, options.top_p)
    if options.min_p > 0:
        logprobs = apply_min_p(logprobs, options.min_p)
    if 0 < options.top_k < logits.shape[-1]:
        logprobs = apply_top_k(logprobs, options.top_k)
    return logprobs * min(1 / options.temperature, _LARGEST)


def draw(logprobs: mx.array, seed: int, position: int) -> mx.array:
    """A token for each row, [rows]: x with probability exp(logprobs[x]) over the sum of those.

    logprobs: [rows, vocab] of float32, at most 0. position: of the first row's token.
    """
    return mx.argmax(race(logprobs, seed, position), axis=-1)


def race(logprobs: mx.array, seed: int, position: int) -> mx.array:
    """What the drawn token has most of, [rows, vocab]; see `draw`."""
    rows, vocabulary = logprobs.shape
    return mx.exp(logprobs) / exponential(random_bits(_keys(seed, position, rows), vocabulary))


def random_bits(keys: mx.array, count: int) -> mx.array:
    """Random words, [keys, count] of uint32; each row depends on its own key and `count` only.

    keys: [keys, 2].
    """
    pairs = (count + 1) // 2  # `split` is the way from Python to MLX's random bits
    if keys.shape[0] == 1:
        bits = mx.random.split(keys[0], pairs)
    else:
        bits = mx.vmap(lambda key: mx.random.split(key, pairs))(keys)
    return bits.reshape(keys.shape[0], -1)[:, :count]


def exponential(bits: mx.array) -> mx.array:
    """Random words as float32 of the exponential distribution, positive and finite."""
    u = (bits | 1).astype(mx.float32) * 2.0**-32  # above 0, and 1 at most
    rest = mx.maximum(1 - u, 2.0**-33)
    # -log(1 - u). What 1 - u rounds off is added again: the smallest draw the unlikeliest tokens.
    return (u - (1 - rest)) - mx.log(rest)


def _keys(seed: int, position: int, rows: int) -> mx.array:
    """The random key of each row, [rows, 2]."""
    return mx.array([[seed, position + row] for row in range(rows)], mx.uint32)


def accepted_leniently(
    logits: mx.array, draft: mx.array, options: SamplingOptions, key: mx.array
) -> mx.array:
    """Which drafted tokens to accept although the target sampled another: [rows] of bool.

    logits: [rows, vocab], filtered; draft: [rows]. Lenience is Leviathan et al. (2023), appendix
    A.5: x is accepted with min(1, p(x) / lenience) in all, of which drawing x itself contributes
    p(x). Typical acceptance is Cai et al. (2024, Medusa), section 2.3.1, equation 2.
    """
    p = mx.softmax(logits.astype(mx.float32), axis=-1)
    chance = mx.take_along_axis(p, draft[:, None].astype(mx.uint32), axis=-1)[:, 0]
    accepted = mx.zeros(chance.shape, mx.bool_)
    if options.lenience < 1 and options.temperature == 0:
        accepted = chance >= options.lenience * p.max(axis=-1)
    elif options.lenience < 1:
        wanted = mx.minimum(1, chance / options.lenience)
        extra = (wanted - chance) / mx.maximum(1 - chance, 1e-9)
        accepted = mx.random.uniform(shape=chance.shape, key=key) < extra
    if options.typical > 0:
        entropy = -(p * mx.log(mx.maximum(p, 1e-30))).sum(axis=-1)
        bound = mx.minimum(options.typical, options.typical**0.5 * mx.exp(-entropy))
        accepted = accepted | (chance > bound)
    return accepted


def _check(options: SamplingOptions) -> None:
    ranges: Sequence[tuple[str, float, float, float]] = (
        ("temperature", options.temperature, 0, 100),
        ("top_p", options.top_p, 0, 1),
        ("min_p", options.min_p, 0, 1),
        ("top_k", options.top_k, 0, float("inf")),
        ("repetition_penalty", options.repetition_penalty, 0.01, 100),
        ("presence_penalty", options.presence_penalty, -100, 100),
        ("frequency_penalty", options.frequency_penalty, -100, 100),
        ("penalty_window", options.penalty_window, 1, float("inf")),
        ("lenience", options.lenience, 0.01, 1),
        ("typical", options.typical, 0, 1),
        ("seed", options.seed or 0, 0, _MAX_SEED),
        ("logprobs", options.logprobs or 0, 0, 20),
    )
    for name, value, low, high in ranges:
        if not low <= value <= high:
            raise UsageError(f"{name} must be from {low:g} to {high:g}, got {value:g}")


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
