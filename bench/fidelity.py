"""Whether drafting changes a model's output: whole answers, with drafts and without.

In exact arithmetic it never would. Floating point rounds a pass over several rows otherwise than a
pass over one, and where two tokens are nearly a tie that can decide. So this counts, precision by
precision, how many answers differ, and how near the tie was where they first diverge.
"""

from __future__ import annotations

import itertools
import json
import tomllib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from akunu_py.bench.curve import FixedCosts
from akunu_py.bench.runners import Passes
from akunu_py.bench.runners.akunu import UnsavedState, record_passes
from akunu_py.decoding import kv_cache
from akunu_py.decoding.drafting.drafter import Drafting
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.load import load_engine
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.sampling import filtered, race
from akunu_py.decoding.token_ids import common_prefix
from akunu_py.errors import StoreError, UsageError
from akunu_py.ngram.cost import PRIOR_SHAPE, CostCurve
from akunu_py.types import (
    DraftMode,
    GenerateOptions,
    LoadOptions,
    Message,
    SamplingOptions,
    WeightMode,
)

MODES: tuple[DraftMode, ...] = ("fixed", "auto")

_GREEDY = SamplingOptions()

Turns = Sequence[tuple[list[int], list[int]]]
"""The answers of a conversation: (prompt, output), both as token ids."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two conversations first differ. position: tokens into the answer of turn `turn`.

    margin: by how much the likeliest token's logit exceeds the second's there, with the noise of
    the draw where there is one; None where the prompts differed already, or the model is not at
    hand. expected, found: token ids, -1 for the
    end of an answer.
    """

    turn: int
    position: int
    expected: int
    found: int
    margin: float | None


def first_divergence(
    engine: Engine | None,
    expected: Turns,
    found: Turns,
    sampling: SamplingOptions = _GREEDY,
) -> Divergence | None:
    """None where both are the same, token for token. engine: whose output it is, for the margin;
    sampling: how it was drawn, with a seed where the temperature is above 0."""
    for turn, ((prompt, left), (other, right)) in enumerate(zip(expected, found, strict=True)):
        if prompt != other:
            return Divergence(turn, 0, -1, -1, None)
        if left != right:
            at = common_prefix(left, right)
            margin = top_two_margin(engine, [*prompt, *left[:at]], sampling) if engine else None
            ours, theirs = (side[at] if at < len(side) else -1 for side in (left, right))
            return Divergence(turn, at, ours, theirs, margin)
    return None


def top_two_margin(engine: Engine, tokens: Sequence[int], sampling: SamplingOptions) -> float:
    """The best next token's score less the second best's, after `tokens`; see `scores`."""
    second, first = mx.sort(scores(engine, tokens, sampling))[-2:].tolist()
    return float(first - second)


def scores(engine: Engine, tokens: Sequence[int], sampling: SamplingOptions) -> mx.array:
    """What the next token after `tokens` has most of, [vocab]: the logits, and of a draw with a
    seed the logits with their noise (Gumbel-max), in units of logits."""
    cache = kv_cache.new_cache(engine.model, engine.plan.kv_bits)
    logits = engine.model(mx.array(tokens)[None], cache=cache)[0, -1].astype(mx.float32)
    if sampling.temperature:
        assert sampling.seed is not None
        raced = race(filtered(logits[None], sampling), sampling.seed, len(tokens))[0]
        logits = mx.log(raced) * sampling.temperature
    return logits


@dataclass(frozen=True, slots=True)
class AnswerComparison:
    """One answer with drafts beside the same without.

    weights: the precision, in words. tokens: of the answer without drafts. drafted: tokens that
    were drafted, drafting_passes: passes over more than one row. difference: where and how the
    answers first differ, None where they are the same.
    """

    model: str
    weights: str
    mode: DraftMode
    prompt: str
    max_tokens: int
    tokens: int
    drafted: int
    drafting_passes: int
    difference: Divergence | None

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """The model, and what was asked of it."""
        return self.model, self.weights, self.mode, self.prompt, self.max_tokens


@dataclass(slots=True)
class FidelitySummary:
    """How many answers of one precision a drafter left as they were; see `AnswerComparison`."""

    weights: str
    mode: DraftMode
    answers: int = 0
    tokens: int = 0
    drafted: int = 0
    drafting_passes: int = 0
    differences: list[tuple[str, Divergence]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        differences = [{"prompt": prompt} | asdict(each) for prompt, each in self.differences]
        return asdict(self) | {"differences": differences}


def load_prompts(count: int) -> list[str]:
    """The first `count` prompts (300 at most), such that any few of them are of many kinds."""
    text = files(__package__).joinpath("fidelity.toml").read_text(encoding="utf-8")
    whole = tomllib.loads(text)
    tasks, topics = whole["tasks"], whole["topics"]
    if count > (most := len(tasks) * len(topics)):
        raise UsageError(f"--answers: there are {most} prompts, got {count}")
    # Both turn with each prompt, shifted once per round, so that no pair comes twice.
    pairs = (
        (tasks[at % len(tasks)], topics[(at + at // len(tasks)) % len(topics)])
        for at in itertools.count()
    )
    return [task.format(topic) for task, topic in itertools.islice(pairs, count)]


def compare_answers(
    engine: Engine,
    prompts: Sequence[str],
    max_tokens: int,
    progress: Callable[[str], None] = lambda line: None,
    done: Collection[AnswerComparison] = (),
    temperature: float = 0.0,
) -> Iterator[AnswerComparison]:
    """Answers each prompt without drafts and in every mode of `MODES`, but for what is `done`.

    temperature: above 0 each prompt has a seed of its own.

    The three answers are of one session, which reads the prompt once and goes back to its end.
    """
    known = {each.key for each in done}
    weights = engine.plan.weights + (
        f", KV cache of {engine.plan.kv_bits} bits" if engine.plan.kv_bits else ""
    )
    weights += f", temperature {temperature:g}" if temperature else ""
    for number, prompt in enumerate(prompts):
        wanted = [
            mode for mode in MODES if (engine.name, weights, mode, prompt, max_tokens) not in known
        ]
        if not wanted:
            continue
        progress(f"{weights}: answer {number + 1} of {len(prompts)}")
        tokens = engine.tokens.encode_chat([Message("user", prompt)])
        session = Session(engine, UnsavedState(CostCurve()))
        sampling = SamplingOptions(temperature=temperature, seed=number)
        options = GenerateOptions(max_tokens, "off", sampling=sampling)
        plain = _answer(session, tokens, options, Passes())
        for mode in wanted:
            passes = Passes()
            output = _answer(session, tokens, replace(options, draft=mode), passes)
            answers = [(tokens, plain)], [(tokens, output)]
            yield AnswerComparison(
                engine.name,
                weights,
                mode,
                prompt,
                max_tokens,
                tokens=len(plain),
                drafted=sum(passes.drafted),
                drafting_passes=sum(count > 0 for count in passes.drafted),
                difference=first_divergence(engine, *answers, sampling),
            )


def compare_precisions(
    model: str,
    precisions: Sequence[str],
    prompts: Sequence[str],
    max_tokens: int,
    comparisons: list[AnswerComparison],
    path: Path | None,
    progress: Callable[[str], None],
    kv_bits: int | None = None,
    temperature: float = 0.0,
) -> None:
    """Appends to `comparisons`, and to the file `path` if any, what they do not have yet; they
    grow while it compares. precisions: keys of `PRECISIONS`."""
    for name in precisions:
        weights, change = PRECISIONS[name]
        engine = load_engine(model, LoadOptions(weights, kv_bits))
        engine = change(engine) if change else engine
        done = tuple(comparisons)
        for each in compare_answers(engine, prompts, max_tokens, progress, done, temperature):
            comparisons.append(each)
            if path is not None:
                append_comparison(path, each)


def summarize(comparisons: Sequence[AnswerComparison]) -> list[FidelitySummary]:
    """One row for each precision and mode, in the order in which they first come."""
    rows: dict[tuple[str, DraftMode], FidelitySummary] = {}
    for each in comparisons:
        row = rows.setdefault((each.weights, each.mode), FidelitySummary(each.weights, each.mode))
        row.answers += 1
        row.tokens += each.tokens
        row.drafted += each.drafted
        row.drafting_passes += each.drafting_passes
        if each.difference is not None:
            row.differences.append((each.prompt, each.difference))
    return list(rows.values())


def load_comparisons(path: Path) -> list[AnswerComparison]:
    """What `append_comparison` kept in `path`, which need not exist. A last line that was cut off
    is left out. Raises StoreError for any other line that is none of ours."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            break
        try:
            fields = json.loads(line)
            difference = fields.pop("difference")
            found.append(
                AnswerComparison(**fields, difference=difference and Divergence(**difference))
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StoreError(
                f"{path}, line {number}: expected a comparison of this command, found {line!r:.60}"
            ) from error
    return found


def append_comparison(path: Path, comparison: AnswerComparison) -> None:
    """Adds a line to `path`, on the disk when this returns. Raises StoreError where it cannot."""
    try:
        with path.open("a+b") as file:
            file.seek(0)
            whole = file.read().rpartition(b"\n")
            file.truncate(len(whole[0]) + len(whole[1]))  # a line that was cut off
            file.write(json.dumps(asdict(comparison)).encode() + b"\n")
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error}") from error


def _answer(
    session: Session, prompt: list[int], options: GenerateOptions, passes: Passes
) -> list[int]:
    """With a drafter that has learned nothing yet."""
    state = UnsavedState(FixedCosts(PRIOR_SHAPE))
    session.drafting = Drafting(session.engine, session.target, state)
    record_passes(session, passes)
    return list(session.generate(prompt, options).answer().tokens)


# Precisions
#
# MLX's CPU kernels for half precision add up each row by itself, in one order: a pass over five
# rows rounds exactly as five passes over one, and a token takes up to seconds. A GPU's kernels add
# in float32, in an order that depends on the number of rows, and round the sum to the format. So do
# the layers below, through the BLAS, on the weights that the format holds.

_EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)


class _Rounded(nn.Module):
    """A product in float32, rounded to `dtype`. weight: [out, in], float32."""

    def __init__(self, weight: mx.array, bias: mx.array | None, dtype: mx.Dtype) -> None:
        super().__init__()
        self.weight = weight
        if bias is not None:
            self.bias = bias
        self._dtype = dtype

    def __call__(self, rows: mx.array) -> mx.array:
        """[..., in] -> [..., out]"""
        product = (rows.astype(mx.float32) @ self.weight.T).astype(self._dtype)
        return product + self.bias if "bias" in self else product


class _RoundedEmbedding(_Rounded):
    """A table of embeddings, whose transpose may give the logits."""

    def __call__(self, tokens: mx.array) -> mx.array:
        """[...] -> [..., in]"""
        return self.weight[tokens].astype(self._dtype)

    def as_linear(self, rows: mx.array) -> mx.array:
        """[..., in] -> [..., tokens]"""
        return super().__call__(rows)


def round_products(engine: Engine) -> Engine:
    """`engine`, whose model is altered in place: every dense or quantized layer rounds as on a
    GPU."""
    rounded = [
        (name, made)
        for name, module in engine.model.named_modules()
        if (made := _rounded(module)) is not None
    ]
    engine.model.update_modules(tree_unflatten(rounded))
    mx.eval(engine.model.parameters())
    weights = f"{engine.plan.weights}, through the BLAS"
    return replace(engine, plan=replace(engine.plan, weights=weights))


def compute_in_float32(engine: Engine) -> Engine:
    """`engine`, whose model is altered in place: quantized matrices stay, all else is float32."""
    engine.model.set_dtype(mx.float32)
    mx.eval(engine.model.parameters())
    bits = [part for part in engine.plan.weights.split(" + ") if part.endswith("-bit")]
    weights = " + ".join([*bits, "float32"])
    return replace(engine, plan=replace(engine.plan, weights=weights))


def _rounded(module: Any) -> nn.Module | None:
    kind = _RoundedEmbedding if isinstance(module, _EMBEDDINGS) else _Rounded
    if not isinstance(module, (nn.Linear, nn.QuantizedLinear, *_EMBEDDINGS)):
        return None
    weight, dtype = module.weight, module.weight.dtype
    if "scales" in module:
        dtype = module.scales.dtype
        # Exact: in half precision it would round a second time.
        weight = mx.dequantize(
            weight,
            module.scales.astype(mx.float32),
            None if module.get("biases") is None else module.biases.astype(mx.float32),
            module.group_size,
            module.bits,
            module.mode,
        )
    return kind(weight.astype(mx.float32), module.get("bias"), dtype)


# How the weights are loaded for each precision, and what is done to the model then.
PRECISIONS: dict[str, tuple[WeightMode, Callable[[Engine], Engine] | None]] = {
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
    "keep": ("keep", None),
    "keep-float32": ("keep", compute_in_float32),
    "bfloat16-blas": ("bfloat16", round_products),
    "keep-blas": ("keep", round_products),
}
