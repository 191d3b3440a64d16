"""Sampling, greedy or from the filtered distribution, in a way that drafts do not change.

The speculative sampling rule (Leviathan et al. 2023, section 2.3) with a point-mass draft equals
drawing y from p and accepting if y is the draft token. So each row is sampled as in plain decoding
and drafts are compared with the result. Rows are drawn by Gumbel-max (as exponential races: the
largest p / E). The noise depends only on seed, position and token, so a logit that rounds
differently changes the token only if the race was that close.
"""

import math
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p
from transformers.convert_slow_tokenizer import bytes_to_unicode

from akunu_py.errors import UsageError
from akunu_py.types import SamplingOptions, TokenLogprobs

_MAX_INVERSE_TEMPERATURE = 1e30  # maximum of 1 / temperature; infinity times 0 would be NaN
_LEAST_TOP_P = 1e-6  # 0 keeps the most likely token, too
_OUTSIDE = 1e-6  # highest probability of a token that top-p excludes, per draw
_MAX_CANDIDATES = 6  # with more, that is for top-p below 0.75, sorting is as fast
_MIN_LOGPROB = -9999.0  # for forbidden tokens: OpenAI's value, as JSON has no infinity
_MASS_UNIT = 2.0**40  # of the most likely token's probability; the sum of a vocabulary fits int64


class Sampler:
    """Stateless sampler of a token for each row of logits. Raises UsageError for bad options."""

    def __init__(self, options: SamplingOptions) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(options, name)
            if value is not None and not low <= value <= high:
                raise UsageError(f"{name} must be from {low:g} to {high:g}, got {value:g}")
        self.options = options
        self.seed = secrets.randbits(32) if options.seed is None else options.seed
        penalties = options.presence_penalty, options.frequency_penalty
        self._penalizes = options.repetition_penalty != 1 or any(penalties)
        self._cached_offsets: mx.array | None = None  # [vocab]; see `_logit_offsets`
        self._candidates = top_p_candidates(options)
        self._is_exact = options.lenience == 1 and not options.typical
        # Samplers with equal `group` sample rows together, except those without.
        self.group: SamplingOptions | None = None
        if self._is_exact and not self._penalizes:
            self.group = replace(options, seed=None, constraint=None)
        # Top-p keeps the most likely tokens, as min-p and top-k do, so it can be applied last.
        self._filters = replace(options, top_p=1.0) if self._candidates else options

    @property
    def window(self) -> int:
        """Number of tokens before a row that the sampler needs."""
        return self.options.penalty_window if self._penalizes else 0

    def sample(self, logits: mx.array, before: mx.array, position: int) -> mx.array:
        """Return the token sampled after each row, [rows], not yet evaluated.

        logits: [rows, vocab], the last rows of a pass. before: the tokens up to the last row's, at
        least the last `window` + rows - 1. position: of the first row's token in the history.
        """
        rows = logits.shape[0]
        keys = [(self.seed, position + row) for row in range(rows)]
        logits, _, sampled = self._process_and_draw(logits, before, keys)
        if rows > 1 and not self._is_exact:
            draft = before[-(rows - 1) :]
            key = mx.random.split(mx.array(keys[0], mx.uint32))[1]
            accepted = accepted_leniently(logits[:-1], draft, self.options, key)
            sampled = mx.concatenate([mx.where(accepted, draft, sampled[:-1]), sampled[-1:]])
        return sampled

    def sample_draft(
        self, logits: mx.array, before: mx.array, position: int, others: int = 0
    ) -> list[tuple[int, float]]:
        """Sample from a draft model's logits [1, vocab]; return the token and its probability.

        Up to `others` more tokens follow, which would be sampled without those before them. Tokens
        that top-p excludes may be counted in the probabilities.
        """
        keys = [(self.seed, position)]
        logits, values, tokens = self._process_and_draw(logits, before, keys)
        chances = mx.softmax(logits[0].astype(mx.float32))
        if others:
            rest = mx.put_along_axis(values[0], tokens, mx.array(-mx.inf, values.dtype), axis=0)
            best = mx.argpartition(-rest, others - 1)[:others]
            best = best[mx.argsort(-rest[best])]
            tokens = mx.concatenate([tokens, best.astype(tokens.dtype)])
        # Read both in one wait; float32 holds every token below 2**24.
        found = mx.stack([tokens.astype(mx.float32), chances[tokens]], axis=1).tolist()
        return [(int(token), chance) for token, chance in found]

    def _process_and_draw(
        self, logits: mx.array, before: mx.array, keys: Sequence[tuple[int, int]]
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Return the processed logits, the values that decide, and the tokens; see `sample`."""
        options = self.options
        if options.logit_bias or options.allowed_tokens:
            logits = logits + self._logit_offsets(logits.shape[-1])
        if self._penalizes:
            logits = penalized(logits, before, options)
        if options.temperature == 0:
            return logits, logits, mx.argmax(logits, axis=-1)
        kept = filtered(logits, self._filters)
        values = race(kept, keys)
        if not self._candidates:
            return kept, values, mx.argmax(values, axis=-1)
        return kept, values, top_p_winner(values, logits, options.top_p, self._candidates)

    def _logit_offsets(self, vocabulary: int) -> mx.array:
        """Return the offset of each logit, [vocab]: the bias, or minus infinity if forbidden."""
        if self._cached_offsets is None or self._cached_offsets.shape[0] != vocabulary:
            bias, allowed = dict(self.options.logit_bias), self.options.allowed_tokens
            offsets = [-math.inf if allowed else 0.0] * vocabulary
            for token in allowed:
                if 0 <= token < vocabulary:
                    offsets[token] = 0.0
            for token, offset in bias.items():
                if 0 <= token < vocabulary:
                    offsets[token] += offset
            self._cached_offsets = mx.array(offsets)
        return self._cached_offsets


@dataclass(frozen=True, slots=True)
class RowsToSample:
    """The last rows of one request in a pass; see `Sampler.sample`."""

    sampler: Sampler
    logits: mx.array
    before: mx.array
    position: int
    depths: Sequence[int] = ()  # of a tree's rows: positions after the first one


def sample_together(parts: Sequence[RowsToSample]) -> list[mx.array]:
    """Sample as `Sampler.sample`; parts whose options differ only in the seed share one call."""
    groups = dict[object, list[int]]()
    for index, part in enumerate(parts):
        group = part.sampler.group
        groups.setdefault(index if group is None else group, []).append(index)
    found = dict[int, mx.array]()
    for members in groups.values():
        same = [parts[index] for index in members]
        if len(same) == 1 and not same[0].depths:
            (part,) = same
            found[members[0]] = part.sampler.sample(part.logits, part.before, part.position)
            continue
        counts = [part.logits.shape[0] for part in same]
        keys = [
            (part.sampler.seed, part.position + depth)
            for part, rows in zip(same, counts, strict=True)
            for depth in part.depths or range(rows)
        ]
        logits = mx.concatenate([part.logits for part in same])
        sampled = same[0].sampler._process_and_draw(logits, mx.array([]), keys)[2]
        found |= zip(members, mx.split(sampled, [*accumulate(counts)][:-1]), strict=True)
    return [found[index] for index in range(len(parts))]


def penalized(logits: mx.array, before: mx.array, options: SamplingOptions) -> mx.array:
    """Apply mlx-lm's penalty formulas to logits [rows, vocab]. before: see `Sampler.sample`."""
    rows = logits.shape[0]
    window = min(options.penalty_window, before.shape[0])
    ends = mx.arange(before.shape[0] - rows + 1, before.shape[0] + 1)
    columns = ends[:, None] + mx.arange(-window, 0)  # [rows, window]
    # Pad short windows with the first token, which they contain anyway.
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
    """Apply top-p, min-p, top-k and temperature in mlx-lm's order; float32 [rows, vocab].

    Returns log-probabilities up to a constant: the highest is 0, removed tokens are minus infinity.
    """
    logprobs = _below_highest(logits)
    if options.top_p < 1:
        logprobs = apply_top_p(logprobs, max(options.top_p, _LEAST_TOP_P))
    if options.min_p > 0:
        logprobs = apply_min_p(logprobs, options.min_p)
    if 0 < options.top_k < logits.shape[-1]:
        logprobs = apply_top_k(logprobs, options.top_k)
    return logprobs * min(1 / options.temperature, _MAX_INVERSE_TEMPERATURE)


def _below_highest(logits: mx.array) -> mx.array:
    """Return the logits less the highest of each row, which is independent of the order of sums."""
    logits = logits.astype(mx.float32)
    return logits - logits.max(axis=-1, keepdims=True)


def top_p_candidates(options: SamplingOptions) -> int:
    """Return the number of candidates that `top_p_winner` needs, 0 if sorting is better.

    Candidates outside the nucleus are independent records of the race (Rényi's theorem) whose
    expected number is at most -log(top_p), so n of them have at most the probability
    (-log top_p)^n / n!. That holds for temperatures up to 1, which favor the nucleus.
    """
    exact = options.lenience == 1 and not options.typical  # these need all filtered probabilities
    if not 0 < options.top_p < 1 or options.temperature > 1 or not exact:
        return 0
    expected, chance = -math.log(options.top_p), 1.0
    for count in range(1, _MAX_CANDIDATES + 1):
        chance *= expected / count
        if chance <= _OUTSIDE:
            return count
    return 0


def top_p_winner(values: mx.array, logits: mx.array, top_p: float, candidates: int) -> mx.array:
    """Return the token with the largest value among those that top-p keeps, [rows], unsorted.

    values, logits: [rows, vocab]. A token is kept if all likelier tokens together have less than
    the probability `top_p`. If the winner of the race is excluded, so are all tokens that are not
    likelier, and the winner of the others is the next candidate. The last one is not checked.
    Probabilities are summed as integers, because GPUs sum one row and several in another order.
    """
    logprobs = _below_highest(logits)
    mass = (mx.exp(logprobs) * _MASS_UNIT).astype(mx.int64)
    limit = top_p * mass.sum(axis=-1, keepdims=True).astype(mx.float32)
    tokens, kept = [mx.argmax(values, axis=-1, keepdims=True)], []
    for _ in range(candidates - 1):
        likelier = logprobs > mx.take_along_axis(logprobs, tokens[-1], axis=-1)
        above = mx.where(likelier, mass, 0).sum(axis=-1, keepdims=True)
        kept.append(above.astype(mx.float32) < limit)
        values = values * likelier
        tokens.append(mx.argmax(values, axis=-1, keepdims=True))
    first = mx.argmax(mx.concatenate([*kept, mx.ones_like(limit)], axis=-1), axis=-1, keepdims=True)
    return mx.take_along_axis(mx.concatenate(tokens, axis=-1), first, axis=-1)[:, 0]


def race(logprobs: mx.array, keys: Sequence[tuple[int, int]]) -> mx.array:
    """Return the race values [rows, vocab]; the largest one of a row wins.

    logprobs: [rows, vocab] of float32, at most 0. keys: (seed, position) by row.
    """
    bits = random_bits(mx.array(keys, mx.uint32), logprobs.shape[-1])
    return mx.exp(logprobs) / exponential(bits)


def random_bits(keys: mx.array, count: int) -> mx.array:
    """Return uint32 words [keys, count]; each row depends on its key [2] and `count` only."""
    pairs = (count + 1) // 2  # from Python, only `split` returns MLX's random bits
    if keys.shape[0] == 1:
        bits = mx.random.split(keys[0], pairs)
    else:
        bits = mx.vmap(lambda key: mx.random.split(key, pairs))(keys)
    return bits.reshape(keys.shape[0], -1)[:, :count]


def exponential(bits: mx.array) -> mx.array:
    """Map random words to positive, finite float32 of the exponential distribution."""
    u = (bits | 1).astype(mx.float32) * 2.0**-32  # above 0, and 1 at most
    rest = mx.maximum(1 - u, 2.0**-33)
    # -log(1 - u), plus the rounding error of 1 - u: the smallest values draw unlikely tokens.
    return (u - (1 - rest)) - mx.log(rest)


def accepted_leniently(
    logits: mx.array, draft: mx.array, options: SamplingOptions, key: mx.array
) -> mx.array:
    """Return which draft tokens to accept although another was sampled: [rows] of bool.

    logits: [rows, vocab], filtered; draft: [rows]. Lenience: Leviathan et al. (2023), appendix A.5:
    x is accepted with min(1, p(x) / lenience) in all. Typical acceptance: Cai et al. (2024,
    Medusa), section 2.3.1, equation 2.
    """
    p = mx.softmax(logits.astype(mx.float32), axis=-1)
    chance = mx.take_along_axis(p, draft[:, None].astype(mx.uint32), axis=-1)[:, 0]
    accepted = mx.zeros(chance.shape, mx.bool_)
    if options.lenience < 1 and options.temperature == 0:
        accepted = chance >= options.lenience * p.max(axis=-1)
    elif options.lenience < 1:
        total = mx.minimum(1, chance / options.lenience)
        extra = (total - chance) / mx.maximum(1 - chance, 1e-9)
        accepted = mx.random.uniform(shape=chance.shape, key=key) < extra
    if options.typical > 0:
        entropy = -(p * mx.log(mx.maximum(p, 1e-30))).sum(axis=-1)
        bound = mx.minimum(options.typical, options.typical**0.5 * mx.exp(-entropy))
        accepted = accepted | (chance > bound)
    return accepted


_RANGES = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "top_k": (0, math.inf),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
    "penalty_window": (1, math.inf),
    "lenience": (0.01, 1),
    "typical": (0, 1),
    "seed": (0, 2**32 - 1),
    "logprobs": (0, 20),
}


class LogprobSampler(Sampler):
    """A `Sampler` that keeps logprobs by position; later passes replace earlier ones."""

    def __init__(self, options: SamplingOptions, tokenizer: Any) -> None:
        super().__init__(options)
        self.group = None
        self._tokenizer = tokenizer
        # A pass's logprobs [rows], top tokens and their logprobs [rows, count]; the row in it.
        self._rows: dict[int, tuple[mx.array, mx.array, mx.array, int]] = {}

    def sample(self, logits: mx.array, before: mx.array, position: int) -> mx.array:
        sampled = super().sample(logits, before, position)
        logits32 = logits.astype(mx.float32)
        logprobs = logits32 - mx.logsumexp(logits32, axis=-1, keepdims=True)  # [rows, vocab]
        count = min(self.options.logprobs or 0, logits.shape[-1])
        top = mx.argpartition(-logprobs, max(0, count - 1), axis=-1)[:, :count]
        top_logprobs = mx.take_along_axis(logprobs, top, axis=-1)
        chosen = mx.take_along_axis(logprobs, sampled[:, None].astype(mx.uint32), axis=-1)[:, 0]
        mx.async_eval(chosen, top, top_logprobs)
        for index in range(logits.shape[0]):
            self._rows[position + index] = chosen, top, top_logprobs, index
        return sampled

    def pop_logprobs(self, position: int, tokens: Sequence[int], last: int) -> list[TokenLogprobs]:
        """Return logprobs of `tokens`, the first at `position` after the token `last`."""
        result = []
        for number, token in enumerate(tokens):
            *arrays, index = self._rows.pop(position + number)
            # Slicing arrays would launch work, which waits for the pass that is running by now.
            logprob, top, top_logprobs = (each.tolist()[index] for each in arrays)
            ranked = sorted(zip(top, top_logprobs, strict=True), key=lambda pair: -pair[1])
            text, logprob, raw = self._entry(last, token, logprob)
            others = tuple(self._entry(last, *each) for each in ranked)
            result.append(TokenLogprobs(text, logprob, raw, others))
            last = token
        return result

    def _entry(self, last: int, token: int, logprob: float) -> tuple[str, float, bytes]:
        """Return the text of `token` after `last`, its logprob and its bytes."""
        before = self._tokenizer.decode([last])  # SentencePiece adds spaces only behind a token
        both = str(self._tokenizer.decode([last, token]))
        text = both[len(before) :]
        raw = text.encode()
        if "\ufffd" in (text or before) or not both.startswith(before):  # parts of a character
            raw = token_bytes(self._tokenizer.convert_ids_to_tokens(token) or "")
        return text, max(_MIN_LOGPROB, logprob), raw


def token_bytes(piece: str) -> bytes:
    """Return the bytes of a vocabulary entry: `<0xE2>`, or GPT-2's letters for bytes."""
    if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", piece):
        return bytes.fromhex(byte[1])
    return b"".join(bytes([_BYTES[each]]) if each in _BYTES else each.encode() for each in piece)


_BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}
