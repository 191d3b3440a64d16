"""Heads for multi-token prediction (MTP), which checkpoints carry and mlx-lm drops.

`load_head` reads a head from the checkpoint, or from `mtp*.safetensors` beside it: as published, as
mlx-vlm and MTPLX convert them, or as `write_head` writes them. Such a file belongs to a model if
all its shapes do. `FAMILIES` says how each family publishes its heads.

A head guesses the token after the next one. For the last token's hidden state h and the next token
t it computes

    norm(layer(project([norm(embedding of t), norm(h)])))

and the target's lm_head makes logits of it. `layer` is a decoder layer of the family, whose
attention keeps keys and values of its own. What the families have differently is in `FAMILIES`.
Names and steps are those of the published checkpoints as these implementations read them:

- Qwen3-Next, Qwen3.5, Qwen3.6 (`mtp.*`): vllm-project/vllm, vllm/model_executor/models/
  qwen3_next_mtp.py and qwen3_5_mtp.py. Their RMSNorms store gains minus one, and Qwen3.6 stores
  the experts of the head in one tensor (ISEEKYAN/mbridge#145). `mtp_num_hidden_layers` in the
  configuration counts the layers.
- DeepSeek-V3, GLM-4.5 and later (`model.layers.N.*`, N being num_hidden_layers):
  vllm/model_executor/models/deepseek_mtp.py and glm4_moe_mtp.py, sgl-project/sglang,
  python/sglang/srt/models/deepseek_nextn.py. `num_nextn_predict_layers` counts them. The copies of
  the embedding and of the lm_head that they hold are the target's.
- MiMo (`model.mtp_layers.0.*`): vllm/model_executor/models/mimo_mtp.py; its hidden state comes
  first, and before the target's norm (mimo.py beside it).
- MiMo-V2 (`model.mtp.layers.0.*`): vllm/model_executor/models/mimo_v2_mtp.py; a dense layer with
  the attention of a sliding window.

All others take the hidden state behind the target's norm, and hand their own on behind theirs:
ggml-org/llama.cpp#24025, ROCm/ATOM#1764 and vllm-project/vllm#47448 measured that more is accepted
so. Of several heads the first is used, again for each further token, as vLLM does.
"""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.utils import infer_quant_config

from akunu_py.errors import UnsupportedModel
from akunu_py.models.load import safetensors
from akunu_py.models.load.model_files import boundary, head_files, weight_files

HEAD_FILE = "mtp.safetensors"
_EXPERT = re.compile(r"(.+\.mlp)\.experts\.(\d+)\.(\w+)\.(\w+)")

Weights = dict[str, mx.array]


def load_head(directory: Path, model: Any, config: dict[str, Any]) -> Head | None:
    """The head that belongs to `model`, None where there is none; weights are read when they are
    needed, and quantized as the target's are.

    model, config: as `mlx_loader.load_model` returned them for `directory`. Raises
    UnsupportedModel, DamagedModel for a head that does not fit the model.
    """
    name = type(model).__module__.rpartition(".")[2]
    family = FAMILIES.get(name)
    if family is None:
        return None
    weights, raw = _find(directory, family, len(model.layers))
    if not weights:
        return None
    with boundary(f"the MTP head of {directory} does not belong to it", UnsupportedModel):
        text = config.get("text_config")
        head = Head(family, text if isinstance(text, dict) else config)
        weights = _converted(head, weights, deltas=family.deltas, raw=raw)
        quantize = _quantize_as(config.get("quantization"), head, weights)
        head.load_weights(list(weights.items()))
        head.eval()
        quantize()
    return head


def write_head(head: Head, path: Path) -> None:
    """Writes a file of the head alone, which `load_head` reads."""
    weights = {OWN + name: value for name, value in tree_flatten(head.parameters())}
    mx.save_safetensors(str(path), weights, metadata={"format": "mlx"})


def _find(directory: Path, family: HeadFamily, layers: int) -> tuple[Weights, bool]:
    """The head's weights by `Head`'s names, and whether those beside them are as published. A file
    of heads alone comes first: it may be a better one."""
    raw = False
    for files, alone in ((head_files(directory), True), (weight_files(directory), False)):
        found: Weights = {}
        for path in files:
            header = safetensors.read_header(path)
            raw |= any(
                name.endswith("conv1d.weight") and entry["shape"][-1] != 1
                for name, entry in header.items()
            )
            names = {name: family.own_name(name, layers, alone=alone) for name in header}
            names.pop("__metadata__", None)
            if any(names.values()):
                tensors = mx.load(str(path))
                found |= {own: tensors[name] for name, own in names.items() if own}
        if found:
            return found, raw
    return {}, raw


def _converted(head: Head, weights: Weights, *, deltas: bool, raw: bool) -> Weights:
    """Published weights as mlx-lm would convert them; converted ones stay as they are."""
    norms = {k: v for k, v in weights.items() if v.ndim == 1 and k.endswith("norm.weight")}
    # A gain is positive, and some of those of a head are below one. (mlx-lm converts the target's
    # only, and some conversions keep the head's as they were: jundot/omlx#1507.)
    if deltas and (
        raw or any(norm.astype(mx.float32).mean().item() < 0 for norm in norms.values())
    ):
        norms = {name: norm + 1.0 for name, norm in norms.items()}
    rest = {k.removeprefix("body."): v for k, v in weights.items() if k not in norms}
    for name in [name for name in rest if name.endswith(".experts.gate_up_proj")]:
        mlp = name.removesuffix(".experts.gate_up_proj")
        gate, up = mx.split(rest.pop(name), 2, axis=-2)
        rest[f"{mlp}.switch_mlp.gate_proj.weight"] = gate
        rest[f"{mlp}.switch_mlp.up_proj.weight"] = up
        rest[f"{mlp}.switch_mlp.down_proj.weight"] = rest.pop(f"{mlp}.experts.down_proj")
    rest = _stacked(head.body.sanitize(rest))
    return norms | {f"body.{k}" if k.startswith("model.") else k: v for k, v in rest.items()}


def _stacked(weights: Weights) -> Weights:
    """Experts that are tensors of their own, as one each: mlx-lm does it for some families."""
    experts: dict[str, dict[int, mx.array]] = {}
    stacked: Weights = {}
    for name, value in weights.items():
        if found := _EXPERT.fullmatch(name):
            mlp, number, module, part = found.groups()
            experts.setdefault(f"{mlp}.switch_mlp.{module}.{part}", {})[int(number)] = value
        else:
            stacked[name] = value
    for name, by_number in experts.items():
        stacked[name] = mx.stack([by_number[number] for number in range(len(by_number))])
    return stacked


def _quantize_as(settings: Any, head: Head, weights: Weights) -> Any:
    """Makes room in `head` for weights that are quantized already. Returns what quantizes it as
    `settings` say where none are, once it has them."""
    if any(name.endswith(".scales") for name in weights):

        def packed(path: str, module: Any) -> Any:
            if f"{path}.scales" not in weights or not hasattr(module, "to_quantized"):
                return False
            return infer_quant_config(path, module, weights)

        nn.quantize(head, class_predicate=packed)
        return lambda: None
    if not isinstance(settings, dict) or not settings.get("bits"):
        return lambda: None
    group = int(settings["group_size"])
    own = getattr(head.body, "quant_predicate", None)

    def wanted(path: str, module: Any) -> Any:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % group:
            return False
        return own(path, module) if own else True

    mode = settings.get("mode", "affine")
    return lambda: nn.quantize(
        head, group, int(settings["bits"]), mode=mode, class_predicate=wanted
    )


class Head(nn.Module):
    """A head. Its layer is the only one of a model of its family, mlx-lm's own, which sees to masks
    and positions; that has no embedding and no lm_head: those of the target are used.

    Calling it takes the target's embeddings [1, rows, width] of tokens and, for each, the hidden
    state before it [1, rows, width], and writes into `cache`, which `make_cache` made. Returns the
    hidden states [1, rows, width] that `Trunk.logits` makes logits of, for the token after each;
    they are also what a further token is guessed from.
    """

    def __init__(self, family: HeadFamily, config: dict[str, Any]) -> None:
        """config: the target's, of its text."""
        super().__init__()
        module = importlib.import_module(f"mlx_lm.models.{family.module}")
        one = {"num_hidden_layers": 1, "vocab_size": 1, **family.config}
        args = getattr(module, family.args).from_dict(config | one)
        self.body = getattr(module, family.model)(args)
        self.body.pop("lm_head", None)
        self.body.model.embed_tokens = nn.Identity()
        if "ssm_idx" in vars(self.body.model):  # of the first recurrent layer, which there is none
            self.body.model.ssm_idx = 1
        norm = self.body.model.norm
        width = norm.weight.shape[0]
        self.embedding_norm = nn.RMSNorm(width, eps=norm.eps)
        self.hidden_norm = nn.RMSNorm(width, eps=norm.eps)
        self.project = nn.Linear(2 * width, width, bias=False)
        self._embedding_first = family.embedding_first
        self.normed = family.normed

    @property
    def width(self) -> int:
        return int(self.hidden_norm.weight.shape[0])

    @property
    def layers(self) -> list[Any]:
        return list(self.body.layers)

    def make_cache(self) -> list[Any]:
        """An empty cache. Masks keep windows; what is behind one stays for rolling back."""
        made = self.body.make_cache() if hasattr(self.body, "make_cache") else [KVCache()]
        return [KVCache() if type(entry) is RotatingKVCache else entry for entry in made[:1]]

    def __call__(self, embeddings: mx.array, hidden: mx.array, cache: list[Any]) -> mx.array:
        both = [self.embedding_norm(embeddings), self.hidden_norm(hidden)]
        if not self._embedding_first:
            both.reverse()
        return self.body.model(self.project(mx.concatenate(both, -1)), [*cache, None])


class Trunk:
    """The parts of a target that a head needs."""

    def __init__(self, model: Any, *, normed: bool = True) -> None:
        """normed: whether the head takes hidden states behind the target's norm."""
        self._text = getattr(model, "language_model", model)
        self._normed = normed

    def forward(self, tokens: mx.array, cache: list[Any]) -> tuple[mx.array, mx.array]:
        """One pass over `tokens` [1, rows]. Returns what `logits` takes, and what the head takes,
        both [1, rows, width]."""
        if self._normed:
            normed = self._text.model(tokens, cache)
            return normed, normed
        bare = copy.copy(self._text.model)  # a handle on the same layers
        bare.norm = nn.Identity()
        hidden = bare(tokens, cache)
        return self._text.model.norm(hidden), hidden

    def embed(self, tokens: mx.array) -> mx.array:
        """The embeddings [1, rows, width] of `tokens` [1, rows]."""
        return self._text.model.embed_tokens(tokens)

    @property
    def lm_head(self) -> nn.Module:
        """What makes logits: often the embedding."""
        return self._text.lm_head if "lm_head" in self._text else self._text.model.embed_tokens

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits [..., vocab] of hidden states [..., width]."""
        head = self.lm_head
        return head(hidden) if "lm_head" in self._text else head.as_linear(hidden)


OWN = "head."  # begins the names of a head that akunu wrote; what follows is `Head`'s own name
_LAYER = "body.model.layers.0."
_TEXT = r"(?:(?:model\.)?language_model\.)?"  # where the text is a part of a larger model


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFamily:
    """How one family's heads are published.

    module: of mlx-lm, with the classes `model` and `args`. home: an expression for what the names
    of the first head's weights begin with, {layers} being the number of the target's layers.
    modules: names of all but the layer, and what they are in `Head`. layer: what the layer's names
    begin with behind the home; renamed: what of those mlx-lm calls otherwise. config: makes a model
    of one such layer of the target's configuration. embedding_first: the order of what is
    projected. normed: whether hidden states are taken behind the target's norm. deltas: whether
    norms are published as gains minus one. bare: whether files of heads alone omit the home.
    """

    module: str
    model: str = "Model"
    args: str = "ModelArgs"
    home: str
    modules: Mapping[str, str]
    layer: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    embedding_first: bool = True
    normed: bool = True
    deltas: bool = False
    bare: bool = False

    def own_name(self, name: str, layers: int, *, alone: bool = False) -> str | None:
        """What `Head` calls the weight `name`, None where it is none of the head's.

        layers: of the target. alone: whether it is in a file of heads alone.
        """
        if alone and name.startswith(OWN):
            return name.removeprefix(OWN)
        home = self.home.format(layers=layers)
        found = re.match(f"(?:{home})?" if alone and self.bare else home, name)
        if not found:
            return None
        rest = name[found.end() :]
        module, _, part = rest.rpartition(".")
        if module in self.modules:
            return f"{self.modules[module]}.{part}"
        if not rest.startswith(self.layer) or rest.startswith(("embed_tokens.", "shared_head.")):
            return None
        rest = rest.removeprefix(self.layer)
        for published, own in self.renamed.items():
            rest = rest.replace(published, own)
        return _LAYER + rest


def _qwen(module: str, model: str = "Model", args: str = "ModelArgs") -> HeadFamily:
    return HeadFamily(
        module=module,
        model=model,
        args=args,
        home=_TEXT + r"mtp\.",
        modules={
            "fc": "project",
            "pre_fc_norm_embedding": "embedding_norm",
            "pre_fc_norm_hidden": "hidden_norm",
            "norm": "body.model.norm",
        },
        layer="layers.0.",
        config={
            "full_attention_interval": 1,
            "mlp_only_layers": [],
            "decoder_sparse_step": 1,
            "tie_word_embeddings": True,
        },
        deltas=True,
        bare=True,
    )


def _nextn(module: str) -> HeadFamily:
    return HeadFamily(
        module=module,
        home=r"(?:language_model\.)?model\.layers\.{layers}\.",
        modules={
            "eh_proj": "project",
            "enorm": "embedding_norm",
            "hnorm": "hidden_norm",
            "shared_head.norm": "body.model.norm",
        },
        config={"first_k_dense_replace": 0, "moe_layer_freq": 1},
    )


_QWEN3_5 = _qwen("qwen3_5", "TextModel", "TextModelArgs")
# By mlx-lm's module of the target.
FAMILIES = {
    "qwen3_next": _qwen("qwen3_next"),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    **{
        name: _nextn(name)
        for name in ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa")
    },
    "mimo": HeadFamily(
        module="mimo",
        home=r"model\.mtp_layers\.0\.",
        modules={
            "input_proj": "project",
            "token_layernorm": "embedding_norm",
            "hidden_layernorm": "hidden_norm",
            "final_layernorm": "body.model.norm",
        },
        config={"tie_word_embeddings": True},
        embedding_first=False,
        normed=False,
    ),
    "mimo_v2_flash": HeadFamily(
        module="mimo_v2_flash",
        home=r"model\.mtp\.layers\.0\.",
        modules={
            "eh_proj": "project",
            "enorm": "embedding_norm",
            "hnorm": "hidden_norm",
            "final_layernorm": "body.model.norm",
        },
        renamed={"pre_mlp_layernorm": "post_attention_layernorm"},
        # mlx-lm looks for the first layer of either kind of attention.
        config={"hybrid_layer_pattern": [1, 0], "moe_layer_freq": [0, 0]},
    ),
}
