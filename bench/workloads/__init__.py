"""The workloads of the speed bench: one TOML file each, named after it, with maker and licence.

A workload is a conversation. Turns whose answer is given are examples; the others are answered by
the runner, each with its earlier answers in the prompt.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files

from akunu_py.errors import UsageError
from akunu_py.types import Message

NAMES = ("chat", "story", "code", "edit", "json", "summary", "question", "multi-turn")


@dataclass(frozen=True, slots=True)
class WorkloadTurn:
    """A user's message. assistant: the answer where it is given, None where it is measured."""

    user: str
    assistant: str | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """A named conversation, to be put through the model's chat template.

    max_tokens: where an answer is cut off, so that no loop of a small model is measured.
    """

    name: str
    turns: tuple[WorkloadTurn, ...]
    about: str = ""
    maker: str = ""
    licence: str = ""
    max_tokens: int = 128

    def talk(self, answer: Callable[[list[Message]], str]) -> list[str]:
        """Calls `answer` with the messages so far for each answer that is not given. Returns
        these answers."""
        messages: list[Message] = []
        answers = []
        for turn in self.turns:
            messages.append(Message("user", turn.user))
            reply = turn.assistant
            if reply is None:
                reply = answer(list(messages))
                answers.append(reply)
            messages.append(Message("assistant", reply))
        return answers


def load_workloads(names: Sequence[str] | None = None) -> list[Workload]:
    """The workloads of these names, all of them for None, in the order of `NAMES`.

    Raises UsageError for a name that is not among them.
    """
    if unknown := sorted(set(names or ()) - set(NAMES)):
        raise UsageError(f"no workload {', '.join(unknown)}; there are: {', '.join(NAMES)}")
    return [_load(name) for name in NAMES if names is None or name in names]


def _load(name: str) -> Workload:
    entry = tomllib.loads(files(__package__).joinpath(f"{name}.toml").read_text(encoding="utf-8"))
    turns = [
        WorkloadTurn(
            turn["user"].strip(), turn["assistant"].strip() if "assistant" in turn else None
        )
        for turn in entry.pop("turn")
    ]
    return Workload(name, tuple(turns), **entry)
