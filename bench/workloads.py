"""The prompts that the speed bench decodes."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Workload:
    """A named prompt, to be put through the model's chat template."""

    name: str
    prompt: str


def load_workloads() -> list[Workload]:
    """All built-in workloads, in the order of the file."""
    text = files(__package__).joinpath("workloads.toml").read_text(encoding="utf-8")
    return [
        Workload(entry["name"], entry["prompt"].strip())
        for entry in tomllib.loads(text)["workload"]
    ]
