"""The drafter to train for a model: its configuration, its vocabulary, and its first weights.

It is an EAGLE-3 drafter of one layer in the "speculators" container (vllm-project/speculators).
Its layer starts as the model's last one, its hidden state as that before the model's last layer.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from akunu_py.engine.engine import Engine
from akunu_py.engine.model import device
from akunu_py.engine.model.output_rows import find_layers
from akunu_py.errors import DoesNotFit, UnsupportedModel
from akunu_py.models.drafters.drafter_config import parse_config
from akunu_py.models.drafters.eagle3 import Eagle3
from akunu_py.models.load.model_files import as_error, read_settings, text_config
from akunu_py.models.mtp import Trunk
from akunu_py.text import human_size

BATCH_TOKENS = 1024  # of a training step
# Memory of a trained weight (itself, its gradient, two means), and of a logit in all draft steps.
_WEIGHT_BYTES, _LOGIT_BYTES = 16, 48
_MOST_TOKENS = 32_000  # of a draft vocabulary
_SHARE = 6  # a draft vocabulary is this part of the model's, if that is large
_LARGE = 6_000  # tokens
_ROWS = 256  # of a matrix that are computed at a time
_RENAMED = {"hidden_norm": "input_layernorm"}  # of the last layer
_COPIED = (
    *(f"self_attn.{name}_proj" for name in "qkvo"), "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj", "hidden_norm", "post_attention_layernorm",
)  # fmt: skip


def taps_of(engine: Engine) -> tuple[int, ...]:
    """Return the layers whose outputs the drafter takes: an early, a middle and a late one."""
    count = len(engine.model.layers)
    return tuple(sorted({min(1, count - 1), max(0, count // 2 - 1), max(0, count - 2)}))


def make_config(engine: Engine) -> dict[str, Any]:
    """Return config.json of the drafter. Raises UnsupportedModel."""
    found = text_config(read_settings(engine.path / "config.json"))
    with as_error(f"no drafter can be made for {engine.name}", UnsupportedModel):
        width, heads = int(found["hidden_size"]), int(found["num_attention_heads"])
        rope = found.get("rope_parameters") or {}
        vocabulary = int(found.get("vocab_size") or engine.tokens.vocabulary)
        layer = {
            "model_type": "llama", "hidden_size": width, "num_hidden_layers": 1,
            "intermediate_size": min(int(found.get("intermediate_size") or width), 4 * width),
            "num_attention_heads": heads, "num_key_value_heads": heads,
            "head_dim": int(found.get("head_dim") or width // heads), "vocab_size": vocabulary,
            "rms_norm_eps": float(found.get("rms_norm_eps") or 1e-6), "attention_bias": False,
            "rope_theta": float(found.get("rope_theta") or rope.get("rope_theta") or 1e4),
            "max_position_embeddings": engine.plan.fit.needs.context,
        }  # fmt: skip
    drafted = min(_MOST_TOKENS, vocabulary // _SHARE) if vocabulary > _LARGE else vocabulary
    method, verifier = {"proposal_type": "greedy", "speculative_tokens": 4}, engine.name
    container = {"proposal_methods": [method], "verifier": {"name_or_path": verifier}}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", **container},
        "transformer_layer_config": layer,
        "draft_vocab_size": drafted,
        "target_hidden_size": width,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in taps_of(engine)],  # inputs
    }


def check_memory(engine: Engine, config: dict[str, Any]) -> None:
    """Raise DoesNotFit if training a drafter of `config` needs more memory than is left."""
    width, rows = config["target_hidden_size"], config["draft_vocab_size"]
    none = {
        "lm_head.weight": mx.zeros((rows, width)),
        "d2t": mx.zeros(rows, mx.int32),
        "layers.0.hidden_norm.weight": mx.ones(width),
    }
    weights = tree_flatten(make_drafter(config, none, engine).parameters())  # none is computed
    need = sum(_WEIGHT_BYTES * each.size for _, each in weights)
    need += _LOGIT_BYTES * BATCH_TOKENS * rows
    left = device.memory_left(engine.plan.memory_limit)
    if left < need and not engine.plan.forced:
        raise DoesNotFit(
            f"training a drafter of {engine.name} needs {human_size(need)} of memory, "
            f"{human_size(max(0, left))} are left; close other programs, or use a smaller model"
        )


def make_drafter(config: dict[str, Any], weights: dict[str, mx.array], engine: Engine) -> Eagle3:
    """Return a drafter of `config`; `weights` may lack tensors, but not d2t and lm_head."""
    parsed = parse_config(Path("config.json"), config)
    assert parsed is not None
    drafter = Eagle3(replace(parsed, taps=taps_of(engine)), dict(weights))
    drafter.load_weights([each for each in weights.items() if each[0] != "d2t"], strict=False)
    drafter.lm_head.freeze()  # it stays a part of the model's
    return drafter


def first_weights(
    engine: Engine, config: dict[str, Any], ids: Sequence[int]
) -> dict[str, mx.array]:
    """Return the weights to start with. ids: the tokens of the draft vocabulary, ascending."""
    trunk, width = Trunk(engine.model), config["target_hidden_size"]
    layer, chosen = config["transformer_layer_config"], mx.array(ids, mx.int32)
    weights = {
        "lm_head.weight": _matrix(lambda rows: trunk.logits(rows)[..., chosen], width),
        "layers.0.hidden_norm.weight": mx.ones(width),  # `Eagle3` counts the layers by name
    }
    if len(ids) < layer["vocab_size"]:
        weights["d2t"] = chosen - mx.arange(len(ids))
    made = make_drafter(config, weights, engine)
    weights |= dict(tree_flatten(made.parameters()))
    others = mx.zeros((width, width * (len(made.taps) - 1)))
    weights["fc.weight"] = mx.concatenate([others, mx.eye(width)], axis=1)
    with contextlib.suppress(AttributeError):
        text = getattr(engine.model, "language_model", engine.model)
        weights["norm.weight"] = text.model.norm.weight.astype(mx.float32)
    last = find_layers(engine.model)[1][-1]
    for name in _COPIED:
        own = weights[f"layers.0.{name}.weight"]
        # Models have any code: a part of another form keeps its random weights.
        with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
            part, _, linear = name.partition(".")
            if not linear:
                found = last[_RENAMED.get(part, part)].weight
            elif own.shape[1] == 2 * width:  # takes the embedding, too
                heads = _matrix(last[part][linear], width).reshape(-1, layer["head_dim"], width)
                found = mx.repeat(heads, layer["num_attention_heads"] // len(heads), axis=0)
                found = mx.concatenate([own[:, :width], found.reshape(-1, width)], axis=1)
            else:
                found = _matrix(last[part][linear], own.shape[1])
            if found.shape == own.shape:
                weights[f"layers.0.{name}.weight"] = found.astype(mx.float32)
    mx.eval(weights)
    return weights


def _matrix(linear: Callable[[mx.array], mx.array], inputs: int) -> mx.array:
    """Return the weights [outputs, inputs] of a linear function, quantized or not."""
    parts = []
    for start in range(0, inputs, _ROWS):
        rows = mx.eye(min(_ROWS, inputs - start), inputs, start)
        parts.append(linear(rows[None])[0].astype(mx.float32))
        mx.eval(parts[-1])
    return mx.concatenate(parts).T
