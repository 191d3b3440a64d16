"""Answers under a mask are distributed as the model's own, and planted bugs are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from akunu_py.decoding.constraint.matcher import ConstraintMatcher
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.sampling import Sampler, filtered
from akunu_py.decoding.token_ids import common_prefix
from akunu_py.types import Constraint, SamplingOptions
from tests.support.chi_square import p_value
from tests.support.engines import altered

# A vocabulary that an answer's words can be spelled with in several ways.
SMALL = ("</s>", "a", "b", "c", "d", "ab", "bc", "cd", "abc", "bcd", "da", "dd")
SEEDS = 1500
Rule = Callable[[Sampler, ConstraintMatcher, mx.array, list[int]], list[int]]


@pytest.fixture(scope="module")
def small_engine(shallow_starter: Engine) -> Engine:
    vocabulary = {token: index for index, token in enumerate(SMALL)}
    pairs = [("a", "b"), ("b", "c"), ("c", "d"), ("ab", "c"), ("bc", "d"), ("d", "a"), ("d", "d")]
    backend = Tokenizer(BPE(vocabulary, pairs))
    backend.decoder = ByteLevel()
    backend.add_special_tokens(["</s>"])

    class Small:
        backend_tokenizer = backend

    return altered(
        shallow_starter,
        tokenizer=Small(),
        vocabulary=len(SMALL),
        stop_tokens=frozenset([0]),
        digest="small",
    )


def our_rule(
    sampler: Sampler, matcher: ConstraintMatcher, logits: mx.array, draft: list[int]
) -> list[int]:
    """What the loop accepts of a pass over the draft."""
    masked = matcher.masked(logits, draft)
    sampled = [int(token) for token in sampler.sample(masked, mx.array([1, *draft]), 1).tolist()]
    return sampled[: common_prefix(draft, sampled) + 1]


def masked_after_acceptance(
    sampler: Sampler, matcher: ConstraintMatcher, logits: mx.array, draft: list[int]
) -> list[int]:
    """With a planted bug: drafts are held against the unmasked model, and the mask only serves for
    what is drawn where one was rejected."""
    sampled = [int(token) for token in sampler.sample(logits, mx.array([1, *draft]), 1).tolist()]
    accepted = common_prefix(draft, sampled)
    again = Sampler(replace(sampler.options, seed=sampler.seed + 77777))
    bonus = again.sample(matcher.masked(logits, draft), mx.array([1, *draft]), 1).tolist()
    return [*draft[:accepted], int(bonus[accepted])]


def forced_injected(
    sampler: Sampler, matcher: ConstraintMatcher, logits: mx.array, draft: list[int]
) -> list[int]:
    """With a planted bug: the forced token that was drafted is taken without asking the model."""
    tokens = our_rule(sampler, matcher, logits, draft)
    return [*draft[:1], *(tokens[1:] if tokens[0] == draft[0] else ())]


def p_values(engine: Engine, rule: Rule) -> list[float]:
    """Of each row of a pass over a draft, from the runs that got there."""
    logits = np.zeros((3, len(SMALL)), np.float32)
    # What the grammar allows has half of the chances, so that the mask matters.
    for row, likely in enumerate(({"ab": 2, "a": 2, "d": 2, "dd": 2}, {"c": 2, "b": 2}, {"da": 1})):
        for word, logit in likely.items():
            logits[row, SMALL.index(word)] = logit
    constraint = Constraint("regex", "abc(d|da|dd)*")  # "abc" is forced, in four tokenizations
    draft = [SMALL.index("ab"), SMALL.index("c")]
    options = SamplingOptions(temperature=0.8)
    counts = np.zeros(logits.shape)
    matcher = ConstraintMatcher(engine.tokens, constraint, [1])
    for seed in range(SEEDS):
        sampler = Sampler(replace(options, seed=seed))
        for row, token in enumerate(rule(sampler, matcher, mx.array(logits), draft)):
            counts[row, token] += 1
    values = []
    for row, fitting in enumerate((["a", "ab", "abc"], ["c", "cd"], ["</s>", "d", "da", "dd"])):
        fits = np.array([token in fitting for token in SMALL])
        logprobs = np.array(filtered(mx.array(logits[row : row + 1]), options), np.float64)[0]
        expected = np.exp(logprobs) * fits
        expected *= counts[row].sum() / expected.sum()
        if counts[row].sum() < 100:
            continue
        if counts[row][expected == 0].sum():
            return [0.0]
        if (expected > 0).sum() > 1:
            values.append(p_value(counts[row][expected > 0], expected[expected > 0]))
    return values


@pytest.mark.long
def test_the_distribution_is_the_models_own_under_the_mask(small_engine: Engine) -> None:
    values = p_values(small_engine, our_rule)
    print(f"p = {', '.join(f'{value:.3f}' for value in values)}")
    assert len(values) == 3
    assert min(values) > 1e-4


@pytest.mark.long
@pytest.mark.parametrize("rule", [masked_after_acceptance, forced_injected])
def test_a_planted_bug_is_found(small_engine: Engine, rule: Rule) -> None:
    assert min(p_values(small_engine, rule)) < 1e-6
