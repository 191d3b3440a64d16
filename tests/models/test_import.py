"""`akunu models import`: directories and GGUF files of this machine become models of the store."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model, load_tokenizer

from akunu_py import paths
from akunu_py.errors import AkunuError, DamagedModel, UnknownModel, UnsupportedModel, UsageError
from akunu_py.models.gguf.file import GgufFile
from akunu_py.models.gguf.tokenizer import plan_tokenizer
from akunu_py.models.store import mlx_directory, model_store
from akunu_py.models.store.local_import import import_model
from tests.support.tiny_gguf import TOKENIZER, Tiny, write_tiny
from tests.support.tiny_gguf_families import CASES, prompt, weights_of, write_directory


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return paths.models_dir()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A directory of a tiny qwen3 in transformers' format, with unneeded files."""
    made = write_directory(tmp_path / "My Model (v1)", CASES["qwen3"], weights_of(CASES["qwen3"]))
    metadata = TOKENIZER | {"general.architecture": "llama"}
    metadata.pop("tokenizer.ggml.token_type")
    plan_tokenizer(GgufFile(Path("x.gguf"), metadata, {})).write(made)
    (made / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# Model\n")
    (made / "modeling.py").write_text("raise SystemExit('code of the model was run')")
    (made / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))
    return made


def edit(path: Path, **changes: Any) -> None:
    value = json.loads(path.read_text("utf-8")) | changes
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not None}))


def logits(path: Path) -> np.ndarray[Any, Any]:
    model, _ = load_model(path)
    return np.array(model(mx.array([prompt()]))[0].astype(mx.float32))


def test_a_directory_becomes_a_model(source: Path, data: Path) -> None:
    moments: list[tuple[str, int, int]] = []
    model = import_model(source, progress=lambda *moment: moments.append(moment))
    assert model.name == "My-Model-v1"
    assert {path.name for path in model.path.iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    model_store.verify(model)
    assert (model.context_length, model.license) == (512, "apache-2.0")
    assert np.array_equal(logits(model.path), logits(source))
    assert load_tokenizer(model.path).encode("a the")
    assert {phase for phase, _, _ in moments} == {"copy", "record"}
    copied = [(done, total) for phase, done, total in moments if phase == "copy"]
    assert copied[-1][0] == copied[-1][1]


@pytest.mark.parametrize("bits", [4, 8])
def test_import_quantizes_a_directory(source: Path, bits: int) -> None:
    model = import_model(source, name="small", bits=bits)
    config = json.loads((model.path / "config.json").read_text())
    assert config["quantization"]["bits"] == bits
    assert model.quantization == f"{bits}-bit, groups of 64"
    assert model.size < 0.5 * sum(file.stat().st_size for file in source.glob("model*"))
    error = np.abs(logits(model.path) - logits(source)).mean() / logits(source).std()
    assert error < (0.4 if bits == 4 else 0.05)
    model_store.verify(model)


def test_an_mlx_directory_is_imported_as_it_is(source: Path) -> None:
    first = import_model(source, name="first", bits=4)
    second = import_model(first.path, name="second")
    assert second.quantization == "4-bit, groups of 64"
    assert np.array_equal(logits(second.path), logits(first.path))
    with pytest.raises(UsageError, match="quantized already"):
        import_model(first.path, name="third", bits=8)


def test_a_gguf_file_becomes_a_model(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "Tiny LM.gguf", Tiny(metadata={"general.license": "mit"}))
    model = import_model(path)
    assert (model.name, model.license) == ("Tiny-LM", "mit")
    model_store.verify(model)
    with pytest.raises(UsageError, match="quantized already"):
        import_model(path, name="again", bits=4)
    (model.path / "config.json").write_text("{")
    with pytest.raises(DamagedModel, match=r"models import '.*/Tiny LM\.gguf' --name Tiny-LM"):
        model_store.get(model.name)


def test_a_plain_gguf_file_is_quantized_on_the_way(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "x.gguf", Tiny(kind="F16", embedding="F16"))
    model = import_model(path, bits=8)
    assert model.quantization == "8-bit, groups of 64"
    assert {path.name for path in model.path.glob("*.json")} >= {"config.json", "tokenizer.json"}
    assert not (model.path / "work").exists()
    assert load_model(model.path)[1]["quantization"]["bits"] == 8


def test_name_of_another_model_is_not_taken_over(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = "akunu_py.models.store.local_import.plan_directory"

    def slow(path: Path) -> mlx_directory.DirectoryPlan:
        monkeypatch.setattr(place, mlx_directory.plan_directory)
        import_model(source, name="mine")
        return mlx_directory.plan_directory(path)

    monkeypatch.setattr(place, slow)
    for _ in range(2):  # meanwhile, and before
        with pytest.raises(UsageError, match="already installed"):
            import_model(source, name="mine")


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", ".hidden", "a b", "x" * 200])
def test_names_stay_inside_the_store(source: Path, name: str) -> None:
    with pytest.raises(UsageError, match="invalid model name"):
        import_model(source, name=name)


def test_code_of_a_model_is_neither_run_nor_kept(source: Path) -> None:
    pointer = {"AutoTokenizer": ["modeling.Tok", None], "AutoModelForCausalLM": "modeling.Model"}
    edit(source / "config.json", auto_map=pointer)
    edit(source / "tokenizer_config.json", auto_map=pointer)
    model = import_model(source)
    for path in model.path.glob("*.json"):
        assert "auto_map" not in path.read_text("utf-8")
    assert not list(model.path.glob("*.py"))


def _remove(*names: str) -> Callable[[Path], object]:
    def change(source: Path) -> None:
        for name in names:
            (source / name).unlink()

    return change


def _config(**changes: Any) -> Callable[[Path], object]:
    return lambda source: edit(source / "config.json", **changes)


def _cut(source: Path) -> None:
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _write(name: str, value: Any) -> Callable[[Path], object]:
    return lambda source: (source / name).write_text(json.dumps(value))


_INDEX = {"a": "model.safetensors", "b": "../../other/model-00002.safetensors"}


@pytest.mark.parametrize(("change", "error", "message"), [
    (_config(model_type="mambo"), UnsupportedModel, "'mambo'.*mamba.*mlx-lm supports"),
    (_config(model_type="../../x"), UnsupportedModel, "mlx-lm supports"),
    (_config(model_type=None), UnsupportedModel, "mlx-lm supports"),
    (_config(model_file="modeling.py"), UnsupportedModel, "its own code"),
    (_config(num_hidden_layers=10**9), DamagedModel, "num_hidden_layers"),
    (_config(hidden_size=63), UnsupportedModel, "mlx-lm cannot load"),
    (_config(num_attention_heads="four"), UnsupportedModel, "mlx-lm cannot load"),
    (_remove("config.json"), UnknownModel, "no config.json"),
    (_remove("model.safetensors"), UnsupportedModel, r"pickle \(pytorch_model.bin\)"),
    (
        _remove("model.safetensors", "pytorch_model.bin"),
        UnsupportedModel,
        r"expected model\*.safetensors, found none",
    ),
    (_remove("tokenizer.json"), UnsupportedModel, "no tokenizer"),
    (
        _write("tokenizer.json", {"model": {"type": "BPE"}}),
        UnsupportedModel,
        "tokenizer .* cannot be loaded",
    ),
    (_cut, DamagedModel, "damaged"),
    (
        _write("model.safetensors.index.json", {"weight_map": _INDEX}),
        DamagedModel,
        "files of weights are missing",
    ),
])  # fmt: skip
def test_refusals_come_before_anything_is_written(
    source: Path, data: Path, change: Callable[[Path], object], error: type[AkunuError],
    message: str,
) -> None:  # fmt: skip
    change(source)
    with pytest.raises(error, match=message) as caught:
        import_model(source)
    assert "\n" not in str(caught.value)
    assert not data.exists()


def test_source_that_is_neither_directory_nor_gguf(
    tmp_path: Path, data: Path, source: Path
) -> None:
    with pytest.raises(UnknownModel, match="nothing there"):
        import_model(Path("~no-user/nowhere"))
    with pytest.raises(UnsupportedModel, match="not GGUF"):
        import_model(source / "pytorch_model.bin")
    only = tmp_path / "files"
    only.mkdir()
    write_tiny(only / "a.gguf")
    with pytest.raises(UnknownModel, match=r"akunu models import .*a\.gguf"):
        import_model(only)
    assert not data.exists()


def test_names_inside_a_gguf_file_never_become_paths(tmp_path: Path, data: Path) -> None:
    evil = "../../../evil"
    named = {"general.name": evil, "general.basename": evil, "general.license": "/etc/passwd"}
    import_model(write_tiny(tmp_path / "x.gguf", Tiny(metadata=named)))
    with pytest.raises(UnsupportedModel, match="evil"):
        import_model(
            write_tiny(tmp_path / "y.gguf", Tiny(extra={evil: np.ones((2, 32), np.float32)}))
        )
    assert not list(tmp_path.rglob("*evil*"))
    assert sorted(path.name for path in data.iterdir() if path.is_dir()) == ["x"]
