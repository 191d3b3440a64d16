"""Read a drafter's weights: safetensors only, plain or quantized by mlx-lm."""

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import infer_quant_config

from akunu_py.errors import UnsupportedModel
from akunu_py.models.drafters.drafter_config import DrafterConfig
from akunu_py.models.load import safetensors
from akunu_py.models.load.model_files import ADVICE, as_error

_PICKLES = ("*.bin", "*.pt", "*.pth")
_UNUSED = ("t2d", "verifier_", "rotary_emb.")  # for training only


def read_weights(config: DrafterConfig) -> dict[str, mx.array]:
    """Return the tensors by name, without the prefix "model." and without those for training.

    They are read on first use. Raises UnsupportedModel, DamagedModel.
    """
    path = config.path
    files = sorted(file for file in path.glob("*.safetensors") if file.is_file())
    if not files:
        pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
        if not pickles:
            raise UnsupportedModel(f"{path}: expected a *.safetensors file, found none; {ADVICE}")
        raise UnsupportedModel(
            f"the drafter in {path} has its weights as pickle ({pickles[0]}), which can run code; "
            "akunu reads safetensors only: use a repository that has them, or convert this one"
        )
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
    return {name: value for name, value in named.items() if not name.startswith(_UNUSED)}


def fill(module: nn.Module, weights: dict[str, mx.array], config: DrafterConfig) -> None:
    """Load `weights` into `module`, quantized as they are. Raises UnsupportedModel."""

    def packing(path: str, layer: nn.Module) -> bool | dict[str, int | str]:
        if f"{path}.scales" not in weights or not hasattr(layer, "to_quantized"):
            return False
        return infer_quant_config(path, layer, weights)

    what = f"the drafter in {config.path} cannot be loaded"
    with as_error(what, UnsupportedModel):
        if any(name.endswith(".scales") for name in weights):
            nn.quantize(module, class_predicate=packing)
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
