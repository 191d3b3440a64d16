"""Published drafters of random weights for tiny models, and rounds of drafts."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from akunu_py.engine.model.drafters import PublishedDrafter
from akunu_py.models.drafters import load_drafter
from akunu_py.models.drafters.block import BlockDrafter
from akunu_py.models.drafters.drafter_config import DrafterConfig, read_config
from akunu_py.models.load.fit import Activations, CacheGrowth, MemoryNeeds
from tests.support import tiny_drafters
from tests.support.tiny_drafters import ACCEPTED, LENGTHS, draw_states, draw_tokens

NEEDS = MemoryNeeds(1, CacheGrowth(1), Activations(1, 1, 1, 1), 4096)
BLOCK = 6
SETTINGS = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 32,
    "conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 8, "selector_top_k": 4,
    "markov_rank": 4,
}  # fmt: skip


def block_drafter(kind: str, model: Any, width: int, vocabulary: int, *, wide: bool = False) -> Any:
    """Return a drafter for `model`. width, vocabulary: of the model. wide: can be quantized."""
    mx.random.seed(0)
    dspark = kind == "dspark"
    taps = (*([-1] if dspark else []), 0, len(model.layers) - 1)
    config = DrafterConfig(
        path=Path(),
        kind=kind,
        settings=SETTINGS,
        speculators=False,
        width=(128 if wide else 24) if dspark else width,  # others share the target's embedding
        target_width=width,
        layers=2,
        vocabulary=vocabulary,
        draft_vocabulary=vocabulary,
        target_layers=None,
        taps=taps,
        block=BLOCK,
        suggested_tokens=None,
        mask_token=vocabulary - 1,
        anchor_predicts=dspark,
    )
    parts = ("markov_head", "confidence_head", "embed_tokens", "lm_head") if dspark else ()
    drafter = BlockDrafter(config, {f"{part}.": mx.zeros(0) for part in parts})
    drafter.eval()
    mx.eval(drafter.parameters())
    return PublishedDrafter(kind, Path(), drafter, NEEDS, 1e-6)


def write_drafter(directory: Path, width: int, vocabulary: int, **changes: Any) -> Path:
    """Write the repository of a DFlash drafter of one layer for a target of two layers."""
    target = SimpleNamespace(layers=[None, None])
    drafter = block_drafter("dflash", target, width, vocabulary).model
    config = SETTINGS | {
        "architectures": ["DFlashDraftModel"], "hidden_size": width, "num_hidden_layers": 2,
        "num_target_layers": 2, "vocab_size": vocabulary, "block_size": BLOCK,
        "dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": vocabulary - 1},
    }  # fmt: skip
    return save_drafter(directory, config | changes, dict(tree_flatten(drafter.parameters())))


def eagle3_drafter(directory: Path, model: Any, width: int, vocabulary: int, **changes: Any) -> Any:
    """Return an EAGLE-3 drafter for `model`, which takes the first and the last layer."""
    changes |= {"eagle_aux_hidden_state_layer_ids": [1, len(model.layers)]}  # inputs
    shape = {"hidden_size": width, "vocab_size": vocabulary, "target_hidden_size": width}
    config = tiny_drafters.eagle3_config(4, **shape, **changes)
    save_drafter(directory, config, tiny_drafters.eagle3_checkpoint(config, 4))
    settings = {"hidden_size": width, "vocab_size": vocabulary, "model_type": "llama"}
    return load(directory, settings | {"num_hidden_layers": len(model.layers)})


def load(directory: Path, target: dict[str, Any]) -> Any:
    """Return the drafter in `directory`. target: the target's config.json."""
    config = read_config(directory)
    assert config is not None
    return load_drafter(config, target)


def save_drafter(directory: Path, config: dict[str, Any], weights: dict[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    arrays = {name: mx.array(value) for name, value in weights.items()}
    mx.save_safetensors(str(directory / "model.safetensors"), arrays)
    return directory


def is_divisible(part: Any) -> bool:
    """Return whether a module can be quantized in groups of 32."""
    return hasattr(part, "to_quantized") and part.weight.shape[-1] % 32 == 0


@dataclass(frozen=True)
class Target:
    """A target whose hidden states are random."""

    embed: Callable[[mx.array], mx.array]
    logits: Callable[[mx.array], mx.array]
    width: int = 0  # of the hidden states that the drafter takes
    vocabulary: int = 0


def greedy(logits: mx.array) -> int:
    assert logits.shape[0] == 1
    return int(mx.argmax(logits[0]).item())


def cut(cache: Sequence[Any], count: int) -> None:
    """Remove all but the first `count` rows, as the engine does before it extends a cache."""
    for entry in cache:
        entry.trim(max(0, entry.offset - count))


def draft_rounds(drafter: Any, target: Target, seed: int) -> list[list[int]]:
    """Return the drafts of all passes, as `make_drafters` records them."""
    prompt, longest = LENGTHS
    tokens = draw_tokens(seed, prompt + 1 + len(ACCEPTED), target.vocabulary)
    cache = drafter.make_cache()

    def extend(taps: mx.array, known: list[int]) -> Any:
        embeddings = drafter.embed(mx.array([known]), target)
        return drafter.extend(drafter.states(taps), embeddings, cache)

    rows = extend(mx.array(draw_states(seed, prompt, target.width)), tokens[1 : prompt + 1])
    drafts = []
    for number, accepted in enumerate(ACCEPTED):
        draft = drafter.start(target, rows, cache)
        made: list[int] = []
        for depth in range(longest):
            made.append(greedy(draft.logits(depth, made[-1] if made else -1)))
        cut(cache, prompt + sum(ACCEPTED[:number]) + number)
        drafts.append(made)
        taps = draw_states(seed + number + 1, longest + 1, target.width)[:, : accepted + 1]
        rows = extend(mx.array(taps), [*made[:accepted], tokens[prompt + 1 + number]])
        assert cache[0].offset == prompt + sum(ACCEPTED[: number + 1]) + number + 1
    return drafts
