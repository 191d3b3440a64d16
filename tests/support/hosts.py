"""Models split over several processes: `akunu run --hosts`, its processes, and tiny models."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.support.command import AKUNU
from tests.support.families import make
from tests.support.family_table import FAMILIES, Family
from tests.support.tiny import VOCABULARY

_LAYERS = 4  # so that 4 ranks have something each
_MIXED = ["sliding_attention", "full_attention"] * 2
_EXPERTS = {
    name: value
    for name, value in FAMILIES["deepseek_v3"].args.items()
    if "lora" not in name and "qk" not in name and name != "v_head_dim"
}
_LATENT = FAMILIES["deepseek_v3"].args

# By the module of mlx-lm: all that it shards or pipelines, but for muse_spark, which needs Metal.
_FAMILIES: dict[str, Family] = {
    **{
        name: FAMILIES[name]
        for name in (
            "llama",
            "qwen3",
            "deepseek_v3",
            "deepseek_v32",
            "longcat_flash_ngram",
            "iquestloopcoder",
            "qwen3_next",
            "kimi_k3",
        )
    },
    "qwen3_5": replace(
        FAMILIES["qwen3_5"], args={**FAMILIES["qwen3_5"].args, "linear_num_key_heads": 4}
    ),
    "gpt_oss": replace(
        FAMILIES["gpt_oss"], args={**FAMILIES["gpt_oss"].args, "layer_types": _MIXED}
    ),
    "deepseek_v41": replace(
        FAMILIES["deepseek_v41"],
        args={
            **FAMILIES["deepseek_v41"].args,
            "num_attention_heads": 4,
            "o_groups": 4,
            "compress_ratios": (0, 4, 4, 4),
        },
    ),
    "minimax_m3_vl": replace(
        FAMILIES["minimax_m3_vl"],
        args={
            **FAMILIES["minimax_m3_vl"].args,
            "index_n_heads": 4,
            "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        },
    ),
    "bailing_hybrid": replace(
        FAMILIES["bailing_hybrid"],
        args={**FAMILIES["bailing_hybrid"].args, "num_hidden_layers": 8},
    ),
    "deepseek_v2": Family(
        "deepseek_v2",
        {
            **_LATENT,
            "rope_scaling": {
                "factor": 2.0,
                "original_max_position_embeddings": 2048,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "beta_fast": 32,
                "beta_slow": 1,
            },
        },
    ),
    "kimi_k25": Family("kimi_k25", _LATENT, inner="text_config"),
    "glm4_moe_lite": Family("glm4_moe_lite", _LATENT),
    "mistral4": Family(
        "mistral4",
        {
            **_LATENT,
            "rope_parameters": {
                "rope_theta": 10000.0,
                "type": "default",
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
    "longcat_flash": Family(
        "longcat_flash",
        {
            **FAMILIES["longcat_flash_ngram"].args,
            "attention_method": "MLA",
            "zero_expert_type": "identity",
        },
    ),
    "exaone_moe": Family(
        "exaone_moe",
        {**_EXPERTS, "layer_types": _MIXED, "is_moe_layer": [False, True, True, True]},
    ),
    "glm4_moe": Family(
        "glm4_moe",
        {**_EXPERTS, "use_qk_norm": True, "partial_rotary_factor": 0.5, "rope_scaling": None},
    ),
    "qwen2": Family("qwen2"),
    "qwen3_moe": Family("qwen3_moe", {**_EXPERTS, "rope_scaling": None}),
    "minimax": Family("minimax", {**_EXPERTS, "rotary_dim": 8}),
    "ministral3": Family(
        "ministral3",
        {
            "layer_types": _MIXED,
            "rope_parameters": {
                "rope_theta": 10000.0,
                "rope_type": "default",
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
    "step3p5": Family(
        "step3p5",
        {
            "num_attention_groups": 4,
            "layer_types": _MIXED[::-1],
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "moe_intermediate_size": 32,
            "share_expert_dim": 32,
            "moe_layers_enum": "2,3",
            "attention_other_setting": {"num_attention_heads": 4, "num_attention_groups": 4},
        },
    ),
}

SHARDED = tuple(name for name in _FAMILIES if name not in ("qwen3_next", "bailing_hybrid"))
PIPELINED = (
    "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v41", "glm4_moe",
    "glm4_moe_lite", "kimi_k25", "kimi_k3", "minimax_m3_vl", "ministral3", "mistral4", "qwen2",
    "qwen3_5", "qwen3_moe", "qwen3_next",
)  # fmt: skip


def write_named(directory: Path, name: str, layers: int = _LAYERS) -> None:
    """Writes the model of the family of that name. layers: at least, 4 where it says the kind of
    each of them."""
    family = _FAMILIES[name]
    if any(isinstance(value, (list, tuple)) and value for value in family.args.values()):
        layers = _LAYERS
    layers = max(layers, family.args.get("num_hidden_layers", 0))
    write_family(
        directory, family, num_layers=layers, num_hidden_layers=layers, num_key_value_heads=4
    )


def write_talking(directory: Path) -> None:
    """Writes a llama with a chat template."""
    write_named(directory, "llama")
    file = directory / "tokenizer_config.json"
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))


def write_family(directory: Path, family: Family, **more: Any) -> None:
    """Writes a model of the family, with `more` arguments or others, and a tokenizer to which every
    token is a number."""
    model, args = make(family, **more)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(args))
    words = Tokenizer(models.WordLevel({str(each): each for each in range(VOCABULARY)}, "0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


FOLLOWER = "akunu_py.decoding.hosts.partition_worker"
PROMPT = " ".join(str(each * 7 % 90) for each in range(40))


def command(model: Path, hosts: str, *more: str, tokens: int = 200) -> list[str]:
    options = ["--raw", "--no-answer-cache", "--max-tokens", str(tokens), "--model", str(model)]
    return [*AKUNU, "run", *options, *(["--hosts", hosts] if hosts else []), *more, PROMPT]


@contextmanager
def running(
    model: Path, hosts: str, *more: str, tokens: int = 4000
) -> Iterator[subprocess.Popen[bytes]]:
    """It, while it answers."""
    with subprocess.Popen(
        command(model, hosts, *more, tokens=tokens),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,  # or what is read ahead would be lost to `communicate`
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def ranks(process: subprocess.Popen[Any]) -> list[int]:
    """The processes of its other ranks."""
    return [pid for pid, parent, what in _all() if parent == process.pid and FOLLOWER in what]


def below(process: int) -> list[int]:
    """The processes that it started, and those that they did, its own children first."""
    rows, found = _all(), [process]
    for each in found:
        found += [pid for pid, parent, _ in rows if parent == each]
    return found[1:]


def ranks_below(process: int) -> list[int]:
    """Those of them that are ranks but the first."""
    found = below(process)
    return [pid for pid, _, what in _all() if pid in found and FOLLOWER in what]


def all_gone(pids: Sequence[int], seconds: float) -> bool:
    """Whether they end in that time."""
    ends = time.monotonic() + seconds
    while any(pid in pids for pid, _, what in _all() if "python" in what):
        if time.monotonic() > ends:
            return False
        time.sleep(0.05)
    return True


def _all() -> list[tuple[int, int, str]]:
    """Of each process its id, its parent's and its command; no command where it has ended."""
    shown = subprocess.check_output(["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], text=True)
    rows = [line.split(None, 2) for line in shown.splitlines()]
    return [(int(row[0]), int(row[1]), row[2]) for row in rows if "<defunct>" not in row[2]]
