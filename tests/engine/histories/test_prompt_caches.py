"""Prompt caches in memory: reuse, branches, checkpoints, eviction, and their size in bytes.

Every answer must be that of a target that never held another history.
"""

import gc
import random
import tracemalloc
from collections.abc import Iterator, Sequence

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache

from akunu_py.engine import kv_cache
from akunu_py.engine import prefill as prefill_module
from akunu_py.engine import target as target_module
from akunu_py.engine.engine import Engine
from akunu_py.engine.histories import history
from akunu_py.engine.histories.history import NO_OWNER, TokenHistory
from akunu_py.engine.histories.memory import MIN_CACHED, PrefixStats, PromptCaches
from akunu_py.engine.model.load_plan import growth
from akunu_py.engine.model.token_ids import common_prefix
from akunu_py.engine.prefill import ChunkSizes, prefill
from akunu_py.engine.target import Reuse, Target
from akunu_py.models.load.fit import Activations, CacheGrowth, FittedContext, MemoryNeeds
from akunu_py.ngram.auto import AutoDrafter
from tests.support.engines import altered
from tests.support.families import build, families_of_each_kind
from tests.support.family_table import ONE_OF_EACH_KIND
from tests.support.identity import choices
from tests.support.slow import cover
from tests.support.targets import Counting, answer, fresh, read, some
from tests.support.tiny_fim import load_tiny

PLENTY = 1 << 30
COUNT = 12  # tokens of an answer
# Plain, sliding window, recurrent, recurrent hybrid, quantized.
KINDS = {"llama", "llama-sliding", "mamba2", "qwen3_next", "llama-kv8"}
RETURNING = ["llama-sliding", "llama4", "mamba2", "qwen3_next"]  # only to checkpoints


def prompt(target: Target, name: str, tokens: list[int]) -> tuple[Reuse, list[int]]:
    """Return what a prompt reuses and its answer, after checking it."""
    target.model.rows = 0
    reuse = target.reuse_prefix(tokens)
    assert target.tokens + target.pending == tokens
    sampled = answer(target, tokens, [], COUNT)
    likeliest = choices(name, tokens, sampled)  # in one pass, which may round otherwise
    assert sampled == likeliest or sampled == fresh(name, tokens)[:COUNT]
    assert target.model.rows >= len(tokens) - reuse.cached
    return reuse, sampled


@pytest.mark.parametrize("name", RETURNING)
def test_checkpoints_stay_where_prompts_branched_and_where_templates_rewrite(name: str) -> None:
    target = Target(Counting(build(name)), caches=PromptCaches(PLENTY))
    system = some(150, 1)
    prompt(target, name, [*system, *some(60, 2)])
    assert prompt(target, name, [*system, *some(70, 3)])[0] == Reuse(0, 150, "no checkpoint")
    assert prompt(target, name, [*system, *some(80, 4)])[0].cached == len(system)
    stable, header = some(100, 5), some(40, 6)  # longer than the tail left to the first pass
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
    before = kept.nbytes
    target.caches.make_room(PLENTY - target.caches.nbytes + before // 3)
    if kept not in target.caches.histories():  # a state of constant size
        assert not kept.tokens or kept.reach(len(kept.tokens) // 2) < 256
        return
    assert 256 <= len(kept.tokens) < 600
    assert kept.nbytes <= before - before // 3
    assert prompt(target, name, [*first, 5])[0].missing == "evicted"


class Sized(TokenHistory):
    """A history without arrays, of one byte per token."""

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__([], NO_OWNER, tokens)

    @property
    def nbytes(self) -> int:
        return len(self.tokens)


@pytest.mark.parametrize("seed", range(10))
def test_the_limit_holds_and_the_protected_history_stays(seed: int) -> None:
    draw = random.Random(seed)
    caches = PromptCaches([0, 500, 5000][seed % 3])
    for number in range(60):
        if caches.histories() and draw.random() < 0.4:
            caches.take(draw.choice(caches.histories()))
        caches.add(Sized(some(draw.randrange(1, 600), draw.randrange(8) + number)))
        protected = draw.choice([*caches.histories(), None])
        needed = draw.randrange(400)
        caches.make_room(needed, protected)
        others = [each for each in caches.histories() if each is not protected]
        assert not others or caches.nbytes + needed <= caches.limit
        assert protected is None or protected in caches.histories()
        assert all(len(each.tokens) >= MIN_CACHED for each in caches.histories())
        assert caches.limit or not caches.histories()


class Evictions:
    """An independent model of the eviction order: the least value per byte goes first."""

    def __init__(self, caches: PromptCaches) -> None:
        self.caches, self.stats, self.requests = caches, PrefixStats(), 0
        self.last: dict[int, int] = {}

    def add(self, history: Sized) -> None:
        self.caches.add(history)
        self.requests += 1
        self.last[id(history)] = self.requests
        if history.uses <= 2:
            self.stats.add(history.tokens, continued=history.uses == 2)

    def value(self, history: TokenHistory) -> float:
        others = [each.tokens for each in self.caches.histories() if each is not history]
        shared = max((common_prefix(history.tokens, each) for each in others), default=0)
        chance = 1.0 if history.uses > 1 else self.stats.chance(history.tokens)
        chance /= 1 + self.requests - self.last[id(history)]
        return chance * (len(history.tokens) - shared) / max(1, history.nbytes)


@pytest.mark.parametrize("seed", range(5))
def test_the_history_of_least_value_is_evicted_first(seed: int) -> None:
    """Its value counts the tokens that no other history has."""
    draw = random.Random(seed)
    caches = PromptCaches(1 << 20)
    model = Evictions(caches)
    texts = [some(draw.randrange(300, 600), number) for number in range(3)]
    for _ in range(60):
        begin = draw.choice(texts)[: draw.randrange(600)]
        model.add(Sized([*begin, *some(draw.randrange(100, 300), draw.randrange(1 << 30))]))
        if draw.random() < 0.4:
            taken = draw.choice(caches.histories())
            caches.take(taken)
            model.add(taken)  # type: ignore[arg-type]
        lengths = {id(each): len(each.tokens) for each in caches.histories()}
        values = {id(each): model.value(each) for each in caches.histories()}
        if len(caches.histories()) > 1:
            caches.make_room(caches.limit - caches.nbytes + 1)
        left = {id(each): len(each.tokens) for each in caches.histories()}
        changed = [key for key, length in lengths.items() if left.get(key) != length]
        assert all(values[key] == pytest.approx(min(values.values())) for key in changed)


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


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load_tiny(tmp_path_factory.mktemp("tiny"), ["<|end|>"])


def active() -> int:
    gc.collect()
    mx.synchronize()
    return int(mx.get_active_memory())


def slack(target: Target) -> int:
    """Return the bytes besides recurrent states that MLX does not copy."""
    states = [entry for entry in kv_cache.leaves(target.cache) if type(entry) is ArraysCache]
    copies = 1 + len(target.history.checkpoints)
    return SHARED * copies * len(kv_cache.own_states(states))


def unused_bytes(target: Target, per_token: int) -> int:
    """Return the bytes of rows after the prompt: caches grow by 256 rows."""
    growing = [entry for entry in kv_cache.leaves(target.cache) if type(entry) in kv_cache.GROWING]
    keys = [part for entry in growing for _, part in tree_flatten(entry.keys) if part is not None]
    more = max([part.shape[-2] - LENGTH for part in keys], default=0)
    assert more < 256
    return max(0, more) * per_token


@pytest.mark.usefixtures("no_unused_buffers")
@families_of_each_kind(quick={*ONE_OF_EACH_KIND, "minimax_m3_vl"})
def test_the_counted_bytes_are_those_that_mlx_holds(name: str, tiny: Engine) -> None:
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
    needs, rest = growth(model), list(target.pending)
    filled = active() - before - unused_bytes(target, needs.per_token)
    mx.eval(target.forward(mx.array(rest)))
    mx.eval(kv_cache.state_arrays(target.cache))  # deepseek_v32 leaves zeros to the next pass
    target.commit((), len(rest))
    history, room = target.history, slack(target)
    unused = unused_bytes(target, needs.per_token)
    target.release()
    held = active() - before
    assert held == pytest.approx(history.nbytes, rel=0.05, abs=room)
    engine = needing(tiny, needs, checkpoints=history.needs_checkpoints)
    expected = max(filled, held - unused)
    room += 128 * needs.per_token
    assert prefill_module.history_bytes(engine, LENGTH) == pytest.approx(
        expected, rel=0.05, abs=room
    )


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
    target, first = Target(Counting(build(name))), some(150, 1)  # several windows
    turn = [*first, *prompt(target, name, first)[1]]
    length = len(target.tokens)
    side = [*turn, *some(20, 7)]
    target.reuse_prefix(side, stable=len(turn))
    if tokens:
        assert answer(target, side, fresh(name, side)[:tokens])
    target.keep(len(turn))
    assert len(target.tokens) == (len(turn) if tokens else length)
    following = [*turn, *some(30, 2)]
    assert prompt(target, name, following)[0].cached == (len(turn) if tokens else length)


@pytest.mark.parametrize("name", ["llama", "llama-sliding", "qwen3_next"])
def test_a_template_that_drops_the_thinking_costs_only_the_last_turn(name: str) -> None:
    """`ending` is what the template adds for an answer, and puts otherwise in the next turn."""
    target, ending = Target(Counting(build(name))), some(5, 9)
    known = some(400, 1)
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


@given(st.lists(st.integers(0, 1), max_size=600), st.lists(st.integers(0, 1), max_size=600))
def test_common_prefix(left: list[int], right: list[int]) -> None:
    for pair in ((left, right), (left + right, left), (left, left)):
        length = common_prefix(*pair)
        assert pair[0][:length] == pair[1][:length]
        assert length == min(map(len, pair)) or pair[0][length] != pair[1][length]
