"""Train a drafter on the conversations of a dataset.

Li et al. (2025), "EAGLE-3", section 3.2: training unrolls several draft steps, each on the hidden
states that the drafter itself made in the step before.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx import optimizers
from mlx.utils import tree_flatten, tree_unflatten

from akunu_py.engine.engine import Engine
from akunu_py.errors import UsageError
from akunu_py.files import disk_errors, remove_unfinished
from akunu_py.models.drafters.drafter_config import TRAINING_KEY
from akunu_py.models.drafters.eagle3 import Eagle3
from akunu_py.models.load.model_files import write_settings
from akunu_py.models.mtp import Trunk
from akunu_py.training.dataset import Dataset, TrainingChat, read_tensors, write_tensors
from akunu_py.training.design import BATCH_TOKENS, first_weights, make_drafter

DEPTHS = 4  # draft tokens whose acceptance is measured
_UNROLLED = 3  # draft steps of a training step, after the first ones
# Maximum training steps of one draft step, before the learning rate falls. Three draft steps take
# three times as long.
_FIRST_STEPS = 1200
_DECAY = 0.8  # weight of a draft step, relative to the one before it
_RATE = 0.5  # learning rate times width
_WARM_UP = 50  # steps
_LONGEST_GRADIENT = 1.0
_MEASURED = 64  # held-out conversations


class UnrolledCache:
    """Keys and values of unrolled draft steps, in the place of a KV cache.

    Row i of step k is the k-th drafted position behind row i. It sees the rows up to i of step 0,
    and row i of later steps.
    """

    def __init__(self) -> None:
        self.offset = 0  # position of the first row
        self._steps: list[tuple[mx.array, mx.array]] = []

    def make_mask(self, rows: int, **_: Any) -> mx.array:
        """Return which keys the rows of the next step see, [rows, keys]."""
        own = [mx.eye(rows, dtype=mx.bool_)] * len(self._steps)
        return mx.concatenate([mx.tri(rows, dtype=mx.bool_), *own], axis=1)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add a step's keys and values [batch, heads, rows, size]; return those of all steps."""
        self._steps.append((keys, values))
        self.offset += 1
        both = (mx.concatenate(each, axis=2) for each in zip(*self._steps, strict=True))
        return cast(tuple[mx.array, mx.array], tuple(both))


@dataclass(frozen=True, slots=True)
class Batch:
    """Conversations, padded to the longest."""

    hidden: mx.array  # of the drafter's taps, [batch, rows, width]
    final: mx.array  # after the target's last norm, [batch, rows, width]
    tokens: npt.NDArray[np.int64]  # [batch, rows + 1]
    answers: npt.NDArray[np.bool_]  # whether a token belongs to an answer, [batch, rows + 1]
    learned: npt.NDArray[np.bool_]  # whether it is also in the draft vocabulary


def unroll(
    drafter: Eagle3, embed: Callable[[mx.array], mx.array], batch: Batch, steps: int
) -> tuple[mx.array, list[tuple[mx.array, mx.array]]]:
    """Draft from every row, and compare with the target's distributions and tokens.

    Only rows that draft learned tokens get logits, which take most of the time. Returns the loss,
    and for each step how many drafts of answers are right up to it, of how many.
    """
    cache, rows = [cast(Any, UnrolledCache())], batch.hidden.shape[1]
    ids, tokens = drafter.target_ids, mx.array(batch.tokens)
    embeddings = embed(mx.pad(tokens[:, 1:], [(0, 0), (0, steps)]))
    found = np.nonzero(batch.learned[:, 1:])  # texts, and positions before learned tokens
    texts, places = (mx.array(each) for each in found)
    chances = mx.softmax(batch.final[texts, places] @ drafter.lm_head.weight.T, axis=-1)
    state, loss, counts, right = drafter.states(batch.hidden), mx.array(0.0), [], mx.array(True)
    for step in range(min(steps, rows - 1)):
        made = drafter.extend(state, embeddings[:, step : step + rows], cache)
        state = drafter.drafted_state(made)
        if not (inside := np.asarray(places) > step).all():
            kept = mx.array(np.flatnonzero(inside))
            texts, places, chances = texts[kept], places[kept], chances[kept]
        drafting = texts, places - step - 1
        logits = drafter.lm_head(drafter.norm(made[drafting]))
        entropy = mx.logsumexp(logits, axis=-1) - (chances * logits).sum(axis=-1)
        loss = loss + _DECAY**step * entropy.sum() / max(1, len(places))
        hits = mx.zeros((len(batch.tokens), rows), mx.bool_)
        hits[drafting] = ids[mx.argmax(logits, axis=-1)] == tokens[texts, places + 1]
        right = right & hits
        last = batch.answers[:, step + 2 :]
        valid = batch.answers[:, 2 : last.shape[1] + 2] & last
        counts.append((right.sum(), mx.array(int(valid.sum()))))
    return loss, counts


def group(conversations: Iterable[TrainingChat]) -> list[list[TrainingChat]]:
    """Group conversations of similar length into batches."""
    batches: list[list[TrainingChat]] = []
    for each in sorted(conversations, key=lambda each: -len(each.tokens)):
        if not batches or (len(batches[-1]) + 1) * len(batches[-1][0].tokens) > BATCH_TOKENS:
            batches.append([])
        batches[-1].append(each)
    return batches


class Trainer:
    """A drafter in training, with its optimizer, from a checkpoint if there is one."""

    def __init__(
        self, engine: Engine, dataset: Dataset, config: dict[str, Any], checkpoint: Path
    ) -> None:
        """config: by `make_config`. checkpoint: its file. Raises StoreError, UsageError."""
        self._checkpoint, self._dataset = checkpoint, dataset
        everything = dataset.conversations
        self._measured = group([each for each in everything if each.held_out][:_MEASURED])
        self._batches = group(each for each in everything if not each.held_out)
        if not (self._measured and self._batches):
            raise UsageError(
                f"{len(everything)} conversations are too few to train on; run the command again "
                "with a longer --time"
            )
        self._embed, self._config = Trunk(engine.model).embed, config
        self.steps = self.tokens = 0  # trained so far, and their answer tokens
        self.curve: list[Any] = []  # measurements: steps, tokens, accepted by depth
        saved = self._read()
        state = [(name[2:], saved.pop(name)) for name in list(saved) if name.startswith("o.")]
        if not saved:
            size = config["draft_vocab_size"]
            frequent = dataset.frequent_tokens(size, engine.tokens.vocabulary)
            saved = first_weights(engine, config, frequent)
        self._d2t = {name: saved[name] for name in ("d2t",) if name in saved}
        self.drafter = make_drafter(config, saved, engine)
        # Whether the drafter can draft each token.
        self._drafted = np.isin(np.arange(engine.tokens.vocabulary), self.drafter.target_ids)
        self._optimizer = optimizers.AdamW(0.0)
        self._optimizer.init(self.drafter.trainable_parameters())
        if state:
            self._optimizer.state = tree_unflatten(state)
        self._gradient = nn.value_and_grad(
            self.drafter, lambda batch, steps: unroll(self.drafter, self._embed, batch, steps)
        )

    def _read(self) -> dict[str, mx.array]:
        """Return the tensors of the checkpoint; none if there is none, or a crash damaged it."""
        with disk_errors(f"cannot use {self._checkpoint}"):
            remove_unfinished(self._checkpoint)
        try:
            tensors, (self.steps, self.tokens, self.curve) = read_tensors(self._checkpoint)
        except Exception:  # noqa: BLE001 - MLX raises anything
            return {}
        return tensors

    def _load(self, conversations: Sequence[TrainingChat]) -> Batch:
        longest, width = len(conversations[0].tokens), self._config["target_hidden_size"]
        states = []
        tokens = np.zeros((len(conversations), longest), np.int64)
        answers = np.zeros(tokens.shape, np.bool_)
        for row, each in enumerate(conversations):
            length = len(each.tokens)
            states.append(mx.pad(each.states(), [(0, longest - length), (0, 0)]))
            tokens[row, :length] = each.tokens
            answers[row, each.answer : length] = True
        hidden = mx.stack(states).astype(mx.float32)
        learned = answers & self._drafted[tokens]
        return Batch(hidden[..., :-width], hidden[..., -width:], tokens, answers, learned)

    def step(self, rate: float) -> None:
        """Train on one batch. rate: share of the full learning rate."""
        epoch, place = divmod(self.steps, len(self._batches))
        order = random.Random(epoch).sample(self._batches, len(self._batches))
        unrolled = 1 if self.steps < _FIRST_STEPS and rate == 1.0 else _UNROLLED
        (_, counts), gradients = self._gradient(self._load(order[place]), unrolled)
        gradients, _ = optimizers.clip_grad_norm(gradients, _LONGEST_GRADIENT)
        rate *= min(1.0, (self.steps + 1) / _WARM_UP)
        self._optimizer.learning_rate = rate * _RATE / self._config["target_hidden_size"]
        self._optimizer.update(self.drafter, gradients)
        mx.eval(self.drafter.parameters(), self._optimizer.state)
        self.steps += 1
        self.tokens += int(counts[0][1].item())

    def save(self) -> list[float]:
        """Measure the acceptance by depth on held-out greedy answers, and write the checkpoint.

        Raises StoreError; an older checkpoint stays intact.
        """
        totals = mx.zeros((DEPTHS, 2))
        for each in self._measured:
            counts = unroll(self.drafter, self._embed, self._load(each), DEPTHS)[1]
            totals[: len(counts)] = totals[: len(counts)] + mx.array(counts)
        accepted = [round(right / max(1, drafts), 4) for right, drafts in totals.tolist()]
        self.curve = [*self.curve, (self.steps, self.tokens, accepted)]
        state = {f"o.{name}": value for name, value in tree_flatten(self._optimizer.state)}
        facts = [self.steps, self.tokens, self.curve]
        write_tensors(self._checkpoint, self.weights() | state, facts)
        return accepted

    def weights(self) -> dict[str, mx.array]:
        """Return the weights under the names of the published format."""
        return dict(tree_flatten(self.drafter.parameters())) | self._d2t

    @property
    def drafter_bytes(self) -> int:
        return sum(value.nbytes for value in self.weights().values())

    def write_drafter(self, directory: Path) -> None:
        """Write the drafter in the published format. Raises StoreError."""
        facts = {
            "answer_tokens": self._dataset.answer_tokens,
            "trained_tokens": self.tokens,
            "accepted": self.curve[-1][-1],
        }
        write_settings(directory, {"config.json": self._config | {TRAINING_KEY: facts}})
        weights = self.weights()
        half = {n: value.astype(mx.bfloat16) for n, value in weights.items() if n != "d2t"}
        write_tensors(directory / "model.safetensors", half | self._d2t, {})
