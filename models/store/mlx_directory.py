"""Check a model directory in MLX's or transformers' format before an import.

Never reads pickle and never runs the model's code: Python files are not copied, and `auto_map`,
which refers to them, is removed.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from akunu_py import files
from akunu_py.errors import UnsupportedModel
from akunu_py.models.drafters.drafter_config import read_config
from akunu_py.models.load import safetensors
from akunu_py.models.load.model_files import ModelFacts, as_error, head_files, read_settings

_SETTINGS = ("config.json", "tokenizer_config.json")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")
_COPIED = (
    *TOKENIZERS, "merges.txt", "added_tokens.json", "special_tokens_map.json",
    "generation_config.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DirectoryPlan:
    """A checked directory."""

    settings: dict[str, Any]  # files to rewrite, by name
    copies: list[Path]  # files to copy unchanged
    facts: ModelFacts

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self.copies)


def plan_directory(source: Path) -> DirectoryPlan:
    """Check a model's headers and settings. Raises UnknownModel, UnsupportedModel, DamagedModel."""
    from mlx_lm.utils import get_total_parameters

    if read_config(source) is not None:
        return _plan_drafter(source)
    from akunu_py.models.load.mlx_loader import load_tokenizer, open_directory

    with as_error(f"{source} cannot be imported"):
        opened = open_directory(source)
        model = opened.files
        small = [source / name for name in _COPIED if (source / name).is_file()]
        if not any((source / name).is_file() for name in TOKENIZERS):
            raise UnsupportedModel(
                f"{source} has no tokenizer: expected tokenizer.json or tokenizer.model; download "
                "one from the source of the model"
            )
        settings = {name: model.settings[name] for name in _SETTINGS if name in model.settings}
        parameters = int(get_total_parameters(opened.model))
        facts = _facts(source, model.config, model.tensors, parameters)
        load_tokenizer(model, opened.vocabulary, small)
        return DirectoryPlan(settings, [*model.weights, *head_files(source), *small], facts)


def _plan_drafter(source: Path) -> DirectoryPlan:
    """Check the headers of a drafter, which has no tokenizer; its target is not known here."""
    weights, tensors = sorted(source.glob("*.safetensors")), dict[str, Any]()
    for path in weights:
        tensors |= safetensors.read_header(path)[0]
    if not tensors:
        raise UnsupportedModel(f"the drafter in {source} has no *.safetensors files; use another")
    config = read_settings(source / "config.json")
    parameters = sum(math.prod(each["shape"]) for each in tensors.values())
    facts = _facts(source, config, tensors, parameters)
    return DirectoryPlan({"config.json": config}, weights, facts)


def _facts(
    source: Path, config: dict[str, Any], tensors: dict[str, Any], parameters: int
) -> ModelFacts:
    settings, other = config.get("quantization"), config.get("quantization_config")
    quantized = True
    if isinstance(settings, dict) and isinstance(settings.get("bits"), int):
        quantization = f"{settings['bits']}-bit, groups of {settings.get('group_size')}"
    elif isinstance(other, dict):
        quantization = f"{other.get('quant_method')!s:.40}"
    else:
        quantized = False
        types = Counter(each["dtype"] for each in tensors.values() if len(each["shape"]) > 1)
        quantization = ", ".join(f"{name} x {count}" for name, count in types.most_common())
    return ModelFacts(
        parameters=parameters,
        quantized=quantized,
        quantization=quantization,
        license=_license(source),
    )


def _license(source: Path) -> str:
    """Return the license in the model card's front matter, empty if there is none."""
    try:
        with files.open_regular(source / "README.md") as file:
            card = file.read(20_000).decode("utf-8", "replace")
    except OSError:
        return ""
    found = re.match(r"---\n(?:.*\n)*?license: *([\w.+-]{1,60}) *\n(?:.*\n)*?---", card)
    return found[1] if found else ""
