"""Convert a GGUF file into a directory that mlx-lm loads, one tensor at a time.

The architectures follow llama.cpp's own conversion from transformers (conversion/*.py there) and
mlx-lm's model arguments; tests compare them with llama.cpp's logits. A tensor or setting that the
conversion would ignore raises UnsupportedModel, before anything is written.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, get_tensor_name_map
from mlx.utils import tree_flatten
from mlx_lm.models.rope_utils import Llama3RoPE

from akunu_py.errors import DamagedModel, UnsupportedModel
from akunu_py.models.gguf import file as weights
from akunu_py.models.gguf.file import GgufFile, GgufTensor, damaged, read_gguf
from akunu_py.models.gguf.tokenizer import TokenizerPlan, plan_tokenizer
from akunu_py.models.load.model_files import ModelFacts, as_error, write_settings
from akunu_py.models.load.safetensors import Entry, write_safetensors

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """A checked conversion, ready to be written."""

    config: Config
    entries: list[Entry]
    tokenizer: TokenizerPlan
    facts: ModelFacts

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    def write(
        self, directory: Path, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> None:
        """Write the model into the existing, empty `directory`.

        progress: called with the bytes written and their total. Raises UnsupportedModel if a weight
        overflows its float type, and OSError.
        """
        total = self.nbytes
        with (directory / "model.safetensors").open("xb") as file:

            def report(block: memoryview) -> None:
                progress(min(file.tell(), total), total)

            write_safetensors(file, {"format": "mlx"}, self.entries, report)
        progress(total, total)
        self.tokenizer.write(directory)
        write_settings(directory, {"config.json": self.config})


def plan_import(source: Path) -> ImportPlan:
    """Check a GGUF file, except weights' values. Raises UnsupportedModel or DamagedModel."""
    with as_error(f"{source.name} cannot be imported"):
        file = read_gguf(source)
        architecture, family = family_of(file)
        tokenizer = plan_tokenizer(file)
        settings = GgufSettings(file, architecture)
        for key, value in _NEUTRAL.items():
            if key not in family.reads:
                settings.expect(key, value)
        config: Config = {"model_type": family.model_type, "architectures": [family.class_name]}
        config |= common_config(settings, tokenizer.tokenizer.get_vocab_size())
        config |= family.configure(settings, config)
        config |= tokenizer.config_ids()
        slots = _place_tensors(settings, family, config)
        used = [tensor for tensor in file.tensors.values() if tensor.name in slots]
        dtype = _float_type(used, slots, family)
        bits = {
            slots[tensor.name].name.removesuffix(".weight"): tensor.type.bits
            for tensor in used
            if tensor.type.bits
        }
        if bits:
            config["quantization"] = _quantization(bits)
        entries = [
            entry
            for tensor in used
            for entry in _entries(tensor, slots[tensor.name], config, dtype)
        ]
        types = Counter(tensor.type.name for tensor in used if len(tensor.shape) > 1)
        license = file.metadata.get("general.license")
        facts = ModelFacts(
            parameters=sum(math.prod(tensor.shape) for tensor in used),
            quantized=bool(bits),
            quantization=", ".join(f"{name} x {count}" for name, count in types.most_common()),
            license=license if isinstance(license, str) and len(license) < 100 else "",
        )
        return ImportPlan(config, entries, tokenizer, facts)


def _place_tensors(settings: GgufSettings, family: Family, config: Config) -> dict[str, TensorSlot]:
    file, expected = settings.file, {}
    names = get_tensor_name_map(MODEL_ARCH[settings.architecture.upper()], 1)
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    one_layer = module.ModelArgs.from_dict(config | {"num_hidden_layers": 1})  # all are alike
    parameters = tree_flatten(module.Model(one_layer).parameters())  # none of them is computed
    # A damaged layer count may be a billion: stop at the number of tensors.
    for layer in range(min(config["num_hidden_layers"], len(file.tensors))):
        for parameter, array in parameters:
            owner, _, part = parameter.rpartition(".")
            name = names.get_name(owner.replace("switch_mlp", "experts"))
            if name == "output" and config["tie_word_embeddings"]:
                continue
            expected[f"{name}.{part}".replace(".0.", f".{layer}.")] = TensorSlot(
                parameter.replace(".0.", f".{layer}."),
                array.shape,
                heads=family.permuted.get(owner.rpartition(".")[2]),
                shift=family.shift if owner.endswith("norm") else 0.0,
            )
    if missing := [name for name in expected if name not in file.tensors]:
        message = f"{len(missing)} tensors are missing, the first is {missing[0]}"
        raise damaged(file.path, message)
    for name, tensor in file.tensors.items():
        if name in settings.tables:
            continue
        if name not in expected:
            raise UnsupportedModel(
                f"{file.path.name} has a tensor {name[:80]!r} that akunu cannot import"
            )
        shape = expected[name].shape
        if tensor.shape != shape:
            found = f"found {list(tensor.shape)}"
            raise damaged(file.path, f"expected the shape {list(shape)} for {name}, {found}")
        if len(shape) == 1 and tensor.type.bits:
            raise damaged(file.path, f"expected floats for {name}, found {tensor.type.name}")
    return expected


def _float_type(tensors: list[GgufTensor], slots: dict[str, TensorSlot], family: Family) -> str:
    """Return the float type for everything that is not quantized.

    MLX computes in the widest type it finds, so one float32 norm would slow down the whole model.
    """
    matrices = {tensor.type.name for tensor in tensors if len(tensor.shape) > 1}
    if matrices == {"F32"}:
        return "F32"
    if family.needs_bfloat16 or "BF16" in matrices:
        return "BF16"
    fits = all(
        np.isfinite(weights.round_to(_vector(tensor, slots[tensor.name].shift), "F16")).all()
        for tensor in tensors
        if len(tensor.shape) == 1
    )
    return "F16" if fits else "BF16"


def _vector(tensor: GgufTensor, shift: float) -> weights.Array:
    values = weights.load(weights.convert_float(tensor, tensor.type.name), tensor.type.name)
    return values - np.float32(shift)


def _quantization(bits: dict[str, int]) -> dict[str, Any]:
    common = Counter(bits.values()).most_common(1)[0][0]
    exceptions = {
        module: {"group_size": weights.GROUP_SIZE, "bits": width}
        for module, width in bits.items()
        if width != common
    }
    return {"group_size": weights.GROUP_SIZE, "bits": common, "mode": "affine"} | exceptions


def _entries(tensor: GgufTensor, slot: TensorSlot, config: Config, dtype: str) -> list[Entry]:
    """Return the entries of `tensor` in model.safetensors, with floats stored as `dtype`."""
    parts: dict[str, weights.Array] = {}  # of a quantized tensor, from the first entry to the last

    def unpermuted(values: weights.Array) -> weights.Array:
        return weights.unpermute(values, config[slot.heads]) if slot.heads else values

    def floats() -> weights.Array:
        if len(tensor.shape) == 1:
            return weights.store(_vector(tensor, slot.shift), dtype)
        return unpermuted(weights.convert_float(tensor, dtype))

    def quantized(part: str) -> weights.Array:
        if not parts:
            parts.update(weights.convert_quantized(tensor, dtype))
        return unpermuted(parts.pop(part))

    if not tensor.type.bits:
        return [Entry(slot.name, dtype, tensor.shape, floats)]
    module = slot.name.removesuffix(".weight")
    *rows, columns = tensor.shape
    groups = (*rows, columns // weights.GROUP_SIZE)
    return [
        Entry(f"{module}.{part}", kind, shape, partial(quantized, part))
        for part, kind, shape in (
            ("weight", "U32", (*rows, columns * tensor.type.bits // 32)),
            ("scales", dtype, groups),
            ("biases", dtype, groups),
        )
    ]


# Settings of some llama.cpp architectures, after the value that has no effect.
_NEUTRAL_KEYS: list[tuple[Any, str]] = [
    (0.0, "attention.clamp_kqv attention.max_alibi_bias attn_logit_softcapping"),
    (0.0, "final_logit_softcapping rope.scaling.yarn_log_multiplier"),
    (0, "attention.shared_kv_layers attention.sliding_window expert_count expert_shared_count"),
    (0, "expert_shared_feed_forward_length leading_dense_block_count nextn_predict_layers"),
    (0, "pooling_type"),
    (1, "expert_gating_func"),  # softmax
    (1.0, "embedding_scale expert_weights_scale logit_scale residual_scale"),
    (1.0, "rope.scaling.attn_factor rope.scaling.yarn_attn_factor rope.scaling.yarn_ext_factor"),
    (True, "attention.causal expert_weights_norm"),
]
_NEUTRAL = {key: value for value, keys in _NEUTRAL_KEYS for key in keys.split()}


class GgufSettings:
    """The settings of one architecture in a GGUF file's metadata, by key without its name.

    A setting that the import ignores must have no effect. Errors name the key.
    """

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file, self.architecture = file, architecture
        self.tables: set[str] = set()  # names of tensors that hold settings

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def count(self, key: str, default: int | None = None) -> int:
        """Return an integer from 1 to 2**31 - 1. Raises DamagedModel."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise self.wrong(key, "a positive number", value)
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """Return a finite number above 0. Raises DamagedModel."""
        value = self.get(key, default)
        if not isinstance(value, float) or not math.isfinite(value) or value <= 0:
            raise self.wrong(key, "a positive real number", value)
        # GGUF stores float32: return the shortest decimal that has the same float32 value.
        return float(str(np.float32(value)))

    def expect(self, key: str, value: object) -> None:
        """Raise UnsupportedModel if the metadata sets `key` to anything but `value`."""
        found = self.get(key, value)
        same = type(found) is type(value) and found == value
        if isinstance(value, float) and isinstance(found, float):
            same = math.isclose(found, value, rel_tol=1e-5)
        if not same:
            raise UnsupportedModel(
                f"{self.file.path.name} sets {self.architecture}.{key} to {found!r:.60}; akunu "
                f"imports {self.architecture} models with {value!r}"
            )

    def table(self, name: str, count: int) -> list[float] | None:
        """Return the `count` positive values of a tensor, None without it. Raises DamagedModel."""
        if (tensor := self.file.tensors.get(name)) is None:
            return None
        if tensor.type.name != "F32" or tensor.shape != (count,):
            found = f"{tensor.type.name} of {list(tensor.shape)}"
            raise damaged(tensor.path, f"expected {count} F32 values in {name}, found {found}")
        values = tensor.read().view("<f4")[:, 0]
        if not np.isfinite(values).all() or values.min() <= 0:
            raise damaged(tensor.path, f"{name} is not positive")
        self.tables.add(name)
        return [float(str(value)) for value in values]

    def wrong(self, key: str, expected: str, found: object) -> DamagedModel:
        description = "nothing" if found is None else repr(found)[:60]
        key = f"{self.architecture}.{key}"
        return damaged(self.file.path, f"expected {expected} for {key}, found {description}")


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """The place of a GGUF tensor in mlx-lm's model."""

    name: str  # of the parameter in mlx-lm
    shape: tuple[int, ...]
    heads: str | None  # setting with the number of heads whose rows llama.cpp permutes
    shift: float  # added to the values by llama.cpp


@dataclass(frozen=True, slots=True)
class Family:
    """The conversion of one architecture."""

    model_type: str
    class_name: str
    configure: Callable[[GgufSettings, Config], Config]  # returns further settings
    reads: Collection[str] = ()  # keys of _NEUTRAL that this family uses
    permuted: Mapping[str, str] = field(default_factory=dict)  # modules, and `TensorSlot.heads`
    shift: float = 0.0  # of norms: Gemma multiplies by 1 + w, and GGUF stores the sum
    needs_bfloat16: bool = False  # activations overflow half precision


def common_config(settings: GgufSettings, vocabulary: int) -> Config:
    """Return the settings that all families share, after a check of the attention's shape."""
    hidden = settings.count("embedding_length")
    heads = settings.count("attention.head_count")
    key_heads = settings.count("attention.head_count_kv", heads)
    head_dim = settings.count("attention.key_length", hidden // heads or 1)
    if head_dim % 2 or heads % key_heads:
        raise damaged(settings.file.path, "its numbers of attention heads do not fit together")
    settings.expect("attention.value_length", head_dim)
    settings.expect("attention.scale", 1 / math.sqrt(head_dim))
    return {
        "hidden_size": hidden,
        "intermediate_size": settings.count("feed_forward_length"),
        "num_hidden_layers": settings.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": head_dim,
        "rms_norm_eps": settings.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": settings.real("rope.freq_base", 10000.0),
        "rope_traditional": False,
        "max_position_embeddings": settings.count("context_length"),
        "vocab_size": vocabulary,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in settings.file.tensors,
    }


def _plain(settings: GgufSettings, config: Config) -> Config:
    return {"rope_scaling": _rope_scaling(settings, config)}


def _qwen2(settings: GgufSettings, config: Config) -> Config:
    settings.expect("attention.key_length", config["hidden_size"] // config["num_attention_heads"])
    return _plain(settings, config)


def _qwen3_moe(settings: GgufSettings, config: Config) -> Config:
    experts = settings.count("expert_count")
    used = settings.count("expert_used_count")
    if used > experts:
        raise settings.wrong("expert_used_count", f"at most {experts}", used)
    return _plain(settings, config) | {
        "num_experts": experts,
        "num_experts_per_tok": used,
        "moe_intermediate_size": settings.count("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


def _gemma3(settings: GgufSettings, config: Config) -> Config:
    # The largest Gemma 3 divides by hidden size / heads, the others by the head dimension. GGUF
    # does not record which; llama.cpp decides by the number of layers.
    largest = config["num_hidden_layers"] == 62
    per_head = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": per_head if largest else config["head_dim"],
        "sliding_window": settings.count("attention.sliding_window"),
        "sliding_window_pattern": settings.count("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": settings.real("rope.freq_base_swa", 10000.0),
        "rope_scaling": _rope_scaling(settings, config),
    }


def _phi3(settings: GgufSettings, config: Config) -> Config:
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    settings.expect("attention.key_length", head_dim)
    rotated = settings.count("rope.dimension_count", head_dim)
    if rotated > head_dim or rotated % 2:
        raise settings.wrong("rope.dimension_count", f"an even number up to {head_dim}", rotated)
    settings.expect("rope.scaling.type", "longrope")
    context = config["max_position_embeddings"]
    original = settings.count("rope.scaling.original_context_length", context)
    scaling = None
    names = "rope_factors_long.weight", "rope_factors_short.weight"
    if all(name in settings.file.tensors for name in names):
        factor = max(context / original, 1.0)
        stretch = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        settings.expect("rope.scaling.attn_factor", stretch)
        long, short = (settings.table(name, rotated // 2) for name in names)
        scaling = {"type": "longrope", "long_factor": long, "short_factor": short}
    return {
        "partial_rotary_factor": rotated / head_dim,
        "original_max_position_embeddings": original,
        "rope_scaling": scaling,
    }


def _rope_scaling(settings: GgufSettings, config: Config) -> Config | None:
    """Return mlx-lm's settings for scaled rotary positions, None for plain ones."""
    settings.expect("rope.dimension_count", config["head_dim"])
    kind = settings.get("rope.scaling.type") or "none"
    divisors = settings.table("rope_freqs.weight", config["head_dim"] // 2)
    if divisors and kind == "none":
        return None if set(divisors) == {1.0} else _frequency_scaling(divisors, config)
    if kind == "none":
        if settings.get("rope.scale_linear") in (None, 1.0):
            return None
        return {"type": "linear", "factor": settings.real("rope.scale_linear")}
    if kind == "linear" and divisors is None:
        return {"type": "linear", "factor": settings.real("rope.scaling.factor")}
    if kind == "yarn" and divisors is None:
        return {
            "type": "yarn",
            "factor": settings.real("rope.scaling.factor"),
            "original_max_position_embeddings": settings.count(
                "rope.scaling.original_context_length"
            ),
            "beta_fast": settings.real("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": settings.real("rope.scaling.yarn_beta_slow", 1.0),
        }
    raise UnsupportedModel(
        f"{settings.file.path.name} has rope scaling of type {kind!r:.40}; akunu imports none, "
        "linear, yarn and tables of frequencies"
    )


def _frequency_scaling(divisors: list[float], config: Config) -> Config:
    """Return Llama 3.1's scaling, which GGUF stores as one divisor per frequency."""
    scaling: Config = {
        "rope_type": "llama3",
        "factor": max(divisors),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    head_dim, base = config["head_dim"], config["rope_theta"]
    plain = base ** (np.arange(0, head_dim, 2) / head_dim)
    scaled = Llama3RoPE(head_dim, base=base, scaling_config=scaling)._freqs
    if np.allclose(divisors, np.array(scaled) / plain, rtol=1e-4):
        return scaling
    # Not Meta's numbers: pass the table to the scaling type that accepts one.
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": config["max_position_embeddings"],
        "short_factor": divisors,
        "long_factor": divisors,
    }


FAMILIES = {
    "llama": Family(
        "llama",
        "LlamaForCausalLM",
        _plain,
        permuted={"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"},
    ),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", _qwen2),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", _plain),
    "qwen3moe": Family("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe, {"expert_count"}),
    "gemma3": Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _gemma3,
        {"attention.sliding_window"},
        shift=1,
        needs_bfloat16=True,
    ),
    # Neither mlx-lm nor llama.cpp uses the sliding window of some Phi 3 models.
    "phi3": Family(
        "phi3", "Phi3ForCausalLM", _phi3, {"attention.sliding_window", "rope.scaling.attn_factor"}
    ),
}


def family_of(file: GgufFile) -> tuple[str, Family]:
    """Return the name and the family of the file's architecture. Raises UnsupportedModel."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in FAMILIES:
        raise UnsupportedModel(
            f"{file.path.name} has the architecture {name!r:.40}; akunu imports "
            f"{', '.join(FAMILIES)} from GGUF, and any that mlx-lm supports from a directory"
        )
    return name, FAMILIES[name]
