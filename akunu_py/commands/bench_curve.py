"""`akunu bench curve`: what a pass over 1 to 32 positions costs here."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from akunu_py.arguments import positive
from akunu_py.commands.bench_common import add_format, add_model
from akunu_py.ngram.planner import choose_length

if TYPE_CHECKING:
    from akunu_py.decoding.engine import Engine
_BAR = 40  # characters
_CHANCES = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=positive, default=7, metavar="N")
    parser.add_argument("--context", type=positive, metavar="TOKENS")
    add_model(parser)
    add_format(parser)


def curve(options: argparse.Namespace) -> int:
    from akunu_py.bench.curve import CONTEXT, measure_curve
    from akunu_py.decoding.load import load_engine

    engine = load_engine(options.model, options.weights)
    context = options.context or CONTEXT
    costs = measure_curve(engine, range(1, 33), options.repeats, context)
    if options.format == "json":
        print(json.dumps(curve_as_dict(engine, costs, context), indent=1))
    else:
        print_curve(engine, costs, context)
    return 0


def machine(engine: Engine) -> dict[str, Any]:
    """What a figure depends on."""
    from akunu_py.decoding import device

    return {
        "model": engine.name,
        "weights": engine.weights,
        "device": device.device_name(),
        "blas": device.blas_name(),
    }


def curve_as_dict(engine: Engine, costs: Mapping[int, float], context: int) -> dict[str, Any]:
    return machine(engine) | {
        "context": context,
        "curve_s": {str(count): round(seconds, 6) for count, seconds in costs.items()},
        "draft_tokens_at_acceptance": {
            str(chance): best_length(costs, chance) for chance in _CHANCES
        },
    }


def print_curve(engine: Engine, costs: Mapping[int, float], context: int) -> None:
    print(" · ".join(f"{name} {value}" for name, value in machine(engine).items()))
    print(f"\none pass over N positions, {context} tokens in the cache:")
    most = max(costs.values())
    for count, seconds in costs.items():
        bar = "█" * round(_BAR * seconds / most)
        print(f"  {count:>2}  {seconds * 1e3:>7.1f} ms  {seconds / costs[1]:>5.2f}  {bar}")
    print("\nwhat the planner drafts where each token is accepted with the same chance:")
    print("  chance  " + "".join(f"{chance:>6.0%}" for chance in _CHANCES))
    print("  tokens  " + "".join(f"{best_length(costs, chance):>6}" for chance in _CHANCES))


def best_length(costs: Mapping[int, float], chance: float) -> int:
    """The draft length that the planner settles on when every token has the same chance.

    The rate that the planner charges with is the one that its own choice earns: a fixed point.
    """
    table = [costs[count] / costs[1] for count in sorted(costs)]
    chances = [chance] * len(table)
    rate, length = 1.0, 0
    for _ in range(20):
        length = choose_length(chances, table, rate, len(table) - 1)
        expected = (1 - chance ** (length + 1)) / (1 - chance)
        rate = max(1.0, expected / table[length])
    return length
