"""How the bench's figures are printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from akunu_py import backend
from akunu_py.bench.curve import CONTEXT
from akunu_py.bench.speed import BASELINE, Series
from akunu_py.engine import Engine
from akunu_py.ngram.planner import choose_length

_BAR = 40  # characters
_CHANCES = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99)


def machine(engine: Engine) -> dict[str, Any]:
    """What a figure depends on."""
    return {
        "model": engine.name,
        "weights": engine.weights,
        "device": backend.device_name(),
        "blas": backend.blas_name(),
    }


def speed_as_dict(
    engine: Engine, costs: Mapping[int, float], rows: Sequence[Series]
) -> dict[str, Any]:
    runs = [
        {
            "workload": row.workload,
            "contestant": row.contestant,
            "prompt_tokens": row.prompt_tokens,
            "generated_tokens": len(row.tokens),
            "tokens_per_s": round(row.tokens_per_s, 2),
            "tokens_per_pass": round(row.tokens_per_pass, 3),
            "acceptance_rate": round(row.acceptance_rate, 3),
            "prefill_s": row.prefill_s,
            "decode_s": row.decode_s,
            "identical": row.identical,
        }
        for row in rows
    ]
    curve = {str(count): round(seconds, 6) for count, seconds in costs.items()}
    return machine(engine) | {"curve_s": curve, "runs": runs}


def print_speed(engine: Engine, costs: Mapping[int, float], rows: Sequence[Series]) -> None:
    _print_machine(engine)
    print(f"\none pass over N positions, {CONTEXT} tokens in the cache:")
    print("  N       " + "".join(f"{count:>7}" for count in costs))
    print("  ms      " + "".join(f"{seconds * 1e3:>7.1f}" for seconds in costs.values()))
    print("  passes  " + "".join(f"{seconds / costs[1]:>7.2f}" for seconds in costs.values()))
    print(
        f"\n{'workload':<10}{'':<8}{'tokens':>7}{'tokens/s':>10}{'x mlx-lm':>10}"
        f"{'tokens/pass':>13}{'accepted':>10}  identical"
    )
    baseline = 0.0
    for row in rows:
        if row.contestant == BASELINE:
            baseline = row.tokens_per_s
        ratio = row.tokens_per_s / baseline if baseline else 0.0
        print(
            f"{row.workload:<10}{row.contestant:<8}{len(row.tokens):>7}{row.tokens_per_s:>10.1f}"
            f"{ratio:>10.2f}{row.tokens_per_pass:>13.2f}{row.acceptance_rate:>10.0%}"
            f"  {'yes' if row.identical else 'NO'}"
        )


def curve_as_dict(engine: Engine, costs: Mapping[int, float], context: int) -> dict[str, Any]:
    return machine(engine) | {
        "context": context,
        "curve_s": {str(count): round(seconds, 6) for count, seconds in costs.items()},
        "draft_tokens_at_acceptance": {
            str(chance): best_length(costs, chance) for chance in _CHANCES
        },
    }


def print_curve(engine: Engine, costs: Mapping[int, float], context: int) -> None:
    _print_machine(engine)
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


def _print_machine(engine: Engine) -> None:
    print(" · ".join(f"{name} {value}" for name, value in machine(engine).items()))
