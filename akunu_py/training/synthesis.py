"""A model writes prompts and answers them, many at a time, and their hidden states are kept.

Xu et al. (2024), "Magpie: Alignment data synthesis from scratch by prompting aligned LLMs with
nothing": after the header of a user's turn, an aligned model samples a plausible prompt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from akunu_py.engine import kv_cache
from akunu_py.engine.engine import Engine
from akunu_py.engine.model import device, output_rows
from akunu_py.errors import AkunuError, UnsupportedModel
from akunu_py.training.dataset import Dataset
from akunu_py.types import Message

_LONGEST, _LONGEST_PROMPT = 512, 128  # tokens of a conversation, and of a prompt in it
_MOST = 64  # conversations at a time
_MARK = "akunu"  # stands for the user's text in a rendered template
_LOOP, _FEWEST = 64, 16  # an answer ends whose last tokens have so few different ones


class Synthesizer:
    """Conversations in progress; each step is a pass of the model over all of them."""

    def __init__(
        self,
        engine: Engine,
        taps: Sequence[int],
        temperature: float,
        dataset: Dataset,
        prompts: Sequence[Sequence[Message]] = (),
    ) -> None:
        """taps: hidden states to keep; see `output_rows.run`. temperature: of half the answers.

        dataset: receives the conversations. prompts: to answer first, unless `dataset` has an
        answer. Raises UsageError without a chat template, UnsupportedModel.
        """
        self._dataset = dataset
        self._engine, self._taps, self._temperature = engine, taps, temperature
        codec = engine.tokens
        rendered = codec.decode(codec.encode_chat([Message("user", _MARK)]))
        before, _, after = rendered.rpartition(_MARK)
        self._before, self._after = codec.encode_text(before), codec.encode_text(after)
        if not (self._before and self._after):
            raise UnsupportedModel(f"the chat template of {engine.name} hides the user's text")
        self._longest = min(_LONGEST, engine.plan.context_length)
        answered = {tuple(each.tokens[: each.answer]) for each in dataset.conversations}
        self._prompts: list[list[int]] = []
        for prompt in prompts:
            with contextlib.suppress(AkunuError):  # the template refuses this chat
                tokens = codec.encode_chat(prompt)
                if len(tokens) <= self._longest // 2 and tuple(tokens) not in answered:
                    self._prompts.append(tokens)
        self._key, self._begun = mx.random.key(len(dataset.conversations)), 0
        left = device.memory_left(engine.plan.memory_limit)
        each = engine.plan.fit.needs.cache.at(self._longest)
        self._most = max(1, min(_MOST, left // 2 // max(1, each)))
        self._cache: kv_cache.Cache = []
        self._dialogs: list[_Dialog | None] = []  # by row of the cache; None: finished

    def step(self) -> None:
        """Add a token to each conversation, and the finished ones to the dataset.

        All conversations begin and grow together, so that no row of a pass is padded.
        """
        self._remove_finished()
        dialogs = self._dialogs
        count = min(len(each.pending) for each in dialogs if each)
        inputs = np.zeros((len(dialogs), count), np.int32)
        for row, each in enumerate(dialogs):
            if each:
                inputs[row], each.pending = each.pending[:count], each.pending[count:]
        logits, found = output_rows.run(
            self._engine.model, mx.array(inputs), self._cache, lambda rows: rows[:, -1:], self._taps
        )
        states = mx.concatenate([found[tap] for tap in self._taps], -1).astype(mx.bfloat16)
        logits = logits[:, -1].astype(mx.float32)
        self._key, key = mx.random.split(self._key)
        temperatures = mx.array([[each.temperature if each else 0.0] for each in dialogs])
        drawn = mx.random.categorical(logits / mx.maximum(temperatures, 1e-3), key=key)
        chosen = mx.where(temperatures[:, 0] > 0, drawn, mx.argmax(logits, axis=-1))
        mx.eval(chosen, states)
        for row, (each, token) in enumerate(zip(dialogs, chosen.tolist(), strict=True)):
            if not each:
                continue
            each.states.append(states[row])
            if not each.pending and self._add(each, token):
                dialogs[row] = None
                if each.answer:
                    kept = mx.concatenate(each.states)
                    self._dataset.add(each.tokens, each.answer, not each.temperature, kept)

    def _remove_finished(self) -> None:
        """Remove the finished conversations once they are half; begin new ones after the last."""
        left = [row for row, each in enumerate(self._dialogs) if each]
        if not left:
            self._dialogs = [self._begin() for _ in range(self._most)]
            self._cache = kv_cache.new_cache(self._engine.model, self._engine.plan.kv_bits)
        elif 2 * len(left) <= len(self._dialogs):
            self._dialogs, rows = [self._dialogs[row] for row in left], mx.array(left)
            for each in self._cache:
                each.state = tree_map(
                    lambda value: value[rows] if isinstance(value, mx.array) else value, each.state
                )

    def _begin(self) -> _Dialog:
        self._begun += 1
        dialog = _Dialog(self._temperature * (self._begun % 2 == 0))
        if self._prompts:
            dialog.extend(self._prompts.pop())
            dialog.answer = len(dialog.tokens)
        else:
            dialog.extend(self._before)
        return dialog

    def _add(self, dialog: _Dialog, token: int) -> bool:
        """Add a sampled token. Returns True if the conversation is finished."""
        ends = token in self._engine.tokens.stop_tokens
        if dialog.answer:
            dialog.extend([token])
            last = dialog.tokens[dialog.answer :][-_LOOP:]
            loops = len(last) == _LOOP and len(set(last)) < _FEWEST
            return ends or loops or len(dialog.tokens) >= self._longest
        written = len(dialog.tokens) - len(self._before)
        if not (ends or token == self._after[0] or written >= _LONGEST_PROMPT):
            dialog.extend([token])
            return len(dialog.tokens) + len(self._after) >= self._longest
        dialog.extend(self._after)
        dialog.answer = len(dialog.tokens) if written else 0
        return not written  # an empty prompt


class _Dialog:
    def __init__(self, temperature: float) -> None:
        """temperature: of the answer."""
        self._temperature = temperature
        self.tokens: list[int] = []
        self.pending: list[int] = []  # the last tokens, for the next passes
        self.answer = 0  # index of the answer's first token; 0: the user writes
        self.states: list[mx.array] = []  # of the passes so far, [rows, width]

    @property
    def temperature(self) -> float:
        return self._temperature if self.answer else 1.0

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.pending += tokens
