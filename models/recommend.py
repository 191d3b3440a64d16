"""Which model of the catalogue suits a machine best, and why.

Owns the choice. It is made by memory and by the catalogue's own order of capability; how fast a
machine is, nobody knows before it was tried.
"""

from __future__ import annotations

from dataclasses import dataclass

from akunu_py.models import catalogue
from akunu_py.models.catalogue import CatalogueEntry
from akunu_py.text import human_size


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The best model for a `purpose`, None where none fits. why: in one sentence."""

    purpose: str
    entry: CatalogueEntry | None
    why: str


def recommend(memory: int) -> list[Recommendation]:
    """The best for chat and for code where `memory` bytes are to be had for a model."""
    entries = catalogue.load_catalogue().values()
    talkers = [e for e in entries if "chat" in e.purpose and "code" not in e.purpose]
    coders = [e for e in entries if "fim" in e.purpose]
    return [_best("chat", talkers, memory), _best("code", coders, memory)]


def _best(purpose: str, able: list[CatalogueEntry], memory: int) -> Recommendation:
    able = sorted(able, key=lambda entry: entry.grade)
    fitting = [entry for entry in able if entry.fits(memory)]
    if not fitting:
        smallest = min(able, key=lambda entry: entry.memory_8k)
        why = (
            f"none fits: the smallest, {smallest.name}, takes {human_size(smallest.memory_8k)} of "
            f"the {human_size(memory)} that a model can have here"
        )
        return Recommendation(purpose, None, why)
    best = fitting[-1]
    why = (
        f"the most capable of {len(able)} that leaves room: it takes "
        f"{human_size(best.memory_8k)} with 8,192 tokens of context, of the {human_size(memory)} "
        "that a model can have here"
    )
    better = [entry for entry in able if entry.grade > best.grade]
    if better:
        least = min(better, key=lambda entry: entry.memory_8k)
        why += f"; a better one, {least.name}, would take {human_size(least.memory_8k)}"
    return Recommendation(purpose, best, why)
