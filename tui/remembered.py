"""What the chat remembers from run to run besides conversations: the text that was not sent, and
whether the drafting view has explained itself."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from akunu_py.errors import AkunuError
from akunu_py.files import read_bounded, write_atomically

_MAX_BYTES = 4 << 20


@dataclass
class Remembered:
    """unsent: what was in the prompt box at the end. explained: drafting was."""

    unsent: str = ""
    explained: bool = False


def recall(path: Path) -> Remembered:
    """What is in the file at `path`; nothing where it cannot be read."""
    found = Remembered()
    with contextlib.suppress(OSError, ValueError, RecursionError, AkunuError):
        content = json.loads(read_bounded(path, _MAX_BYTES))
        if isinstance(content, dict):
            if isinstance(unsent := content.get("unsent"), str):
                found.unsent = unsent
            found.explained = content.get("explained") is True
    return found


def remember(path: Path, remembered: Remembered) -> None:
    """Writes the file, readable by its owner alone, unless it says so already; a disk that refuses
    loses no more than this."""
    if recall(path) == remembered:
        return
    with contextlib.suppress(OSError, ValueError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(remembered)).encode())
