"""When a model was last used, and how its estimate of memory compared with what was measured.

One small file per model under `.usage` in the store, replaced whole. It is worth nothing that a
load should fail for: a disk that refuses is ignored, and what cannot be read counts as nothing.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from akunu_py import paths
from akunu_py.files import read_json, write_atomically

DIRECTORY = ".usage"
_MAX_BYTES = 10_000


@dataclass(frozen=True, slots=True)
class Usage:
    """What is recorded of a model. used: ISO 8601, UTC. weights: their format in words.

    In bytes: estimated_weights and measured_weights right after loading; estimated_peak and
    measured_peak over an answer, at `tokens` of context. 0 where nothing is known.
    """

    used: str = ""
    weights: str = ""
    estimated_weights: int = 0
    measured_weights: int = 0
    tokens: int = 0
    estimated_peak: int = 0
    measured_peak: int = 0


def read_usage(name: str) -> Usage:
    """What is known of the use of the model `name`."""
    with contextlib.suppress(OSError, ValueError):
        raw = read_json(_path(name), _MAX_BYTES)
        if isinstance(raw, dict):
            known: dict[str, Any] = {
                field.name: raw.get(field.name)
                for field in fields(Usage)
                if type(raw.get(field.name)) is type(field.default)
            }
            return Usage(**known)
    return Usage()


def note_usage(name: str, **changes: Any) -> None:
    """Records `changes` of a Usage, and that the model is used now."""
    with contextlib.suppress(OSError):
        now = datetime.now(UTC).isoformat(timespec="seconds")
        usage = replace(read_usage(name), used=now, **changes)
        path = _path(name)
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, json.dumps(asdict(usage)).encode())


def forget_usage(name: str) -> None:
    """Removes what is recorded of the model `name`."""
    with contextlib.suppress(OSError):
        _path(name).unlink()


def _path(name: str) -> Path:
    return paths.models_dir() / DIRECTORY / f"{name}.json"
