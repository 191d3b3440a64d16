"""A model writes prompts and answers them, many at a time, and their hidden states are kept.

Xu et al. (2024), "Magpie: Alignment data synthesis from scratch by prompting aligned LLMs with
nothing": after the header of a user's turn, an aligned model samples a plausible prompt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import mlx.core as mx

from akunu_py.engine import batched_pass, kv_cache
from akunu_py.engine.batched_pass import Part
from akunu_py.engine.engine import Engine
from akunu_py.engine.model import device
from akunu_py.errors import AkunuError, UnsupportedModel
from akunu_py.training.dataset import Dataset
from akunu_py.types import Message

_LONGEST, _LONGEST_PROMPT = 512, 128  # tokens of a conversation, and of a prompt in it
_MOST = 32  # conversations at a time
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
        shared = batched_pass.why_not_batched(engine.model, engine.plan.kv_bits) is None
        self._batched = shared and not engine.recurrent
        left = device.memory_left(engine.plan.memory_limit)
        each = engine.plan.fit.needs.cache.at(self._longest)
        self._most = max(1, min(_MOST, left // 2 // max(1, each)))
        self._dialogs: list[_Dialog] = []

    def step(self) -> None:
        """Add a token to each conversation, and the finished ones to the dataset."""
        while len(self._dialogs) < self._most:
            self._dialogs.append(self._begin())
        dialogs, self._dialogs = self._dialogs, []
        parts = [Part(mx.array(each.pending), each.cache, 1, [each]) for each in dialogs]
        passes = [parts] if self._batched else [[part] for part in parts]
        found = [logits for each in passes for logits in batched_pass.run(self._engine.model, each)]
        logits = mx.concatenate(found).astype(mx.float32)
        self._key, key = mx.random.split(self._key)
        temperatures = mx.array([[each.temperature] for each in dialogs])
        drawn = mx.random.categorical(logits / mx.maximum(temperatures, 1e-3), key=key)
        chosen = mx.where(temperatures[:, 0] > 0, drawn, mx.argmax(logits, axis=-1))
        mx.eval(chosen, [each.states[-1] for each in dialogs])
        for each, token in zip(dialogs, chosen.tolist(), strict=True):
            ends = token in self._engine.tokens.stop_tokens
            if not self._add(each, token, ends):
                self._dialogs.append(each)
            elif each.answer:
                states = mx.concatenate(each.states)
                self._dataset.add(each.tokens, each.answer, not each.temperature, states)

    def _begin(self) -> _Dialog:
        self._begun += 1
        cache = kv_cache.new_cache(self._engine.model, self._engine.plan.kv_bits)
        dialog = _Dialog(cache, self._taps, self._temperature * (self._begun % 2 == 0))
        if self._prompts:
            dialog.extend(self._prompts.pop())
            dialog.answer = len(dialog.tokens)
        else:
            dialog.extend(self._before)
        return dialog

    def _add(self, dialog: _Dialog, token: int, ends: bool) -> bool:
        """Add a sampled token. Returns True if the conversation is finished.

        ends: the token ends a turn.
        """
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


class _Dialog(batched_pass.PassFollower):
    """A conversation in progress, with its hidden states."""

    def __init__(self, cache: kv_cache.Cache, taps: Sequence[int], temperature: float) -> None:
        """temperature: of the answer."""
        self.cache, self.taps, self._temperature = cache, taps, temperature
        self.tokens: list[int] = []
        self.pending: Sequence[int] = ()  # the last tokens, for the next pass
        self.answer = 0  # index of the answer's first token; 0: the user writes
        self.states: list[mx.array] = []  # of the passes so far, [rows, width]

    @property
    def temperature(self) -> float:
        """The temperature of the next token."""
        return self._temperature if self.answer else 1.0

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.pending = tokens

    def keep_states(self, hidden: mx.array) -> None:
        self.states.append(hidden[0].astype(mx.bfloat16))
