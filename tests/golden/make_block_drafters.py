"""Record what independent implementations draft with tiny DFlash, DFlash2 and DSpark drafters.

In an environment with mlx-lm, mlx-vlm 0.7.10, mlx-dspark 0.20.3, dflash 0.1.0 (without its
dependencies), speculators 0.9.0 and PyTorch, from the checkout:

    python -m tests.golden.make_block_drafters

writes drafters/block.json: for each case of `tests.support.tiny_block_drafters` the greedy drafts
and the confidences, and the biases of Markov heads that only speculators has.
"""

import importlib
import importlib.util
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from tests.support import tiny_block_drafters as tiny

GOLDEN = Path(__file__).parent / "drafters" / "block.json"


def write(directory: Path, config: tiny.Config, seed: int) -> None:
    weights = {name: mx.array(value) for name, value in tiny.checkpoint(config, seed).items()}
    mx.save_safetensors(str(directory / "model.safetensors"), weights)
    (directory / "config.json").write_text(json.dumps(config))


def draft_dflash(directory: Path, config: tiny.Config, seed: int) -> list[Any]:
    model_mlx: Any = importlib.import_module("dflash.model_mlx")
    model_mlx.snapshot_download = lambda path, **_: path
    model = model_mlx.load_draft(str(directory))
    matrix, head = map(mx.array, tiny.target(config, seed))
    embedding = nn.Embedding(*matrix.shape)
    embedding.weight = matrix
    model.bind(SimpleNamespace(embed_tokens=embedding, lm_head=lambda hidden: hidden @ head.T))
    cache, drafts = model.make_cache(), []
    for hidden, anchor in tiny.rounds(config, seed):
        block = mx.array([[anchor] + [model.config.mask_token_id] * (model.config.block_size - 1)])
        if isinstance(model, model_mlx.DFlash2DraftModel):
            tokens, _, _ = model.propose(block, mx.array(hidden), cache, 0.0, logits_start=1)
        else:
            tokens = mx.argmax(model(block, mx.array(hidden), cache, logits_start=1), -1)
        drafts.append({"tokens": tokens[0].tolist()})
    return drafts


def draft_dspark(directory: Path, config: tiny.Config, seed: int) -> list[Any]:
    module: Any = importlib.import_module("mlx_dspark.load")
    model, options = module.load_drafter(str(directory), quantize=False)
    _, head = map(mx.array, tiny.target(config, seed))
    model.bind_lm_head(lambda hidden: hidden @ head.T)
    cache, position, drafts = model.make_ctx_cache(), 0, []
    for hidden, anchor in tiny.rounds(config, seed):
        model.update_context(mx.array(hidden), position, cache)
        position += hidden.shape[1]
        block = mx.array([[anchor] + [options.mask_token_id] * (options.block_size - 1)])
        rows = model.head_slice(model.backbone(model.embed(block), position, cache), 99)
        tokens = model.sample_block(model.compute_logits(rows)[0], anchor)
        found: dict[str, Any] = {"tokens": tokens.tolist()}
        if model.confidence_head is not None:
            before = mx.concatenate([mx.array([[anchor]]), tokens[None, :-1]], 1)
            chances = mx.sigmoid(model.confidence_logits(rows, before))
            found["confidences"] = [round(chance, 4) for chance in chances[0].tolist()]
        drafts.append(found)
    return drafts


def markov_biases(kind: str) -> list[list[float]]:
    """Return the biases of each row of a block that speculators' Markov head gives."""
    import torch

    found = importlib.util.find_spec("speculators")
    assert found is not None
    assert found.submodule_search_locations is not None
    file = Path(found.submodule_search_locations[0]) / "models/dspark/model_definitions.py"
    spec = importlib.util.spec_from_file_location("definitions", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = tiny.dspark(markov_head_type=kind)
    prefix = "markov_head."
    weights = {
        name.removeprefix(prefix): torch.from_numpy(value)
        for name, value in tiny.checkpoint(config, 0).items()
        if name.startswith(prefix)
    }
    rank, width = config["markov_rank"], config["hidden_size"]
    head = module.MarkovHead(
        verifier_vocab_size=tiny.TOKENS, draft_vocab_size=tiny.TOKENS, markov_rank=rank,
        hidden_size=width, head_type=kind,
    )  # fmt: skip
    head.load_state_dict(weights)
    hidden = np.random.default_rng(0).normal(size=(1, config["block_size"], width))
    tokens = torch.arange(config["block_size"])[None] * 7
    with torch.no_grad():
        states = torch.from_numpy(hidden.astype(np.float32))
        biases = head.block_bias(prev_token_ids=tokens, hidden_states=states)
    return [[round(value, 4) for value in row] for row in biases[0].tolist()]


def main() -> None:
    mx.set_default_device(mx.cpu)
    programs = {"dflash": draft_dflash, "mlx-dspark": draft_dspark}
    drafts = {}
    for seed, (name, program, config) in enumerate(tiny.CASES):
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), config, seed)
            drafts[name] = programs[program](Path(folder), config, seed)
    content = {
        "command": "python -m tests.golden.make_block_drafters",
        "drafts": drafts,
        "biases": {kind: markov_biases(kind) for kind in ("gated", "rnn")},
    }
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(content, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
