"""A store of earlier versions: migrated without a download, and safe at every moment."""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomlkit  # noqa: F401 - loaded here, or its import would be among the points of a kill
from huggingface_hub import constants

from akunu_py import paths
from akunu_py.models.store import cleanup, model_store
from akunu_py.models.store.migration import migrate
from tests.support.tiny_model import tiny_files

COMMIT = "0123456789" * 4
REPOSITORY = "someone/tiny-model"
_WRITES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return tiny_files(tmp_path_factory.mktemp("made"))


@pytest.fixture
def home(tmp_path: Path, own_directories: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def write_manifest(directory: Path, files: dict[str, bytes], **more: str) -> None:
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    records = {name: {"size": len(files[name]), "sha256": hashes[name]} for name in files}
    about = {"name": directory.name, "source": "there", "created": "2026-11-21T05:46:40+00:00"}
    facts = {"quantisation": "4-bit", "licence": "mit", "context_length": 9, "parameters": 9}
    manifest = {"format": 1, **about, **facts, "files": records, **more}
    (directory / "akunu.json").write_text(json.dumps(manifest))


def write_old_store(home: Path, files: dict[str, bytes]) -> Path:
    """Write an import and a pulled model as earlier versions did. Return the snapshot."""
    snapshot = home / "hub" / "models--someone--tiny-model" / "snapshots" / COMMIT
    blobs = snapshot.parents[1] / "blobs"
    root = paths.models_dir()
    for directory in (snapshot, blobs, root / "pulled", root / "imported", root / ".usage"):
        directory.mkdir(parents=True)
    for name, data in files.items():
        blob = blobs / hashlib.sha256(data).hexdigest()
        blob.write_bytes(data)
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
        (root / "pulled" / name).symlink_to(snapshot / name)
        (root / "imported" / name).write_bytes(data)
    write_manifest(root / "pulled", files, repository=REPOSITORY, commit=COMMIT)
    write_manifest(root / "imported", files)
    (root / ".usage" / "pulled.json").write_text("{}")
    (root / ".pulling").mkdir()
    caches = paths.cache_dir() / "learned" / paths.model_directory_name(root / "pulled")
    caches.mkdir(parents=True)
    (caches / "costs").write_text("learned")
    return snapshot


def check_migrated(snapshot: Path) -> None:
    root = paths.models_dir()
    imported, pulled = model_store.list_models()
    assert (imported.path, imported.source) == (root / "imported", "there")
    assert (pulled.path, pulled.repository, pulled.commit) == (snapshot, REPOSITORY, COMMIT)
    for model in (imported, pulled):
        assert (model.quantization, model.license) == ("4-bit", "mit")
        assert len(model_store.known_hashes(model)) == len(list(snapshot.iterdir()))
        model_store.verify(model)
    assert model_store.external_models([imported, pulled]) == []
    for leftover in cleanup.find_leftovers():
        cleanup.remove_leftover(leftover)
    left = {path.name for path in root.iterdir() if not path.name.startswith(".lock")}
    assert left == {"imported", "models.toml"}
    assert not list((root / "imported").glob("akunu.json"))
    learned = paths.cache_dir() / "learned" / paths.model_directory_name(snapshot)
    assert (learned / "costs").read_text() == "learned"


@pytest.mark.parametrize("cache", ["the same", "another", "moved"])
def test_no_file_is_lost(
    home: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    """Programs without the HF_HOME of the pull find the model, too."""
    snapshot = write_old_store(home, files)
    weights = (snapshot / "model.safetensors").stat().st_ino
    if cache == "another":
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "other"))
    check_migrated(snapshot)
    if cache == "moved":
        shutil.move(home / "hub", home / "new")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "new"))
        snapshot = home / "new" / snapshot.relative_to(home / "hub")
        assert model_store.get("pulled").path == snapshot
    assert (snapshot / "model.safetensors").stat().st_ino == weights


@pytest.mark.parametrize("harm", [
    lambda old: (old / "pulled" / "akunu.json").write_text("{"),
    lambda old: (old / "pulled" / "akunu.json").write_text('{"files": {}}'),
    lambda old: (old / "imported" / "akunu.json").write_bytes(bytes(99)),
    lambda old: (old / "models.toml").write_text("{"),
])  # fmt: skip
def test_models_stay_usable_after_an_unreadable_file(
    home: Path, files: dict[str, bytes], harm: Callable[[Path], Any]
) -> None:
    write_old_store(home, files)
    root = paths.models_dir()
    harm(root)
    if (root / "models.toml").exists():
        migrate()
        assert len(list(root.rglob("akunu.json"))) == 2
        (root / "models.toml").unlink()
    for model in model_store.list_models():
        model_store.verify(model)
    assert {model.name for model in model_store.list_models()} == {"imported", "pulled"}


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a copy of this process")
def test_a_kill_at_any_moment_loses_nothing(home: Path, files: dict[str, bytes]) -> None:
    point, code = 0, -1
    while code != 0:
        point += 1
        for directory in ("data", "cache", "hub"):
            shutil.rmtree(home / directory, ignore_errors=True)
        snapshot = write_old_store(home, files)
        if (child := os.fork()) == 0:
            _die_before_write(point)
            migrate()
            os._exit(0)
        code = os.waitpid(child, 0)[1]
        for name in ("imported", "pulled"):  # at once, whatever the kill left
            old = paths.models_dir() / name
            assert old.is_dir() or (paths.models_dir() / "models.toml").exists()
        check_migrated(snapshot)
    assert point > 15


def _die_before_write(point: int) -> None:
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        writes = event == "open" and isinstance(flags := arguments[2], int) and flags & os.O_RDWR
        count += bool(writes or event in _WRITES)
        if count == point:
            os._exit(9)

    sys.addaudithook(hook)
