"""How the families of models publish their MTP heads: names of weights, and what a head computes.

A head guesses the token after the next one. For the last token's hidden state h and the next token
t it computes

    norm(layer(project([norm(embedding of t), norm(h)])))

and the target's lm_head makes logits of it. `layer` is a decoder layer of the family, whose
attention keeps keys and values of its own. What the families have differently stands in `FAMILIES`.
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

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
