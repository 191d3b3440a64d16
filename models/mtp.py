"""Heads for multi-token prediction (MTP), which checkpoints contain and mlx-lm drops.

A head predicts the token after the next one. For the last token's hidden state h and the next token
t it computes norm(layer(project([norm(embedding of t), norm(h)]))), and the target's lm_head turns
that into logits. `layer` is a decoder layer of the family with its own keys and values. Names and
steps follow vllm-project/vllm, vllm/model_executor/models/ (deepseek_mtp.py, exaone_moe_mtp.py,
glm4_moe_mtp.py, mimo_mtp.py, mimo_v2_mtp.py, nemotron_h_mtp.py, qwen3_5_mtp.py, qwen3_next_mtp.py),
sgl-project/sglang, python/sglang/srt/models/ (deepseek_nextn.py, step3p5_mtp.py, exaone_moe.py) and
PaddlePaddle/FastDeploy, fastdeploy/model_executor/models/ernie4_5_mtp.py:

- Qwen3-Next, Qwen3.5, Qwen3.6: RMSNorms store gains minus one, and Qwen3.6 stores the head's
  experts in one tensor (ISEEKYAN/mbridge#145).
- DeepSeek-V3, GLM-4.5 and later: copies of the embedding and the lm_head are the target's.
- MiMo: the hidden state comes first, and from before the target's norm (mimo.py there).
- Step 3.5: three heads in a chain, each with an lm_head. Hidden states come from before the norms.
- K-EXAONE: without `mtp_layer_types` its attention is that of the target's first layer.
- ERNIE 4.5: the target's own norm comes last; vLLM's ernie_mtp.py leaves it out.

All others take the hidden state after the target's norm, and pass on their own after theirs:
ggml-org/llama.cpp#24025, ROCm/ATOM#1764 and vllm-project/vllm#47448 measured higher acceptance.

A single head drafts every token: it takes its own state for each further one. In a chain, head k
drafts token k: at every position it takes the state of head k - 1 there (or the target's), and the
token k + 1 positions later. So its keys and values end k positions before those of the first head.
DeepSeek-V3 (arXiv:2412.19437), section 2.2; sgl-project/sglang, srt/models/step3p5_mtp.py and
srt/speculative/multi_layer_eagle_worker_v2.py.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, RotatingKVCache

from akunu_py.errors import UnsupportedModel
from akunu_py.models.drafters.drafter_config import read_config
from akunu_py.models.drafters.state_drafter import (
    StateDrafter,
    StepDraft,
    TargetEnds,
    quantize_packed,
)
from akunu_py.models.load import safetensors
from akunu_py.models.load.model_files import as_error, head_files, text_config, weight_files

HEAD_FILE = "mtp.safetensors"
_PUBLISHED = re.compile(r"^mtp_layers\.0\.|\.moe\.gate_proj\.")  # names that mlx-lm changes
_EXPERT = re.compile(r"(.+\.mlp)\.experts\.(\d+)\.(\w+)\.(\w+)")

Weights = dict[str, mx.array]
Rows = list[mx.array]
"""For each head, the states that it passed on, [1, rows, width], fewer for each further head.

If further heads take the target's states, those come last.
"""


def load_heads(directory: Path, model: Any, config: dict[str, Any]) -> HeadChain | None:
    """Return the heads of `model` in `directory`, None without any. Reads weights on first use.

    directory: the model's, or a repository of heads alone. A head that is not quantized gets the
    target's quantization. model, config: from `mlx_loader.open_directory` for the model. Raises
    UnsupportedModel or DamagedModel for a head that does not fit the model.
    """
    family = FAMILIES.get(type(model).__module__.rpartition(".")[2])
    drafter = read_config(directory)
    if alone := drafter is not None and drafter.kind == "mtp":
        drafter.check(text_config(config))
        if family is None:
            raise UnsupportedModel(
                "akunu knows no MTP heads for the architecture "
                f"{config.get('model_type')!r:.40}; use another drafter for this model"
            )
    if family is None:
        return None
    heads: list[Head] = []
    layers = len(model.layers)
    while not heads or "{" in family.prefix:  # with a number, which tells several heads apart
        weights, raw = _find_weights(directory, family, layers, len(heads), alone=alone)
        if not weights:
            break
        with as_error(f"the MTP head in {directory} does not fit the model", UnsupportedModel):
            head = Head(family, text_config(config), layers + len(heads))
            weights = _convert(head, weights, zero_centered=family.zero_centered, raw=raw)
            if family.shared_norm:
                weights.setdefault("body.model.norm.weight", model.model.norm.weight)
            is_packed = quantize_packed(head, weights)
            head.load_weights(list(weights.items()))
            head.eval()
            if not is_packed:
                _quantize(head, config.get("quantization"))
        heads.append(head)
    return HeadChain(heads, layers) if heads else None


def write_heads(chain: HeadChain, path: Path) -> None:
    """Write a file of heads, which `load_heads` can read."""
    weights = {
        _own_prefix(number) + name: value
        for number, head in enumerate(chain.heads)
        for name, value in tree_flatten(head.parameters())
    }
    mx.save_safetensors(str(path), weights, metadata={"format": "mlx"})


def _find_weights(
    directory: Path, family: HeadFamily, layers: int, number: int, *, alone: bool
) -> tuple[Weights, bool]:
    """Return a head's weights by `Head`'s names, and whether the checkpoint is as published."""
    raw = False
    for files, separate in ((head_files(directory), True), (weight_files(directory), alone)):
        found: Weights = {}
        for path in files:
            header, _ = safetensors.read_header(path)
            raw |= any(
                (name.endswith("conv1d.weight") and entry["shape"][-1] != 1)
                or _PUBLISHED.search(name)
                for name, entry in header.items()
            )
            names = {
                name: family.head_name(name, layers, number, separate=separate) for name in header
            }
            if any(names.values()):
                tensors = mx.load(str(path))
                found |= {new: tensors[name] for name, new in names.items() if new}
        if found:
            return found, raw
    return {}, raw


def _convert(head: Head, weights: Weights, *, zero_centered: bool, raw: bool) -> Weights:
    """Return published weights in mlx-lm's form; converted weights stay unchanged."""
    norms = {k: v for k, v in weights.items() if v.ndim == 1 and k.endswith("norm.weight")}
    # Gains are positive, so a negative mean shows gains minus one. mlx-lm converts only the
    # target's, and some conversions leave the head's unchanged (jundot/omlx#1507).
    if zero_centered and (
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
    rest = _stack_experts(head.body.sanitize(rest))
    in_body = ("model.", "backbone.")
    return norms | {f"body.{k}" if k.startswith(in_body) else k: v for k, v in rest.items()}


def _stack_experts(weights: Weights) -> Weights:
    """Stack experts that are separate tensors; mlx-lm does it for some families only."""
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


def _quantize(head: Head, settings: Any) -> None:
    if not isinstance(settings, dict) or not settings.get("bits"):
        return
    group = int(settings["group_size"])
    predicate = getattr(head.body, "quant_predicate", None)

    def is_quantizable(path: str, module: Any) -> Any:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % group:
            return False
        return predicate(path, module) if predicate else True

    mode = settings.get("mode", "affine")
    nn.quantize(head, group, int(settings["bits"]), mode=mode, class_predicate=is_quantizable)


class Head(StateDrafter):
    """An MTP head. Its layers are those of an mlx-lm model, without its embedding and lm_head."""

    def __init__(self, family: HeadFamily, config: dict[str, Any], layer: int) -> None:
        """config: the text configuration of the target. layer: number of its layer there."""
        super().__init__()
        module = importlib.import_module(f"mlx_lm.models.{family.module}")
        own = {"num_hidden_layers": 1, "vocab_size": 1, **family.config}
        if family.choose is not None:
            own |= family.choose(config, layer)
        args = getattr(module, f"{family.model}Args").from_dict(config | own)
        self.body = getattr(module, family.model)(args)
        self.body.pop("lm_head", None)
        decoder = _decoder(self.body)
        decoder[_embedding_name(decoder)] = nn.Identity()
        if "ssm_idx" in vars(decoder):  # index of the first recurrent layer; here none
            decoder.ssm_idx = 1
        norm = decoder.norm_f if "norm_f" in decoder else decoder.norm
        width = norm.weight.shape[0]
        self.embedding_norm = nn.RMSNorm(width, eps=norm.eps)
        self.hidden_norm = nn.RMSNorm(width, eps=norm.eps)
        self.project = nn.Linear(2 * width, width, bias=False)
        self.family = family
        if family.own_lm_head:
            self.output_norm, self.body.model.norm = norm, nn.Identity()
            self.lm_head = nn.Linear(width, int(config["vocab_size"]), bias=False)

    def make_cache(self) -> list[Any]:
        """Return an empty cache. It keeps tokens beyond a window, for rollbacks."""
        entries = self.body.make_cache() if hasattr(self.body, "make_cache") else [KVCache()]
        return [KVCache() if type(entry) is RotatingKVCache else entry for entry in entries[:1]]

    def __call__(self, embeddings: mx.array, hidden: mx.array, cache: list[Any]) -> mx.array:
        """Return the hidden states [1, rows, width] for the token after each row.

        embeddings: of the tokens, [1, rows, width]. hidden: the state before each, [1, rows,
        width]. Appends to `cache`, from `make_cache`. `logits` turns the result into logits, and
        the next draft token takes it as `hidden`.
        """
        inputs = [self.embedding_norm(embeddings), self.hidden_norm(hidden)]
        if not self.family.embedding_first:
            inputs.reverse()
        return _decoder(self.body)(self.project(mx.concatenate(inputs, -1)), [*cache, None])

    def logits(self, state: mx.array, target: TargetEnds) -> mx.array:
        """Return the logits of a state [..., width] that the head returned."""
        return self.raw_logits(self.output_norm(state) if "output_norm" in self else state, target)


class Trunk:
    """The parts of a target that a head needs."""

    def __init__(self, model: Any) -> None:
        self._text = getattr(model, "language_model", model)

    @property
    def _embedding(self) -> nn.Module:
        decoder = _decoder(self._text)
        return decoder[_embedding_name(decoder)]

    def embed(self, tokens: mx.array) -> mx.array:
        """Return the embeddings [1, rows, width] of `tokens` [1, rows]."""
        return self._embedding(tokens)

    @property
    def lm_head(self) -> nn.Module:
        """The module that computes logits, often the embedding."""
        return self._text.lm_head if "lm_head" in self._text else self._embedding

    def logits(self, hidden: mx.array) -> mx.array:
        """Return the logits [..., vocab] of hidden states [..., width]."""
        head = self.lm_head
        return head(hidden) if "lm_head" in self._text else head.as_linear(hidden)


def _decoder(model: Any) -> Any:
    """Return the part of an mlx-lm model without its lm_head."""
    return model.backbone if "backbone" in model else model.model


def _embedding_name(decoder: nn.Module) -> str:
    return "embeddings" if "embeddings" in decoder else "embed_tokens"


def _own_prefix(number: int) -> str:
    """Return the prefix of `Head`'s names in a file that akunu wrote. number: of the head."""
    return f"head{number or ''}."


_SPECULATORS = "mtp_layers.0."  # prefix of names in the "speculators" container
_SEPARATE_NAMES = {  # in files of the head alone, and the names of checkpoints
    f"{_SPECULATORS}input_proj": "fc",
    f"{_SPECULATORS}token_layernorm": "pre_fc_norm_embedding",
    f"{_SPECULATORS}hidden_layernorm": "pre_fc_norm_hidden",
    f"{_SPECULATORS}final_layernorm": "norm",
    _SPECULATORS: "layers.0.",
    "shared_head_norm": "shared_head.norm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFamily:
    """The names and layout under which a model family publishes its heads."""

    module: str  # of mlx-lm
    model: str = "Model"  # class in the module; its arguments' class has this name and "Args"
    # Expression for the prefix of a head; {layer}: its layer's number, {number}: of the head.
    prefix: str
    modules: Mapping[str, str]  # published names, and `Head`'s; all but the layer
    layer: str = ""  # prefix of the layer's names after `prefix`
    own_layer: str = "body.model.layers.0."  # prefix of `Head`'s names of the layer
    renamed: Mapping[str, str] = field(default_factory=dict)  # names in the layer, and mlx-lm's
    config: Mapping[str, Any] = field(default_factory=dict)  # changes for a model of one layer
    # Further changes. Takes the target's text configuration and the number of the head's layer.
    choose: Callable[[Mapping[str, Any], int], dict[str, Any]] | None = None
    shared_norm: bool = False  # its last norm is the target's
    own_lm_head: bool = False  # it has one, and passes its state on before its norm
    embedding_first: bool = True  # order of the inputs of the projection
    normed: bool = True  # hidden states come from after the target's norm
    chained: bool = True  # each further head takes the state of the one before, not the target's
    zero_centered: bool = False  # norms are published as gains minus one
    separate_prefix: str | None = None  # another one, in files of the head alone

    def head_name(
        self, name: str, layers: int, number: int = 0, *, separate: bool = False
    ) -> str | None:
        """Return `Head`'s name of the weight `name`, None if it is not part of the head.

        layers: of the target. number: of the head. separate: the weight is in a separate head file.
        """
        if separate and name.startswith(own := _own_prefix(number)):
            return name.removeprefix(own)
        prefix = self.prefix.format(layer=layers + number, number=number)
        if separate and self.separate_prefix is not None and not number:
            prefix = f"(?:{prefix}|{self.separate_prefix})"
            for published, renamed in _SEPARATE_NAMES.items():
                name = name.replace(published, renamed)
        found = re.match(prefix, name)
        if not found:
            return None
        rest = name[found.end() :]
        module, _, part = rest.rpartition(".")
        if module in self.modules:
            return f"{self.modules[module]}.{part}"
        if not rest.startswith(self.layer) or rest.startswith(("embed_tokens.", "shared_head.")):
            return None
        rest = rest.removeprefix(self.layer)
        for published, renamed in self.renamed.items():
            rest = rest.replace(published, renamed)
        return self.own_layer + rest


_QWEN3_NEXT = HeadFamily(
    module="qwen3_next",
    prefix=r"(?:(?:model\.)?language_model\.)?mtp\.",  # the beginning: in multimodal models
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
    zero_centered=True,
    separate_prefix="",
)
_QWEN3_5 = replace(_QWEN3_NEXT, module="qwen3_5", model="TextModel")
_NEXTN = {"eh_proj": "project", "enorm": "embedding_norm", "hnorm": "hidden_norm"}
_DEEPSEEK = HeadFamily(
    module="deepseek_v3",
    prefix=r"(?:language_model\.)?model\.layers\.{layer}\.",
    separate_prefix=r"(?:model|mtp)\.(?:mtp_block\.)?",
    modules=_NEXTN | {"shared_head.norm": "body.model.norm"},
    config={"first_k_dense_replace": 0, "moe_layer_freq": 1},
)


def _step_layer(config: Mapping[str, Any], layer: int) -> dict[str, Any]:
    """Return the values of the head's layer in lists by layer; the last one is for all others."""
    chosen = {}
    for name in ("layer_types", "partial_rotary_factors", "swiglu_limits_shared", "rope_theta"):
        if isinstance(values := config.get(name), list):
            value = values[min(layer, len(values) - 1)]
            chosen[name] = value if name == "rope_theta" else [value]
    return chosen


def _exaone_layer(config: Mapping[str, Any], layer: int) -> dict[str, Any]:
    """Return the type of attention; mlx-lm finds in the others whether full attention has RoPE."""
    types = config["layer_types"]
    return {"layer_types": [(config.get("mtp_layer_types") or types)[0], *types]}


_LIKE_DEEPSEEK = ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa")
# By mlx-lm's module of the target.
FAMILIES = {
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    **{name: replace(_DEEPSEEK, module=name) for name in _LIKE_DEEPSEEK},
    "mimo": HeadFamily(
        module="mimo",
        prefix=r"model\.mtp_layers\.{number}\.",
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
        prefix=r"model\.mtp\.layers\.{number}\.",
        modules=_NEXTN | {"final_layernorm": "body.model.norm"},
        renamed={"pre_mlp_layernorm": "post_attention_layernorm"},
        # mlx-lm needs a layer of either kind of attention.
        config={"hybrid_layer_pattern": [1, 0], "moe_layer_freq": [0, 0]},
        chained=False,
    ),
    "step3p5": HeadFamily(
        module="step3p5",
        prefix=r"model\.layers\.{layer}\.(?:transformer\.)?",
        modules=_NEXTN | {"shared_head.norm": "output_norm", "shared_head.output": "lm_head"},
        config={"moe_layers_enum": ""},
        choose=_step_layer,
        normed=False,
        own_lm_head=True,
        zero_centered=True,
    ),
    "exaone_moe": replace(
        _QWEN3_NEXT,
        module="exaone_moe",
        config={"tie_word_embeddings": True, "is_moe_layer": [False]},
        choose=_exaone_layer,
        zero_centered=False,
    ),
    "ernie4_5_moe": HeadFamily(
        module="ernie4_5_moe",
        prefix=r"model\.mtp_",
        modules={
            "linear_proj.0": "project",
            "emb_norm.0": "embedding_norm",
            "hidden_norm.0": "hidden_norm",
        },
        layer="block.0.",
        config={"tie_word_embeddings": True, "moe_layer_start_index": 1},
        shared_norm=True,
    ),
    "nemotron_h": HeadFamily(
        module="nemotron_h",
        # The norms and the projection are stored with the first and the last layer.
        prefix=r"mtp\.(?:layers\.\d+\.(?=enorm|hnorm|eh_proj|final_layernorm))?",
        modules=_NEXTN | {"final_layernorm": "body.backbone.norm_f"},
        layer="layers.",
        own_layer="body.backbone.layers.",
        config={"hybrid_override_pattern": "*E"},  # the default in transformers
    ),
}


class HeadChain(StateDrafter):
    """The heads of a model, most often one."""

    kind = "mtp"

    def __init__(self, heads: list[Head], layers: int) -> None:
        """layers: of the target."""
        super().__init__()
        self.heads = heads
        self.family = heads[0].family
        self.needs_final = self.family.normed  # the state after the target's final norm, not `taps`
        self.taps = () if self.needs_final else (layers - 1,)
        if len(heads) > 1:  # one drafts any number, rarely right further on
            self.longest, self.overlap = len(heads), len(heads) - 1

    def make_cache(self) -> list[Any]:
        """Return an empty cache of the committed positions, with one entry for each head."""
        return [entry for head in self.heads for entry in head.make_cache()]

    def extend(self, states: mx.array, embeddings: mx.array, cache: list[Any]) -> Rows:
        """Append positions to `cache`, and return what `start` needs.

        states: of the positions, [1, rows, width]. embeddings: of the token after each. All calls
        but the first begin with the last `overlap` positions again, which the cache must lack.
        """
        rows = [self.heads[0](embeddings, states, cache[:1])]
        for number, head in enumerate(self.heads[1:], 1):
            known = max(0, states.shape[1] - number)  # rows whose tokens are known
            made = (rows[-1] if self.family.chained else states)[:, :known]
            if known:
                made = head(embeddings[:, number:], made, cache[number : number + 1])
            rows.append(made)
        return rows if self.family.chained else [*rows, states]

    def start(self, target: TargetEnds, rows: Rows, cache: list[Any]) -> StepDraft:
        """Begin a draft. rows: from the last `extend`."""
        if len(self.heads) == 1:
            return StepDraft(self.heads[0], target, [rows[0][:, -1:]], cache)
        return ChainDraft(self.heads, target, rows, cache)


class ChainDraft(StepDraft):
    """A draft of several heads, one token each."""

    def __init__(self, heads: list[Head], target: TargetEnds, rows: Rows, cache: list[Any]) -> None:
        super().__init__(heads[0], target, rows[:1], cache)
        self._heads, self._rows = heads, rows
        self._embeddings: Rows = []  # of the draft, [1, 1, width] each

    def _run(self, embedding: mx.array) -> mx.array:
        """Run the next head on the last rows, whose tokens are known now."""
        self._embeddings.append(embedding)
        depth = len(self._embeddings)
        head = self._drafter = self._heads[depth]
        before = (self._states[-1] if head.family.chained else self._rows[-1])[:, -depth:]
        after = mx.concatenate(self._embeddings[-before.shape[1] :], axis=1)
        made = head(after, before, self._cache[depth : depth + 1])
        return mx.concatenate([self._rows[depth], made], axis=1)
