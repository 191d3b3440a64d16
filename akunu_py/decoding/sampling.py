"""Sampling: greedy, or from the filtered distribution, in a way that drafts do not change.

Pure functions on logits. A draft is a point mass, so the speculative sampling rule (accept x with
min(1, p(x) / q(x)), else sample from norm(max(0, p - q)); Leviathan et al. 2023, section 2.3)
becomes: accept x with probability p(x), else sample from p without x, renormalized. Drawing y from
p and accepting where y = x is the same thing: y = x has probability p(x), and a y that is not x is
distributed as p without x. So every row is sampled as plain decoding would sample it, and drafts
are compared with the result, whatever the temperature.

The random numbers of a row depend on the seed and the row's position in the history only. With the
same seed, sampling with drafts therefore gives the very tokens of plain sampling.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_logits_processors

from akunu_py.errors import UsageError
from akunu_py.types import SamplingOptions

_MAX_SEED = 2**32 - 1

Processor = Callable[[mx.array, mx.array], mx.array]


class Sampler:
    """Samples a token for each row of logits. Repeatable: it has no state.

    Raises UsageError for options that cannot be honoured. seed: the one in use, also where the
    options left it to chance.
    """

    def __init__(self, options: SamplingOptions) -> None:
        _check(options)
        self.options = options
        self.seed = secrets.randbits(32) if options.seed is None else options.seed
        self._processors = _processors(options)

    @property
    def window(self) -> int:
        """How many of the tokens before a row it looks at."""
        return self.options.penalty_window if self._processors else 0

    def sample(self, logits: mx.array, before: mx.array, position: int) -> mx.array:
        """The token sampled after each row, [rows], not yet evaluated.

        logits: [rows, vocab], the last rows of a pass. before: the tokens up to the last row's,
        or the last of them, at least `window` + rows - 1 where there are as many. position: that
        of the first row's token in the history.
        """
        rows, options = logits.shape[0], self.options
        logits = self._processed(logits, before)
        if options.temperature == 0:
            sampled = mx.argmax(logits, axis=-1)
        else:
            logits = filtered(logits, options)
            drawn = [
                mx.random.categorical(logits[row : row + 1], key=self._key(position + row))
                for row in range(rows)
            ]
            sampled = mx.concatenate(drawn)
        if rows > 1 and (options.lenience < 1 or options.typical > 0):
            draft = before[-(rows - 1) :]
            key = mx.random.split(self._key(position))[1]
            accepted = accepted_leniently(logits[:-1], draft, options, key)
            sampled = mx.concatenate([mx.where(accepted, draft, sampled[:-1]), sampled[-1:]])
        return sampled

    def _processed(self, logits: mx.array, before: mx.array) -> mx.array:
        """After bias and penalties, each row by the tokens before it, and only allowed tokens."""
        if self._processors:
            rows = []
            for row in range(logits.shape[0]):
                end = before.shape[0] - logits.shape[0] + row + 1
                each = logits[row : row + 1]
                for processor in self._processors:
                    each = processor(before[:end], each)
                rows.append(each)
            logits = mx.concatenate(rows)
        if self.options.allowed_tokens:
            mask = mx.full(logits.shape[-1:], -mx.inf, logits.dtype)
            mask[mx.array(self.options.allowed_tokens)] = 0
            logits = logits + mask
        return logits

    def _key(self, position: int) -> mx.array:
        return mx.random.key((self.seed << 32) + position)


def filtered(logits: mx.array, options: SamplingOptions) -> mx.array:
    """Log-probabilities, up to a constant, after top-p, min-p, top-k and temperature, in the order
    of mlx-lm's sampler: [rows, vocab] -> [rows, vocab], minus infinity for what they remove."""
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    if 0 < options.top_p < 1:
        logprobs = apply_top_p(logprobs, options.top_p)
    if options.min_p > 0:
        logprobs = apply_min_p(logprobs, options.min_p)
    if 0 < options.top_k < logits.shape[-1]:
        logprobs = apply_top_k(logprobs, options.top_k)
    return logprobs * (1 / options.temperature)


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


def _processors(options: SamplingOptions) -> list[Processor]:
    made: list[Any] = make_logits_processors(
        logit_bias=dict(options.logit_bias) or None,
        # mlx-lm takes 0 for "none", and 1 is the factor that changes nothing.
        repetition_penalty=None if options.repetition_penalty == 1 else options.repetition_penalty,
        repetition_context_size=options.penalty_window,
        presence_penalty=options.presence_penalty or None,
        presence_context_size=options.penalty_window,
        frequency_penalty=options.frequency_penalty or None,
        frequency_context_size=options.penalty_window,
    )
    return made


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
    )
    for name, value, low, high in ranges:
        if not low <= value <= high:
            raise UsageError(f"{name} must be from {low:g} to {high:g}, got {value:g}")
