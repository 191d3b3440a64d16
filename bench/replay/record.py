"""Writes trace files from real runs, so that users can replay their own work."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable
from pathlib import Path

from akunu_py.bench.workloads import Workload, WorkloadTurn
from akunu_py.decoding.engine import Engine
from akunu_py.decoding.session import Session
from akunu_py.errors import StoreError, UsageError
from akunu_py.types import GenerateOptions, Message


def read_prompts(path: Path) -> list[Workload]:
    """Prompts from a text file, one a line; or from JSON lines {"workload", "prompt"}.

    Raises UsageError where the file cannot be read or holds no prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read prompts from {path}: {error}") from error
    prompts = [
        _parse_line(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line
    ]
    if not prompts:
        raise UsageError(f"no prompts in {path}: expected one a line")
    return prompts


def _parse_line(line: str, where: str) -> Workload:
    if not line.lstrip().startswith("{"):
        return Workload("prompts", (WorkloadTurn(line),))
    try:
        entry = json.loads(line)
        return Workload(
            str(entry.get("workload", "prompts")), (WorkloadTurn(str(entry["prompt"])),)
        )
    except (ValueError, KeyError, RecursionError) as error:
        raise UsageError(f'{where}: expected {{"workload": ..., "prompt": ...}}') from error


def record(
    engine: Engine,
    prompts: Iterable[Workload],
    path: Path,
    max_tokens: int,
    progress: Callable[[str], None],
) -> int:
    """Answers each prompt greedily and writes the trace file `path`. Returns the answers' tokens.

    Raises StoreError where the file cannot be written.
    """
    workloads: dict[str, list[dict[str, list[int]]]] = {}
    session = Session(engine)
    for number, workload in enumerate(prompts, 1):
        progress(f"{workload.name}: prompt {number}")
        items = workloads.setdefault(workload.name, [])

        def answer(messages: list[Message], items: list[dict[str, list[int]]] = items) -> str:
            prompt = engine.encode_chat(messages)
            done = session.generate(prompt, GenerateOptions(max_tokens=max_tokens)).answer()
            items.append({"prompt": prompt, "output": list(done.tokens)})
            return done.text

        workload.talk(answer)
    count = sum(len(item["output"]) for items in workloads.values() for item in items)
    text = json.dumps({"tokenizer": engine.name, "workloads": workloads})
    data = text.encode()
    try:
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}") from error
    return count
