"""The store: finding, checking, removing; broken entries do not affect others."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from akunu_py import paths
from akunu_py.cli import main
from akunu_py.errors import DamagedModel, StoreError, UnknownModel
from akunu_py.models.manifest import ModelFacts
from akunu_py.models.store import model_store
from akunu_py.models.store.directories import lock_model
from akunu_py.models.store.model_store import install, note_usage


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return paths.models_dir()


def build(work: Path, directory: Path) -> ModelFacts:
    (directory / "config.json").write_text('{"max_position_embeddings": 64}')
    (directory / "model.safetensors").write_bytes(b"x" * 1000)
    return ModelFacts(
        source="made here", context_length=64, parameters=1000, quantization="none", license="MIT"
    )


def add(name: str) -> model_store.StoredModel:
    return install(name, build, 1)


def test_models_are_listed_by_name_with_their_facts(root: Path) -> None:
    assert model_store.list_models() == []
    assert not root.exists()
    add("b")
    add("a")
    (root / ".partial-x-1").mkdir()
    (root / "README").write_text("")
    first, second = model_store.list_models()
    assert (first.name, second.name) == ("a", "b")
    assert (first.size, first.context_length, first.source) == (1031, 64, "made here")
    assert first.damaged == ""
    assert model_store.get("a") == first


@pytest.mark.parametrize(
    "text",
    [None, b"", b"{", b"[]", b"{}", b'{"format": 2}', b'{"format": 1, "name": 3}',
     bytes(range(256)), b'{"format": 1, "name": "bad", "files": {}}',
     b'{"format": 1, "name": "bad", "files": []}'],
)  # fmt: skip
@pytest.mark.parametrize("name", ["bad", "bad name\n"])
def test_broken_entry_is_listed_as_damaged(root: Path, name: str, text: bytes | None) -> None:
    add("good")
    (root / name).mkdir()
    if text is not None:
        (root / name / "akunu.json").write_bytes(text)
    bad, good = model_store.list_models()
    assert bad.damaged
    assert not good.damaged
    if name == "bad":
        with pytest.raises(DamagedModel, match="`akunu models rm bad`, then pull or import it"):
            model_store.get("bad")


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/../../b", "a\0b", ""])
def test_a_manifest_cannot_name_files_outside_the_model(name: str, root: Path) -> None:
    add("m")
    path = root / "m" / "akunu.json"
    manifest = json.loads(path.read_text())
    manifest["files"][name] = {"size": 1, "sha256": ""}
    path.write_text(json.dumps(manifest))
    assert "outside" in model_store.list_models()[0].damaged


def test_an_unknown_name_lists_the_models() -> None:
    with pytest.raises(UnknownModel, match="store is empty; run `akunu models pull starter`"):
        model_store.get("nonesuch")
    add("smol-chat")
    with pytest.raises(UnknownModel, match=r"did you mean 'smol-chat'.*installed: smol-chat.*list"):
        model_store.get("smol-chta")
    with pytest.raises(UnknownModel, match=r"did you mean 'starter'"):
        model_store.get("satrter")
    with pytest.raises(UnknownModel, match="run `akunu models pull starter`"):
        model_store.resolve("starter")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/etc", "a\\b", "a\nb", "-x", ".x", "x" * 97, "é"]
)
def test_names_cannot_leave_the_store(name: str) -> None:
    for use in (model_store.get, model_store.remove):
        with pytest.raises(UnknownModel) as caught:
            use(name)
        assert "\n" not in str(caught.value)
    with pytest.raises(UnknownModel):
        model_store.resolve(name)


def test_a_directory_may_be_named_by_its_path(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "mine"
    directory.mkdir()
    with pytest.raises(UnknownModel, match=r"config\.json"):
        model_store.resolve(str(directory))
    (directory / "config.json").write_text('{"text_config": {"max_position_embeddings": 99}}')
    model = model_store.resolve(str(directory))
    assert (model.name, model.context_length, model.path) == ("mine", 99, directory)
    monkeypatch.chdir(tmp_path)
    assert model_store.resolve("mine").path.resolve() == directory
    assert model_store.resolve("./mine").path.resolve() == directory
    add("mine")  # the store comes first for a bare name
    assert model_store.resolve("mine").path == root / "mine"
    assert model_store.resolve(str(root / "mine")).manifest is not None


def test_path_without_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_text("")
    with pytest.raises(UnknownModel, match="found the file"):
        model_store.resolve(str(tmp_path / "x.gguf"))
    with pytest.raises(UnknownModel, match="nothing there"):
        model_store.resolve(str(tmp_path / "no"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DamagedModel, match="unreadable"):
        model_store.resolve(str(tmp_path))


def test_check_finds_missing_and_cut_files_and_verify_altered_bytes(root: Path) -> None:
    model, weights = add("m"), root / "m" / "model.safetensors"
    seen: list[tuple[int, int]] = []
    model_store.check(model)
    model_store.verify(model, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (model.size, model.size)
    weights.write_bytes(b"x" * 999 + b"y")
    model_store.check(model)
    with pytest.raises(DamagedModel, match=r"model\.safetensors was altered"):
        model_store.verify(model)
    weights.write_bytes(b"x" * 999)
    with pytest.raises(DamagedModel, match=r"model\.safetensors: expected 1000 bytes, found 999"):
        model_store.check(model)
    weights.unlink()
    with pytest.raises(DamagedModel, match=r"model\.safetensors is missing; run `akunu models rm"):
        model_store.check(model)


def test_check_of_a_directory_outside_reads_the_weights_header(tmp_path: Path) -> None:
    directory = tmp_path / "mine"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    model = model_store.resolve(str(directory))
    with pytest.raises(DamagedModel, match="contains no model"):
        model_store.check(model)
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    whole = len(header).to_bytes(8, "little") + header + b"\0" * 8
    weights = directory / "model.safetensors"
    weights.write_bytes(whole)
    model_store.check(model)
    model_store.verify(model)
    for broken in (whole[:-1], whole[:20], b"", whole + b"\0", b"\xff" * 64, b"\2" + b"\0" * 9):
        weights.write_bytes(broken)
        with pytest.raises(DamagedModel) as caught:
            model_store.check(model)
        assert "akunu models rm" not in str(caught.value)


def test_remove_frees_space_and_accepts_damaged_models(root: Path) -> None:
    add("m")
    assert model_store.remove("m") > 1000
    assert model_store.list_models() == []
    (root / "bad").mkdir()
    model_store.remove("bad")
    assert [path.name for path in root.iterdir() if not path.name.startswith(".lock")] == []
    with pytest.raises(UnknownModel):
        model_store.remove("m")


def test_remove_does_not_follow_a_link(root: Path, tmp_path: Path) -> None:
    add("m")
    outside = tmp_path / "outside"
    os.rename(root / "m", outside)
    (root / "m").symlink_to(outside)
    assert model_store.get("m").size > 0
    assert model_store.remove("m") == 0
    assert (outside / "config.json").exists()


def test_remove_does_not_disturb_another_process() -> None:
    add("m")
    with lock_model("m"), pytest.raises(StoreError, match="another akunu"):
        model_store.remove("m")
    assert model_store.get("m")


def test_verify_of_all_continues_after_a_damaged_one(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add("a")
    add("b")
    (root / "a" / "model.safetensors").write_bytes(b"y" * 1000)
    (root / "c").mkdir()
    assert main(["models", "verify"]) == 1
    captured = capsys.readouterr()
    assert "a: model 'a' is damaged: model.safetensors was altered" in captured.out
    assert "b: 1.0 kB verified" in captured.out
    assert "2 of 3 models are damaged" in captured.err
    assert main(["models", "verify", "b"]) == 0
    assert main(["models", "verify", "a"]) == 1
    assert main(["models", "list"]) == 0
    assert "akunu.json is missing" in capsys.readouterr().out


def test_gc_removes_leftovers_of_dead_processes_and_nothing_else(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add("living")
    note_usage("living")
    note_usage("gone")
    for name in ("dead", "busy"):
        (root / f".partial-{name}-1" / "work").mkdir(parents=True)
        (root / f".partial-{name}-1" / "work" / "x").write_bytes(b"x" * 3000)
    with lock_model("busy"):
        assert main(["models", "gc", "--dry-run"]) == 0
        assert "leftover of an interrupted pull of dead" in capsys.readouterr().out
        assert (root / ".partial-dead-1").exists()
        assert main(["models", "gc"]) == 0
    assert not (root / ".partial-dead-1").exists()
    assert (root / ".partial-busy-1").exists()
    assert [path.name for path in (root / ".usage").iterdir()] == ["living.json"]
    model_store.remove("living")
    assert list((root / ".usage").iterdir()) == []
    assert main(["models", "gc"]) == 0
    assert main(["models", "gc"]) == 0
    assert capsys.readouterr().out.endswith("nothing to remove\n")


def test_a_store_that_is_no_directory_is_a_one_line_error(root: Path) -> None:
    root.parent.mkdir(parents=True)
    root.write_text("")
    with pytest.raises(StoreError) as caught:
        model_store.list_models()
    assert str(root) in str(caught.value)
    with pytest.raises(StoreError, match="XDG_DATA_HOME"):
        add("m")


def test_usage_is_recorded_where_possible(root: Path) -> None:
    root.parent.parent.mkdir()
    root.parent.write_text("in the place of the directory")
    note_usage("m", tokens=3)
    assert model_store.read_usage("m") == model_store.Usage()
    root.parent.unlink()
    note_usage("m", tokens=3)
    note_usage("m", measured_peak=5)
    saved = model_store.read_usage("m")
    assert (saved.tokens, saved.measured_peak, bool(saved.used)) == (3, 5, True)
    for rubbish in ("{", "[1]", json.dumps({"tokens": "x", "used": 3}), "x" * 20_000):
        (root / ".usage" / "m.json").write_text(rubbish)
        assert model_store.read_usage("m") == model_store.Usage()
