"""What the actions of `akunu bench` print, as text for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from akunu_py.bench.report import tables
from akunu_py.bench.result import Result, half_range, median
from akunu_py.types import Stats

if TYPE_CHECKING:
    from akunu_py.bench.chat import ChatResult
    from akunu_py.bench.check import Check
    from akunu_py.bench.compare import Comparison
    from akunu_py.bench.fidelity import FidelitySummary
    from akunu_py.bench.oracle.places import Place
    from akunu_py.bench.profile import Profile

_BAR = 40  # characters
_CONTEXTS = ("the prompt alone", "+ the rest of the buffer", "+ the other files")
_FIDELITY_NOTE = """\
Answers with drafts beside the same without. Where one differs it is at a near-tie: a pass
over several rows rounds otherwise than a pass over one. Margin: by how much the likeliest token's
logit exceeds the second's where an answer first differs, the largest and the median of them.
"""
_DIVERGENCES = 5  # printed for each precision and mode; --format json has all
_PROFILE_NOTE = """\
Milliseconds a pass, medians. The stages are told apart by waiting for each, which costs the head
start of plain steps; "in use" is the same without. Drawing is the chat's, in characters of 80 x 24,
each pass drawn for itself; it goes on beside the passes, and is not in the sum.
"""
_TABLE_1 = """\
Leviathan et al. (2023), table 1: a is the chance that a drafted token is accepted, g how many are
drafted; drafting costs nothing. Speed as in the paper, where a pass over any number of positions
takes as long as one, and by the costs measured here.
"""
_TABLE_4 = """\
Table 4: drafts of a fixed length. a and c (what drafting a token costs, in plain steps) are
measured; then tokens a pass and times as fast, predicted and measured.
"""


def print_speed(result: Result, format_: str) -> None:
    """format_: text, md, csv, json or jsonl."""
    texts = {"csv": tables.to_csv, "json": Result.to_json, "jsonl": tables.to_jsonl}
    if format_ in texts:
        print(texts[format_](result), end="")
        return
    layout = tables.to_markdown if format_ == "md" else tables.to_text
    print(tables.heading(result), end="\n\n")
    for table in (
        tables.throughput_table(result),
        tables.curve_table(result),
        tables.speed_table(result),
    ):
        if table[1]:
            print(layout(table))
    for line in tables.notes(result):
        print(line)


def print_curve(
    setup: Mapping[str, str], costs: Mapping[int, float], found: dict[str, Any]
) -> None:
    """found: as in JSON."""
    print(" · ".join(f"{name} {value}" for name, value in setup.items()))
    print(f"\none pass over N positions, {found['context']} tokens in the cache:")
    most = max(costs.values())
    for count, seconds in costs.items():
        bar = "█" * round(_BAR * seconds / most)
        print(f"  {count:>2}  {seconds * 1e3:>7.1f} ms  {seconds / costs[1]:>5.2f}  {bar}")
    lengths = found["draft_tokens_at_acceptance"]
    print("\nwhat the planner drafts where each token is accepted with the same chance:")
    print("  chance  " + "".join(f"{float(chance):>6.0%}" for chance in lengths))
    print("  tokens  " + "".join(f"{length:>6}" for length in lengths.values()))


def print_exits(found: dict[str, Any]) -> None:
    """found: as in JSON."""
    headings = ["layers", "agreement", "of a step", "reused", "speed at best"]
    cells = [
        [str(row["layers"]), f"{row['agreement']:.0%}", f"{row['share']:.2f}",
         f"{row['reused']:.2f}", f"{row['promise']:.2f}"]
        for row in found["exits"]
    ]  # fmt: skip
    print(tables.to_text((headings, cells)), end="")
    print(f"\nchosen among eighths of the layers: {found['chosen']}")


def print_theory(result: Result, found: dict[str, Any]) -> None:
    """Tables 1 and 4 of the paper. found: as in JSON."""
    print(tables.heading(result), end="\n\n")
    print(_TABLE_1)
    cells = [
        [f"{row['chance']:.1f}", str(row["drafted"]), f"{row['operations']:.2f}",
         f"{row['speed_by_paper']:.2f}", f"{row['speed_by_curve']:.2f}", str(row["best"])]
        for row in found["table_1"]
    ]  # fmt: skip
    headings = ["a", "g", "operations", "speed, paper", "speed, here", "best g here"]
    print(tables.to_text((headings, cells)))
    print(_TABLE_4)
    print(tables.to_text(tables.theory_table(result)), end="")


def print_profiles(profiles: Sequence[Profile], stages: Sequence[str]) -> None:
    print(_PROFILE_NOTE)
    cells = []
    for one in profiles:
        passes = max(1, one.passes)
        times = [one.stages_s[stage] for stage in stages]
        each = [*times, one.staged_s, one.unstaged_s, one.drawing_s]
        cells.append([one.workload, str(one.passes), str(one.tokens)]
                     + [f"{1e3 * seconds / passes:.2f}" for seconds in each])  # fmt: skip
        cells.append(["", "", ""] + [f"{seconds / one.staged_s:.1%}" for seconds in times])
        cells[-1] += ["", "", ""]
    headings = ["workload", "passes", "tokens", *stages, "sum", "in use", "drawing"]
    print(tables.to_text((headings, cells)), end="")


def print_fidelity(summaries: Sequence[FidelitySummary]) -> None:
    print(_FIDELITY_NOTE)
    headings = ["weights", "drafts", "answers", "tokens", "drafted", "drafting passes",
                "differing", "largest margin", "median"]  # fmt: skip
    cells = []
    for each in summaries:
        margins = [m for _, divergence in each.differences if (m := divergence.margin) is not None]
        cells.append(
            [each.weights, each.mode, str(each.answers), str(each.tokens), str(each.drafted),
             str(each.drafting_passes), str(len(each.differences)),
             f"{max(margins):.2g}" if margins else "-",
             f"{median(margins):.2g}" if margins else "-"]
        )  # fmt: skip
    print(tables.to_text((headings, cells)), end="")
    for each in summaries:
        for prompt, divergence in each.differences[:_DIVERGENCES]:
            margin = "?" if divergence.margin is None else f"{divergence.margin:.2g}"
            print(f"{each.weights}, {each.mode}: token {divergence.position} after {prompt!r}, "
                  f"margin {margin}")  # fmt: skip


def print_comparisons(comparisons: Sequence[Comparison], unit: str, slower: bool) -> None:
    cells = [
        [c.runner, c.test, f"{c.before:.2f}", f"{c.after:.2f}", f"{c.ratio - 1:+.1%}",
         f"{c.p:.2g}", c.verdict]
        for c in comparisons
    ]  # fmt: skip
    headings = ["loop", "test", f"A, {unit}", f"B, {unit}", "change", "p", "verdict"]
    print(tables.to_text((headings, cells)))
    if any(c.plain and c.verdict in ("slower", "faster") for c in comparisons):
        print("A plain loop of others changed too, so the machine did: see --against-baseline.")
    print(f"B is slower than A: {'yes' if slower else 'no'}")


def print_completion(found: dict[str, Any]) -> None:
    """found: as in JSON."""
    replay, live = found["replay"], found["live"]
    print(f"what really stands at {replay['places']} places, planned for {found['curve']}")
    for name, contexts in replay["projects"].items():
        _print_contexts(name, contexts)
    if live["places"]:
        same = "the same text each time" if live["identical"] else "NOT the same text"
        print(f"\nwhat {found['model']} completes at {live['places']} of them: {same}")
        contexts = {name: counts for name, counts in live.items() if isinstance(counts, dict)}
        _print_contexts("", contexts)
    keys = found["keystrokes"]
    print(
        f"\nopening a buffer: {keys['first']} tokens read; a letter that was not predicted: "
        f"{keys['typed']}; one that was: {keys['predicted']} passes; a request that was given up: "
        f"{keys['superseded']} passes more"
    )


def _print_contexts(name: str, contexts: Mapping[str, Any]) -> None:
    for words, counts in zip(_CONTEXTS, contexts.values(), strict=True):
        print(
            f"  {name:<6} {words:<25} {counts['tokens']:>6} tokens {counts['passes']:>6} "
            f"passes {counts['tokens_per_pass']:>6.2f} a pass  x{counts['gain']:.2f}"
        )
        name = ""


def print_oracle(found: dict[str, Any]) -> None:
    """found: as in JSON."""
    print(
        "what the rules keep of the true text: brackets balanced, nothing lost or repeated; whole"
    )
    for name, score in [*found["languages"].items(), ("all", found["all"])]:
        print(
            f"  {name:<11} {score['places']:>6} places {score['safe']:>8.2%} safe "
            f"{score['blocks']:>6} blocks {score['complete']:>8.2%} whole"
        )


def print_definitions(
    budgets: Sequence[int], found: Mapping[str, Mapping[str, Sequence[float]]]
) -> None:
    """found: as in JSON."""
    print(f"calls whose definition the model reads, at {', '.join(map(str, budgets))} tokens")
    for name, shares in sorted(found.items()):
        cells = [
            f"{way} " + " ".join(f"{share:7.1%}" for share in each)
            for way, each in shares.items()
            if way != "calls"
        ]
        print(f"  {name:<11} {int(shares['calls'][0]):>5} calls  {'   '.join(cells)}")


def print_fault(place: Place, mode: str, verdict: str, kept: str) -> None:
    """A place where not the right text was kept, with that and the right one."""
    print(f"\n{place.describe()}, the output {mode}: {verdict}")
    print(f"  taken out {place.taken!r}\n  kept      {kept!r}\n  behind    {place.behind[:80]!r}")


def print_structured(found: dict[str, Any]) -> None:
    """found: as in JSON."""
    print(f"{found['model']}, tokens a pass, planned for {found['curve']}\n")
    cells = [
        [source, layout, str(by_drafter["both"]["items"]), str(by_drafter["both"]["tokens"])]
        + [f"{counts['tokens_per_pass']:.2f}" for counts in by_drafter.values()]
        for source, layouts in found["sources"].items()
        for layout, by_drafter in layouts.items()
    ]
    names = ["both", "n-grams", "forced"]
    print(tables.to_text((["source", "whitespace", "answers", "tokens", *names], cells)))


def print_check(check: Check) -> None:
    """The verdicts; the figures behind them are in the file."""
    print(tables.to_text(tables.check_table(check.lines)))
    verdicts = Counter(line.verdict for line in check.lines)
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))


def print_chat(model: str, draft: str, result: ChatResult) -> None:
    from akunu_py.bench.chat import GOAL_MS, GOAL_RATIO, GOAL_WORST_MS

    print(f"{model}, drafting {draft}, in a terminal of 80 x 24\n")
    cells = [
        [name, str(len(keys.seconds)), str(keys.lost)]
        + [
            f"{1e3 * each:.1f}" if keys.seconds else "–"
            for each in (keys.median, keys.p95, keys.worst)
        ]
        for name, keys in result.keys.items()
    ]
    print(
        tables.to_text(
            (["ms from key to letter", "keys", "lost", "median", "95 %", "worst"], cells)
        )
    )
    sides = (("without the chat", result.alone), ("in the chat", result.chat))
    cells = [[name, *_speed_cells([stats for _, stats in answers])] for name, answers in sides]
    print(tables.to_text((["decoding", "answers", "tokens", "t/s", "±", "tokens/pass"], cells)))
    if result.ratio:
        same = "the same answer" if result.identical else "NOT the same answer each time"
        print(f"in the chat: x{result.ratio:.3f} ± {result.spread:.3f}; {same}")
    goals = f"a median of {GOAL_MS} ms and {GOAL_WORST_MS} ms at worst while decoding"
    print(f"goals: {goals}, x{GOAL_RATIO} at least")
    if result.history:
        print(f"the long chat: {result.history} tokens before the answer")


def _speed_cells(answers: Sequence[Stats]) -> list[str]:
    if not answers:
        return ["0", "–", "–", "–", "–"]
    rates = [stats.tokens_per_s for stats in answers]
    per_pass = median([stats.tokens_per_pass for stats in answers])
    tokens = median([stats.generated_tokens for stats in answers])
    return [str(len(answers)), f"{tokens:.0f}", f"{median(rates):.1f}", f"{half_range(rates):.1f}",
            f"{per_pass:.2f}"]  # fmt: skip


def print_replay(curve: str, draft: str, workloads: Mapping[str, Any]) -> None:
    """workloads: counts and rates by workload."""
    print(f"curve {curve}, draft {draft}; score: tokens per cost, plain decoding is 1.00\n")
    print(f"{'workload':<10}{'items':>6}{'tokens':>8}{'passes':>8}{'tokens/pass':>13}"
          f"{'accepted':>10}{'score':>8}{'us/token':>10}")  # fmt: skip
    for name, row in workloads.items():
        accepted = row["accepted"] / row["drafted"] if row["drafted"] else 0.0
        print(f"{name:<10}{row['items']:>6}{row['tokens']:>8}{row['passes']:>8}"
              f"{row['tokens_per_pass']:>13.2f}{accepted:>10.0%}{row['score']:>8.2f}"
              f"{row.get('draft_us_per_token', '–'):>10}")  # fmt: skip


def print_replays(curve: str, drafters: Mapping[str, Mapping[str, Any]]) -> None:
    """drafters: by drafter and workload, side by side."""
    print(f"curve {curve}: tokens per pass, and score (tokens per cost, plain decoding is 1.00)\n")
    print(f"{'workload':<10}" + "".join(f"{drafter:>20}" for drafter in drafters))
    for name in next(iter(drafters.values())):
        cells = [workloads[name] for workloads in drafters.values()]
        line = "".join(f"{cell['tokens_per_pass']:>12.2f}{cell['score']:>8.3f}" for cell in cells)
        print(f"{name:<10}{line}")
