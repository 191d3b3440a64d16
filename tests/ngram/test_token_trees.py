"""Token trees: acceptance, by walking and in theory, and which alternatives are drafted."""

from collections.abc import Sequence
from itertools import accumulate, groupby, product
from operator import mul

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from akunu_py.bench.curve import CURVES, parse_curve
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.cost import CostCurve
from akunu_py.ngram.token_tree import LEAST_GAIN, Candidates, TokenTree
from akunu_py.types import PassCosts
from tests.support.drafters import Choices

CHANCES = st.lists(st.floats(0.02, 1.0), min_size=1, max_size=4)


@given(st.lists(st.tuples(st.integers(-1, 15), st.integers(0, 2)), max_size=16), st.data())
def test_a_target_accepts_its_own_text_in_any_branch(
    nodes: list[tuple[int, int]], data: st.DataObject
) -> None:
    parents = [min(parent, place - 1) for place, (parent, _) in enumerate(nodes)]
    tree = TokenTree([token for _, token in nodes], parents)
    text = data.draw(st.lists(st.integers(0, 2), min_size=17, max_size=17))
    accepted = tree.accepted([text[depth] for depth in (0, *tree.depths)])
    last = accepted[-1] if accepted else -1
    assert tree.path(last) == accepted
    assert [tree[node] for node in accepted] == text[: len(accepted)]
    after = [token for token, parent in zip(tree, parents, strict=True) if parent == last]
    assert text[len(accepted)] not in after
    first = [branch[0] for branch in tree.continuations(last)]
    assert [token for token, _ in groupby(first)] == [token for token, _ in groupby(after)]
    assert TokenTree.of(text).continuations(3) == [text[4:]]
    first = tree.first(5)
    assert (first, TokenTree.of(first).parents) == (tree[:5], parents[:5])
    assert isinstance(first, TokenTree) == (parents[:5] != list(range(-1, len(first) - 1)))


def rejection(rest: np.ndarray, draft: np.ndarray) -> float:
    """Return the chance that SpecInfer accepts one of two tokens, drawn without replacement."""
    missed = np.maximum(draft - rest, 0)
    after, again = np.maximum(rest - draft, 0) / missed.sum(), 0.0
    for token, chance in enumerate(missed):
        second = draft * (np.arange(len(draft)) != token)
        again += chance * np.minimum(second / second.sum(), after).sum()
    return float(1 - missed.sum() + again)


def test_two_alternatives_are_accepted_as_often_as_by_specinfer() -> None:
    draw = np.random.default_rng(1)
    for target, draft in draw.dirichlet(np.ones(4), (10, 2)):
        noise = draw.gumbel(size=(5000, 4))  # the same for both, as in `Sampler`
        pairs = np.argsort(-noise - np.log(draft))[:, :2].tolist()
        trees = [TokenTree(pair, [-1, -1]) for pair in pairs]
        sampled = np.argmax(noise + np.log(target), axis=1).tolist()
        found = [len(tree.accepted([each] * 3)) for tree, each in zip(trees, sampled, strict=True)]
        assert np.mean(found) > rejection(target, draft) - 0.06


def joint(draft: np.ndarray, target: np.ndarray, one: int, other: int) -> float:
    """Return the chance that Gumbel-max draws `one` and `other`, with the same noise for both."""
    by_draft, by_target = draft / draft[one], target / target[other]
    # Two races with exponential times: integrate over the ratio of the winners' times.
    ratios = np.sort(np.clip(by_draft / by_target, by_draft[other], 1 / by_target[one]))
    rates = np.maximum(by_draft, np.outer(ratios, by_target)).sum(1)  # linear between the ratios
    return float((one == other) / rates[0] + (np.diff(ratios) / rates[1:] / rates[:-1]).sum())


def test_noise_by_position_keeps_the_distribution_of_two_tokens() -> None:
    q, p = np.random.default_rng(1).dirichlet(np.ones(3), (2, 4))  # draft, target; [3]: first token
    output, expected = np.zeros((3, 3)), p[3][:, None] * p[:3]
    for root, token, child, second in product(range(3), repeat=4):
        tree = TokenTree([root, (root + 1) % 3, child, child], [-1, -1, 0, 1])
        found = [tree[node] for node in tree.accepted([token, *[second] * 4])]
        chance = joint(q[3], p[3], root, token) * joint(q[token], p[token], child, second)
        output[(*found, *(token, second)[len(found) :])] += chance
    assert np.allclose(output, expected, rtol=0, atol=1e-12)
    reused = [[joint(p[3], p[one], one, other) for other in range(3)] for one in range(3)]
    assert not np.allclose(reused, expected, atol=1e-3)


@given(
    CHANCES,
    st.lists(st.tuples(st.integers(0, 4), CHANCES), max_size=2),
    st.integers(0, 2),
    st.lists(st.floats(0.0, 0.6), min_size=14, max_size=14),
)
def test_the_planned_tree_has_the_highest_gain_of_all(
    chances: list[float], others: list[tuple[int, list[float]]], drafted: int, steps: list[float]
) -> None:
    """Without values of later drafts, the likeliest tokens are the best for each number of rows."""
    costs, drafted = list(accumulate(steps, initial=1.0)), min(drafted, len(chances))
    candidates = Candidates([-1] * len(chances), chances)
    branches = [(min(at, len(chances)), each) for at, each in others]
    for index, (at, each) in enumerate(branches):
        candidates.add(at - 1, [index] * len(each), each)
    reached = list(accumulate(chances, mul, initial=1.0))

    def gain(end: int, counts: Sequence[int]) -> float:
        tokens = sum(reached[drafted + 1 : end + 1])
        for (at, branch), count in zip(branches, counts, strict=True):
            tokens += sum(list(accumulate(branch, mul, initial=reached[at]))[1:][:count])
        return tokens - 0.9 * (costs[end + sum(counts)] - costs[drafted])

    ends = range(drafted, len(chances) + 1)
    counts = product(*[range(len(branch) + 1) for _, branch in branches])
    best = max(
        gain(end, each)
        for end, each in product(ends, counts)
        if all(at <= end or not n for (at, _), n in zip(branches, each, strict=True))
    )
    in_chain = max(gain(each, [0] * len(branches)) for each in ends)
    tree, found, more = candidates.best(drafted, costs, 0.9)
    if tree is None:  # the chain is planned elsewhere, with the passes after this one
        assert best - in_chain < LEAST_GAIN or best == pytest.approx(in_chain)
        return
    assert more == pytest.approx(best - in_chain)
    assert list(tree[:drafted]) == [-1] * drafted
    assert found[drafted:] == sorted(found[drafted:], reverse=True)
    kept = [tree.count(index) for index in range(len(branches))]
    assert gain(tree.count(-1), kept) == pytest.approx(best)
    for node, token in enumerate(tree):
        path = [tree[each] for each in TokenTree.of(tree).path(node)]
        before = len(path) if token < 0 else branches[token][0]
        assert path == [-1] * before + [token] * (len(path) - before)


def test_a_branch_that_the_next_pass_would_draft_as_well_is_worth_no_rows() -> None:
    costs = [1.0, 1.05, 1.1, 1.15]
    for value, rows in ((0.0, 2), (1.9, 0)):  # of the second token, once the first is known
        candidates = Candidates([], [])
        candidates.add(-1, [1, 2], [0.5, 0.9], [value, 0.0])
        tree, _, _ = candidates.best(0, costs, 2.0)
        assert len(tree or ()) == rows


def drafter_with(*texts: list[int], curve: str) -> AutoDrafter:
    drafter = AutoDrafter(CostCurve(parse_curve(curve).points))
    drafter.extend([1, 2, 3])
    drafter.extend([4])
    drafter.guide = Choices(*texts)
    return drafter


@pytest.mark.parametrize("curve", CURVES)
def test_choices_of_a_grammar_are_drafted_together_where_their_rows_pay(curve: str) -> None:
    texts = [11, 12], [21, 22]
    drafter = drafter_with(*texts, curve=curve)
    assert drafter.propose(16) == []
    drafter.branches = True
    draft = drafter.propose(16)
    if curve in ("m1", "m2pro"):  # each row costs half a step
        assert draft == []
        return
    assert isinstance(draft, TokenTree)
    roots = [node for node, parent in zip(draft, draft.parents, strict=True) if parent < 0]
    assert sorted(roots) == [11, 21]
    drafter.observe(len(draft), 2, 1 + len(draft), 1.0)
    drafter.extend([21, 22, 5])
    assert drafter.index.tokens[-3:] == [21, 22, 5]


def test_choices_of_a_grammar_are_offered_to_a_shared_pass_where_their_rows_pay() -> None:
    """The likeliest tokens are first, so that the plan of all requests can take any number."""
    texts = [11, 12, 13], [21, 22, 23]
    for step, pays in ((0.01, True), (0.5, False)):
        drafter = drafter_with(*texts, curve="m5max")
        drafter.branches = True
        known = PassCosts([1.0 + step * row for row in range(33)], 1.2)
        chances = drafter.offer(16, known)
        assert bool(chances) == pays
        assert max(accumulate(chances, mul), default=0.0) <= 1.0
        for count in range(len(chances) + 1):
            assert drafter.offer(16, known) == chances
            draft = TokenTree.of(drafter.take(count))
            assert len(draft) == count
            paths = [[draft[at] for at in draft.path(node)] for node in range(count)]
            assert all(any(text[: len(path)] == path for text in texts) for path in paths)
        if pays:
            roots = [each for each, at in zip(draft, draft.parents, strict=True) if at < 0]
            assert sorted(roots) == [11, 21]
            drafter.extend([21, 22, 23, 5])
            assert drafter.index.tokens[-4:] == [21, 22, 23, 5]
        assert drafter.offer(16) == []  # without the costs of the pass


def test_alternatives_that_are_never_right_are_no_longer_drafted() -> None:
    drafter = drafter_with([11, 12], [21, 22], curve="m5max")
    drafter.branches = True
    assert drafter.propose(8)
    for _ in range(200):
        drafter.observe(0, 0, 1, 1.0)
        drafter.extend([drafter.index.size + 100])
        draft = drafter.propose(8)
    assert draft == []


class Hesitant:
    """A `NeuralDrafter` whose first choice is 11, and whose second and third are 21 and 31."""

    key = "mtp"
    relative_cost, longest, parallel, prefilled, most_others = 1e-6, 4, False, 0, 0
    others: Sequence[tuple[int, float]] = ()

    def start_draft(self, known: Sequence[int]) -> bool:
        return True

    def draft_token(self) -> tuple[int, float]:
        self.others = [(21, 0.6), (31, 0.2)][: self.most_others]
        return 11, 0.5

    def release(self) -> None:
        """Nothing is kept."""

    def clock(self) -> float:
        return 0.0


@pytest.mark.parametrize("curve", ["m5max", "m1"])
def test_alternatives_of_a_neural_drafter_are_drafted_while_they_are_right(curve: str) -> None:
    costs = CostCurve(parse_curve(curve).points)
    drafter = AutoDrafter(costs, neural_drafters=[Hesitant()], ngrams=False)
    drafter.extend([1, 2, 3, 4])
    chain = drafter.propose(16)
    assert type(chain) is list
    assert set(chain) <= {11}
    drafter.branches = True
    roots = list[set[int]]()
    known = PassCosts(costs.table(0)[:17], 1.0)
    for place, token in enumerate([*[21] * 60, *[11] * 60, *[5] * 120]):
        if place % 2:  # a pass shared with another request
            draft = TokenTree.of(drafter.take(len(drafter.offer(16, known))))
        else:
            draft = TokenTree.of(drafter.propose(16))
        roots.append({each for each, at in zip(draft, draft.parents, strict=True) if at < 0})
        accepted = draft.accepted([token] * (1 + len(draft)))
        if not place % 2:
            drafter.observe(len(draft), len(accepted), 1 + len(draft), 1.0)
        drafter.extend([token] * (1 + len(accepted)))
    assert 21 in roots[58] & roots[59]
    assert roots[118] == roots[119] == {11}
    assert 21 not in roots[238] | roots[239]


def test_trees_of_a_neural_drafter_try_row_counts_whose_cost_is_unknown() -> None:
    """Here each further row turns out to cost a plain step, so that later drafts are short."""
    curve, sizes = CostCurve(), list[int]()
    drafter = AutoDrafter(curve, neural_drafters=[Hesitant()], ngrams=False)
    drafter.branches = True
    drafter.extend([1, 2, 3, 4])
    for token in [11, 21, 11] * 20:
        draft = TokenTree.of(drafter.propose(16))
        sizes.append(len(draft))
        accepted = draft.accepted([token] * (1 + len(draft)))
        drafter.observe(len(draft), len(accepted), 1 + len(draft), 1.0 + len(draft))
        drafter.extend([token] * (1 + len(accepted)))
    assert max(sizes[:3]) > 5
    assert all(curve.measured(rows) for rows in range(4, 2 + max(sizes)))
    assert max(sizes[10:]) < 5
