"""Conversations with the target's hidden states, one file each, so that an interrupt loses none."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from akunu_py.engine.histories.disk import tensor_entry
from akunu_py.files import disk_errors, replacing
from akunu_py.models.load.safetensors import write_safetensors

_HELD_OUT = 8  # of so many greedy answers, acceptance is measured on one


def write_tensors(path: Path, tensors: Mapping[str, mx.array], facts: object) -> None:
    """Write a safetensors file completely or not at all. facts: for JSON. Raises StoreError."""
    mx.eval(list(tensors.values()))
    entries = [tensor_entry(name, value) for name, value in tensors.items()]
    metadata = {"format": "mlx", "akunu": json.dumps(facts)}
    with disk_errors(f"cannot write {path}"), replacing(path) as new, new.open("wb") as file:
        write_safetensors(file, metadata, entries)


def read_tensors(path: Path) -> tuple[dict[str, mx.array], Any]:
    """Return the tensors, read on first use, and the facts of a file by `write_tensors`."""
    tensors, metadata = mx.load(str(path), return_metadata=True)
    return tensors, json.loads(metadata["akunu"])


@dataclass(frozen=True, slots=True)
class TrainingChat:
    """A prompt and its answer, stored in a file."""

    tokens: Sequence[int]  # all but the last have hidden states
    answer: int  # index of the answer's first token
    greedy: bool  # how the answer was sampled
    held_out: bool  # acceptance is measured on it, instead of training
    path: Path

    def states(self) -> mx.array:
        """Return the hidden states [tokens - 1, width], read on first use."""
        return read_tensors(self.path)[0]["states"]


class Dataset:
    """The conversations in a directory."""

    def __init__(self, directory: Path) -> None:
        """Create the directory if it is missing. Raises StoreError."""
        self._directory = directory
        self.conversations: list[TrainingChat] = []
        self.answer_tokens = self.nbytes = 0
        with disk_errors(f"cannot use {directory}"):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in sorted(directory.iterdir()):
                if not path.stem.isdigit():
                    if path.name.startswith("."):  # an unfinished file
                        path.unlink()
                    continue
                try:
                    tensors, (answer, greedy, held_out) = read_tensors(path)
                    tokens = tensors["tokens"].tolist()
                    self._append(TrainingChat(tokens, answer, greedy, held_out, path))
                except OSError:
                    continue  # such as too many open files
                except Exception:  # noqa: BLE001 - a crash cut the file off; MLX raises anything
                    path.unlink()

    def _append(self, added: TrainingChat) -> None:
        self.conversations.append(added)
        self.answer_tokens += len(added.tokens) - added.answer
        self.nbytes += added.path.stat().st_size

    def add(self, tokens: Sequence[int], answer: int, greedy: bool, states: mx.array) -> None:
        """Store a conversation; see `TrainingChat`. states: bfloat16. Raises StoreError."""
        number = int(self.conversations[-1].path.stem) + 1 if self.conversations else 0
        path = self._directory / f"{number:08}.safetensors"
        count = sum(each.greedy for each in self.conversations)
        held_out = greedy and count % _HELD_OUT == 0
        tensors = {"tokens": mx.array(tokens, mx.int32), "states": states}
        write_tensors(path, tensors, [answer, greedy, held_out])
        self._append(TrainingChat(tokens, answer, greedy, held_out, path))

    def frequent_tokens(self, count: int, vocabulary: int) -> list[int]:
        """Return the `count` most frequent tokens of the answers, ascending.

        Tokens that never appeared follow in the order of the vocabulary: common ones come first.
        """
        seen = Counter(token for c in self.conversations for token in c.tokens[c.answer :])
        return sorted(sorted(range(vocabulary), key=lambda token: -seen[token])[:count])
