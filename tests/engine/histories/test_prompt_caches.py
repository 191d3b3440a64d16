"""Prompt caches in memory: reuse, branches, checkpoints, eviction, and their size in bytes.

Every answer must be that of a target that never held another history.
"""

import gc
import random
import tracemalloc
from collections.abc import Iterator

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache

from akunu_py.engine import kv_cache
from akunu_py.engine import prefill as prefill_module
from akunu_py.engine import target as target_module
from akunu_py.engine.engine import Engine
from akunu_py.engine.histories import history
from akunu_py.engine.histories.memory import MIN_CACHED, PrefixStats, PromptCaches
from akunu_py.engine.prefill import ChunkSizes, prefill
from akunu_py.engine.target import Reuse, Target
from akunu_py.models.load.fit import Activations, CacheGrowth, FittedContext, MemoryNeeds
from akunu_py.ngram.auto import AutoDrafter
from tests.measure.caches import SizedHistory
from tests.support.engines import altered
from tests.support.families import build, families_of_each_kind
from tests.support.family_table import ONE_OF_EACH_KIND
from tests.support.slow import cover
from tests.support.targets import Counting, answer, fresh, read, some

PLENTY = 1 << 30
COUNT = 12  # tokens of an answer
# Plain, sliding window, recurrent, recurrent hybrid, quantized.
KINDS = {"llama", "llama-sliding", "mamba2", "qwen3_next", "llama-kv8"}
LONG = [pytest.param(name, marks=pytest.mark.long) for name in ("llama4", "qwen3_next")]
RETURNING = ["llama-sliding", "mamba2", *LONG]  # only to checkpoints


def prompt(target: Target, name: str, tokens: list[int]) -> tuple[Reuse, list[int]]:
    """Return what a prompt reuses and its answer, after checking it."""
    target.model.rows = 0
    reuse = target.reuse_prefix(tokens)
    assert target.tokens + target.pending == tokens
    sampled = answer(target, tokens, [], COUNT)
    assert sampled == fresh(name, tokens, COUNT)
    assert target.model.rows >= len(tokens) - reuse.cached
    return reuse, sampled


@pytest.mark.parametrize("name", RETURNING)
def test_checkpoints_stay_where_prompts_branched_and_where_templates_rewrite(name: str) -> None:
    target = Target(Counting(build(name)), caches=PromptCaches(PLENTY))
    system = some(70, 1)
    prompt(target, name, [*system, *some(60, 2)])
    assert prompt(target, name, [*system, *some(70, 3)])[0] == Reuse(
        0, len(system), "no checkpoint"
    )
    assert prompt(target, name, [*system, *some(80, 4)])[0].cached == len(system)
    stable, header = some(70, 5), some(40, 6)  # longer than the tail left to the first pass
    for turn in range(3):
        reuse = target.reuse_prefix([*stable, *header], stable=len(stable))
        answer(target, [*stable, *header], [], COUNT)
        assert turn == 0 or reuse.cached == len(stable) - 30
        stable += some(30, turn + 7)


@families_of_each_kind(quick=KINDS)
def test_a_shortened_history_frees_memory_and_continues(name: str) -> None:
    target = Target(Counting(build(name)), caches=PromptCaches(PLENTY))
    first = some(600, 1)
    target.reuse_prefix(first, stable=300)
    answer(target, first, [], COUNT)
    prompt(target, name, some(100, 2))
    (kept,) = target.caches.histories()
    before, reach = kept.nbytes, kept.reach(len(kept.tokens) * 2 // 3 - 1)
    target.caches.make_room(PLENTY - target.caches.nbytes + before // 3)
    if reach < 256:  # a state of constant size
        assert kept not in target.caches.histories()
        return
    assert 256 <= len(kept.tokens) < 600
    assert target.caches.nbytes == kept.nbytes <= before - before // 3
    assert prompt(target, name, [*first, 5])[0].missing == "evicted"


@pytest.mark.parametrize("seed", range(10))
def test_the_limit_holds_and_the_protected_history_stays(seed: int) -> None:
    draw = random.Random(seed)
    caches = PromptCaches([0, 500, 5000][seed % 3])
    for number in range(60):
        if caches.histories() and draw.random() < 0.4:
            caches.take(draw.choice(caches.histories()))
        caches.add(SizedHistory(some(draw.randrange(1, 600), draw.randrange(8) + number)))
        protected = draw.choice([*caches.histories(), None])
        needed = draw.randrange(400)
        caches.make_room(needed, protected)
        others = [each for each in caches.histories() if each is not protected]
        assert not others or caches.nbytes + needed <= caches.limit
        assert protected is None or protected in caches.histories()
        assert all(len(each.tokens) >= MIN_CACHED for each in caches.histories())
        assert caches.limit or not caches.histories()


def test_a_history_above_the_limit_stays_until_the_next_one() -> None:
    caches = PromptCaches(500)
    for size in (600, 700, 100):
        caches.release(history := SizedHistory(some(size, size)))
        assert caches.histories() == [history]


def test_the_history_of_least_value_is_evicted_first() -> None:
    """Its value counts its age, and the tokens that no other history has."""
    caches, system = PromptCaches(PLENTY), some(400, 1)
    texts = {
        "used again": some(500, 2), "old": some(500, 3), "new": some(500, 4),
        "branch": [*system, *some(100, 5)], "other": [*system, *some(100, 6)],
    }  # fmt: skip
    names = {name: SizedHistory(text) for name, text in texts.items()}
    for added in names.values():
        caches.add(added)
    caches.take(names["used again"])
    caches.add(names["used again"])
    evicted = []
    while left := caches.histories():
        caches.make_room(caches.limit - caches.nbytes + 500)
        (gone,) = set(left) - set(caches.histories())
        evicted += [name for name, each in names.items() if each is gone]
    assert evicted == ["branch", "old", "new", "other", "used again"]


def test_chances_follow_texts_with_a_similar_beginning() -> None:
    stats = PrefixStats()
    system, title = some(40, 1), some(50, 2)

    def text(begin: list[int], number: int) -> list[int]:
        stats.add(new := [*begin, *some(90, number)], continued=False)
        return new

    for number in range(100):  # only the latest are remembered
        stats.add(text(system, number), continued=True)
        text(title, number)
        chances = [stats.chance(text(each, 1000 + number)) for each in (system, [], title)]
        stats.add([*system, *some(90, 1000 + number)], continued=True)
        assert all(0 < each <= 1 for each in chances)
        assert number < 3 or (chances[0] > 0.8 and chances[2] < 0.2)
        assert chances == sorted(chances, reverse=True)


# --- Sizes ---

LENGTH, CHUNK = 1536, 512
SHARED = 16 << 10  # MLX copies an array out of a buffer that is larger by more than this


@pytest.fixture
def no_unused_buffers() -> Iterator[None]:
    """A reused buffer may be larger than its array."""
    before = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(before)


def active() -> int:
    gc.collect()
    mx.synchronize()
    return int(mx.get_active_memory())


def slack(target: Target) -> int:
    """Return the bytes besides recurrent states that MLX does not copy."""
    states = [entry for entry in kv_cache.leaves(target.cache) if type(entry) is ArraysCache]
    copies = 1 + len(target.history.checkpoints)
    return SHARED * copies * len(kv_cache.own_states(states))


@pytest.mark.usefixtures("no_unused_buffers")
@families_of_each_kind(quick={*ONE_OF_EACH_KIND, "minimax_m3_vl"})
def test_the_counted_bytes_are_those_that_mlx_holds(name: str) -> None:
    model = build(name)
    mx.eval(mx.random.state)
    before = active()
    target = Target(model, caches=PromptCaches(PLENTY))
    target.reuse_prefix(some(LENGTH, 1), stable=500)
    chunks = prefill(target, ChunkSizes(largest=CHUNK))
    while next(chunks) < LENGTH // 3:
        pass
    chunks.close()  # cancelled
    held = active() - before
    assert held == pytest.approx(target.history.nbytes, rel=0.05, abs=slack(target))
    list(prefill(target, ChunkSizes(largest=CHUNK)))
    rest = list(target.pending)
    mx.eval(target.forward(mx.array(rest)))
    mx.eval(kv_cache.state_arrays(target.cache))  # deepseek_v32 leaves zeros to the next pass
    target.commit((), len(rest))
    history, room = target.history, slack(target)
    target.release()
    held = active() - before
    assert held == pytest.approx(history.nbytes, rel=0.05, abs=room)


def needing(engine: Engine, cache: CacheGrowth, *, checkpoints: bool) -> Engine:
    needs = MemoryNeeds(0, cache, Activations(0, 0, 0, 4), 1 << 20)
    fit = FittedContext(needs, 1 << 20, 1 << 40)
    return altered(engine, fit=fit, needs_checkpoints=checkpoints)


def test_checkpoints_of_a_long_prompt_are_counted_up_to_their_limit(tiny: Engine) -> None:
    """The figures of Qwen3.5, whose states take 50 MB."""
    cache = CacheGrowth(per_token=30_000, fixed=50_000_000)
    for checkpoints, expected in ((True, [2, 4, 8, 8]), (False, [0, 0, 0, 0])):
        engine = needing(tiny, cache, checkpoints=checkpoints)
        lengths = 100, 5000, 16_384, 100_000
        found = [prefill_module.checkpoint_bytes(engine, tokens) for tokens in lengths]
        assert found == [each * 50_000_000 for each in expected]


def test_the_ngram_index_of_a_long_text_is_counted() -> None:
    dice = random.Random(0)
    text = [min(50_000, int(dice.paretovariate(0.7))) for _ in range(20_000)]
    tracemalloc.start()
    try:
        drafter = AutoDrafter()
        drafter.extend(text)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.7 * held < prefill_module.INDEX_BYTES * len(text) < 1.5 * held


@pytest.mark.parametrize(
    ("name", "tokens"), cover(["llama", "llama-sliding", "qwen3_next"], [5, 0])
)
def test_a_side_request_leaves_what_the_next_turn_needs(name: str, tokens: int) -> None:
    """tokens: of its answer, before it is cancelled."""
    target, first = Target(Counting(build(name))), some(100, 1)  # two windows
    turn = [*first, *prompt(target, name, first)[1]]
    length = len(target.tokens)
    side = [*turn, *some(20, 7)]
    target.reuse_prefix(side, stable=len(turn))
    if tokens:
        assert answer(target, side, fresh(name, side, tokens))
    target.keep(len(turn))
    assert len(target.tokens) == (len(turn) if tokens else length)
    following = [*turn, *some(30, 2)]
    assert prompt(target, name, following)[0].cached == (len(turn) if tokens else length)


@pytest.mark.parametrize("name", ["llama", "llama-sliding", LONG[1]])
def test_a_template_that_drops_the_thinking_costs_only_the_last_turn(name: str) -> None:
    """`ending` is what the template adds for an answer, and puts otherwise in the next turn."""
    target, ending = Target(Counting(build(name))), some(5, 9)
    known = some(100, 1)
    for turn in range(3):
        text = [*known, *ending]
        reuse, sampled = prompt(target, name, text)
        assert turn == 0 or len(text) - reuse.cached <= 61 + target_module._TEMPLATE_TAIL
        known = [*text[:-3], *sampled[10:], *some(40, turn)]  # `ending` was 2 of 5 tokens shared


@pytest.mark.long
def test_checkpoints_are_few_and_lie_where_they_save_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_module, "CHECKPOINT_EVERY", 100)
    target = Target(build("qwen3_next"))
    target.reuse_prefix(some(2000, 1))
    read(target, prefill_module.ChunkSizes(largest=50))
    places = [each.length for each in target.history.checkpoints]
    assert len(places) == history.MAX_CHECKPOINTS
    assert places[-1] == 2000 - target.prompt_tail
    gaps = [after - before for before, after in zip([0, *places], places, strict=False)]
    assert max(gaps) <= 800
    # Back to the nearest of them, whatever was asked for.
    assert target.reuse_prefix([*some(2000, 1)[: places[2] + 5], 7, 7]).cached == places[2]
    assert [each.length for each in target.history.checkpoints] == places[:3]


def test_checkpoints_take_no_more_than_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_CHECKPOINT_BYTES", 1)
    target = Target(build("mamba2"))
    target.reuse_prefix(some(100, 1))
    read(target)
    target.reuse_prefix([*target.tokens, *some(50, 2)])
    read(target)
    assert len(target.history.checkpoints) == 1
    assert target.history.checkpoints[0].nbytes > 0
