"""Loading: files are read once, and the plan says what a session gets."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from akunu_py.decoding.model.engine import Engine
from akunu_py.models.load import mlx_loader, model_files
from akunu_py.types import LoadOptions
from tests.support.tiny_fim import byte_level, write_model


def test_settings_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_model(tmp_path / "tiny", byte_level(["<|end|>"]), end="<|end|>")
    read, found = model_files.read_settings, Counter[str]()

    def count(path: Path, *limit: int) -> dict[str, Any]:
        found[path.name] += 1
        return read(path, *limit)

    for module in (model_files, mlx_loader):
        monkeypatch.setattr(module, "read_settings", count)
    Engine.load(directory)
    assert found["config.json"] == 1
    assert set(found.values()) == {1}


def test_the_plan_follows_the_options(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "tiny", byte_level(["<|end|>"]), end="<|end|>")
    options = LoadOptions(
        weights="bfloat16", context=256, prompt_cache_memory=1 << 20, memory_limit=1 << 40
    )
    plan = Engine.load(directory, options, name="small").plan
    assert (plan.name, plan.path, plan.weights) == ("small", directory, "bfloat16")
    assert (plan.context_length, plan.prompt_cache_memory) == (256, 1 << 20)
    assert (plan.memory_limit, plan.fit.limit, plan.forced) == (1 << 40, 1 << 40, False)
