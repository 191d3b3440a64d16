"""The networks that draft beside the n-grams, as `types.DraftNetwork` has them: which of them a
model offers, and who may have them draft."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from akunu_py.decoding.engine import Engine
from akunu_py.decoding.networks import exit as first_layers
from akunu_py.decoding.networks import model, mtp
from akunu_py.decoding.target import Target
from akunu_py.errors import UsageError
from akunu_py.types import DraftMode, DraftNetwork


class Offer(NamedTuple):
    """A kind of network.

    missing: why the engine cannot have it, "" where it can. make: one for the history of a target.
    by_itself: whether `--draft auto` uses it.
    """

    missing: Callable[[Engine], str]
    make: Callable[[Engine, Target], DraftNetwork]
    by_itself: bool


# By the draft mode that has one draft alone: a module, and a line here.
NETWORKS: Mapping[DraftMode, Offer] = {
    "mtp": Offer(mtp.missing, mtp.make, by_itself=True),
    "model": Offer(model.missing, model.make, by_itself=True),
    "exit": Offer(first_layers.missing, first_layers.make, by_itself=False),
}


def check_mode(engine: Engine, mode: DraftMode) -> None:
    """Raises UsageError where `mode` asks for a network that there is none of."""
    offer = NETWORKS.get(mode)
    if offer is not None and (why := offer.missing(engine)):
        raise UsageError(f"--draft {mode}: {why}")


def networks_for(engine: Engine, target: Target, mode: DraftMode) -> list[DraftNetwork]:
    """New ones of those that `mode` has draft."""
    return [
        offer.make(engine, target)
        for name, offer in NETWORKS.items()
        if (name == mode or (mode == "auto" and offer.by_itself)) and not offer.missing(engine)
    ]
