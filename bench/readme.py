"""The tables of a README, generated from result files, and whether they still agree with them.

A block stands between `<!-- bench:speed FILE ... -->` and `<!-- /bench -->`; files are named from
the README's folder. Owns what stands between the two. Everything else is left alone.
"""

from __future__ import annotations

import re
from pathlib import Path

from akunu_py.bench.result import Result, Series, load_result, merged
from akunu_py.bench.rows import versions
from akunu_py.errors import UsageError

_BLOCK = re.compile(r"(<!-- bench:speed (\S[^>]*?) -->\n)(.*?)(<!-- /bench -->)", re.DOTALL)


def regenerated(readme: Path) -> str:
    """The README's text with every block made anew.

    Raises UsageError where it cannot be read, has no block, or names what is no result file.
    """
    try:
        text = readme.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {readme}: {error.strerror or error}") from error
    if not _BLOCK.search(text):
        raise UsageError(
            f"no <!-- bench:speed FILE --> with a <!-- /bench --> behind it in {readme}"
        )

    def block(match: re.Match[str]) -> str:
        files = match[2].split()
        results = merged([load_result(readme.parent / file) for file in files])
        return match[1] + "\n".join(speed_block(r, files) for r in results) + match[4]

    return _BLOCK.sub(block, text)


def speed_block(result: Result, files: list[str]) -> str:
    """A row a workload, a column a contestant; below it the command, the machine, the versions."""
    groups: dict[tuple[str, float], list[Series]] = {}
    for series in result.runs:
        if series.rates:
            groups.setdefault((series.workload, series.temperature), []).append(series)
    names = list(dict.fromkeys(s.contestant for group in groups.values() for s in group))
    temperatures = {temperature for _, temperature in groups}
    auto = "auto" in names
    headings = ["", *(f"**{n}**" if n == "auto" else n for n in names)]
    headings += ["tokens a pass, auto"] if auto else []
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for (workload, temperature), group in groups.items():
        by_name = {series.contestant: series for series in group}
        title = workload if len(temperatures) == 1 else f"{workload}, temperature {temperature:g}"
        cells = [title, *(_cell(result, by_name.get(name), name == "auto") for name in names)]
        if auto:
            cells.append(f"{by_name['auto'].tokens_per_pass:.2f}" if "auto" in by_name else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n" + "\n".join(lines) + f"\n\n{_caption(result, files)}\n\n"


def _cell(result: Result, series: Series | None, bold: bool) -> str:
    if series is None:
        return ""
    text = f"{series.tokens_per_s:.1f}"
    speedup = result.speedup(series)
    if speedup is not None and series.contestant != series.baseline:
        text += f" ({speedup:.2f}x)"
    if series.identical is False:
        text += " (tokens differ)"
    return f"**{text}**" if bold else text


def _caption(result: Result, files: list[str]) -> str:
    machine = result.machine
    repeats = max((len(series.repeats) for series in result.runs), default=0)
    commands = "; ".join(f"`{command}`" for command in result.command.split("; "))
    kept = ", ".join(f"[{Path(file).name}]({file})" for file in files)
    return (
        f"Tokens per second, medians of {repeats}. {commands}: {result.model['name']} in "
        f"{result.model['weights']}, {machine['device']}, {machine['cores']} cores, "
        f"{machine['system'].split('-')[0]}, {machine['backend']}; "
        f"{versions(result)}; {result.date}. All figures: {kept}."
    )
