"""Record what independent implementations draft with the tiny drafters of the tests.

In an environment with mlx-vlm 0.7.10, speculators 0.9.0 and PyTorch, from the checkout:

    python -m tests.golden.make_drafters

- drafters/eagle3.json: drafts of mlx-vlm's EAGLE-3 in several rounds, and the most likely draft
  tokens of speculators' EAGLE-3 and P-EAGLE behind every prefix of a text
- drafters/gemma4_assistant.json: drafts of mlx-vlm's Gemma 4 assistant
- drafters/mtp.json: drafts of mlx-vlm's MTP heads
"""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import mlx.core as mx
import numpy as np

from tests.support import tiny_drafters as tiny

GOLDEN = Path(__file__).parent / "drafters"


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


Case = tuple[int, dict[str, Any], Callable[..., Any]]


def record(name: str, cases: list[Case]) -> None:
    found = [
        {"seed": seed, "config": config, "by": draft.__name__, "drafts": draft(seed, config)}
        for seed, config, draft in cases
    ]
    lines = ",\n".join(json.dumps(each) for each in found)
    (GOLDEN / f"{name}.json").write_text(
        f'{{"command": "python -m tests.golden.make_drafters", "cases": [\n{lines}\n]}}\n'
    )


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
    for name in sys.argv[1:] or CASES:
        record(name, CASES[name]())


if __name__ == "__main__":
    main()
