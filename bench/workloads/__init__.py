"""The workloads of the speed bench, one TOML file each.

A workload is a conversation. Turns with a given answer are examples; a runner answers the others.
"""

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files

from akunu_py.errors import UsageError
from akunu_py.types import Message

NAMES = ("chat", "story", "code", "edit", "json", "summary", "question", "multi-turn", "agent")


@dataclass(frozen=True, slots=True)
class WorkloadTurn:
    user: str
    assistant: str | None = None  # the given answer; None if a runner answers


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    turns: tuple[WorkloadTurn, ...]
    max_tokens: int = 128  # limit of an answer; longer ones of small models end in loops

    def run_turns(self, answer: Callable[[list[Message]], str]) -> list[str]:
        """Return the answers of `answer`, which gets the messages so far."""
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
    """Return the named workloads in the order of `NAMES`, all for None. Raises UsageError."""
    if unknown := sorted(set(names or ()) - set(NAMES)):
        raise UsageError(f"no workload {', '.join(unknown)}; workloads: {', '.join(NAMES)}")
    return [_load(name) for name in NAMES if names is None or name in names]


def _load(name: str) -> Workload:
    entry = tomllib.loads(files(__package__).joinpath(f"{name}.toml").read_text(encoding="utf-8"))
    turns = [{role: text.strip() for role, text in turn.items()} for turn in entry["turn"]]
    return Workload(name, tuple(WorkloadTurn(**turn) for turn in turns), entry["max_tokens"])
