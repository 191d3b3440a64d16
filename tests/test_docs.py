"""The pages of the documentation: links lead somewhere, and command lines parse."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from akunu_py import cli
from akunu_py.bench.command import with_action

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    path
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    if path.name != "CHANGELOG.md"  # it names commands of the past
]
VALUES = {"LINE:COL": "1:1", "N": "1", "NAME": "starter", "COMMAND": "run"}  # of placeholders


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        other = page.parent / name if name else page
        assert other.exists(), target
        assert not anchor or other.is_dir() or anchor in anchors(other), target


def command_lines(page: Path) -> list[str]:
    """The lines of code blocks that start akunu, but no patterns of usage such as `[OPTIONS]`."""
    fenced, lines = False, list[str]()
    for line in page.read_text("utf-8").splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            lines.append(line.strip())
    found = [re.search(r"(?:^|\| )akunu(?: (.*))?$", line) for line in lines]
    return [each[1] or "" for each in found if each and " [" not in (each[1] or "")]


def arguments(line: str) -> list[str]:
    """The words of a command line, up to an operator of the shell."""
    line = re.sub(r"\d?>", " > ", line)
    words = shlex.split(line, comments=True)
    ends = [words.index(each) for each in ("|", "||", "<", ">") if each in words]
    kept = words[: min(ends, default=None)]
    return [VALUES.get(word, word) for word in kept]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_line_parses(page: Path) -> None:
    for line in command_lines(page):
        words = arguments(line) or ["chat"]
        if words[0] == "bench":
            words[1:] = with_action(words[1:])
        try:
            cli._parser(words[0], actions=words[1:]).parse_args(words)
        except SystemExit as end:
            if end.code:  # not --help
                pytest.fail(line)
