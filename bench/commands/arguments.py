"""Options that several actions of `akunu bench` have."""

from __future__ import annotations

import argparse

from akunu_py.bench.curve import CURVES
from akunu_py.types import DEFAULT_MODEL, WEIGHT_MODES


def lengths(text: str) -> list[int]:
    """Numbers of tokens, such as 512 or 0,1024."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = [-1]
    if any(value < 0 for value in values):
        raise argparse.ArgumentTypeError(f"expected numbers such as 512 or 0,1024, got {text!r}")
    return values


def temperature(text: str) -> float:
    """0 is greedy."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"expected a temperature from 0 to 100, got {text!r}")
    return value


def percent(text: str) -> float:
    """A share, given in per cent."""
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 < value < 100:
        raise argparse.ArgumentTypeError(f"expected per cent above 0 and below 100, got {text!r}")
    return value / 100


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEFAULT_MODEL, metavar="NAME_OR_PATH")
    parser.add_argument("--weights", choices=WEIGHT_MODES, default="auto")


def add_curve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--curve",
        default="m5max",
        metavar="CURVE",
        help=f"what passes cost: {', '.join(CURVES)}, points such as 1:1,3:1.11,5:1.42, or both: "
        "m5max,33:7",
    )


def add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=("text", "json"), default="text")
