"""Models of other programs: listed, used in place, never changed."""

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from akunu_py.errors import UnknownModel
from akunu_py.models.store import model_store, scan
from tests.support.command import assert_one_line_error, run_here
from tests.support.tiny_model import tiny_directory

COMMIT = "0123456789" * 4


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("made"))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, own_directories: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home; a function of the hub's library computed its path long ago."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def in_hub_cache(home: Path, tiny: Path, name: str, *, branch: bool = True) -> Path:
    """Puts the model where huggingface-hub puts it: files in blobs, links in a snapshot."""
    root = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = root / "snapshots" / COMMIT
    shutil.copytree(tiny, root / "blobs")
    snapshot.mkdir(parents=True)
    for blob in (root / "blobs").iterdir():
        (snapshot / blob.name).symlink_to(blob)
    if branch:
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text(COMMIT)
    return snapshot


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("place", "program"), [
    ("hub", "Hugging Face cache"),
    ("hub without a branch", "Hugging Face cache"),
    (".lmstudio/models/them/tiny", "LM Studio"),
    pytest.param("elsewhere/them/tiny", "LM Studio", marks=pytest.mark.long),
    ("moved/models/them/tiny", "LM Studio"),
])  # fmt: skip
def test_they_are_listed_used_by_name_and_never_removed(
    home: Path, tiny: Path, place: str, program: str
) -> None:
    if place.startswith("hub"):
        directory = in_hub_cache(home, tiny, "them/tiny", branch=place == "hub")
    else:
        directory = home / place
        shutil.copytree(tiny, directory)
        (home / ".lmstudio").mkdir(exist_ok=True)
        settings = json.dumps({"downloadsFolder": str(home / "elsewhere")})
        (home / ".lmstudio" / "settings.json").write_text(settings)
        (home / ".lmstudio-home-pointer").write_text(f"{home / 'moved'}\n")
    before = contents(home)

    listed = run_here("models", "list").stdout.splitlines()
    assert any(line.startswith("them/tiny ") and line.endswith(program) for line in listed)
    assert "no models of akunu, and 1 of other programs" in listed
    shown = run_here("models", "show", "them/tiny").stdout
    assert str(directory) in shown
    assert program in shown
    done = run_here("run", "hi", "--model", "them/tiny", "--raw", "--max-tokens", "2", "--quiet")
    assert done.returncode == 0, done.stderr
    removal = run_here("models", "rm", "them/tiny", "--yes", "--hub-files")
    assert_one_line_error(removal, 2, program, str(directory))
    run_here("models", "gc")

    after = contents(home)
    assert {path: after[path] for path in before} == before
    weights = [path for path in after if path.endswith(".safetensors")]
    assert len(weights) == len([path for path in before if path.endswith(".safetensors")])


def test_a_name_means_one_model(home: Path, tiny: Path) -> None:
    shutil.copytree(tiny, home / ".lmstudio/models/them/tiny")
    snapshot = in_hub_cache(home, tiny, "them/tiny")
    (found,) = model_store.external_models([])
    assert (found.path, found.commit) == (snapshot, COMMIT)
    assert model_store.resolve(f"them/tiny@{COMMIT}").path == snapshot
    with pytest.raises(UnknownModel, match="them/tiny@main"):
        model_store.resolve("them/tiny@main")


def test_incomplete_and_foreign_formats_are_not_listed(home: Path, tiny: Path) -> None:
    models = home / ".lmstudio" / "models" / "them"
    shutil.copytree(tiny, models / "whole")
    weights = tiny.joinpath("model.safetensors").read_bytes().replace(b'"mlx"', b'"pt" ', 1)
    config = json.loads((tiny / "config.json").read_text())
    for name, quantization in (("torch", None), ("quantized", {"group_size": 64, "bits": 4})):
        shutil.copytree(tiny, models / name)
        (models / name / "model.safetensors").write_bytes(weights)
        settings = json.dumps(config | {"quantization": quantization})
        (models / name / "config.json").write_text(settings)
    for name in ("gguf", "shard", "unreadable", "no-tokenizer", "a--b"):
        shutil.copytree(tiny, models / name)
    (models / "gguf" / "model.safetensors").rename(models / "gguf" / "model.gguf")
    (models / "shard" / "model.safetensors").rename(
        models / "shard" / "model-00001-of-00002.safetensors"
    )
    (models / "unreadable" / "config.json").write_text("[")
    (models / "no-tokenizer" / "tokenizer.json").unlink()
    (models / "a-link-to-nothing").symlink_to(home / "nothing")
    names = [model.name for model in scan.find_models()]
    assert names == ["them/quantized", "them/whole"]
