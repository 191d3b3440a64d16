"""The heads of DSpark: a bias by the token before, and a confidence.

Source: deepseek-ai/DeepSpec, `deepspec/modeling/dspark/`, and speculators 0.9.0,
`models/dspark/model_definitions.py`.
"""

import mlx.core as mx
import mlx.nn as nn

from akunu_py.errors import UnsupportedModel


class MarkovHead(nn.Module):
    """Biases the logits of a row by the token before it, through a matrix of low rank."""

    def __init__(self, tokens: int, drafted: int, width: int, rank: int, kind: str) -> None:
        """tokens: of the target. drafted: of the drafter's own head."""
        super().__init__()
        self.markov_w1 = nn.Embedding(tokens, rank)
        self.markov_w2 = nn.Linear(rank, drafted, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(width + 2 * rank, 3 * rank)
        elif kind != "vanilla":
            raise UnsupportedModel(
                f"expected a markov_head_type of vanilla, gated or rnn, found {kind!r:.40}; use "
                "another drafter"
            )

    def __call__(
        self, hidden: mx.array, previous: mx.array, state: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """Return the bias [1, drafted] of a row, and the state for the next row.

        hidden: [1, width] of the row. previous: [1], the token before. state: of the row before,
        None for the first; only the recurrent kind has one.
        """
        before = self.markov_w1(previous)
        if "gate_proj" in self:
            gate = mx.sigmoid(self.gate_proj(mx.concatenate([hidden, before], -1)))
            return self.markov_w2(gate * before), None
        if "joint_proj" in self:
            state = mx.zeros_like(before) if state is None else state
            joint = self.joint_proj(mx.concatenate([state, before, hidden], -1))
            gate, candidate, output = mx.split(joint, 3, axis=-1)
            gate = mx.sigmoid(gate)
            state = gate * state + (1 - gate) * mx.tanh(candidate)
            return self.markov_w2(mx.tanh(output)), state
        return self.markov_w2(before), None


class ConfidenceHead(nn.Module):
    """Predicts whether the target accepts the token of a row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def __call__(self, features: mx.array) -> mx.array:
        """Return the chance [1] for the features [1, width] of a row."""
        return mx.sigmoid(self.proj(features)[:, 0].astype(mx.float32))
