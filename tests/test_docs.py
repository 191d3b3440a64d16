"""The pages of the documentation: links, files, commands, size, and no sentence twice."""

import re
import shlex
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from akunu_py import cli
from akunu_py.bench.command import with_action

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted(ROOT.glob("docs/*.md"))
README = ROOT / "README.md"
PAGES = [
    path
    for path in [*ROOT.glob("*.md"), *DOCS]
    if path.name != "CHANGELOG.md"  # it names commands of the past
]
MAX_BYTES, MAX_LINES = 125_000, 120  # of all docs; of the README
VALUES = {"LINE:COL": "1:1", "N": "1", "NAME": "starter", "COMMAND": "run", "MS": "9"}
TARGETS = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
COMMAND = re.compile(
    r"(?:^|[|&] |[A-Z_]+=\S+ )(?:\.venv/bin/)?(akunu|make|python -m)(?: (?!.*\[)(.*))?$"
)  # no patterns of usage such as `[OPTIONS]`
# Names of files are relative to one of these directories.
BASES = [ROOT, ROOT / "akunu_py", ROOT / "akunu_py/engine", ROOT / "docs", ROOT / "tests"]


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


def split_code(page: Path) -> tuple[list[str], str]:
    """Return the lines of a page's code blocks, and the rest of its text."""
    fenced, code, text = False, list[str](), list[str]()
    for line in page.read_text("utf-8").splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            code.append(line.strip())
        else:
            text.append(line)
    return code, "\n".join(text)


def spans(page: Path) -> list[str]:
    """The code within a page's sentences and tables."""
    found = re.findall(r"`([^`]+)`", split_code(page)[1])
    return [" ".join(span.split()).replace("\\|", "|") for span in found]


def arguments(line: str) -> list[str]:
    """The words of a command line, up to an operator of the shell."""
    line = re.sub(r"\d?[<>]", " > ", line)
    words = shlex.split(line, comments=True)
    ends = [words.index(each) for each in ("|", "||", "&", "&&", ">") if each in words]
    kept = words[: min(ends, default=None)]
    return [VALUES.get(word, word) for word in kept]


def problem(program: str, line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what is wrong with a command, "" if it parses."""
    words = arguments(line)
    if program == "make":
        return "" if set(words) - set(TARGETS) <= {w for w in words if "=" in w} else "target"
    if program != "akunu":
        return "" if not words or find_spec(words[0]) else "module"
    if not words or (words[0].startswith("-") and words[0] not in cli._TOP_LEVEL):
        words = ["chat", *words]
    if words[0] == "bench":
        words[1:] = with_action(words[1:])
    try:
        cli._parser(words[0], actions=words[1:]).parse_args(words)
    except SystemExit as end:
        errors = capsys.readouterr().err
        return errors if end.code else ""  # not --help
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_parses(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in split_code(page)[0]:
        if found := COMMAND.search(line):
            assert not problem(found[1], found[2] or "", capsys), line
    for span in spans(page):
        if found := COMMAND.search(span):
            wrong = problem(found[1], found[2] or "", capsys)
            # `akunu models pull` and `akunu models import --quantize` name commands and options.
            assert not wrong or re.search(r"are required|expected (one argument|\w+: )", wrong), (
                span
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_named_file_exists(page: Path) -> None:
    tops = {path.name for base in BASES for path in base.iterdir()}
    names = [span for span in spans(page) if re.fullmatch(r"[\w.-]+/[\w./-]*", span)]
    for name in names:
        known = name.split("/")[0] in tops
        assert not known or any((base / name).exists() for base in BASES), name


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_a_page_begins_with_a_command(page: Path) -> None:
    title, _, first, second = page.read_text("utf-8").splitlines()[:4]
    assert title.startswith("# ")
    assert first == "```" or first.startswith("    ")
    line = (second if first == "```" else first).strip()
    assert COMMAND.search(line) or re.match(r"akunu .*\[", line), line


def test_pages_are_short_and_say_nothing_twice() -> None:
    assert sum(path.stat().st_size for path in DOCS) <= MAX_BYTES
    assert len(README.read_text("utf-8").splitlines()) <= MAX_LINES
    counts = Counter[str]()
    for page in (README, *DOCS):
        text = re.sub(r"^\|.*", "", split_code(page)[1], flags=re.MULTILINE)  # no tables
        for sentence in re.split(r"(?<=[.:!?])\s+|\n\n|\n- ", text):
            words = re.findall(r"\w+", sentence.lower())
            counts[" ".join(words)] += len(words) > 4
    assert not [sentence for sentence, count in counts.items() if count > 1]
