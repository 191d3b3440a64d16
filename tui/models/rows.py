"""The models that a person can choose from, as plain rows: those here first, then the catalogue.

Owns the order and the words; knows nothing of widgets. Measuring the machine's memory imports MLX,
so `available_memory` belongs into another thread than the one that draws.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from akunu_py.errors import AkunuError
from akunu_py.models import catalogue, store
from akunu_py.models.catalogue import CatalogueEntry, recommend
from akunu_py.text import human_size
from akunu_py.tui.session.threads import release_streams

Fits = Literal["fits", "too large", "unknown"]


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A model. size: bytes on disk or to fetch. memory: bytes that it takes with 8,192 tokens of
    context, 0 where not known. damaged: what is wrong, empty where nothing is known to be."""

    name: str
    title: str
    description: str
    size: int
    memory: int
    context: int
    licence: str
    here: bool
    fits: Fits = "unknown"
    damaged: str = ""

    @property
    def facts(self) -> str:
        """Licence, context and size in one line."""
        parts = [
            self.licence,
            f"{self.context:,} tokens of context" if self.context else "",
            f"{human_size(self.size)} {'on disk' if self.here else 'to fetch'}"
            if self.size
            else "",
        ]
        return " · ".join(part for part in parts if part)


def available_memory() -> int:
    """Bytes that a model may take on this machine. Imports MLX."""
    from akunu_py.decoding import device

    try:
        return device.available_memory()
    finally:
        release_streams()


def model_rows(memory: int | None) -> list[ModelRow]:
    """All models: those here by name, then those that can be fetched, the fitting ones first.

    memory: bytes that a model may take; None where that is not known yet. A store that cannot be
    read counts as empty: loading a model says what is wrong with it.
    """
    entries = catalogue.load_catalogue()
    try:
        stored = store.list_models()
    except AkunuError:
        stored = []
    here = [_here(model, entries.get(model.name), memory) for model in stored]
    names = {row.name for row in here}
    more = [_to_fetch(entry, memory) for entry in entries.values() if entry.name not in names]
    return [*here, *sorted(more, key=lambda row: row.fits == "too large")]


def better_model(current: str) -> ModelRow | None:
    """The model for chat that this machine should have instead of the catalogue's `current`.

    One that is here and fits comes before any that would have to be fetched. None where `current`
    is the best, or is not of the catalogue: whoever brought it knows why. Imports MLX.
    """
    entries = catalogue.load_catalogue()
    if current not in entries:
        return None
    grade = entries[current].grade
    memory = available_memory()
    rows = {row.name: row for row in model_rows(memory)}
    here = [
        name
        for name, row in rows.items()
        if row.here
        and row.fits == "fits"
        and not row.damaged
        and "chat" in entries[name].purpose
        and entries[name].grade > grade
    ]
    if here:
        return rows[max(here, key=lambda name: entries[name].grade)]
    best = recommend(memory)[0].entry
    return rows[best.name] if best is not None and best.grade > grade else None


def matching(rows: Iterable[ModelRow], words: str) -> list[ModelRow]:
    """The rows in which all of `words` occur, in any case."""
    wanted = words.lower().split()
    return [
        row
        for row in rows
        if all(word in f"{row.name} {row.title} {row.description}".lower() for word in wanted)
    ]


def _here(model: store.StoredModel, entry: CatalogueEntry | None, memory: int | None) -> ModelRow:
    return ModelRow(
        name=model.name,
        title=entry.title if entry else model.name,
        description=entry.description if entry else model.source,
        size=model.size,
        memory=entry.memory_8k if entry else 0,
        context=model.context_length,
        licence=model.licence,
        here=True,
        fits=_fits(entry, memory),
        damaged=model.damaged,
    )


def _to_fetch(entry: CatalogueEntry, memory: int | None) -> ModelRow:
    return ModelRow(
        name=entry.name,
        title=entry.title,
        description=entry.description,
        size=entry.download_bytes,
        memory=entry.memory_8k,
        context=entry.context,
        licence=entry.licence,
        here=False,
        fits=_fits(entry, memory),
    )


def _fits(entry: CatalogueEntry | None, memory: int | None) -> Fits:
    if entry is None or memory is None:
        return "unknown"
    return "fits" if entry.fits(memory) else "too large"
