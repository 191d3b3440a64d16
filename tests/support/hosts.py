"""Models split over several processes: `akunu run --hosts`, its processes, and tiny models."""

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

_MIXED = ["sliding_attention", "full_attention"] * 2

# What a family needs so that 2 ranks have equal parts, by name.
_CHANGES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_hidden_layers": 8},
    "deepseek_v3": {},
    "deepseek_v32": {},
    "deepseek_v41": {
        "num_attention_heads": 4, "o_groups": 4, "compress_ratios": (0, 4, 4, 4)
    },
    "gpt_oss": {"layer_types": _MIXED},
    "iquestloopcoder": {},
    "kimi_k3": {},
    "llama": {},
    "longcat_flash_ngram": {},
    "minimax_m3_vl": {
        "index_n_heads": 4, "layer_types": ["full_attention", "minimax_m3_sparse"] * 2
    },
    "qwen2": {},
    "qwen3_5": {"linear_num_key_heads": 4},
    "qwen3_next": {},
}  # fmt: skip
SPLIT_FAMILIES = tuple(_CHANGES)


def write_named(directory: Path, name: str) -> None:
    """Write a model of the family, with four layers or more."""
    family = FAMILIES.get(name, Family(name))
    args = family.args | _CHANGES[name]
    layers = max(4, args.get("num_hidden_layers", 0))
    changes = {"num_layers": layers, "num_hidden_layers": layers, "num_key_value_heads": 4}
    model, args = make(replace(family, args=args), **changes)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(args))
    words = Tokenizer(models.WordLevel({str(each): each for each in range(VOCABULARY)}, "0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def write_talking(directory: Path) -> None:
    """Write a llama with a chat template."""
    write_named(directory, "llama")
    file = directory / "tokenizer_config.json"
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))


WORKER = "akunu_py.engine.hosts.partition_worker"
PROMPT = " ".join(str(each * 7 % 90) for each in range(40))


def command(model: Path, hosts: str, *more: str, tokens: int = 200) -> list[str]:
    options = ["--raw", "--no-answer-cache", "--max-tokens", str(tokens), "--model", str(model)]
    return [*AKUNU, "run", *options, *(["--hosts", hosts] if hosts else []), *more, PROMPT]


def answer(model: Path, hosts: str, *more: str, tokens: int) -> str:
    """Return what `akunu run` prints."""
    args = command(model, hosts, *more, tokens=tokens)
    return subprocess.run(args, capture_output=True, text=True, check=True, timeout=240).stdout


@contextmanager
def running(
    model: Path, hosts: str, program: Sequence[str] = AKUNU
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a long answer, and kill it in the end."""
    with subprocess.Popen(
        [*program, *command(model, hosts, tokens=4000)[len(AKUNU) :]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,  # `communicate` would lose buffered bytes
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def workers(process: int, module: str = WORKER) -> list[int]:
    """Return its descendants that run `module`, by default the ranks other than rank 0."""
    rows, found = _processes(), [process]
    for each in found:
        found += [pid for pid, parent, _ in rows if parent == each]
    return [pid for pid, _, args in rows if pid in found and module in args]


def all_gone(pids: Sequence[int], seconds: float = 60) -> bool:
    """Return True once the processes have ended, False after `seconds`."""
    ends = time.monotonic() + seconds
    while any(pid in pids for pid, _, args in _processes() if "python" in args):
        if time.monotonic() > ends:
            return False
        time.sleep(0.05)
    return True


def _processes() -> list[tuple[int, int, str]]:
    """Return the id, parent and command of each process; the command is empty if it has ended."""
    shown = subprocess.check_output(["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], text=True)
    rows = [line.split(None, 2) for line in shown.splitlines()]
    return [(int(row[0]), int(row[1]), row[2]) for row in rows if "<defunct>" not in row[2]]
