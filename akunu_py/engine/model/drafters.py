"""Open and load a target's neural drafters (Leviathan et al., 2023): a draft model, an MTP head."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from akunu_py.engine import kv_cache
from akunu_py.engine.model import device
from akunu_py.engine.model import load_plan as plan
from akunu_py.engine.model.output_rows import why_no_taps
from akunu_py.engine.model.tokens import TokenCodec
from akunu_py.errors import ModelError, UsageError
from akunu_py.files import read_bounded
from akunu_py.models.drafters import load_drafter
from akunu_py.models.drafters.drafter_config import DIGEST_KEY, DrafterConfig
from akunu_py.models.load.fit import MIN_CONTEXT, CacheGrowth, MemoryNeeds
from akunu_py.models.load.mlx_loader import OpenModel, open_directory
from akunu_py.models.load.model_files import MAX_TOKENIZER_BYTES, ModelFiles, text_config
from akunu_py.models.mtp import HeadChain, Trunk, load_heads
from akunu_py.ngram.cost import PRIOR_SHAPE, interpolate
from akunu_py.types import WeightMode

_GROUP = 64  # weights that share a scale
_MIN_SHARED = 0.9  # minimum share of the target's tokens in a draft model's vocabulary


@dataclass(frozen=True, slots=True)
class SeparateDrafter:
    """A neural drafter in another directory than its target."""

    name: str
    path: Path
    model: Any
    needs: MemoryNeeds
    relative_cost: float  # of a draft's first pass, in passes of the target

    @property
    def key(self) -> str:
        """Identifies its learned state."""
        return f"model {self.name}"


@dataclass(frozen=True, slots=True)
class PublishedDrafter(SeparateDrafter):
    """A drafter that was trained for a target; its `model` is one of `models.drafters`."""


@dataclass(frozen=True, slots=True)
class DraftModel(SeparateDrafter):
    """A smaller model that drafts for a target. Its cost is the ratio of their weights."""

    vocabulary: int  # width of its logits


@dataclass(frozen=True, slots=True)
class MtpHead:
    """The MTP heads of a model."""

    chain: HeadChain
    needs: MemoryNeeds
    relative_cost: float  # see `DraftModel`; includes the lm_head, shared with the model


def open_drafter(
    name: str,
    path: Path,
    config: DrafterConfig | None,
    weights: WeightMode,
    target: OpenModel,
    needs: MemoryNeeds,
) -> DraftModel | PublishedDrafter:
    """Open the drafter or the draft model in the directory `path` without reading its weights.

    config: None for a draft model. needs: of the target. Raises what `open_directory` does, and
    UsageError if it cannot draft.
    """
    if config is None:
        return _open_draft_model(name, path, weights, needs)
    trained_on = config.settings.get(DIGEST_KEY)
    if trained_on not in (None, weights_digest(target.model)):
        raise UsageError(
            f"{name} was trained for other weights; train it again: akunu drafter train MODEL"
        )
    model = load_drafter(config, target.config)
    taps = (len(target.model.layers),) if model.needs_final else model.taps
    if why := why_no_taps(target.model, taps):
        raise UsageError(f"{name} cannot draft for this model: {why}; use another --draft-model")
    if device.on_metal() and weights == "auto":
        quantize_drafter(model)
    device.convert_weights(model, weights)
    width, cache = int(text_config(target.config)["hidden_size"]), model.make_cache()
    hidden = mx.zeros((1, 2, width * len(taps)))
    model.extend(model.states(hidden), hidden[..., :width], cache)  # lazy: only for the shapes
    own = _needs(model, cache, needs)
    size, rows = own.weights, 1 + model.longest if model.is_parallel else 1
    if "lm_head" not in model:
        size += device.weight_bytes(Trunk(target.model).lm_head)
    share = size / max(1, needs.weights) * interpolate(PRIOR_SHAPE, rows)
    return PublishedDrafter(name, path, model, own, share)


def weights_digest(model: Any) -> str:
    """Return a digest of the gains of a model's norms, which quantization does not change."""
    digest = hashlib.sha256()
    for name, value in sorted(tree_flatten(model.parameters())):
        if value.ndim == 1 and "norm" in name:
            digest.update(f"{name} {value.astype(mx.bfloat16).tolist()}".encode())
    return digest.hexdigest()


def quantize_drafter(model: nn.Module) -> None:
    """Quantize a drafter to 4 bits, which hardly changes its acceptance (mlx-dspark)."""

    def fits(path: str, module: Any) -> bool:
        small = not hasattr(module, "to_quantized") or "scales" in module
        return not small and module.weight.shape[-1] % _GROUP == 0

    nn.quantize(model, _GROUP, 4, class_predicate=fits)


def _open_draft_model(
    name: str, path: Path, weights: WeightMode, target: MemoryNeeds
) -> DraftModel:
    opened = open_directory(path)
    if why := kv_cache.no_rollback_reason(kv_cache.new_cache(opened.model)):
        raise UsageError(f"{name} cannot draft: {why}; use another --draft-model")
    needs = plan.needs(opened, itemsize=device.convert_weights(opened.model, weights))
    share = needs.weights / max(1, target.weights)
    return DraftModel(name, path, opened.model, needs, share, opened.vocabulary)


def open_head(
    opened: OpenModel,
    weights: WeightMode,
    target: MemoryNeeds,
    limit: int,
    directory: Path | None = None,
) -> tuple[MtpHead | None, str]:
    """Open the model's MTP head without reading its weights, or return None and the reason.

    target: needs of the model. limit: available bytes, which must suffice for MIN_CONTEXT.
    directory: of a head that is not in the model's directory; if that head does not fit the model,
    raises UnsupportedModel or DamagedModel.
    """
    try:
        chain = load_heads(directory or opened.files.path, opened.model, opened.config)
    except ModelError as error:
        if directory is not None:
            raise
        return None, str(error)
    if chain is None:
        return None, "its files have no MTP head (docs/models.md says which do)"
    device.convert_weights(chain, weights)
    cache, norm = chain.make_cache(), chain.heads[0].hidden_norm.weight
    rows = mx.zeros((1, 1 + len(chain.heads), norm.size), norm.dtype)
    chain.extend(rows, rows, cache)  # lazy: only for the shapes
    needs = _needs(chain, cache, target)
    if target.with_draft(needs).at(min(MIN_CONTEXT, target.context)).total > limit:
        return None, "there is not enough memory for its MTP head"
    size = needs.weights + device.weight_bytes(Trunk(opened.model).lm_head)
    return MtpHead(chain, needs, size / max(1, target.weights)), ""


def _needs(drafter: nn.Module, cache: Any, target: MemoryNeeds) -> MemoryNeeds:
    """Return the memory that a drafter needs, by its cache of some positions."""
    per_token = sum(plan.bytes_per_row(entry) for entry in kv_cache.leaves(cache))
    return replace(target, weights=device.weight_bytes(drafter), cache=CacheGrowth(per_token))


def check_draft_model(small: DraftModel, target: TokenCodec) -> None:
    """Raise UsageError if a draft model's vocabulary differs from the target's."""
    files = [each / "tokenizer.json" for each in (small.path, target.path)]
    both = all(file.exists() for file in files)
    if not both or len({read_bounded(file, MAX_TOKENIZER_BYTES) for file in files}) > 1:
        codec = TokenCodec.load(small.name, ModelFiles.read(small.path), small.vocabulary)
        if why := difference(target.tokenizer.get_vocab(), codec.tokenizer.get_vocab()):
            raise UsageError(
                f"{small.name} cannot draft for {target.name}: {why}; use a smaller model of the "
                "same family as --draft-model"
            )


def difference(target: dict[str, int], draft: dict[str, int]) -> str:
    """Describe how two vocabularies differ; "" if they match, apart from a few extra tokens."""
    theirs = {token: text for text, token in target.items()}
    ours = {token: text for text, token in draft.items()}
    shared = theirs.keys() & ours.keys()
    if differing := [token for token in shared if theirs[token] != ours[token]]:
        first = min(differing)
        texts = f"{theirs[first]!r:.40} and {ours[first]!r:.40}"
        return f"their tokens differ, {len(differing):,} of them; the first is {first}: {texts}"
    if len(shared) < _MIN_SHARED * len(theirs):
        return f"it knows {len(shared):,} of its {len(theirs):,} tokens only"
    return ""
