"""Altered files of every kind: each opens, or is refused with an AkunuError of one line.

Each case makes a valid file and opens it. The same alterations and the same promises apply to all:
no other exception, bounded memory, no writes outside, nothing left behind.
"""

import contextlib
import gzip
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import strategies as st

from akunu_py import paths
from akunu_py.bench.replay import load_trace
from akunu_py.bench.result import CHECK_FORMAT, Result, load_result, load_results
from akunu_py.engine.engine import Engine
from akunu_py.engine.loop import StepLoop
from akunu_py.models.gguf.convert import plan_import
from akunu_py.models.gguf.file import read_gguf
from akunu_py.models.load.safetensors import read_header
from akunu_py.models.store import model_store, names
from akunu_py.models.store.mlx_directory import plan_directory
from akunu_py.types import GenerateOptions, Message, SamplingOptions
from tests.reliability.fuzz import (
    MEGABYTE,
    changed,
    clear,
    damaged,
    explore,
    json_like,
    lengths,
    memory_below,
    peak_mb,
)
from tests.support.tiny_fim import byte_level, write_model
from tests.support.tiny_gguf import write_tiny

pytestmark = pytest.mark.usefixtures("own_directories")

END = "<|end|>"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
MODEL_JSON = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"),
    "special_tokens_map.json",
)
TRACE = {
    "tokenizer": "tiny",
    "workloads": {
        "chat": [{"prompt": [1, 2, 3], "output": [4, 5]}, {"prompt": [1], "output": [2]}],
        "code": [{"prompt": [7, 8], "output": [9, 7, 8, 9]}],
    },
}
NAMES = b"""
[pulled]
repository = "a/b"
revision = "0123456789012345678901234567890123456789"
cache = "/nowhere"
unfinished = 3
[imported]
source = "a directory"
license = "mit"
[imported.sha256]
"config.json" = "0123456789012345678901234567890123456789012345678901234567890123"
"""
# Contents that no reader may accept.
RUBBISH = [
    b"", bytes(1000), b"\xff\xfe\xe9", b"9" * 100_000, b"[" * 200_000, b'{"workloads":' * 50_000,
    b"model = " + b"[" * 200_000,
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One kind of file."""

    # Writes a valid file, and what it needs, below a directory; returns the file to alter.
    make: Callable[[Path], Path]
    open: Callable[[Path], object]
    examples: int = 16
    # Number of first bytes to alter, if the rest is bulk data.
    head: Callable[[Path], int] | None = None
    # Whether rubbish is refused; if not, opening never raises. None: it depends on the content.
    refuses: bool | None = True
    special: bool = True  # akunu finds the file by itself, so it may be a pipe or a device
    messages: int = 0  # different errors to see at least; then memory is traced


def json_file(name: str, value: Any) -> Callable[[Path], Path]:
    return lambda directory: write(directory / name, json.dumps(value).encode())


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def make_model(name: str) -> Callable[[Path], Path]:
    """Write a tiny model with all the files that a directory may have."""

    def make(work: Path) -> Path:
        directory = write_model(work / "model", byte_level([END]), end=END)
        more = {"rope_theta": 1e4, "head_dim": 8, "rope_scaling": None, "attention_bias": False}
        edit(directory / "config.json", **more)
        types = {"chat_template_type": None, "tool_parser_type": None}
        edit(directory / "tokenizer_config.json", chat_template=TEMPLATE, **types)
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [256]}))
        (directory / "special_tokens_map.json").write_text(json.dumps({"eos_token": END}))
        (directory / "added_tokens.json").write_text("{}")
        if name in ("README.md", "chat_template.jinja"):
            (directory / name).write_text("---\nlicense: mit\n---\n" + TEMPLATE)
        return directory / name

    return make


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def open_model(path: Path) -> None:
    """Plan the import and run the model."""
    with clear():
        plan_directory(path.parent)
    engine = Engine.load(path.parent)
    engine.tokens.encode_chat([Message("user", "Hello")])
    options = GenerateOptions(max_tokens=2, sampling=SamplingOptions(temperature=0))
    answer = StepLoop(engine).answer(engine.tokens.encode("Hello"), options)
    assert answer.tokens


def make_safetensors(directory: Path) -> Path:
    arrays = {f"model.layers.{i}.weight": mx.ones((4, 8)) for i in range(12)}
    mx.save_safetensors(str(directory / "x.safetensors"), arrays, metadata={"format": "mlx"})
    return directory / "x.safetensors"


def open_safetensors(path: Path) -> None:
    read_header(path)
    mx.eval(mx.load(str(path)))  # MLX loads what passes the check


def open_gguf(path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as target:
        plan_import(path).write(Path(target))


def length_of_header(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


RESULT = json.loads(Result(command="akunu bench", curve_s={1: 0.01}).to_json())
CHECK = {"format": CHECK_FORMAT, "results": [RESULT]}
PACKED = gzip.compress(json.dumps(TRACE).encode(), mtime=0)
CASES = {
    "trace": Case(json_file("trace.json", TRACE), load_trace, 40, special=False),
    "packed trace": Case(
        lambda directory: write(directory / "trace.gz", PACKED), load_trace, special=False),
    "names": Case(  # an empty file has no names
        lambda directory: write(paths.models_dir() / names.FILE_NAME, NAMES),
        lambda path: model_store.list_models(), 40, refuses=None),
    "result": Case(json_file("result.json", RESULT), load_result, special=False),
    "check": Case(json_file("check.json", CHECK), load_results, 30, special=False),
    "safetensors": Case(
        make_safetensors, open_safetensors, 40, length_of_header, special=False, messages=2),
    "GGUF": Case(
        lambda directory: write_tiny(directory / "tiny.gguf"), open_gguf, 60,
        lambda path: min(tensor.offset for tensor in read_gguf(path).tensors.values()), messages=8),
    **{name: Case(make_model(name), open_model, 6) for name in MODEL_JSON},
    "chat template": Case(make_model("chat_template.jinja"), open_model, 5, refuses=None),
    "weights": Case(make_model("model.safetensors"), open_model, 5, length_of_header),
    "model card": Case(make_model("README.md"), open_model, 2, refuses=False),
}  # fmt: skip
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def contents(path: Path, head: int) -> st.SearchStrategy[bytes]:
    """Return a strategy for altered contents of a valid file."""
    whole = path.read_bytes()
    altered = damaged(whole[:head]).map(lambda data: data + whole[head:])
    if path.suffix == ".json":
        value = json.loads(whole)
        values = changed(value) | json_like(st.sampled_from(sorted(value) or ["x"]))
        return altered | values.map(lambda value: json.dumps(value).encode())
    return altered


@cases
@lengths(1)
def test_altered_content_opens_or_is_refused_in_one_line(
    case: Case, examples: int, tmp_path: Path
) -> None:
    """The valid file opens."""
    path = case.make(tmp_path)
    case.open(path)
    inputs = contents(path, case.head(path) if case.head else path.stat().st_size)
    before, refusals = sorted(path.name for path in tmp_path.iterdir()), list[str]()

    def check(data: bytes) -> None:
        path.write_bytes(data)
        # Hypothesis remembers its inputs, so the memory of each one is measured alone.
        memory = memory_below(MEGABYTE) if case.messages else contextlib.nullcontext()
        with memory, clear() as errors:
            case.open(path)
        refusals.extend(map(str, errors))

    peak = peak_mb()
    explore(check, examples * case.examples, inputs)
    assert peak_mb() - peak < 1000
    assert len(set(refusals)) >= case.messages
    assert case.refuses is not False or not refusals
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@cases
def test_rubbish_is_refused(case: Case, tmp_path: Path) -> None:
    path = case.make(tmp_path)
    for content in RUBBISH if case.refuses is not None else []:
        path.write_bytes(content)
        with clear() as errors:
            case.open(path)
        assert bool(errors) == case.refuses


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.special])
@pytest.mark.parametrize("kind", ["pipe", "device", "holes", "directory", "link", "nothing"])
def test_special_files_are_not_followed(name: str, kind: str, tmp_path: Path) -> None:
    """Pipes and devices do not block, 20 GB of holes are not loaded, links not written through."""
    case = CASES[name]
    path, precious, nothing = case.make(tmp_path), tmp_path / "precious", tmp_path / "nothing"
    precious.write_text("mine")
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "holes":
        path.touch()
        os.truncate(path, 20 << 30)
    else:
        path.symlink_to({"device": Path("/dev/zero"), "link": precious}.get(kind, nothing))
    with clear() as errors:
        case.open(path)
    assert precious.read_text() == "mine"
    assert not nothing.exists()
    if kind in ("pipe", "device", "holes"):
        assert bool(errors) == (case.refuses is not False)
