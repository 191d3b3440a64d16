"""The same tokens as plain decoding alone, for every family, drafter, situation and sampling.

Requests run in the real step loop. The reference is mlx-lm's own loop with a new cache. A run
covers every pair (family, situation), (drafter, situation) and (sampling, situation); the slow
tests cover the whole product.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import pytest

from akunu_py.bench.workloads import load_workloads
from akunu_py.engine import prefill
from akunu_py.engine.drafters.neural import NeuralDrafterBase
from akunu_py.engine.engine import Engine
from akunu_py.engine.events import Finished
from akunu_py.engine.histories.prompt_cache_store import forget
from akunu_py.engine.loop import StepLoop
from akunu_py.engine.model.drafters import DraftModel, PublishedDrafter
from akunu_py.engine.request import Request
from akunu_py.engine.target import Target
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.token_tree import TokenTree
from akunu_py.types import (
    Drafter,
    DraftMode,
    GenerateOptions,
    Message,
    Piece,
    SwitchMode,
    TextPiece,
)
from tests.measure.fidelity import load_prompts
from tests.support.drafters import Mixture
from tests.support.engines import altered
from tests.support.families import UNSHARED, build
from tests.support.family_table import FAMILIES, ONE_OF_EACH_KIND, WINDOW
from tests.support.identity import (
    END,
    GREEDY,
    PLENTY,
    SAMPLINGS,
    SEEDED,
    Served,
    Submitted,
    engine_of,
    learned_on_disk,
    load_tiny_letters,
    plain,
    prompt_of,
)
from tests.support.published_drafters import NEEDS, block_drafter, eagle3_drafter
from tests.support.slow import slow
from tests.support.targets import some
from tests.support.tiny import VOCABULARY, Adversary, TreeAdversary
from tests.support.tiny_mtp import write_chain, write_checkpoint, write_tokenizer

pytestmark = pytest.mark.usefixtures("own_directories")

COUNT = 16  # tokens of most answers
NEW = 8  # prompt tokens that a turn adds
GROWTH = 256  # tokens by which caches grow
TAIL = 17  # prompt tokens that the first pass of an answer may process; see `Target.prompt_tail`
MTP = ("mimo", "qwen3_5 with a head")  # families whose checkpoints have an MTP head
CHAINS = ("step3p5 with heads", "mimo_v2_flash with heads")  # or several
QUICK = ("llama", "llama-sliding", "llama-kv8", "mamba2", "mimo")  # not left to the long tests
UNSAVED = ("deepseek_v41",)  # cache kinds that no prompt cache file can hold
MODES: dict[str, tuple[DraftMode, int]] = {
    "off": ("off", 4), "fixed": ("fixed", 4), "auto": ("auto", 4), "adversary": ("fixed", 5),
    "model": ("model", 4), "exit": ("exit", 4), "mtp": ("mtp", 4), "eagle3": ("model", 4),
    "dflash": ("model", 4), "dspark": ("model", 4), "trees": ("fixed", 6),
}  # fmt: skip
NEURAL = ("model", "exit", "mtp", "eagle3", "dflash", "dspark")
ANY_FAMILY = list(MODES)[:5]
EAGLE3 = ("llama", "qwen3_next", "llama-kv8", "llama-sliding")
TREES = ("deepseek_v3", "llama", "llama-sliding", "llama-kv8", "gemma3_text", "gpt_oss", "gemma3n",
         "llama-kv4", "qwen3", "iquestloopcoder")  # fmt: skip
# Families without trees whose attention changes after some positions.
WINDOWS = ("llama4", "deepseek_v32", "deepseek_v41", "gear", "recurrent_gemma", "baichuan_m1")


@dataclass(frozen=True)
class Case:
    """A cell of the table."""

    family: str
    drafter: str
    situation: str
    sampling: str
    tree: SwitchMode = "auto"

    def __str__(self) -> str:
        return f"{self.family}-{self.drafter}-{self.situation}-{self.sampling}"

    @property
    def options(self) -> GenerateOptions:
        sampling = SAMPLINGS[self.sampling]
        return GenerateOptions(COUNT, *MODES[self.drafter], sampling, draft_tree=self.tree)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load_tiny_letters(tmp_path_factory.mktemp("model"))


@cache
def engine_with_head(family: str) -> Engine:
    """An engine whose checkpoint has an MTP head, or three, of random weights."""
    write = write_chain if family in CHAINS else write_checkpoint
    with TemporaryDirectory() as name:
        write_tokenizer(Path(name))
        write(Path(name), family.split()[0])
        engine = Engine.load(Path(name))
    assert engine.mtp_head is not None
    return replace(engine, mtp_head=replace(engine.mtp_head, relative_cost=1e-6))


def engine_for(case: Case, tiny: Engine) -> Engine:
    ends = case.sampling == "constrained" or case.situation == "shared_passes"
    if case.family in (*MTP, *CHAINS):
        engine = engine_with_head(case.family)
        return engine if ends else altered(engine, stop_tokens=frozenset())
    bits = 8 if case.family == "llama-kv8" else None  # as with --kv-bits
    model = build("llama", head_dim=32) if bits else build(case.family)
    engine = engine_of(tiny, case.family, bits, model, stop_tokens=frozenset({END} if ends else ()))
    if case.drafter == "model":
        small = DraftModel("small", Path(), model, NEEDS, 1e-6, VOCABULARY)
        engine = replace(engine, draft_model=small)
    elif case.drafter in NEURAL[-2:]:
        width = model.layers[0].input_layernorm.weight.size
        made = block_drafter(case.drafter, model, width, VOCABULARY)
        engine = replace(engine, draft_model=made)
    elif case.drafter == "eagle3":
        engine = replace(engine, draft_model=eagle3(model))
    return engine


def eagle3(model: Any) -> PublishedDrafter:
    """Return an EAGLE-3 drafter of random weights."""
    width = model.layers[0].input_layernorm.weight.size
    with TemporaryDirectory() as name:
        drafter = eagle3_drafter(Path(name), model, width, VOCABULARY)
        mx.eval(drafter.parameters())
    return PublishedDrafter("eagle3", Path(), drafter, NEEDS, 1e-6)


class Script:
    """The texts that drafters should draft, right and wrong by turns."""

    def __init__(self, seed: int) -> None:
        self.texts: list[list[int]] = []  # prompts with their answers
        self.random = random.Random(seed)

    def draft(self, known: Sequence[int], count: int) -> list[int]:
        """Return tokens after `known`."""
        for text in reversed(self.texts):
            if text[: len(known)] == list(known):
                return text[len(known) : len(known) + count]
        return []

    def sample_draft(self, sample: Any) -> Any:
        """Return `Target.sample_draft`, whose tokens are right, wrong, or the drafter's own.

        If there are alternatives, the second choice is right more often than the first.
        """

        def sample_scripted(
            target: Target, logits: mx.array, known: Sequence[int], others: int = 0
        ) -> list[tuple[int, float]]:
            drafted = sample(target, logits, known, others)
            kind, right = self.random.random(), self.draft(list(known), 1)
            token = drafted[0][0]
            if kind < 0.8 and right:
                first = kind < (0.3 if others else 0.6)
                token = right[0] if first else (right[0] + 1) % logits.shape[-1]
                drafted[1:2] = [(right[0], 0.4)] * (others > 0 and not first)
            return [(token, 0.5 if others else 0.99), *drafted[1:]]

        return sample_scripted


@dataclass
class Cell:
    """A case that runs: its engine, its drafter's script, and what it submits."""

    case: Case
    engine: Engine
    directory: Path
    script: Script = field(default_factory=lambda: Script(1))
    whole: list[int] = field(default_factory=list)  # the text of the adversary

    def submit(self, prompt: list[int], count: int = COUNT, **more: Any) -> Submitted:
        """Return a request of the case. Its drafter knows the answer, apart from some tokens."""
        options = replace(self.case.options, max_tokens=count)
        truth = self.truth(prompt, options)
        self.whole[:] = [*prompt, *truth]
        self.script.texts.append(list(self.whole))
        nearly = [(t + (i % 11 == 10)) % VOCABULARY for i, t in enumerate(self.whole)]
        context = [nearly] if self.case.drafter in ("fixed", "auto") else []
        return Submitted(prompt, options, context, wrap=self.wrapped, **more)

    def wrapped(self, drafter: Drafter) -> Drafter:
        """Return an adversary, or a mixture of other guesses with those of a neural drafter."""
        if self.case.drafter in ("adversary", "trees"):
            kind = TreeAdversary if self.case.drafter == "trees" else Adversary
            adversary = kind([], [], seed=len(self.whole))
            adversary.truth = self.whole
            return adversary
        if self.case.drafter in NEURAL and self.case.sampling == "seeded":
            assert isinstance(drafter, AutoDrafter)
            (planned,) = drafter.neural_drafters
            return Mixture(planned.neural_drafter, self.whole, VOCABULARY, 1)
        return drafter

    def truth(self, prompt: list[int], options: GenerateOptions) -> list[int]:
        return plain(self.engine, prompt, options.max_tokens, options.sampling)

    def check(self, *requests: Submitted) -> None:
        """Fail unless every request has the tokens of plain decoding alone."""
        for each in requests:
            assert isinstance(each.last, Finished), each.last
            truth = self.truth(each.prompt, each.options)
            if each.last.reason == "cancelled":
                assert each.cancel_after is not None
                truth = truth[: len(each.tokens)]
            assert each.tokens == truth

    def companions(self) -> list[Submitted]:
        """Requests with other drafters and samplings. One of them is cancelled."""
        modes: list[DraftMode] = ["off", "auto", "fixed"]
        samplings = list(SAMPLINGS.values())
        return [
            Submitted(
                some(20 + 9 * place, place),
                GenerateOptions(12 - 3 * place, mode, sampling=samplings[place]),
                after=3 * place,
                cancel_after=5 if place == 1 else None,
            )
            for place, mode in enumerate(modes)
        ]


def alone(cell: Cell) -> None:
    """One request, past sliding windows; of one family of each kind, past a growth of its cache."""
    family = cell.case.family
    prompt = prompt_of(family) if family in FAMILIES else some(33, 1)
    if family in ONE_OF_EACH_KIND and cell.case.drafter == "adversary":
        prompt = some(GROWTH - COUNT // 2, 2)
    # Others draft late, or need more drafts until one is wrong.
    greedy = cell.case.sampling == "greedy" and cell.case.drafter in ("adversary", "trees")
    count = COUNT if greedy else 40
    request = cell.submit(prompt, max(count, WINDOW + 8 - len(prompt)))
    Served(cell.engine).serve([request])
    cell.check(request)
    stats = request.stats
    assert (stats.accepted > 0 and stats.accepted < stats.drafted) == (cell.case.drafter != "off")
    branches = not cell.engine.recurrent and family not in UNSHARED
    assert family not in FAMILIES or branches == (family in TREES)


def shared_passes(cell: Cell) -> None:
    """Four requests at the same time, in passes that they share if the model allows it."""
    served, request = Served(cell.engine, 5), cell.submit(some(41, 5), after=2)
    others = cell.companions()
    neural = cell.case.drafter in NEURAL
    if neural or cell.case.drafter == "trees":  # two requests with drafts of their own
        others.append(replace(cell, whole=[]).submit(some(23, 9), 10, after=1))
    served.serve([request, *others])
    cell.check(request, *others)
    if neural and not cell.engine.recurrent and served.loop.runner.try_batching():
        assert served.drafted[True] > 0


def restored_from_disk(cell: Cell) -> None:
    """A second turn after a restart: only its new tokens are prefilled."""
    forget()  # the files of other cases
    first = cell.submit(some(GROWTH + 4, 1), NEW)
    served = Served(cell.engine, learned=learned_on_disk(cell.engine, cell.directory))
    served.serve([first])
    served.save()
    second = cell.submit([*first.prompt, *first.tokens, *some(NEW, 2)], NEW)
    served = Served(cell.engine, learned=learned_on_disk(cell.engine, cell.directory))
    served.serve([second])
    cell.check(first, second)
    known = len(second.prompt) - NEW - 1 if cell.case.family not in UNSAVED else 0
    assert second.stats.cached_tokens >= known


def evicted(cell: Cell) -> None:
    """A request loses its history while it decodes, because memory is short."""
    memory = 2 * prefill.history_bytes(cell.engine, GROWTH)
    request = cell.submit(some(GROWTH - 6, 3), 10)
    other = Submitted(some(GROWTH - 8, 4), GenerateOptions(12, "off"))
    engine = altered(cell.engine, prompt_cache_memory=memory)
    Served(engine, reserved_tokens=5).serve([request, other])
    cell.check(request, other)
    # With a stop token, the other answer may end before memory is short.
    assert request.evicted or other.evicted or len(other.tokens) < 12


def cancelled(cell: Cell) -> None:
    """Its client cancels a request, repeats it, and continues the conversation."""
    served, prompt = Served(cell.engine), some(70, 6)
    first = cell.submit(prompt, NEW, cancel_after=4)
    again = replace(first, cancel_after=None, events=[])
    served.serve([first])
    served.serve([again])
    cell.check(first, again)
    assert first.tokens
    assert again.stats.cached_tokens >= len(prompt) - TAIL
    partial = [*prompt, *first.tokens]
    following = cell.submit([*partial, *some(NEW, 10)], NEW)
    served.serve([following])
    cell.check(following)
    assert following.stats.cached_tokens >= len(prompt) - TAIL


def edited(cell: Cell) -> None:
    """The second question of a conversation is edited, and then it is as before."""
    served = Served(cell.engine)
    first = cell.submit(some(50, 18), NEW)
    served.serve([first])
    known = [*first.prompt, *first.tokens]
    for question in (9, 10, 9):
        turn = cell.submit([*known, *some(60, question)], NEW)
        served.serve([turn])
        cell.check(turn)
        assert turn.stats.cached_tokens >= len(known) - TAIL
    assert turn.stats.cached_tokens >= len(turn.prompt) - TAIL


SITUATIONS: dict[str, Callable[[Cell], None]] = {
    each.__name__: each
    for each in (alone, shared_passes, restored_from_disk, evicted, cancelled, edited)
}


def covering() -> list[Case]:
    """Return cases that cover all pairs with a situation, and an adversary for every family."""
    samplings = list(SAMPLINGS)[:3]
    cases = [Case(family, "adversary", "alone", "greedy") for family in FAMILIES]
    cases += [Case(family, "trees", "alone", "greedy") for family in TREES]
    cases.append(Case("llama", "off", "alone", "seeded"))
    cases.append(Case("deepseek_v3", "exit", "alone", "greedy"))
    for at, family in enumerate(WINDOWS):
        cases.append(Case(family, ANY_FAMILY[1 + at % 4], "alone", samplings[at % 2 + 1]))
    for at, situation in enumerate(SITUATIONS):
        for place, family in enumerate(ONE_OF_EACH_KIND if at else ()):
            drafter, sampling = ANY_FAMILY[(place + at) % 5], samplings[(place + at) % 3]
            cases.append(Case(family, drafter, situation, sampling))
        neural = [
            (("llama", "llama-kv8")[at % 2], "exit"), (MTP[at % 2], "mtp"), (CHAINS[at % 2], "mtp"),
            (EAGLE3[at % 4], "eagle3"), (("qwen3_next", "llama")[at % 2], NEURAL[4 + at % 2]),
        ]  # fmt: skip
        for place, (family, drafter) in enumerate(neural):
            cases.append(Case(family, drafter, situation, samplings[(at + place) % 3]))
        cases.append(Case(TREES[at], "trees", situation, "sampled"))
    for family, situation in (("mimo", "alone"), ("llama", "shared_passes")):
        cases.append(Case(family, "trees", situation, "constrained"))
    cases += [Case("llama", drafter, "shared_passes", "greedy") for drafter in ("dflash", "eagle3")]
    cases.append(Case("deepseek_v3", "fixed", "shared_passes", "seeded"))  # masks are arrays
    return list(dict.fromkeys(cases))


@pytest.fixture
def timeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """All passes take the same time, and tokens of neural drafters none: every draft pays."""
    ticks = itertools.count(1)
    monkeypatch.setattr(Target, "clock", staticmethod(lambda: float(next(ticks))))
    monkeypatch.setattr(NeuralDrafterBase, "clock", lambda drafter: 0.0)


def run_case(case: Case, tiny: Engine, directory: Path) -> None:
    cell = Cell(case, engine_for(case, tiny), directory)
    with pytest.MonkeyPatch.context() as patch:
        if case.drafter in NEURAL:
            patch.setattr(Target, "sample_draft", cell.script.sample_draft(Target.sample_draft))
        SITUATIONS[case.situation](cell)


@pytest.mark.usefixtures("timeless")
@pytest.mark.parametrize("case", [
    pytest.param(case, marks=() if case.family in QUICK else pytest.mark.long, id=str(case))
    for case in covering()
])  # fmt: skip
def test_the_same_tokens_as_alone(case: Case, tiny: Engine, tmp_path: Path) -> None:
    run_case(case, tiny, tmp_path)


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> dict[bool, int]:
    """Count the accepted tokens of trees, by whether their pass was shared."""
    counts, accept = {False: 0, True: 0}, Request.accept

    def counting(request: Request, seconds: float) -> Piece:
        launched = request.launched[0]
        piece = accept(request, seconds)
        if isinstance(launched.drafted, TokenTree):
            counts[launched.shared is not None] += piece.accepted
        return piece

    monkeypatch.setattr(Request, "accept", counting)
    return counts


@pytest.mark.usefixtures("timeless")
@pytest.mark.parametrize(
    "case",
    [Case("llama", "model", "alone", "sampled"), Case("llama-kv8", "model", "alone", "greedy"),
     Case("mimo", "mtp", "alone", "greedy"), Case("llama", "dspark", "alone", "constrained"),
     Case("qwen3_next", "dflash", "alone", "greedy"),
     Case("llama", "dspark", "alone", "constrained", "off"),
     Case("llama", "model", "shared_passes", "sampled"),
     Case("mimo", "mtp", "shared_passes", "sampled"),
     Case("llama-kv8", "trees", "shared_passes", "greedy")], ids=str,
)  # fmt: skip
def test_branches_of_trees_are_accepted(
    case: Case, tiny: Engine, tmp_path: Path, accepted: dict[bool, int]
) -> None:
    run_case(case, tiny, tmp_path)
    can_branch = case.family != "qwen3_next"  # which has recurrent layers
    found = accepted[case.situation == "shared_passes"]
    assert bool(found) == (case.tree == "auto" and can_branch)


@pytest.mark.slow
@pytest.mark.usefixtures("timeless")
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_tokens_in_the_whole_product(
    family: str, situation: str, tiny: Engine, tmp_path: Path
) -> None:
    for drafter, sampling in itertools.product(ANY_FAMILY, SAMPLINGS):
        run_case(Case(family, drafter, situation, sampling), tiny, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("family", "memory"), [("llama", 140_000), ("qwen3_next", PLENTY)])
def test_the_same_tokens_in_any_mixture(family: str, memory: int, tiny: Engine) -> None:
    """Requests that share prefixes come, wait for memory, stop and are cancelled at any time."""
    stop_tokens, randomly, base = frozenset(range(0, VOCABULARY, 8)), random.Random(1), some(236, 1)
    evictions = shared = 0
    for slots in (3, 6):
        requests = [
            Submitted(
                [*base[: randomly.choice([0, 70, 236])], *some(randomly.randint(1, 20), seed)],
                GenerateOptions(
                    randomly.randint(1, 12),
                    randomly.choice(["auto", "off", "fixed"]),
                    sampling=randomly.choice([GREEDY, SEEDED]),
                ),
                after=randomly.randrange(30),
                cancel_after=randomly.choice([None, None, None, 2, 20]),
            )
            for seed in range(24)
        ]
        engine = engine_of(tiny, family, prompt_cache_memory=memory, stop_tokens=stop_tokens)
        served = Served(engine, slots, chunk_s=1e-9, reserved_tokens=5)
        served.serve(requests)
        Cell(Case(family, "off", "alone", "greedy"), engine, Path()).check(*requests)
        evictions += sum(each.evicted for each in requests)
        shared += served.shared
    assert (shared > 0, evictions > 0) == (True, memory < PLENTY)


# --- The real starter. ---

DRAFTS: tuple[DraftMode, ...] = ("off", "fixed", "auto")
# Code, and another script with repetition: 12 of its 24 tokens are accepted drafts.
CASES = [
    ("Fix this code:\n```python\nfor i in range(10)\n    print(i)\n```", 8, ("fixed",)),
    ("用中文写一句关于海的话。", 24, ("auto",)),
]


@pytest.mark.parametrize(
    "case", [*CASES, *slow(*((each, 128, DRAFTS) for each in load_prompts(20)))]
)
def test_greedy_tokens_equal_mlx_lm(
    starter_engine: Engine,
    request: pytest.FixtureRequest,
    case: tuple[str, int, tuple[DraftMode, ...]],
) -> None:
    text, count, modes = case
    if "auto" in modes:
        request.getfixturevalue("compiled")
    prompt = starter_engine.tokens.encode_chat([Message("user", text)])
    expected = plain(starter_engine, prompt, count)
    for mode in modes:
        options = GenerateOptions(max_tokens=count, draft=mode)
        answer = StepLoop(starter_engine).answer(prompt, options)
        assert list(answer.tokens) == expected, mode
        assert answer.stats.generated_tokens == len(expected)


def test_pieces_join_to_the_decoded_text_and_mark_accepted_drafts(starter_engine: Engine) -> None:
    example, task = load_workloads(["edit"])[0].turns
    answered = Message("assistant", example.assistant or "")
    messages = [Message("user", example.user), answered, Message("user", task.user)]
    prompt = starter_engine.tokens.encode_chat(messages)
    loop = StepLoop(starter_engine)
    request = loop.request(prompt, GenerateOptions(max_tokens=44))
    pieces = [each for each in loop.stream(request) if isinstance(each, TextPiece)]
    tokenizer, stops = starter_engine.tokens.tokenizer, starter_engine.tokens.stop_tokens
    shown = [token for token in request.tokens if token not in stops]
    text = "".join(piece.text for piece in pieces)
    assert text == request.text == tokenizer.decode(shown)
    assert [token for piece in pieces for token in piece.piece.tokens] == request.tokens
    assert request.stats.accepted > 14
    for piece in pieces:  # Every token of this text is whole characters.
        accepted = piece.piece.tokens[: piece.piece.accepted]
        marked = "".join(piece.text[start:end] for start, end in piece.drafted)
        assert marked == tokenizer.decode(accepted)
    assert request.stats.target_passes < request.stats.generated_tokens - 1
    assert request.stats.tokens_per_pass > 2
