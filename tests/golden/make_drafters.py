"""Record what independent implementations draft with the tiny drafters of the tests.

In an environment with mlx-lm, mlx-vlm 0.7.10, mlx-dspark 0.20.3, dflash 0.1.0 (without its
dependencies), speculators 0.9.0 and PyTorch, from the checkout:

    python -m tests.golden.make_drafters

- drafters/eagle3.json: drafts of mlx-vlm's EAGLE-3 in several rounds, and the most likely draft
  tokens of speculators' EAGLE-3 and P-EAGLE behind every prefix of a text
- drafters/gemma4_assistant.json: drafts of mlx-vlm's Gemma 4 assistant
- drafters/mtp.json: drafts of mlx-vlm's MTP heads
- drafters/block.json: drafts and confidences of dflash and mlx-dspark for each case of
  `tests.support.tiny_block_drafters`, and the biases of Markov heads that only speculators has
"""

import importlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from tests.support import tiny_block_drafters as blocks
from tests.support import tiny_drafters as tiny

GOLDEN = Path(__file__).parent / "drafters"
COMMAND = "python -m tests.golden.make_drafters"


def mlx_vlm(drafter: str) -> Any:
    return importlib.import_module(f"mlx_vlm.speculative.drafters.{drafter}")


def eagle3_rounds(seed: int, config: dict[str, Any]) -> list[list[int]]:
    """Return the drafts of mlx-vlm."""
    eagle3 = mlx_vlm("eagle3")
    model = eagle3.Model(eagle3.ModelConfig.from_dict(config))
    weights = {k: mx.array(v) for k, v in tiny.eagle3_checkpoint(config, seed).items()}
    model.load_weights(list(model.sanitize(weights).items()))
    return rounds(model, model, seed, weights["fc.weight"].shape[-1], model.target_vocab_size)


class Target:
    """A target with an embedding and an lm_head, and with hidden states that are random."""

    def __init__(self, weights: dict[str, Any], scale: float = 1.0) -> None:
        self.embed_tokens = lambda tokens: weights["embed_tokens"][tokens]
        self.lm_head = lambda hidden: hidden @ weights["lm_head"].T
        self.embed_scale = scale


def mtp_rounds(seed: int, config: dict[str, Any]) -> list[list[int]]:
    """Return the drafts of mlx-vlm."""
    mtp = mlx_vlm("qwen3_5_mtp")
    model = mtp.Model(mtp.ModelConfig.from_dict(config))
    weights = {k: mx.array(v) for k, v in tiny.mtp_checkpoint(config, seed).items()}
    target = Target({name: weights.pop(f"{name}.weight") for name in ("embed_tokens", "lm_head")})
    model.load_weights(list(model.sanitize(weights).items()))
    text = config["text_config"]
    return rounds(model, target, seed, text["hidden_size"], text["vocab_size"])


def assistant_drafts(seed: int, config: dict[str, Any]) -> list[list[int]]:
    """Return the drafts of mlx-vlm, behind several numbers of positions."""
    module = mlx_vlm("gemma4_assistant")
    model = module.Model(module.ModelConfig.from_dict(config))
    weights = {k: mx.array(v) for k, v in tiny.assistant_checkpoint(config, seed).items()}
    embedding = weights.pop("target.weight")
    model.load_weights(list(model.sanitize(weights).items()))
    model.reset(Target({"embed_tokens": embedding}, scale=2.0))
    drafts = []
    for length in tiny.ATTENDED:
        shared = tiny.assistant_attended(config, seed + length, length)
        shared = {kind: tuple(map(mx.array, both)) for kind, both in shared.items()}
        model.set_shared_kv(shared, length, position=length - 1, kv_valid_len=length)
        hidden = mx.array(tiny.draw_states(seed + length, 1, config["backbone_hidden_size"]))
        made = model.draft_block(
            length, hidden, None, tiny.LENGTHS[1] + 1, lambda logits: mx.argmax(logits, axis=-1)
        )
        drafts.append(made[0].tolist())
    return drafts


def rounds(model: Any, target: Any, seed: int, width: int, vocabulary: int) -> list[list[int]]:
    """Return the drafts of a model of mlx-vlm; each pass accepts some of its tokens."""
    prompt, longest = tiny.LENGTHS
    tokens = tiny.draw_tokens(seed, prompt + 1 + len(tiny.ACCEPTED), vocabulary)
    greedy = {"sampler": None, "greedy": True}
    model.reset(target)
    model.prefill_from_target_hidden(
        mx.array([tokens[:prompt]]),
        mx.array(tiny.draw_states(seed, prompt, width)),
        tokens[prompt],
        **greedy,
    )
    drafts = []
    for number, accepted in enumerate(tiny.ACCEPTED):
        hidden = mx.array(tiny.draw_states(seed + number + 1, longest + 1, width))
        draft = model.draft_block(0, None, None, longest + 1, **greedy)
        drafts.append(draft[0].tolist())
        new = tokens[prompt + 1 + number]
        for entry in model._cache:  # run accepted tokens again, with the target's hidden states
            entry.trim(model._round_appended)
        model._next_position -= model._round_appended
        model._round_appended = 0
        model.accept_verified_tokens(hidden, draft, accepted, [new], **greedy)
    return drafts


def eagle3_forced(seed: int, config: dict[str, Any]) -> list[list[int]]:
    """Return speculators' draft tokens [depth][row], given the text's tokens up to each."""
    sys.modules["hs_connectors"] = MagicMock()  # which only training needs
    torch = importlib.import_module("torch")
    torch.manual_seed(0)  # P-EAGLE drops rows at random
    eagle3, peagle = (
        importlib.import_module(f"speculators.models.{name}.core") for name in ("eagle3", "peagle")
    )

    parallel = config["speculators_model_type"] == "peagle"
    module = peagle if parallel else eagle3
    kind = peagle.PEagleSpeculatorConfig if parallel else eagle3.Eagle3SpeculatorConfig
    layer = {k: v for k, v in config["transformer_layer_config"].items() if v is not None}
    layer["rope_parameters"] = {"rope_type": "default", "rope_theta": layer.pop("rope_theta")}
    layer["use_sliding_window"] = "sliding_window" in layer
    options = kind(**config | {"transformer_layer_config": layer})
    options.transformer_layer_config._attn_implementation = "eager"
    model = (peagle.PEagleDraftModel if parallel else eagle3.Eagle3DraftModel)(options)
    weights = tiny.eagle3_checkpoint(config, seed)
    width, vocabulary = weights["fc.weight"].shape[-1], layer["vocab_size"]
    if "d2t" in weights:
        weights["t2d"] = np.zeros(vocabulary, bool)
        weights["t2d"][weights["d2t"] + np.arange(len(weights["d2t"]))] = True
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in weights.items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected, unexpected
    assert all(name.startswith("verifier_") for name in missing), missing
    model.eval()
    rows, depths = tiny.LENGTHS[0] + 4, tiny.LENGTHS[1]
    tokens = torch.tensor([tiny.draw_tokens(seed, rows + 1, vocabulary)])
    arguments: dict[str, Any] = {
        "hidden_states": torch.from_numpy(tiny.draw_states(seed, rows, width)),
        "input_ids": tokens[:, 1:],
        "document_ids": torch.zeros((1, rows), dtype=torch.long),
    }
    offsets = np.array(weights.get("d2t", np.zeros(layer["vocab_size"], int)))
    with torch.no_grad():
        if not parallel:
            drafts = model(**arguments, ttt_steps=depths)
            return [(ids[0].numpy() + offsets[ids[0].numpy()]).tolist() for ids in drafts]
        seen: dict[str, Any] = {}

        def keep_logits(**values: Any) -> tuple[Any, dict[str, Any]]:
            seen.update(values)
            return values["logits"].sum(), {}

        module.compute_metrics = keep_logits  # type: ignore[attr-defined]
        last = torch.zeros((1, rows, layer["hidden_size"]))
        for linear in (model.verifier_lm_head, model.verifier_norm):
            linear.weight.data.zero_()
        model(
            **arguments, verifier_last_hidden_states=last, num_depths=depths,
            down_sample_ratio=1.0, down_sample_ratio_min=1.0,
        )  # fmt: skip
    best = seen["logits"][0].argmax(-1).numpy()
    best = best + offsets[best]
    table = [[-1] * rows for _ in range(depths)]  # -1: not computed
    for token, anchor, depth in zip(best, seen["anchor_pos"], seen["depth"], strict=True):
        table[int(depth)][int(anchor)] = int(token)
    return table


def draft_dflash(directory: Path, config: blocks.Config, seed: int) -> list[Any]:
    model_mlx: Any = importlib.import_module("dflash.model_mlx")
    model_mlx.snapshot_download = lambda path, **_: path
    model = model_mlx.load_draft(str(directory))
    matrix, head = map(mx.array, blocks.target(config, seed))
    embedding = nn.Embedding(*matrix.shape)
    embedding.weight = matrix
    model.bind(SimpleNamespace(embed_tokens=embedding, lm_head=lambda hidden: hidden @ head.T))
    cache, drafts = model.make_cache(), []
    for hidden, anchor in blocks.rounds(config, seed):
        block = mx.array([[anchor] + [model.config.mask_token_id] * (model.config.block_size - 1)])
        if isinstance(model, model_mlx.DFlash2DraftModel):
            tokens, _, _ = model.propose(block, mx.array(hidden), cache, 0.0, logits_start=1)
        else:
            tokens = mx.argmax(model(block, mx.array(hidden), cache, logits_start=1), -1)
        drafts.append({"tokens": tokens[0].tolist()})
    return drafts


def draft_dspark(directory: Path, config: blocks.Config, seed: int) -> list[Any]:
    module: Any = importlib.import_module("mlx_dspark.load")
    model, options = module.load_drafter(str(directory), quantize=False)
    _, head = map(mx.array, blocks.target(config, seed))
    model.bind_lm_head(lambda hidden: hidden @ head.T)
    cache, position, drafts = model.make_ctx_cache(), 0, []
    for hidden, anchor in blocks.rounds(config, seed):
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
    torch = importlib.import_module("torch")
    found = importlib.util.find_spec("speculators")
    assert found
    assert found.submodule_search_locations
    file = Path(found.submodule_search_locations[0]) / "models/dspark/model_definitions.py"
    spec = importlib.util.spec_from_file_location("definitions", file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = blocks.dspark(markov_head_type=kind)
    prefix = "markov_head."
    weights = {
        name.removeprefix(prefix): torch.from_numpy(value)
        for name, value in blocks.checkpoint(config, 0).items()
        if name.startswith(prefix)
    }
    rank, width = config["markov_rank"], config["hidden_size"]
    head = module.MarkovHead(
        verifier_vocab_size=blocks.TOKENS, draft_vocab_size=blocks.TOKENS, markov_rank=rank,
        hidden_size=width, head_type=kind,
    )  # fmt: skip
    head.load_state_dict(weights)
    hidden = np.random.default_rng(0).normal(size=(1, config["block_size"], width))
    tokens = torch.arange(config["block_size"])[None] * 7
    with torch.no_grad():
        states = torch.from_numpy(hidden.astype(np.float32))
        biases = head.block_bias(prev_token_ids=tokens, hidden_states=states)
    return [[round(value, 4) for value in row] for row in biases[0].tolist()]


def block_drafts(seed: int, config: blocks.Config, program: str) -> list[Any]:
    weights = {name: mx.array(each) for name, each in blocks.checkpoint(config, seed).items()}
    with tempfile.TemporaryDirectory() as folder:
        mx.save_safetensors(f"{folder}/model.safetensors", weights)
        Path(folder, "config.json").write_text(json.dumps(config))
        draft = draft_dflash if program == "dflash" else draft_dspark
        return draft(Path(folder), config, seed)


def record_blocks() -> None:
    drafts = {
        name: block_drafts(seed, config, program)
        for seed, (name, program, config) in enumerate(blocks.CASES)
    }
    biases = {kind: markov_biases(kind) for kind in ("gated", "rnn")}
    content = {"command": COMMAND, "drafts": drafts, "biases": biases}
    (GOLDEN / "block.json").write_text(json.dumps(content, separators=(",", ":")) + "\n")


Case = tuple[int, dict[str, Any], Callable[..., Any]]


def record(name: str, cases: list[Case]) -> None:
    found = [
        {"seed": seed, "config": config, "by": draft.__name__, "drafts": draft(seed, config)}
        for seed, config, draft in cases
    ]
    lines = ",\n".join(json.dumps(each) for each in found)
    (GOLDEN / f"{name}.json").write_text(f'{{"command": "{COMMAND}", "cases": [\n{lines}\n]}}\n')


def eagle3_cases() -> list[Case]:
    plain, others = tiny.EAGLE3_OPTIONS, tiny.FORCED_OPTIONS
    return [
        *((n, tiny.eagle3_config(n, **plain[n % len(plain)]), eagle3_rounds) for n in range(12)),
        *((n, tiny.eagle3_config(n, **others[n % len(others)]), eagle3_forced) for n in range(8)),
    ]


def mtp_cases() -> list[Case]:
    return [(n, tiny.mtp_config(n, experts=n % 2 * 4), mtp_rounds) for n in range(6)]


def assistant_cases() -> list[Case]:
    return [(n, tiny.assistant_config(n, clusters=n % 2 == 1), assistant_drafts) for n in range(6)]


CASES = {"eagle3": eagle3_cases, "gemma4_assistant": assistant_cases, "mtp": mtp_cases}


def main() -> None:
    mx.set_default_device(mx.cpu)
    GOLDEN.mkdir(exist_ok=True)
    for name in sys.argv[1:] or [*CASES, "block"]:
        if name == "block":
            record_blocks()
        else:
            record(name, CASES[name]())


if __name__ == "__main__":
    main()
