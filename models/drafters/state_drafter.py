"""What drafters of all kinds share: what they offer to the engine, and how weights are read.

Each takes the target's hidden states: the outputs of the layers `taps` (-1: the embedding), or the
state after the final norm if `needs_final`. `states` turns them into what is kept of a position.
`extend` appends committed positions to a cache from `make_cache`, in any number of calls. `start`
begins a draft of up to `longest` tokens, all from one pass if `is_parallel`. A block drafter starts
from the newest token, whose states do not exist yet, the others from the last row that `extend`
returned. `logits` of a draft takes the depth, from 0 in order, and the token before; it is -inf for
impossible tokens.
"""

import re
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import infer_quant_config

from akunu_py.errors import UnsupportedModel
from akunu_py.models.drafters.drafter_config import DrafterConfig
from akunu_py.models.load import safetensors
from akunu_py.models.load.model_files import as_error, no_weights

Embed = Callable[[mx.array], mx.array]
"""The target's embedding: tokens [1, n] to [1, n, target width], scaled as its layers take it."""
Project = Callable[[mx.array], mx.array]
"""The target's lm_head: [..., target width] to logits [..., vocabulary], without a softcap."""

_UNUSED = re.compile(r"t2d|verifier_|.*\brotary_emb\.")  # for training, or computed again


def read_weights(config: DrafterConfig) -> dict[str, mx.array]:
    """Return the tensors by name, without the prefix "model." and without those for training.

    They are read on first use. Raises UnsupportedModel, DamagedModel.
    """
    path = config.path
    files = sorted(file for file in path.glob("*.safetensors") if file.is_file())
    if not files:
        raise no_weights(path, "*.safetensors")
    method = config.settings.get("quantization_config") or {}
    if isinstance(method, dict) and (name := method.get("quant_method")):
        raise UnsupportedModel(
            f"the drafter in {path} is quantized by {name!r:.40}; use one in bfloat16 or one that "
            "mlx-lm quantized"
        )
    weights: dict[str, mx.array] = {}
    for file in files:
        safetensors.read_header(file)
        with as_error(f"{file} is unreadable"):
            weights |= mx.load(str(file))
    named = {name.removeprefix("model."): value for name, value in weights.items()}
    return {name: value for name, value in named.items() if not _UNUSED.match(name)}


def quantize_packed(module: nn.Module, weights: dict[str, mx.array]) -> bool:
    """Quantize the layers of `module` whose `weights` are quantized. Returns False if none are."""

    def packing(path: str, layer: nn.Module) -> bool | dict[str, int | str]:
        if f"{path}.scales" not in weights or not hasattr(layer, "to_quantized"):
            return False
        return infer_quant_config(path, layer, weights)

    if not any(name.endswith(".scales") for name in weights):
        return False
    nn.quantize(module, class_predicate=packing)
    return True


def fill(module: nn.Module, weights: dict[str, mx.array], config: DrafterConfig) -> None:
    """Load `weights` into `module`, quantized as they are. Raises UnsupportedModel."""
    what = f"the drafter in {config.path} cannot be loaded"
    with as_error(what, UnsupportedModel):
        quantize_packed(module, weights)
        expected = dict(tree_flatten(module.parameters()))
        for problem, names in (
            ("misses", expected.keys() - weights.keys()),
            ("has the unknown", weights.keys() - expected.keys()),
        ):
            if names:
                raise UnsupportedModel(
                    f"{what}: it {problem} tensor {min(names)!r:.80} ({len(names)} in all), so it "
                    f"is not the {config.kind} drafter that its config.json describes"
                )
        module.load_weights(list(weights.items()))
    module.eval()
