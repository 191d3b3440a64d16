"""What fill-in-the-middle is for, on a model that was trained for it here: the whole command, asked
about places in a text that the model knows by heart. A prompt that is put together wrong, a stop
that comes too late and a prefix that is not healed all show in what it says.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.support import fim_model
from tests.support.command import AKUNU

pytestmark = pytest.mark.slow  # once a machine, eight minutes of training
BUDGETS = [
    *("--prefix-tokens", str(fim_model.PREFIX_TOKENS)),
    *("--suffix-tokens", str(fim_model.SUFFIX_TOKENS)),
]


@pytest.fixture(scope="module")
def model() -> Path:
    return fim_model.trained()


def complete(
    model: Path, asked: Iterable[tuple[str, str]], *options: str, path: str = ""
) -> list[str]:
    """What `akunu complete` says between a prefix and a suffix, of each."""
    requests = [
        {"id": number, "prefix": prefix, "suffix": suffix, "path": path, "max_tokens": 40}
        for number, (prefix, suffix) in enumerate(asked)
    ]
    command = [*AKUNU, "complete", "--no-answer-cache", "--model", str(model), *BUDGETS, *options]
    lines = "\n".join(map(json.dumps, requests))
    done = subprocess.run(command, input=lines, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    found: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert {reply["finish_reason"] for reply in found} <= {"stop", "length"}
    return [reply["text"] for reply in sorted(found, key=lambda reply: int(reply["id"]))]


def word_ends(text: str) -> Iterator[tuple[int, int]]:
    """Behind a word of each line, and the end of the line."""
    for found in re.finditer(r"(?<=[\w)])(?=[ (.,:])", text):
        end = text.find("\n", found.start())
        if end - found.start() >= 3:
            yield found.start(), end


def share(found: Iterable[bool]) -> float:
    each = list(found)
    return sum(each) / len(each)


def test_the_rest_of_a_line_is_filled_in_and_nothing_more(model: Path) -> None:
    """The format is found by the model's name; what it says ends where the suffix begins."""
    text = fim_model.source()
    places = random.Random(1).sample([(at, end) for at, end in word_ends(text) if at > 300], 60)
    said = complete(model, [(text[:at], text[end:]) for at, end in places], path=fim_model.MODULE)
    assert share(each == text[at:end] for each, (at, end) in zip(said, places, strict=True)) > 0.85


def test_one_prefix_with_two_suffixes_has_two_middles(model: Path) -> None:
    """Lines that begin alike and go on differently: of which two, only the suffix says. Nobody who
    does not read it is right in both."""
    text = fim_model.source()
    alike = defaultdict(list)
    for at, end in word_ends(text):
        begun = text[text.rfind("\n", 0, at) + 1 : at]
        if begun.strip():
            alike[begun].append((text[at:end], text[end:]))
    asked = [(begun, suffix) for begun, places in alike.items() for _, suffix in places]
    said = dict(zip(asked, complete(model, asked), strict=True))
    pairs = [
        said[begun, one[1]] == one[0] and said[begun, other[1]] == other[0]
        for begun, places in alike.items()
        for one, other in combinations(places, 2)
        if one[0] != other[0] and one[1][:20] != other[1][:20]
    ]
    assert len(pairs) > 40
    assert share(pairs) > 0.15


def test_a_prefix_that_ends_in_a_word_is_healed(model: Path) -> None:
    """Asked to go on, without the format. At the end of what the tokenizer would take for a word,
    with its rest in the next token, the model knows what comes; the prefix as it was cut, it never
    saw. What is healed is as good in the middle of words as between them."""
    text = fim_model.source()
    inside = [found.start() for found in re.finditer(r"(?<=\w\w)(?=\w\w)", text)]
    places = random.Random(1).sample([at for at in inside if at > 300], 60)
    ends = [text.find("\n", at) for at in places]
    said = complete(
        model, [(text[:at], "") for at in places], "--fim", "none", path=fim_model.MODULE
    )
    right = [
        each.partition("\n")[0] == text[at:end]
        for each, at, end in zip(said, places, ends, strict=True)
    ]
    assert share(right) > 0.5
