"""How fast a model will decode on a machine, before anybody tried: an estimate.

Plain decoding reads every active weight once for each token, so that it is bound by memory:
tokens a second are the bandwidth over the bytes read (Pope et al. 2022, "Efficiently Scaling
Transformer Inference", section 2). Drafting makes it faster. Imports neither MLX nor numpy.
"""

from __future__ import annotations

from dataclasses import dataclass

from akunu_py.models.catalogue import CatalogueEntry

PLEASANT = 5.0  # tokens a second: about as fast as one reads; a slower model is not recommended
_EFFICIENCY = 0.7  # of the bandwidth, that passes really get
_FLOAT32 = 4  # bytes of a weight on a CPU, where they are laid out so


@dataclass(frozen=True, slots=True)
class Machine:
    """What does not change with what else runs. memory: bytes that a model may take. bandwidth:
    bytes of weights a second that a pass can read. plain: weights are laid out as float32."""

    memory: int
    bandwidth: float
    plain: bool = False

    def tokens_per_s(self, entry: CatalogueEntry) -> float:
        """Of plain decoding, estimated."""
        active = entry.active_parameters or entry.parameters
        size = active * _FLOAT32 if self.plain else entry.weight_bytes * active / entry.parameters
        return _EFFICIENCY * self.bandwidth / size

    def suits(self, entry: CatalogueEntry) -> bool:
        """Whether it fits and is fast enough to talk to."""
        return entry.fits(self.memory) and self.tokens_per_s(entry) >= PLEASANT


def describe_speed(tokens_per_s: float) -> str:
    """An estimate in words, rounded as such."""
    if tokens_per_s < 1:
        return "less than 1 token/s (estimate)"
    number = round(tokens_per_s) if tokens_per_s < 20 else round(tokens_per_s, -1)
    return f"about {number:.0f} tokens/s (estimate)"
