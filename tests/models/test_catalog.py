"""The catalog: schema, figures (computed again), recommendations."""

import json
import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from akunu_py.engine.model import load_plan as plan
from akunu_py.errors import UnknownModel
from akunu_py.models import catalog
from akunu_py.models.catalog import load_catalog
from akunu_py.models.catalog.recommend import MIN_TOKENS_PER_S, Machine, recommend
from akunu_py.models.load.fit import GIB, activations_from, soft_limit, usable_memory
from akunu_py.models.store import directories, hub_cache
from tests.support.paths import DOCS, GOLDEN

# Facts of the architectures, from each model's config.json; sources: docs/log/2026-11-catalog.md.
CONFIGS = json.loads((GOLDEN / "catalog_configs.json").read_text())
ENTRIES = load_catalog()
PURPOSES = ("chat", "code", "fim", "thinking", "hybrid")
MEMORY_SIZES = (8, 16, 24, 32, 36, 48, 64, 96, 128)  # GiB of memory in Macs with Apple silicon
# Context lengths of model cards that are below those in config.json.
MADE_FOR = {"lfm2-1.2b": 32_768}


def whole_model_of(name: str) -> Any:
    """Return the model as published, with lazy arrays."""
    config = json.loads(json.dumps(CONFIGS[name]))
    model_class, arguments = _get_classes(config)
    return model_class(arguments.from_dict(config))


def model_of(name: str) -> Any:
    """Return the model quantized like its conversion, with lazy arrays."""
    model = whole_model_of(name)
    model.set_dtype(mx.bfloat16)

    def how(path: str, module: Any) -> Any:
        if not hasattr(module, "to_quantized"):
            return False
        if name == "gpt-oss-20b":
            mxfp4 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
            return mxfp4 if "experts" in path else {"group_size": 64, "bits": 8}
        if name == "starter":
            return {"group_size": 32, "bits": 8 if "embed" in path else 4}
        gate = path.endswith(("mlp.gate", "shared_expert_gate"))  # of a mixture of experts
        return {"group_size": 64, "bits": 8} if gate else True

    nn.quantize(model, 64, 4, class_predicate=how)
    return model


def test_every_entry_is_complete() -> None:
    assert "starter" in ENTRIES
    for entry in ENTRIES.values():
        assert directories.is_name(entry.name)
        assert entry.homepage.startswith("https://")
        assert entry.description.endswith(".")
        assert entry.license
        assert 0.9 < entry.download_bytes / entry.weight_bytes < 1.4
        assert bool(entry.drafter) == (entry.drafter_bytes > 5e8)
        if entry.repository:
            assert hub_cache.parse_reference(entry.repository) == (entry.repository, None)
            assert entry.repository.startswith("mlx-community/")
        else:
            assert len(entry.sha256) == 64
    assert len({entry.repository for entry in ENTRIES.values()}) == len(ENTRIES)

    chat = [entry for entry in ENTRIES.values() if "chat" in entry.purpose]
    assert min(entry.parameters for entry in chat) < 1e9
    assert max(entry.parameters for entry in chat) > 30e9
    for purpose in PURPOSES:
        assert any(purpose in entry.purpose for entry in ENTRIES.values()), purpose


@pytest.mark.parametrize("name", ENTRIES)
def test_figures_follow_from_the_architecture(name: str) -> None:
    entry, model = ENTRIES[name], model_of(name)
    text = CONFIGS[name].get("text_config", CONFIGS[name])
    growth = plan.growth(model)
    arrays = [value for _, value in tree_flatten(model.parameters())]
    assert growth == entry.cache
    weights = sum(array.nbytes for array in arrays)
    assert abs(weights - entry.weight_bytes) < 0.005 * weights
    working = activations_from(CONFIGS[name], on_metal=True, itemsize=2).at(8192)
    assert entry.working_bytes == working
    assert entry.memory_8k == entry.weight_bytes + growth.at(8192) + working
    assert entry.minimum_ram == next(
        size for size in MEMORY_SIZES if entry.memory_8k <= soft_limit(usable_memory(size * GIB))
    )
    assert entry.context == MADE_FOR.get(name, text["max_position_embeddings"])
    assert entry.context <= text["max_position_embeddings"]


@pytest.mark.parametrize("name", ENTRIES)
def test_parameters_are_counted(name: str) -> None:
    """Compare with published counts. Only MLX gives Gemma a separate output matrix."""
    counted = sum(array.size for _, array in tree_flatten(whole_model_of(name).parameters()))
    config = CONFIGS[name] | CONFIGS[name].get("text_config", {})
    doubled = config["vocab_size"] * config["hidden_size"] if name == "gemma-3-1b" else 0
    assert ENTRIES[name].parameters == counted - doubled
    active = 0
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        chosen = config.get("num_experts_per_tok") or config["experts_per_token"]
        width = config.get("moe_intermediate_size") or config["intermediate_size"]
        expert = 3 * config["hidden_size"] * width
        active = counted - config["num_hidden_layers"] * (experts - chosen) * expert
    assert ENTRIES[name].active_parameters == active


def test_unknown_names() -> None:
    with pytest.raises(UnknownModel, match="did you mean 'starter'"):
        catalog.find("start")
    assert catalog.find_repository("mlx-community/Qwen3-8B-4bit") == ENTRIES["qwen3-8b"]
    assert catalog.find_repository("nobody/nothing") is None


def test_recommendations_fit_and_grow_with_memory() -> None:
    grades: dict[str, int] = {"chat": 0, "code": 0}
    for size in MEMORY_SIZES:
        memory = usable_memory(size * GIB)
        for found in recommend(Machine(memory, math.inf)):
            assert found.entry is not None
            assert found.entry.fits(memory)
            assert found.entry.minimum_ram <= size
            assert f"{found.entry.memory_8k / 1e9:.1f} GB" in found.why
            assert found.entry.grade >= grades[found.purpose]
            grades[found.purpose] = found.entry.grade
    chat, code = recommend(Machine(usable_memory(16 * GIB), math.inf))
    assert chat.entry is not None
    assert code.entry is not None
    assert "code" not in chat.entry.purpose
    assert "fim" in code.entry.purpose
    assert [found.entry for found in recommend(Machine(10_000_000, math.inf))] == [None, None]


def test_recommended_models_are_fast_enough_by_estimate() -> None:
    """More bandwidth gives larger models, from two CPU cores to an Ultra."""
    grades = [0]
    for bandwidth, plain in ((20e9, True), (68e9, False), (400e9, False), (800e9, False)):
        machine = Machine(usable_memory(64 * GIB), bandwidth, plain)
        best = recommend(machine)[0].entry
        assert best is not None
        assert machine.tokens_per_s(best) >= MIN_TOKENS_PER_S
        grades.append(best.grade)
    assert grades == sorted(grades)
    assert grades[1] < ENTRIES["qwen3-30b-a3b"].grade, "no 30B on two cores, though it fits"
    slow = Machine(usable_memory(64 * GIB), 1e6)
    for found in recommend(slow):
        assert found.entry is not None
        assert found.entry.parameters < 2e9
        assert "slower than reading speed" in found.why


def test_memory_is_no_reason_where_better_models_are_too_slow() -> None:
    cores = Machine(usable_memory(64 * GIB), 20e9, float32=True)
    chat = recommend(cores)[0]
    assert "fast enough" in chat.why
    assert "would need" not in chat.why


def test_documented_table_equals_the_catalog() -> None:
    page = (DOCS / "catalog.md").read_text("utf-8")
    table = page.split("<!-- catalog -->")[1].split("<!-- /catalog -->")[0]
    expected = ["| name | model | download | memory | from | context | license |"]
    expected.append("|---|---|---|---|---|---|---|")
    for entry in ENTRIES.values():
        title = f"[{entry.title.removesuffix(', 4-bit')}]({entry.homepage})"
        expected.append(
            f"| `{entry.name}` | {title} ({', '.join(entry.purpose)}) "
            f"| {entry.download_bytes / 1e9:.2f} GB | {entry.memory_8k / 1e9:.1f} GB "
            f"| {entry.minimum_ram} GB | {entry.context:,} | {entry.license} |"
        )
    assert table.strip().splitlines() == expected
