"""Counts of shown and accepted completions."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from akunu_py import paths
from akunu_py.completion.acceptance import Acceptance, kind_of, read_counts, stats_table
from akunu_py.completion.completion_queue import Ticket
from akunu_py.completion.protocols.json_lines import JsonLines
from akunu_py.completion.request import Completion, CompletionRequest
from akunu_py.types import Stats
from tests.support.command import run_here

REQUESTED = CompletionRequest("x = ", "\n", path="a.py", language="python")
TEXT = "sorted(items)"


@pytest.mark.parametrize(
    ("prefix", "suffix", "path", "kind"),
    [
        ("x = ", "\ny\n", "a.py", ("py", "at the end of a line")),
        ("x\n  ", " \ny", "", ("text", "on an empty line")),
        ("f(", ")\n", "b/c.tar.gz", ("gz", "inside a line")),
    ],
)
def test_the_kind_of_a_place(prefix: str, suffix: str, path: str, kind: tuple[str, str]) -> None:
    assert kind_of(CompletionRequest(prefix, suffix, path)) == kind
    assert kind_of(CompletionRequest(prefix, suffix, path, "go")) == ("go", kind[1])


@pytest.mark.parametrize("at", [1, 6, len(TEXT) - 1])
def test_a_ghost_is_counted_once_for_all_its_parts(tmp_path: Path, at: int) -> None:
    """It is shown again for each typed letter, and accepted in two parts."""
    path = tmp_path / "counts"
    kept = Acceptance(path)
    for typed in range(at + 1):
        request = replace(REQUESTED, prefix=REQUESTED.prefix + TEXT[:typed])
        kept.shown(request, TEXT[typed:], typed)
    kept.accepted(at, at)
    kept.accepted(at, len(TEXT) - at)
    kept.save()
    expected = {"shown": 1, "accepted": 1, "characters": len(TEXT)}
    assert read_counts(path) == {kind_of(REQUESTED): Counter(expected)}


@pytest.mark.parametrize(
    ("typed", "text", "shown"),
    [("", TEXT, 1), ("so", TEXT[2:], 1), ("so", "on", 2), ("sorted", TEXT[6:], 2)],
)
def test_a_longer_completion_counts_as_the_one_that_it_extends(
    tmp_path: Path, typed: str, text: str, shown: int
) -> None:
    """It was shown in part, and at most a part of that was typed since."""
    path = tmp_path / "counts.json"
    acceptance = Acceptance(path)
    acceptance.shown(REQUESTED, TEXT[:6], 1)
    acceptance.shown(replace(REQUESTED, prefix=REQUESTED.prefix + typed), text, 2)
    acceptance.save()
    assert read_counts(path)[kind_of(REQUESTED)]["shown"] == shown


def test_several_editors_count_into_one_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "counts.json"
    both = [Acceptance(path), Acceptance(path)]
    for number in range(50):  # saved now and then, and at the end
        both[number % 2].shown(REQUESTED, str(number), number)
    assert read_counts(path)[kind_of(REQUESTED)]["shown"] == 40
    for each in both:
        each.save()
    assert read_counts(path)[kind_of(REQUESTED)]["shown"] == 50


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[1]", b'[["a", "b", {"shown": -1, "accepted": true, "x": "y"}]]', b"\xff"],
)
def test_a_damaged_file_counts_for_nothing(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "counts.json"
    path.write_bytes(data)
    assert not any(counts["shown"] for counts in read_counts(path).values())
    assert stats_table(read_counts(path))
    kept = Acceptance(path)
    kept.shown(REQUESTED, "x", 1)
    kept.save()
    assert read_counts(path)[kind_of(REQUESTED)]["shown"] == 1


def test_the_table(tmp_path: Path) -> None:
    env = {"XDG_DATA_HOME": str(tmp_path)}
    assert run_here("complete", "--stats", env=env).stdout == "no completions shown yet\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path))
        kept = Acceptance(paths.acceptance_file())
    for number in range(1234):
        kept.shown(REQUESTED, str(number), number)
    kept.accepted(number, 20)
    kept.shown(replace(REQUESTED, language="\x1b[2J"), "x", "x")
    kept.save()
    assert run_here("complete", "--stats", env=env).stdout.splitlines() == [
        "language  place                 shown  accepted      characters",
        "python    at the end of a line  1,234         1  0%          20",
        "␛[2J      at the end of a line      1         0  0%           0",
    ]


class Thread:
    """Completes everything with the same text."""

    state = "ready"
    battery = False

    def saves_power(self) -> bool:
        return self.battery

    def accepted(self) -> None:
        pass

    def submit(self, ticket: Ticket) -> None:
        ticket.on_done(Completion(TEXT if ticket.request.max_tokens else "", "stop", Stats()))


@pytest.fixture
def kept(tmp_path: Path) -> Acceptance:
    return Acceptance(tmp_path / "counts")


@pytest.mark.parametrize("battery", [True, False])
def test_json_lines_count_acceptances_and_name_battery_power(
    tmp_path: Path, kept: Acceptance, battery: bool
) -> None:
    replies: list[dict[str, Any]] = []
    thread = Thread()
    thread.battery = battery
    lines = JsonLines(thread, lambda line: replies.append(json.loads(line)), REQUESTED, kept)  # type: ignore[arg-type]

    def submit_now(number: int, **more: Any) -> dict[str, Any]:
        lines.handle(json.dumps({"id": number, "prefix": f"{number} = "} | more).encode())
        return replies[-1]

    for number in range(60):
        assert submit_now(number)["text"] == TEXT
    assert replies[0].get("battery") == (True if battery else None)
    submit_now(60, max_tokens=0)
    for id, characters in ((7, 5), (7, 8), ("unknown", 8)):
        lines.handle(json.dumps({"accepted": id, "characters": characters}).encode())
    kept.save()
    counts = read_counts(tmp_path / "counts")[kind_of(REQUESTED)]
    assert counts == {"shown": 60, "accepted": 1, "characters": 13}
    assert submit_now(200, explicit=True)["text"] == TEXT
    before = len(replies)
    for bad in (
        {"accepted": 1, "characters": -1},
        {"accepted": 1, "characters": 1.5},
        {"accepted": [], "characters": 1},
        {"id": 3, "accepted": 1, "characters": 1},
        {"accepted": 1},
    ):
        lines.handle(json.dumps(bad).encode())
    assert [set(reply) for reply in replies[before:]] == [{"id", "error"}] * 5
