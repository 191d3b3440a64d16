"""The settings of the backbone that DFlash, DFlash2 and DSpark share.

Where packagings differ, the rules follow mlx-dspark 0.20.3 (`config.py`), which measured the
acceptance of published drafters, and `dflash` 0.1.0. DSpark's trainers copy many settings of the
target that the drafter does not use: layer types, windows and partial rotation.
"""

from dataclasses import dataclass
from typing import Any

from akunu_py.errors import DamagedModel, UnsupportedModel
from akunu_py.models.drafters.drafter_config import DrafterConfig, count
from akunu_py.models.load.model_files import ADVICE

_SUPPORTED: dict[str, tuple[Any, ...]] = {  # values of settings; others would draft wrongly
    "projector_type": (None, "dspark", "dflash", "dflash2"),
    "hidden_act": (None, "silu"),
    "attention_k_eq_v": (None, True),
    "log_snr_conditioning": (None, False),
    "attention_value_scale": (None, 1.0),
    "use_gemma_norm": (None, False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSettings:
    """Everything that shapes the backbone and its heads."""

    width: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    bias: bool  # of the attention's projections
    rope: dict[str, Any]  # arguments of `initialize_rope`
    windows: tuple[int | None, ...]  # for each layer: keys that a query sees, itself included
    causal: tuple[bool, ...]  # for each layer: rows of the block see no later rows
    sink: bool  # each head has a learned attention sink
    gated: bool  # q_proj gives a gate of the attention's output, too
    offset_norms: bool  # norms are stored minus one
    gemma: bool  # Gemma 4's layers: keys are values, four norms, a scalar


def block_settings(config: DrafterConfig) -> BlockSettings:
    """Return the settings of a DFlash, DFlash2 or DSpark drafter.

    Raises DamagedModel, and UnsupportedModel for variants that would draft wrongly.
    """
    path, found = config.path / "config.json", config.settings
    model_type = str(found.get("model_type"))
    gemma = config.kind == "dspark" and "gemma4" in model_type
    for key, supported in _SUPPORTED.items():
        if found.get(key) not in supported and not (gemma and key == "hidden_act"):
            raise UnsupportedModel(
                f"{path}: akunu does not support drafters with {key} = {found[key]!r:.40}; use "
                "another drafter"
            )
    heads = count(path, found, "num_attention_heads")
    kv_key, dim_key = "num_key_value_heads", "head_dim"
    if gemma:
        kv_key, dim_key = "num_global_key_value_heads", "global_head_dim"
    head_dim = count(path, found, dim_key, config.width // heads)
    gated = bool(found.get("enable_qwen35_gated_q_proj"))
    offset_norms = config.kind == "dspark" and model_type == "qwen3_5"
    windows, causal = _attention(config)
    return BlockSettings(
        width=config.width,
        intermediate=count(path, found, "intermediate_size"),
        heads=heads,
        kv_heads=count(path, found, kv_key, heads),
        head_dim=head_dim,
        eps=float(found.get("rms_norm_eps", 1e-6)),
        bias=bool(found.get("attention_bias")),
        rope=_rope(config, head_dim, partial=gated or offset_norms, gemma=gemma),
        windows=windows,
        causal=causal,
        sink=bool(found.get("attention_sink_bias")),
        gated=gated,
        offset_norms=offset_norms,
        gemma=gemma,
    )


def _attention(config: DrafterConfig) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Return the windows and whether the block is causal, for each layer."""
    path, found = config.path / "config.json", config.settings
    stated = [found.get(key) for key in ("is_causal", "causal", "dflash_query_causal")]
    causal = next((value for value in stated if value is not None), None)
    sink, everywhere = found.get("attention_sink_bias"), found.get("use_swa")
    plain = config.kind == "dspark" and not config.speculators and "dflash_config" not in found
    types = found.get("layer_types")
    if types is None or (plain and causal is None and not sink):  # copied from the target
        types = ["full_attention"] * config.layers
    known = {"full_attention", "sliding_attention"}
    if not isinstance(types, list) or len(types) != config.layers or not known.issuperset(types):
        raise DamagedModel(
            f"{path}: expected {config.layers} layer_types of {sorted(known)}, found "
            f"{types!r:.80}; {ADVICE}"
        )
    sliding = [kind == "sliding_attention" for kind in types]
    window = found.get("sliding_window") or found.get("swa_window_size")
    if window and not any(sliding) and (everywhere or sink or found.get("dflash_query_causal")):
        sliding = [True] * config.layers
    if any(sliding) and (type(window) is not int or window < 2):
        raise DamagedModel(f"{path}: expected a sliding_window, found {window!r:.40}; {ADVICE}")
    # Without a statement, sliding layers are causal and others are not.
    both = found.get("sliding_window_non_causal", config.speculators and config.kind == "dflash2")
    return (
        tuple(window if slides else None for slides in sliding),
        tuple(slides and not both if causal is None else bool(causal) for slides in sliding),
    )


def _rope(config: DrafterConfig, head_dim: int, *, partial: bool, gemma: bool) -> dict[str, Any]:
    """Return the arguments of mlx-lm's `initialize_rope`."""
    found = config.settings
    scaling = found.get("rope_parameters") or found.get("rope_scaling") or {}
    for kind in ("full_attention",) if gemma else ("sliding_attention", "full_attention"):
        scaling = scaling.get(kind, scaling)  # some name settings for each kind of layer
    default = 1e6 if config.kind == "dspark" else 1e4
    factor = float(scaling.get("partial_rotary_factor", 0.25 if gemma else 1.0))
    if gemma:
        scaling = {"rope_type": "proportional", "partial_rotary_factor": factor} | scaling
    return {
        "dims": int(head_dim * factor) if partial else int(scaling.get("rope_dim", head_dim)),
        "base": float(scaling.get("rope_theta") or found.get("rope_theta") or default),
        "traditional": not found.get("rope_is_neox_style", True),
        "scaling_config": scaling,
        "max_position_embeddings": found.get("max_position_embeddings"),
    }
