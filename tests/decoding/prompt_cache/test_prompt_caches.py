"""Several token histories: what is asked for again is not read again, whatever was asked between,
and every answer is that of a target that never held anything else."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from akunu_py.decoding.generate import prefill
from akunu_py.decoding.prompt_cache import memory
from akunu_py.decoding.prompt_cache.history import NO_OWNER, TokenHistory
from akunu_py.decoding.prompt_cache.memory import LEAST, PrefixStats, PromptCaches
from akunu_py.decoding.target import Reuse, Target
from akunu_py.decoding.token_ids import common_prefix
from tests.support.families import build, families_of_each_kind
from tests.support.family_answers import choices
from tests.support.targets import Counting, answer, fresh, some

PLENTY = 1 << 30
COUNT = 12  # tokens of an answer
# Plain, sliding window, chunked, recurrent, recurrent hybrid, latent attention, quantized.
KINDS = {"llama", "llama-sliding", "llama4", "mamba2", "qwen3_next", "deepseek_v3", "llama-kv8"}


def ask(target: Target, name: str, prompt: list[int]) -> tuple[Reuse, list[int]]:
    """What was reused for `prompt`, and its answer, which is checked."""
    target.model.rows = 0
    reuse = target.reuse_prefix(prompt)
    assert target.tokens + target.pending == prompt
    said = answer(target, prompt, [], COUNT)
    likeliest, _ = choices(name, prompt, said)  # in one pass; the loop where a near-tie differs
    assert said == likeliest or said == fresh(name, prompt)[:COUNT]
    assert target.model.rows >= len(prompt) - reuse.cached  # and not from nowhere
    return reuse, said


@pytest.mark.long
@families_of_each_kind(quick=KINDS)
def test_conversations_in_turn_read_only_what_is_new(name: str) -> None:
    target = Target(Counting(build(name)), caches=PromptCaches(PLENTY))
    first, second = some(120, 1), some(90, 2)
    _, said = ask(target, name, first)
    assert ask(target, name, second)[0] == Reuse(0, 0, "")
    longer = [*first, *said, *some(LEAST, 3)]
    reuse, _ = ask(target, name, longer)
    assert reuse.cached >= len(first) + len(said) - 1
    # Asked otherwise in the middle of the first conversation, and back to what it was.
    tail = target.prompt_tail
    other = [*first, *said[:2], *some(LEAST + 20, 4)]
    reuse, _ = ask(target, name, other)
    assert reuse.cached >= len(first) - tail
    assert ask(target, name, [*longer, 5])[0].cached >= len(longer) - tail
    assert ask(target, name, [*other, 5])[0].cached >= len(other) - tail
    assert ask(target, name, [*second, 5])[0].cached >= len(second) - tail


@pytest.mark.parametrize("name", ["llama", "llama-sliding", "qwen3_next"])
def test_with_little_memory_one_is_dropped_and_read_again(name: str) -> None:
    target = Target(Counting(build(name)))
    ask(target, name, some(120, 1))
    size = target.history.nbytes
    target = Target(Counting(build(name)), caches=PromptCaches(size * 2 + size // 2))
    conversations = [some(120, seed) for seed in (1, 2, 3)]
    for prompt in conversations:
        target.reuse_prefix(prompt, needed=size)
        answer(target, prompt, [], 2)
        assert target.caches.nbytes + target.history.nbytes <= target.caches.limit
    target.reuse_prefix(conversations[1], needed=size)
    answer(target, conversations[1], [], 2)
    reuse = target.reuse_prefix(conversations[0], needed=size)
    assert reuse == Reuse(0, len(conversations[0]) - 1, "evicted")


def test_why_a_prompt_is_read_again() -> None:
    target = Target(build("llama-sliding"), caches=PromptCaches(PLENTY))
    first = some(200, 1)
    assert target.reuse_prefix(first) == Reuse(0, 0, "")
    answer(target, first, [], COUNT)
    held = list(target.tokens)
    assert target.reuse_prefix([*held, 1, 2]) == Reuse(len(held), len(held), "")
    # The sliding window has no way back to the middle, only to its checkpoints.
    assert target.reuse_prefix([*first[:100], 1, 2]) == Reuse(0, 100, "no checkpoint")
    plain = Target(build("llama"), caches=PromptCaches(PLENTY))
    plain.reuse_prefix(first)
    answer(plain, first, [], COUNT)
    assert plain.reuse_prefix([*first[:100], 1, 2]) == Reuse(100, 100, "changed")


RETURNING = ["llama-sliding", "llama4", "mamba2", "qwen3_next"]  # to checkpoints only


@pytest.mark.parametrize("name", RETURNING)
def test_where_requests_parted_once_they_do_again(name: str) -> None:
    target = Target(Counting(build(name)), caches=PromptCaches(PLENTY))
    system = some(150, 1)
    ask(target, name, [*system, *some(60, 2)])
    assert ask(target, name, [*system, *some(70, 3)])[0] == Reuse(0, 150, "no checkpoint")
    assert ask(target, name, [*system, *some(80, 4)])[0].cached == len(system)


@pytest.mark.parametrize("name", RETURNING)
def test_what_a_template_puts_otherwise_in_the_next_turn_is_all_that_is_read(name: str) -> None:
    target = Target(Counting(build(name)), caches=PromptCaches(PLENTY))
    said, asks = some(100, 1), some(40, 2)  # longer than what is left to the first pass
    for turn in range(3):
        reuse = target.reuse_prefix([*said, *asks], stable=len(said))
        answer(target, [*said, *asks], [], COUNT)
        assert turn == 0 or reuse.cached == len(said) - 30
        said += some(30, turn + 3)


class Sized(TokenHistory):
    """A history of which only the size counts: a byte a token."""

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__([], NO_OWNER, tokens)

    @property
    def nbytes(self) -> int:
        return len(self.tokens)


@pytest.mark.parametrize("seed", range(20))
def test_the_limit_holds_and_what_is_asked_for_stays(seed: int) -> None:
    draw = random.Random(seed)
    caches = PromptCaches(draw.choice([0, 500, 5000]))
    for number in range(60):
        if caches.histories() and draw.random() < 0.4:
            caches.take(draw.choice(caches.histories()))
        caches.add(Sized(some(draw.randrange(1, 600), draw.randrange(8) + number)))
        asked_for = draw.choice([*caches.histories(), None])
        needed = draw.randrange(400)
        caches.make_room(needed, asked_for)
        others = [each for each in caches.histories() if each is not asked_for]
        assert not others or caches.nbytes + needed <= caches.limit
        assert asked_for is None or asked_for in caches.histories()
        assert all(len(each.tokens) >= LEAST for each in caches.histories())
        assert caches.limit or not caches.histories()


def test_texts_that_begin_alike_are_asked_for_again_alike() -> None:
    beginnings = PrefixStats()
    system, title = some(40, 1), some(50, 2)

    def text(begin: list[int], number: int) -> list[int]:
        beginnings.add(new := [*begin, *some(90, number)], continued=False)
        return new

    for number in range(100):  # of which only the latest are remembered
        beginnings.add(text(system, number), continued=True)
        text(title, number)
        chances = [beginnings.chance(text(each, 1000 + number)) for each in (system, [], title)]
        beginnings.add([*system, *some(90, 1000 + number)], continued=True)
        assert all(0 < each <= 1 for each in chances)
        assert number < 3 or (chances[0] > 0.8 and chances[2] < 0.2)
        assert chances == sorted(chances, reverse=True)


@families_of_each_kind(quick=KINDS)
def test_what_is_shortened_gives_memory_back_and_goes_on(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "CHECKPOINT_EVERY", 100)
    target = Target(Counting(build(name)), caches=PromptCaches(PLENTY))
    first = some(600, 1)
    target.reuse_prefix(first)
    answer(target, first, [], COUNT)
    ask(target, name, some(100, 2))
    (kept,) = target.caches.histories()
    before = kept.nbytes
    target.caches.make_room(PLENTY - target.caches.nbytes + before // 3)
    if kept not in target.caches.histories():  # a state of one size only
        assert not kept.tokens or kept.reach(len(kept.tokens) // 2) < 256
        return
    assert 256 <= len(kept.tokens) < 600
    assert kept.nbytes <= before - before // 3
    reuse, _ = ask(target, name, [*first, 5])
    assert reuse.cached == len(first[: reuse.cached])
    assert reuse.missing == "evicted"


def test_evicting_compares_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A returned history is compared about once, however many histories are cached."""
    compared: list[int] = []  # tokens, by call

    def counting(left: Sequence[int], right: Sequence[int], known: int = 0) -> int:
        length = common_prefix(left, right, known)
        if max(len(left), len(right)) > memory._PREFIX_LENGTH:
            compared.append(length + 1 - known)
        return length

    monkeypatch.setattr(memory, "common_prefix", counting)
    caches = PromptCaches(14 * 4000)
    system = some(2000, 1)
    for number in range(15):
        caches.add(Sized([*system, *some(2000 + number, number + 2)]))
        assert sum(compared) <= 2000 + len(caches.histories())
        compared.clear()
    values = [caches._value_per_byte(each) for each in caches._cached]
    while caches.histories():
        caches.make_room(caches.limit - caches.nbytes + 1500)
        if caches.nbytes < 3000:
            caches.make_room(caches.limit)
    assert compared == []
    assert len({round(value, 6) for value in values}) > 1


@pytest.mark.parametrize("seed", range(5))
def test_the_value_of_a_history_counts_the_tokens_that_no_other_has(seed: int) -> None:
    draw = random.Random(seed)
    caches = PromptCaches(1 << 20)
    texts = [some(draw.randrange(300, 600), number) for number in range(3)]
    for _ in range(60):
        begin = draw.choice(texts)[: draw.randrange(600)]
        caches.add(Sized([*begin, *some(draw.randrange(100, 300), draw.randrange(1 << 30))]))
        if draw.random() < 0.5:
            caches.take(draw.choice(caches.histories()))
        else:
            caches.make_room(caches.limit - caches.nbytes + draw.randrange(300))
        for entry in caches._cached:
            tokens = entry.history.tokens
            others = [each.tokens for each in caches.histories() if each is not entry.history]
            unique = len(tokens) - max((common_prefix(tokens, each) for each in others), default=0)
            value = caches._value_per_byte(entry)
            chance = (
                1.0 if entry.history.uses > 1 else caches._prefix_stats._chance(tuple(tokens[:64]))
            )
            chance /= 1 + caches._requests - entry.last_request
            assert value == pytest.approx(chance * unique / max(1, entry.history.nbytes))
