"""The store: names, finding, checking, removing; broken entries do not affect others."""

import errno
import json
import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from akunu_py import paths
from akunu_py.cli import main
from akunu_py.errors import DamagedModel, StoreError, UnknownModel
from akunu_py.models.store import directories, model_store, names
from akunu_py.models.store.directories import lock_model
from akunu_py.models.store.local_import import install
from akunu_py.models.store.names import NameEntry

pytestmark = pytest.mark.usefixtures("own_directories")
HEADER = json.dumps({"a": {"dtype": "U8", "shape": [900], "data_offsets": [0, 900]}}).encode()
WEIGHTS = len(HEADER).to_bytes(8, "little") + HEADER + b"x" * 900


@pytest.fixture
def root() -> Path:
    return paths.models_dir()


def write(directory: Path) -> None:
    (directory / "config.json").write_text('{"max_position_embeddings": 64}')
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(WEIGHTS)


def build(work: Path, directory: Path) -> NameEntry:
    write(directory)
    return NameEntry(source="made here", quantization="none", license="MIT")


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
    assert (first.size, first.context_length, first.source) == (33 + len(WEIGHTS), 64, "made here")
    assert first.damaged == ""
    assert model_store.get("a") == first


@pytest.mark.parametrize(
    "table",
    ["3", "[]", "{license = 3}", "{sha256 = {'../x' = '0'}}", "{sha256 = {a = 3}}", "{new = 'x'}",
     "{repository = 'a/b'}", f"{{repository = '../b', revision = '{'0' * 40}', cache = '/'}}",
     "{repository = 'a/b', revision = '../x', cache = '/'}"],
)  # fmt: skip
def test_a_wrong_table_is_one_damaged_model(root: Path, table: str) -> None:
    good = add("good")
    file = root / "models.toml"
    file.write_text(f"# a comment\nbad = {table}\n{file.read_text()}")
    assert [bool(model.damaged) for model in model_store.list_models()] == [True, False]
    with pytest.raises(DamagedModel, match=r"models\.toml: .*; run `akunu models rm bad`, then"):
        model_store.get("bad")
    model_store.remove("bad")
    assert "# a comment" in file.read_text()
    assert model_store.list_models() == [good]


def test_a_failed_removal_does_not_advise_another_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add("a")
    monkeypatch.setattr(directories, "locked", Mock(side_effect=OSError(errno.EROFS, "Read-only")))
    with pytest.raises(StoreError, match=r"give yourself write access$"):
        model_store.remove("a")


@pytest.mark.parametrize("text", [b"{", b"\xff", b"a = 1\na = 2", b"[" * 100_000])
def test_a_broken_file_of_names_is_never_overwritten(root: Path, text: bytes) -> None:
    add("m")
    (root / "models.toml").write_bytes(text)
    for use in (model_store.list_models, lambda: model_store.remove("m"), lambda: add("n")):
        with pytest.raises(StoreError, match=r"models\.toml is damaged: .*; correct it, or"):
            use()
    assert (root / "models.toml").read_bytes() == text
    (root / "models.toml").unlink()
    assert model_store.get("m").context_length == 64


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
    "name",
    ["", ".", "..", "../x", "a/b", "/etc", "a\\b", "a\nb", "-x", ".x", "~no/x", "x" * 97, "é"],
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
    assert model.reference == str(directory)
    monkeypatch.chdir(tmp_path)
    assert model_store.resolve("mine").path.resolve() == directory
    assert model_store.resolve("./mine").path.resolve() == directory
    add("mine")  # the store comes first for a bare name
    assert model_store.resolve("mine").path == root / "mine"
    assert model_store.resolve(str(root / "mine")).reference == "mine"


def test_path_without_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_text("")
    with pytest.raises(UnknownModel, match="found a file there"):
        model_store.resolve(str(tmp_path / "x.gguf"))
    with pytest.raises(UnknownModel, match="nothing there"):
        model_store.resolve(str(tmp_path / "no"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DamagedModel, match="unreadable"):
        model_store.resolve(str(tmp_path))


def test_check_finds_missing_and_cut_files_and_verify_altered_bytes(root: Path) -> None:
    model, weights = add("m"), root / "m" / "model.safetensors"
    seen: list[tuple[int, int]] = []
    model_store.verify(model, lambda _, done, total: seen.append((done, total)))
    assert seen[-1] == (model.size, model.size)
    weights.write_bytes(WEIGHTS[:-1] + b"y")
    model_store.check(model)
    with pytest.raises(DamagedModel, match=r"model\.safetensors was altered"):
        model_store.verify(model)
    for name in ("model.safetensors", "tokenizer.json"):
        (root / "m" / name).unlink()
        with pytest.raises(DamagedModel, match=rf"{name} is missing; run `akunu models rm"):
            model_store.check(model)
        shutil.rmtree(root / "m")
        model = add("m")


def test_check_reads_the_headers_of_all_weights(tmp_path: Path) -> None:
    directory = tmp_path / "mine"
    directory.mkdir()
    write(directory)
    model = model_store.resolve(str(directory))
    model_store.verify(model)
    weights = directory / "model.safetensors"
    for broken in (WEIGHTS[:-1], WEIGHTS[:20], b"", WEIGHTS + b"\0", b"\xff" * 64):
        weights.write_bytes(broken)
        with pytest.raises(DamagedModel) as caught:
            model_store.check(model)
        assert "akunu models rm" not in str(caught.value)
    weights.write_bytes(WEIGHTS)
    weights.rename(directory / "model-00001-of-00002.safetensors")
    with pytest.raises(DamagedModel, match="missing or incomplete"):
        model_store.check(model)


def test_remove_accepts_damaged_models_and_links_and_respects_locks(
    root: Path, tmp_path: Path
) -> None:
    add("m")
    with lock_model("m"), pytest.raises(StoreError, match="another akunu"):
        model_store.remove("m")
    assert model_store.remove("m") > 900
    (root / "bad").mkdir()
    model_store.remove("bad")
    outside = tmp_path / "outside"
    os.rename(add("m").path, outside)
    (root / "m").symlink_to(outside)
    assert model_store.get("m").size > 0
    assert model_store.remove("m") == 0
    assert (outside / "config.json").exists()
    assert model_store.list_models() == []
    assert names.read_names() == {}
    assert [path.name for path in root.iterdir() if not path.name.startswith(".lock")] == [
        "models.toml"
    ]


def test_verify_of_all_continues_after_a_damaged_one(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add("a")
    add("b")
    (root / "a" / "model.safetensors").write_bytes(WEIGHTS[:-1] + b"y")
    (root / "c").mkdir()
    assert main(["models", "verify"]) == 1
    captured = capsys.readouterr()
    assert "a: model 'a' is damaged: model.safetensors was altered" in captured.out
    assert "b: 1.0 kB verified" in captured.out
    assert "2 of 3 models are damaged" in captured.err
    assert main(["models", "verify", "b"]) == 0
    assert main(["models", "verify", "a"]) == 1
    assert main(["models", "list"]) == 0
    assert "damaged: " in capsys.readouterr().out


def test_gc_removes_leftovers_of_dead_processes_and_nothing_else(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add("living")
    for name in ("dead", "busy"):
        (root / f".partial-{name}-1" / "work").mkdir(parents=True)
        (root / f".partial-{name}-1" / "work" / "x").write_bytes(b"x" * 3000)
    with lock_model("busy"):
        assert main(["models", "gc", "--dry-run"]) == 0
        assert "leftover of an interrupted import of dead" in capsys.readouterr().out
        assert (root / ".partial-dead-1").exists()
        assert main(["models", "gc"]) == 0
    assert not (root / ".partial-dead-1").exists()
    assert (root / ".partial-busy-1").exists()
    assert main(["models", "gc"]) == 0
    assert main(["models", "gc"]) == 0
    assert capsys.readouterr().out.endswith("nothing to remove\n")
    assert model_store.get("living")


def test_a_store_that_is_no_directory_is_a_one_line_error(root: Path) -> None:
    root.parent.mkdir(parents=True)
    root.write_text("")
    with pytest.raises(StoreError) as caught:
        model_store.list_models()
    assert str(root) in str(caught.value)
    with pytest.raises(StoreError, match="XDG_DATA_HOME"):
        add("m")
