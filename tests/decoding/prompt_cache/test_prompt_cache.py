"""Prompt caches: loaded, a session continues as if never closed; anything else is refused."""

from __future__ import annotations

import errno
import json
import os
import random
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import load_prompt_cache

from akunu_py.decoding import device, kv_cache
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.model.identity import model_digest
from akunu_py.decoding.prompt_cache import cache_file, disk
from akunu_py.decoding.target import Target
from akunu_py.errors import AkunuError, DamagedCache, StoreError, UsageError
from akunu_py.models.store.model_store import StoredModel
from akunu_py.types import GenerateOptions, Message
from tests.support.command import assert_one_line_error, run_here
from tests.support.engines import altered
from tests.support.families import build, families_of_each_kind
from tests.support.jobs import chat_request
from tests.support.targets import answer, fresh, some
from tests.support.tiny import VOCABULARY, write_tiny_llama

OPTIONS = GenerateOptions(max_tokens=12)
FIRST = [Message("user", "Name three colours.")]


@pytest.fixture(scope="module")
def talked(shallow_starter: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a session with one answer."""
    session = Session(shallow_starter)
    chat_request(session, FIRST, OPTIONS).answer()
    path = tmp_path_factory.mktemp("saved") / "talk.safetensors"
    session.save_prompt_cache(path)
    return path


@pytest.mark.long
@families_of_each_kind("deepseek_v41")
def test_every_family_continues_where_it_was(
    name: str, shallow_starter: Engine, tmp_path: Path
) -> None:
    """mlx-lm reads the file too; what it was asked otherwise goes back to the checkpoints."""
    file, prompt = tmp_path / "cache.safetensors", some(70, 1)
    target = Target(build(name))
    target.reuse_prefix(prompt)
    sampled = answer(target, prompt, [])
    engine = altered(shallow_starter, model=build(name), vocabulary=VOCABULARY)
    disk.save(target.history, engine, file)
    assert [type(entry) for entry in load_prompt_cache(str(file))] == [
        type(entry) for entry in target.cache
    ]
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


def test_what_mlx_lm_cannot_keep_is_refused() -> None:
    why = kv_cache.no_prompt_cache_reason(kv_cache.new_cache(build("deepseek_v41")))
    assert why is not None
    assert "LayerCache" in why


def test_the_rows_of_forgotten_turns_are_not_kept() -> None:
    target = Target(build("llama"))
    target.reuse_prefix(some(600, 1))
    answer(target, some(600, 1), [])
    target.reuse_prefix(some(600, 1)[:20])
    packed = kv_cache.compact(target.cache)
    assert [entry.keys.shape[2] for entry in packed] == [19, 19]
    assert target.cache[0].keys.shape[2] > 600


@pytest.mark.long
def test_a_reopened_session_reads_only_what_is_new(shallow_starter: Engine, talked: Path) -> None:
    session = Session(shallow_starter)
    session.load_prompt_cache(talked)
    held = len(session.target.tokens)
    first = chat_request(Session(shallow_starter), FIRST, OPTIONS).answer()
    talk = [*FIRST, Message("assistant", first.text), Message("user", "And one more?")]
    again = chat_request(session, talk, OPTIONS).answer()
    assert again.stats.cached_tokens >= held - 1
    assert again.tokens == chat_request(Session(shallow_starter), talk, OPTIONS).answer().tokens


def test_mlx_lm_reads_the_file(shallow_starter: Engine, talked: Path) -> None:
    entries, metadata = load_prompt_cache(str(talked), return_metadata=True)
    about = json.loads(metadata["akunu"])
    assert {entry.offset for entry in entries} == {len(about["tokens"])}
    assert os.stat(talked).st_mode & 0o777 == 0o600


def refuse(engine: Engine, path: Path, error: type[AkunuError], *words: str) -> None:
    """It is refused in one line that has these words, and the session is as before."""
    session = Session(engine)
    chat_request(session, FIRST, OPTIONS).answer()
    before = list(session.target.tokens)
    with pytest.raises(error) as raised:
        session.load_prompt_cache(path)
    assert "\n" not in str(raised.value)
    for word in words:
        assert word in str(raised.value)
    assert session.target.tokens == before


@pytest.mark.parametrize("seed", range(24))
def test_a_changed_byte_is_noticed(
    shallow_starter: Engine, talked: Path, tmp_path: Path, seed: int
) -> None:
    content = bytearray(talked.read_bytes())
    randomly = random.Random(seed)
    header = 8 + int.from_bytes(content[:8], "little")
    at = randomly.randrange(header) if seed % 3 == 0 else randomly.randrange(header, len(content))
    content[at] ^= 1 << randomly.randrange(8)
    path = tmp_path / "changed.safetensors"
    path.write_bytes(content)
    session, refused = Session(shallow_starter), ""
    try:
        session.load_prompt_cache(path)
    except AkunuError as error:
        refused = str(error)
    assert "\n" not in refused
    assert refused
    assert session.target.tokens == []


@pytest.mark.parametrize("part", [0.0, 0.0001, 0.5, 0.99])
def test_a_file_that_is_cut_off_is_refused(
    shallow_starter: Engine, talked: Path, tmp_path: Path, part: float
) -> None:
    content = talked.read_bytes()
    path = tmp_path / "cut.safetensors"
    path.write_bytes(content[: int(len(content) * part)])
    refuse(shallow_starter, path, DamagedCache, str(path))


@pytest.mark.long
def test_other_files_are_refused(starter: StoredModel, shallow_starter: Engine) -> None:
    refuse(shallow_starter, starter.path / "model.safetensors", DamagedCache, "not a session")
    refuse(shallow_starter, starter.path / "config.json", UsageError, ".safetensors")
    refuse(shallow_starter, starter.path / "none.safetensors", StoreError, "No such file")


@pytest.mark.long
def test_a_file_of_another_model_or_layout_is_refused(
    starter: StoredModel, shallow_starter: Engine, talked: Path
) -> None:
    refuse(altered(shallow_starter, kv_bits=8), talked, UsageError, "--kv-bits")
    other = model_digest(starter.path, "another layout")
    assert other != model_digest(starter.path, shallow_starter.plan.weights)
    refuse(altered(shallow_starter, identity=other), talked, UsageError, "belongs to starter")


def test_models_differ_by_each_tensor_and_by_what_runs_them(
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
    for part in ("mlx", "mlx-lm"):
        with monkeypatch.context() as patch:
            patch.setattr(
                "akunu_py.decoding.model.identity.version",
                lambda name, part=part: "0" if name == part else version(name),
            )
            seen.add(model_digest(tmp_path, "float32"))
    with monkeypatch.context() as patch:
        patch.setattr(device, "device_name", lambda: "another")
        seen.add(model_digest(tmp_path, "float32"))
    assert model_digest(tmp_path, "float32") in seen
    assert len(seen) == 2 + len(weights) + 3


def test_nothing_to_save_is_refused(shallow_starter: Engine, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing to save"):
        Session(shallow_starter).save_prompt_cache(tmp_path / "empty.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_refuses_leaves_the_older_file(
    shallow_starter: Engine, talked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(shallow_starter)
    session.load_prompt_cache(talked)
    content = talked.read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(cache_file, "write", full)
        with pytest.raises(StoreError, match="No space left"):
            session.save_prompt_cache(talked)
    assert talked.read_bytes() == content
    assert list(talked.parent.iterdir()) == [talked]
    with pytest.raises(StoreError, match="cannot write"):
        session.save_prompt_cache(talked.parent / "none" / "x.safetensors")


def test_run_keeps_a_prompt_cache(loaded_shallow_starter: Engine, tmp_path: Path) -> None:
    file = tmp_path / "document.safetensors"
    document = "The owl sat on the old barn and watched the fields. " * 30
    options = ["--raw", "--max-tokens", "4", "--format", "json", "--prompt-cache", str(file)]

    def ask(question: str) -> dict[str, int]:
        done = run_here("run", *options, document + question)
        assert done.returncode == 0, done.stderr
        stats: dict[str, int] = json.loads(done.stdout)["stats"]
        return stats

    first, second = ask("What sat on the barn?"), ask("Who watched?")
    assert first["cached_tokens"] == 0
    assert second["prompt_tokens"] - second["cached_tokens"] < 8
    file.write_bytes(b"something else")
    done = run_here("run", "--prompt-cache", str(file), "hi")
    assert_one_line_error(done, 1, str(file), "not a session")
    assert file.read_bytes() == b"something else"
