"""Prompt cache files: a loaded session continues; mlx-lm loads them; other files are refused."""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import load_prompt_cache

from akunu_py.decoding import device
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.model import identity
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.model.identity import model_digest
from akunu_py.decoding.prompt_cache import disk
from akunu_py.decoding.target import Target
from akunu_py.errors import AkunuError, DamagedCache, StoreError, UsageError
from akunu_py.types import GenerateOptions
from tests.support.command import assert_one_line_error, run_here
from tests.support.engines import altered
from tests.support.families import build, families_of_each_kind
from tests.support.full_disk import full_disk
from tests.support.targets import answer, fresh, some
from tests.support.tiny import VOCABULARY, write_tiny_llama
from tests.support.tiny_fim import load_tiny, write_chat_model

OPTIONS = GenerateOptions(max_tokens=12)
PROMPT = some(40, 1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    engine = load_tiny(tmp_path_factory.mktemp("model"), ["<|end|>"])
    model = build("llama", head_dim=32)
    return altered(engine, model=model, vocabulary=VOCABULARY, stop_tokens=frozenset())


@pytest.fixture(scope="module")
def saved(tiny: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a session with one answer."""
    session = Session(tiny)
    session.generate(PROMPT, OPTIONS).answer()
    path = tmp_path_factory.mktemp("saved") / "session.safetensors"
    session.save_prompt_cache(path)
    return path


@pytest.mark.long
@families_of_each_kind("deepseek_v41")
def test_every_family_continues_from_a_file(name: str, tiny: Engine, tmp_path: Path) -> None:
    """mlx-lm loads the file too; other prompts return to the checkpoints."""
    file, prompt = tmp_path / "cache.safetensors", some(70, 1)
    target = Target(build(name))
    target.reuse_prefix(prompt)
    sampled = answer(target, prompt, [])
    engine = altered(tiny, model=build(name), vocabulary=VOCABULARY)
    disk.save(target.history, engine, file)
    kinds = [type(entry) for entry in load_prompt_cache(str(file))]
    assert kinds == [type(entry) for entry in target.cache]
    again = Target(build(name))
    again.adopt(disk.load(engine, file))
    places = [each.length for each in target.history.checkpoints]
    assert [each.length for each in again.history.checkpoints] == places
    assert again.history.nbytes <= target.history.nbytes
    longer = [*prompt, *sampled, *some(30, 2)]
    assert again.reuse_prefix(longer).cached == len(target.tokens)
    assert answer(again, longer, []) == fresh(name, longer)
    again.adopt(disk.load(engine, file))
    other = [*prompt, *some(30, 3)]
    assert again.reuse_prefix(other).cached >= len(prompt) - target.prompt_tail
    assert answer(again, other, []) == fresh(name, other)


def test_a_family_that_mlx_lm_cannot_save_is_refused(tiny: Engine, tmp_path: Path) -> None:
    session = Session(altered(tiny, model=build("deepseek_v41"), vocabulary=VOCABULARY))
    path = tmp_path / "x.safetensors"
    with pytest.raises(UsageError, match="nothing to save"):
        session.save_prompt_cache(path)
    session.generate(PROMPT, GenerateOptions(2)).answer()
    with pytest.raises(UsageError, match="LayerCache"):
        session.save_prompt_cache(path)
    assert list(tmp_path.iterdir()) == []


def test_unusable_files_are_refused_and_the_session_is_unchanged(
    tiny: Engine, saved: Path, tmp_path: Path
) -> None:
    content, weights = saved.read_bytes(), tiny.path / "model.safetensors"
    cases: list[tuple[Engine, Path, type[AkunuError], str]] = [
        (tiny, weights, DamagedCache, "not a session"),
        (tiny, tiny.path / "config.json", UsageError, ".safetensors"),
        (tiny, tmp_path / "none.safetensors", StoreError, "No such file"),
        (altered(tiny, kv_bits=8), saved, UsageError, "--kv-bits"),
        (altered(tiny, identity="x"), saved, UsageError, "belongs to tiny"),
        (altered(tiny, context_length=40), saved, UsageError, "--context"),
    ]
    for part in (0.0, 0.0001, 0.5, 0.99):
        path = tmp_path / f"{part}.safetensors"
        path.write_bytes(content[: int(len(content) * part)])
        cases.append((tiny, path, DamagedCache, str(path)))
    for engine, path, error, words in cases:
        session = Session(altered(engine, context_length=4096))
        session.generate(PROMPT, OPTIONS).answer()
        session.engine = engine
        before = list(session.target.tokens)
        with pytest.raises(error) as raised:
            session.load_prompt_cache(path)
        assert "\n" not in str(raised.value)
        assert words in str(raised.value)
        assert session.target.tokens == before


def test_models_differ_by_each_tensor_and_by_versions_and_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_llama(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = dict(mx.load(str(file)).items())
    mx.eval(weights)
    seen = {model_digest(tmp_path, "float32"), model_digest(tmp_path, "bfloat16")}
    for name, value in weights.items():
        mx.save_safetensors(str(file), weights | {name: value + 1}, {"format": "mlx"})
        seen.add(model_digest(tmp_path, "float32"))
    mx.save_safetensors(str(file), weights, {"format": "mlx"})
    assert model_digest(tmp_path, "float32") in seen
    versions = {name: version(name) for name in ("mlx", "mlx-lm")}
    for part in (*versions, ""):
        with monkeypatch.context() as patch:
            patch.setattr(identity, "version", (versions | {part: "0"}).__getitem__)
            if not part:
                patch.setattr(device, "device_name", lambda: "another")
            seen.add(model_digest(tmp_path, "float32"))
    assert len(seen) == 2 + len(weights) + 3


def test_a_full_disk_leaves_the_older_file(tiny: Engine, saved: Path) -> None:
    session = Session(tiny)
    session.load_prompt_cache(saved)
    content = saved.read_bytes()
    with full_disk(1000), pytest.raises(StoreError, match="cannot write"):
        session.save_prompt_cache(saved)
    assert saved.read_bytes() == content
    assert list(saved.parent.iterdir()) == [saved]
    with pytest.raises(StoreError, match="cannot write"):
        session.save_prompt_cache(saved.parent / "none" / "x.safetensors")


@pytest.mark.usefixtures("own_directories")
def test_the_run_command_saves_and_loads_a_prompt_cache(tmp_path: Path) -> None:
    model, file = write_chat_model(tmp_path / "model"), tmp_path / "document.safetensors"
    document = "The owl sat on the old barn and watched the fields. " * 30
    command = ["run", "--model", str(model), "--prompt-cache", str(file), "--raw"]
    left = []
    for question in ("What sat on the barn?", "Who?"):
        done = run_here(*command, "--max-tokens", "4", "--format", "json", document + question)
        stats: dict[str, int] = json.loads(done.stdout)["stats"]
        left.append(stats["prompt_tokens"] - stats["cached_tokens"])
    assert os.stat(file).st_mode & 0o777 == 0o600
    assert left[0] > len(document)
    assert left[1] <= 4
    file.write_bytes(b"something else")
    assert_one_line_error(run_here(*command, "hi"), 1, str(file), "not a session")
    assert file.read_bytes() == b"something else"
