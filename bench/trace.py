"""Trace files: prompts and recorded outputs as token ids, in JSON or gzipped JSON.

`{"tokenizer": ..., "workloads": {name: [{"prompt": [ids], "output": [ids]}, ...]}}`
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from akunu_py.bench.workloads import Workload, WorkloadTurn
from akunu_py.errors import UnsupportedModel, UsageError, first_problem
from akunu_py.files import disk_errors
from akunu_py.models.catalog import load_catalog
from akunu_py.models.load.model_files import as_error
from akunu_py.models.store.model_store import list_models
from akunu_py.types import GenerateOptions, Message

if TYPE_CHECKING:
    from akunu_py.engine.engine import Engine

GZIP_MAGIC = b"\x1f\x8b"
_MAX_BYTES = 512 << 20  # unpacked; a hundred thousand answers take less


@dataclass(frozen=True, slots=True)
class TraceItem:
    """A recorded answer, as token ids."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace file."""

    tokenizer: str  # the name of the model whose token ids it holds
    workloads: dict[str, tuple[TraceItem, ...]]


def load_trace(path: str | Path) -> Trace:
    """Load a trace file. Raises UsageError."""
    from pydantic import TypeAdapter, ValidationError

    try:
        with disk_errors(f"cannot read the trace file {path}", UsageError):
            data = Path(path).read_bytes()
        if data.startswith(GZIP_MAGIC):
            with gzip.open(path) as file:
                data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise ValueError(f"it unpacks to more than {_MAX_BYTES >> 20} MB")
        trace = TypeAdapter(Trace).validate_json(data, strict=True)
        for name, items in trace.workloads.items():
            if any(not item.output or min((*item.prompt, *item.output)) < 0 for item in items):
                raise ValueError(f"expected token ids from 0, and outputs, in workload {name!r}")
    except (OSError, ValueError, EOFError, zlib.error) as err:
        why = first_problem(err) if isinstance(err, ValidationError) else err
        raise UsageError(
            f"expected a trace file (JSON, optionally gzipped), got {path}: {why}"
        ) from err
    return trace


def find_tokenizer(name: str) -> Any | None:
    """Return the `tokenizers.Tokenizer` of an installed model by its name or hub repository."""
    from tokenizers import Tokenizer

    entries = load_catalog()
    for model in list_models():
        original = entries[model.name].homepage if model.name in entries else ""
        names = model.name, model.repository, original.removeprefix("https://huggingface.co/")
        file = model.path / "tokenizer.json"
        if name in names and file.is_file():
            with as_error(f"the tokenizer in {model.path} cannot be loaded", UnsupportedModel):
                return Tokenizer.from_file(str(file))
    return None


def read_prompts(path: Path) -> list[Workload]:
    """Load prompts from a text file, one a line. Raises UsageError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read prompts from {path}: {error}") from error
    prompts = [Workload("prompts", (WorkloadTurn(line),)) for line in lines if line]
    if not prompts:
        raise UsageError(f"no prompts in {path}: expected one per line")
    return prompts


def record(
    engine: Engine,
    prompts: Iterable[Workload],
    path: Path,
    max_tokens: int,
    progress: Callable[[str], None],
) -> int:
    """Record greedy answers in the trace file `path` and return the number of their tokens.

    Raises StoreError if the file cannot be written.
    """
    from akunu_py.engine.loop import StepLoop

    workloads: dict[str, list[dict[str, list[int]]]] = {}
    loop = StepLoop(engine)

    def answer(messages: list[Message]) -> str:
        prompt = engine.tokens.encode_chat(messages)
        done = loop.answer(prompt, GenerateOptions(max_tokens=max_tokens))
        items.append({"prompt": prompt, "output": list(done.tokens)})
        return done.text

    for number, workload in enumerate(prompts, 1):
        progress(f"{workload.name}: prompt {number}")
        items = workloads.setdefault(workload.name, [])
        workload.run_turns(answer)
    count = sum(len(item["output"]) for items in workloads.values() for item in items)
    data = json.dumps({"tokenizer": engine.name, "workloads": workloads}).encode()
    with disk_errors(f"cannot write {path}"):
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return count
