"""Sampling: its distribution with drafts, filters, lenient acceptance and logprobs."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from unittest.mock import create_autospec

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akunu_py.engine import sampling
from akunu_py.engine.engine import Engine
from akunu_py.engine.loop import StepLoop
from akunu_py.engine.model.token_ids import common_prefix
from akunu_py.engine.sampling import (
    LogprobSampler,
    RowsToSample,
    Sampler,
    accepted_leniently,
    exponential,
    filtered,
    race,
    sample_together,
    token_bytes,
    top_p_candidates,
)
from akunu_py.errors import UsageError
from akunu_py.ngram.token_tree import TokenTree
from akunu_py.types import DraftMode, GenerateOptions, SamplingOptions
from tests.support.tiny_fim import byte_level

WARM = SamplingOptions(temperature=0.9)
FILTERS = {
    "temperature": WARM,
    "cold": replace(WARM, temperature=0.4),
    "top-p": replace(WARM, top_p=0.8),
    "top-p 0": replace(WARM, top_p=0.0),
    "top-k": replace(WARM, top_k=4),
    "min-p": replace(WARM, min_p=0.1),
    "all": replace(WARM, top_p=0.9, top_k=6, min_p=0.05),
    "repetition": replace(WARM, repetition_penalty=1.5, penalty_window=4),
    "presence": replace(WARM, presence_penalty=1.0, penalty_window=8),
    "frequency": replace(WARM, frequency_penalty=0.7, penalty_window=8),
    "bias": replace(WARM, logit_bias=((3, 2.0), (5, -4.0))),
    "everything": SamplingOptions(0.7, 0.95, 0.02, 8, 1.2, 0.3, 0.2, 6, logit_bias=((1, 1.0),)),
}

SMALL = 12  # tokens in the small vocabulary
ROWS = 4
SEEDS = 800


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Return the p-value of Pearson's chi-square test."""
    from scipy.stats import chisquare  # takes longer to import than most tests to run

    return float(chisquare(counts, expected).pvalue)


def plain_distribution(
    logits: np.ndarray, before: Sequence[int], options: SamplingOptions
) -> np.ndarray:
    """What one row's distribution ought to be, written from the definitions: [vocab]."""
    logits = logits.astype(np.float64).copy()
    for token, bias in options.logit_bias:
        logits[token] += bias
    recent = list(before[-options.penalty_window :])
    for token in set(recent):
        factor = options.repetition_penalty
        logits[token] = logits[token] * factor if logits[token] < 0 else logits[token] / factor
        logits[token] -= options.presence_penalty
        logits[token] -= options.frequency_penalty * recent.count(token)
    p = np.exp(logits - logits.max())
    p /= p.sum()
    order = np.argsort(-p)
    keep = np.ones(len(p), bool)
    if options.top_p < 1:
        above = np.cumsum(p[order]) - p[order]
        keep[order[above >= max(options.top_p, 1e-6)]] = False
    if options.min_p > 0:
        keep &= p >= options.min_p * p.max()
    if options.top_k:
        ranked = sorted(np.flatnonzero(keep), key=lambda token: -p[token])
        keep[ranked[options.top_k :]] = False
    tempered = np.where(keep, p, 0) ** (1 / options.temperature)
    return np.asarray(tempered / tempered.sum())


def fit(counts: np.ndarray, expected: np.ndarray) -> float:
    possible = expected > 0
    assert counts[~possible].sum() == 0, "a token came out that the filters cut away"
    return p_value(counts[possible], expected[possible] * counts.sum())


@pytest.mark.long
@pytest.mark.parametrize("name", ["temperature", "all", "everything"])
def test_the_distribution_is_that_of_plain_sampling(name: str) -> None:
    """At each position of a draft, over the runs that got there, and after it."""
    generator = np.random.default_rng(7)
    logits = generator.normal(size=(ROWS, SMALL)).astype(np.float32) * 1.5
    prompt = [3, 1, 4, 1, 5]
    options = FILTERS[name]
    # The likeliest token of each row, so that many runs get to the end of the draft.
    draft: list[int] = []
    for row in range(ROWS - 1):
        draft.append(int(plain_distribution(logits[row], [*prompt, *draft], options).argmax()))
    counts = np.zeros((ROWS, SMALL))
    rows, before = mx.array(logits), mx.array([*prompt, *draft])
    samplers = [Sampler(replace(options, seed=seed)) for seed in range(SEEDS)]
    parts = [RowsToSample(each, rows, before, len(prompt)) for each in samplers]
    together = sample_together(parts)
    mx.eval(together)
    for sampled in (each.tolist() for each in together):
        for row in range(common_prefix(draft, sampled) + 1):
            counts[row, sampled[row]] += 1
    values = [
        fit(counts[row], plain_distribution(logits[row], [*prompt, *draft[:row]], options))
        for row in range(ROWS)
        if counts[row].sum() > 100
    ]
    assert len(values) >= 2
    assert min(values) > 1e-4


@pytest.mark.long
def test_the_distribution_with_trees_is_that_of_plain_sampling() -> None:
    """Each row of a tree has its own distribution. Trees of many requests share a pass."""
    options, parents = FILTERS["all"], [-1, -1, 0, 0, 1, 2, -1, 4]
    logits = np.random.default_rng(7).normal(size=(1 + len(parents), SMALL)).astype(np.float32)
    expected = [plain_distribution(row, [], options) for row in logits]
    tokens = list[int]()
    for node, parent in enumerate(parents):  # the likeliest tokens after each parent
        rank = parents[:node].count(parent)
        tokens.append(int(np.argsort(-expected[parent + 1])[rank]))
    tokens[6] = tokens[1]  # a duplicate
    tree, counts = TokenTree(tokens, parents), np.zeros_like(logits)
    for first in range(0, 3 * SEEDS, 100):
        parts = [
            RowsToSample(
                Sampler(replace(options, seed=seed)),
                mx.array(logits), mx.array([0]), 5, [0, *tree.depths],
            )
            for seed in range(first, first + 100)
        ]  # fmt: skip
        for sampled in sample_together(parts):
            found = [int(token) for token in sampled.tolist()]
            for row in (0, *[node + 1 for node in tree.accepted(found)]):
                counts[row, found[row]] += 1
    reached = [row for row in range(len(logits)) if counts[row].sum() > 100]
    assert len(reached) >= 6
    assert min(fit(counts[row], expected[row]) for row in reached) > 1e-4


def test_seeds_differ_and_no_seed_is_a_new_one() -> None:
    logits = mx.zeros((20, 50))
    before = mx.array([1] * 20)

    def sample(seed: int | None) -> list[int]:
        return list(Sampler(replace(WARM, seed=seed)).sample(logits, before, 5).tolist())

    assert sample(1) == sample(1) != sample(2)
    assert sample(None) != sample(None)
    # Rows of one pass differ too, though their logits are the same.
    assert len(set(sample(1))) > 5


@pytest.mark.parametrize("name", ["greedy", *FILTERS])
def test_requests_with_equal_options_are_sampled_together(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their seeds may differ. Tokens are those of each row alone, in fewer calls."""
    generator = np.random.default_rng(3)
    options = FILTERS.get(name, SamplingOptions())
    samplers = [Sampler(replace(options, seed=seed)) for seed in (1, 2, 3)]
    samplers.insert(1, Sampler(replace(options, seed=4, logit_bias=((7, 1.5),))))
    parts = [
        RowsToSample(
            sampler,
            mx.array(generator.normal(size=(rows, 301)).astype(np.float32) * 3),
            # The first rows have fewer tokens before them than the penalties look at.
            mx.array(generator.integers(0, 9, rows + 2).astype(np.int32)),
            100 + rows,
        )
        for sampler, rows in zip(samplers, (1, 2, 3, 32), strict=True)
    ]
    alone = [
        [
            p.sampler.sample(p.logits[row : row + 1], p.before[: 3 + row], p.position + row).item()
            for row in range(len(p.logits))
        ]
        for p in parts
    ]
    draw = create_autospec(Sampler._process_and_draw, side_effect=Sampler._process_and_draw)
    monkeypatch.setattr(Sampler, "_process_and_draw", draw)
    assert [each.tolist() for each in sample_together(parts)] == alone
    calls = [len(call.args[1]) for call in draw.call_args_list]
    assert calls == ([1 + 3 + 32, 2] if samplers[0].group else [1, 2, 3, 32])


def test_noise_is_right_down_to_its_smallest_values() -> None:
    """It is -log(1 - word / 2^32), or tokens of probability 1e-8 would never be drawn."""
    words = np.concatenate(
        [np.arange(1, 5001, 2), 2 ** np.arange(13, 32) + 1, np.arange(2**31, 2**32 - 4096, 99_991)]
    ).astype(np.uint32)
    exact = -np.log1p(-words.astype(np.float64) / 2**32)
    assert np.abs(np.array(exponential(mx.array(words))) / exact - 1).max() < 1e-3
    ends = np.array(exponential(mx.array([0, 1, 2**32 - 1], mx.uint32)))
    assert np.isfinite(ends).all()
    assert (ends > 0).all()


def test_positions_draw_independently() -> None:
    """Pairs of tokens of one seed at 6,000 positions, from two distributions in turn."""
    p = np.array([[0.5, 0.2, 0.15, 0.1, 0.05], [0.05, 0.5, 0.2, 0.15, 0.1]])
    rows = mx.log(mx.array(np.tile(p, (3000, 1)), mx.float32))
    tokens = np.array(mx.argmax(race(rows, [(4, row) for row in range(6000)]), axis=-1)).reshape(
        3000, 2
    )
    counts = np.zeros((5, 5))
    np.add.at(counts, (tokens[:, 0], tokens[:, 1]), 1)
    assert p_value(counts.ravel(), np.outer(p[0], p[1]).ravel() * 3000) > 1e-4


@pytest.mark.long
def test_logits_that_round_differently_draw_the_same_tokens() -> None:
    """Passes over one row and over many differ in the last bits. With a long tail, as real
    vocabularies have it, one uniform number for the cumulated distribution would not forgive."""
    logits = -mx.log(mx.arange(10, 20_010).astype(mx.float32))[None]
    rounded = logits + mx.where(mx.arange(20_000) < 20, 3e-5, 0.0)
    kept = [filtered(each, WARM) for each in (logits, rounded)]
    ours = theirs = 0
    for position in range(300):
        pair = [mx.argmax(race(each, [(1, position)])).item() for each in kept]
        ours += pair[0] != pair[1]
        key = mx.random.key(position)
        pair = [mx.random.categorical(each / 0.9, key=key).item() for each in (logits, rounded)]
        theirs += pair[0] != pair[1]
    assert ours <= 1
    assert theirs >= 5


@given(
    st.lists(st.integers(-40, 40), min_size=SMALL, max_size=SMALL, unique=True),
    st.sampled_from(sorted(FILTERS)),
)
def test_filters_are_those_of_the_definition(fifths: list[int], name: str) -> None:
    options = replace(
        FILTERS[name], repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0,
        logit_bias=(),
    )  # fmt: skip
    row = np.array(fifths, np.float32) / 5
    expected = plain_distribution(row, [], options)
    got = np.array(mx.softmax(filtered(mx.array(row[None]), options), axis=-1))[0]
    # Where a cut falls between two nearly equal tokens, float32 may cut the other one.
    assert (
        np.allclose(got, expected, atol=2e-3)
        or abs(np.count_nonzero(got) - np.count_nonzero(expected)) == 1
    )


def rows_of(kind: str, rows: int, vocabulary: int) -> np.ndarray:
    """Logits [rows, vocabulary]: flat, peaked, with many ties, or forbidden by a constraint."""
    logits = np.random.default_rng(3).normal(size=(rows, vocabulary))
    logits *= {"peaked": 4.0, "flat": 0.3}.get(kind, 1.5)
    if kind == "ties":
        logits = np.round(logits * 2) / 2
    if kind == "forbidden":
        logits[:, 3:][:, np.arange(vocabulary - 3) % 7 > 0] = -np.inf
    return logits.astype(np.float32)


@pytest.mark.parametrize("kind", ["flat", "peaked", "ties", "forbidden"])
@pytest.mark.parametrize("top_p", [0.5, 0.75, 0.9, 0.99])
def test_top_p_without_a_sort_draws_the_token_of_the_sorted_vocabulary(
    kind: str, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = mx.array(rows_of(kind, 300, 257))
    before = mx.array([1] * 300)
    for more in ({}, {"temperature": 1.0}, {"top_k": 20}, {"min_p": 0.05, "temperature": 0.5}):
        options = replace(WARM, top_p=top_p, seed=9, **more)
        expected = mx.argmax(
            race(filtered(logits, options), [(9, n) for n in range(300)]), axis=-1
        ).tolist()
        with monkeypatch.context() as patched:
            patched.setattr(mx, "sort", None)
            patched.setattr(sampling, "apply_top_p", None)
            assert (top_p_candidates(options) == 0) == (top_p < 0.75)
            if top_p >= 0.75:
                assert Sampler(options).sample(logits, before, 0).tolist() == expected


@pytest.mark.long
@pytest.mark.parametrize("lenience", [0.3, 0.7])
def test_lenience_accepts_as_often_as_promised(lenience: float) -> None:
    logits = mx.log(mx.array([[0.2, 0.5, 0.3]] * 2))
    options = replace(WARM, temperature=1.0, lenience=lenience)
    before = mx.array([9, 0])  # 0 was drafted
    samplers = [Sampler(replace(options, seed=seed)) for seed in range(SEEDS)]
    sampled = mx.concatenate([each.sample(logits, before, 1)[:1] for each in samplers])
    counts = np.bincount(np.array(sampled), minlength=3)
    first = min(1.0, 0.2 / lenience)
    expected = np.array([first, (1 - first) * 5 / 8, (1 - first) * 3 / 8])
    assert p_value(counts, expected * SEEDS) > 1e-4


def test_lenient_acceptance_by_the_formulas() -> None:
    logits = mx.log(mx.array([[0.5, 0.4, 0.1], [0.9, 0.08, 0.02]]))
    draft = mx.array([1, 1])
    key = mx.random.key(0)
    greedy = SamplingOptions(lenience=0.7)
    assert accepted_leniently(logits, draft, greedy, key).tolist() == [True, False]
    exact = SamplingOptions(lenience=0.99)
    assert accepted_leniently(logits, draft, exact, key).tolist() == [False, False]
    # Entropies 0.94 and 0.37: bounds 0.04 and 0.04, then 0.18 and 0.25.
    low, high = SamplingOptions(typical=0.04), SamplingOptions(typical=0.25)
    assert accepted_leniently(logits, draft, low, key).tolist() == [True, True]
    assert accepted_leniently(logits, draft, high, key).tolist() == [True, False]


@pytest.mark.parametrize(("field", "value"), [
    ("temperature", -0.1), ("top_p", 1.5), ("min_p", -1.0), ("top_k", -1),
    ("repetition_penalty", 0.0), ("penalty_window", 0), ("seed", -1), ("seed", 2**32),
    ("lenience", 0.0), ("typical", 2.0),
])  # fmt: skip
def test_invalid_options_are_refused(field: str, value: float) -> None:
    with pytest.raises(UsageError, match=field):
        Sampler(SamplingOptions(**{field: value}))  # type: ignore[arg-type]


@pytest.mark.long
@settings(max_examples=8)
@given(
    st.text("ab ", min_size=1, max_size=20),
    st.sampled_from(["auto", "fixed", "off"]),
    st.sampled_from([0.0, 1.0]),
    st.integers(0, 5),
)
def test_logprobs_are_the_models_at_every_position(
    tiny: Engine, text: str, draft: DraftMode, temperature: float, count: int
) -> None:
    prompt = tiny.tokens.encode(text * 3)
    options = SamplingOptions(
        temperature=temperature, seed=1, logprobs=count, logit_bias=((70, 2.0),), top_k=9
    )
    loop = StepLoop(tiny)
    generation = loop.request(prompt, GenerateOptions(20, draft, sampling=options))
    list(loop.stream(generation))
    logits = tiny.model(mx.array([prompt + generation.tokens]))[0].astype(mx.float32)
    expected = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    assert len(generation.logprobs) == len(generation.tokens)
    for number, (token, found) in enumerate(
        zip(generation.tokens, generation.logprobs, strict=True)
    ):
        row = expected[len(prompt) - 1 + number]
        assert found.logprob == pytest.approx(float(row[token].item()), abs=1e-3)
        best = sorted(row.tolist(), reverse=True)[:count]
        assert [value for _, value, _ in found.top] == pytest.approx(best, abs=1e-3)
    whole = "".join(found.text for found in generation.logprobs)
    if "\ufffd" not in whole:  # parts of characters
        assert whole == generation.text


@given(st.text())
def test_tokens_of_parts_of_characters_have_their_bytes(tiny: Engine, text: str) -> None:
    assert b"".join(map(token_bytes, byte_level([]).encode(text).tokens)) == text.encode()
    assert b"".join(token_bytes(f"<0x{byte:02X}>") for byte in text.encode()) == text.encode()
    sampler = LogprobSampler(SamplingOptions(logprobs=0), tiny.tokens.tokenizer)
    tokens = tiny.tokens.encode_text("a" + text)
    found = [sampler._entry(last, token, 0.0)[2] for last, token in pairwise(tokens)]
    assert b"".join(found) == text.encode()
