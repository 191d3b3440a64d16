"""Recommendations of models for a machine. Imports neither MLX nor numpy.

Plain decoding reads every active weight once per token, so the speed is estimated as bandwidth over
bytes (Pope et al. 2022, "Efficiently Scaling Transformer Inference", section 2).
"""

from dataclasses import dataclass

from akunu_py.models.catalog import CatalogEntry, load_catalog
from akunu_py.text import human_size

MIN_TOKENS_PER_S = 5.0  # tokens/s, about reading speed; faster models are preferred
_EFFICIENCY = 0.7  # share of the bandwidth that decode steps reach
_FLOAT32 = 4  # bytes of a weight on a CPU


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


def recommend(machine: Machine) -> list[Recommendation]:
    """Return the best model for chat, and the best for code."""
    entries = load_catalog().values()
    chat = [e for e in entries if "chat" in e.purpose and "code" not in e.purpose]
    code = [e for e in entries if "fim" in e.purpose]
    return [_best_of("chat", chat, machine), _best_of("code", code, machine)]


def _best_of(purpose: str, pool: list[CatalogEntry], machine: Machine) -> Recommendation:
    fitting = [entry for entry in pool if entry.fits(machine.memory)]
    fast = [entry for entry in pool if machine.tokens_per_s(entry) >= MIN_TOKENS_PER_S]
    available = f"{human_size(machine.memory)} are available here"
    if not fitting:
        smallest = min(pool, key=lambda entry: entry.memory_8k)
        needs = f"the smallest, {smallest.name}, needs {human_size(smallest.memory_8k)}"
        return Recommendation(purpose, None, f"no model fits: {needs}; {available}")
    suited = [entry for entry in fitting if entry in fast]
    if not suited:
        why = "the fastest model that fits; it is slower than reading speed here"
        return Recommendation(purpose, max(fitting, key=machine.tokens_per_s), why)
    best = max(suited, key=lambda entry: entry.grade)
    better_is_slow = any(entry.grade > best.grade for entry in fitting)
    fits = "fits and is fast enough" if better_is_slow else "fits"
    why = (
        f"the most capable model that {fits}: it needs "
        f"{human_size(best.memory_8k)} with 8,192 tokens of context, and {available}"
    )
    if better := [each for each in fast if each.grade > best.grade]:
        smallest = min(better, key=lambda entry: entry.memory_8k)
        why += f"; a better one, {smallest.name}, would need {human_size(smallest.memory_8k)}"
    return Recommendation(purpose, best, why)


def describe_speed(tokens_per_s: float) -> str:
    """Return a speed estimate as rounded text."""
    if tokens_per_s < 1:
        return "less than 1 token/s (estimate)"
    number = round(tokens_per_s) if tokens_per_s < 20 else round(tokens_per_s, -1)
    return f"about {number:.0f} tokens/s (estimate)"
