"""Fill-in-the-middle formats of families of models, read from fim.toml: which one a model has, and
its template filled into parts that are tokenized one by one.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from akunu_py.errors import UsageError

_FILE = Path(__file__).with_name("fim.toml")
# In the names of models that were made of a coder, for edits or for reasoning.
_OTHERWISE = ("zeta", "sweep", "distill", "next-edit", "instinct")
_SLOT = re.compile(r"\{(prefix|suffix|path|text|repository)\}")


@dataclass(frozen=True, slots=True)
class FimFamily:
    """The format of one family, as its maker published it (`source`; `quote`: in these words).

    tokens: what a vocabulary must have for it. named: parts of model names; "auto" detects only
    models that are called so, since many have the tokens that were never trained for them.
    prompt: the buffer around the cursor. repository, file, prompt_with_files: where other files
    are read too, what comes first, each of them, and the buffer; empty where no such format was
    published. before, after: around all of it.
    path_alone: that format is also for a file without others, which so gets its path.
    bare_suffix: SentencePiece puts no space of its own before the suffix.
    fenced: its answers may come in a Markdown fence, which is none of the buffer's.
    stop: tokens that end the middle, those of them that the vocabulary has.
    """

    name: str
    source: str
    tokens: tuple[str, ...]
    prompt: str
    stop: tuple[str, ...]
    quote: str = ""
    named: tuple[str, ...] = ()
    repository: str = ""
    file: str = ""
    prompt_with_files: str = ""
    before: str = ""
    after: str = ""
    path_alone: bool = False
    bare_suffix: bool = False
    fenced: bool = False

    @property
    def reads_files(self) -> bool:
        return bool(self.file)

    @property
    def has_path(self) -> bool:
        """Whether the model reads the path of a file without others."""
        return self.path_alone or "{path}" in self.prompt

    @property
    def markers(self) -> tuple[str, ...]:
        """Every token that a template or a stop may name, the longest first."""
        return tuple(sorted({*self.tokens, *self.stop}, key=lambda token: (-len(token), token)))


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A piece of a filled template. kind: "token" (exactly one of the vocabulary), "text", or
    "suffix": the text of the suffix, which some families encode apart."""

    kind: str
    text: str


@cache
def load_families() -> dict[str, FimFamily]:
    """All families by name, in the file's order."""
    with _FILE.open("rb") as file:
        rows = tomllib.load(file)["family"]
    known = {field.name for field in fields(FimFamily)}
    families = {}
    for row in rows:
        if unknown := set(row) - known:
            raise ValueError(f"fim.toml: {row.get('name')}: unknown {', '.join(sorted(unknown))}")
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in row.items()
        }
        families[row["name"]] = FimFamily(**values)
    return families


def find_family(name: str, vocabulary: Container[str], model: str) -> FimFamily | None:
    """The family called `name`; for "auto" the one detected by `vocabulary` and the model's name;
    for "none", and where none is detected, None.

    Raises UsageError for an unknown name, and for a family whose tokens the vocabulary lacks.
    """
    families = load_families()
    if name == "none":
        return None
    if name == "auto":
        return detect_family(families.values(), vocabulary, model)
    if name not in families:
        known = ", ".join(["auto", "none", *families])
        raise UsageError(f"no fill-in-the-middle format called {name!r}; there are: {known}")
    family = families[name]
    if missing := [token for token in family.tokens if token not in vocabulary]:
        raise UsageError(
            f"{model} has no token {missing[0]}, so it cannot be asked in the format of {name}; "
            "leave out --fim"
        )
    return family


def detect_family(
    families: Iterable[FimFamily], vocabulary: Container[str], model: str
) -> FimFamily | None:
    """The family whose name a model has and whose tokens a vocabulary has; None where it has not,
    and for what was trained to do something else."""
    name = re.sub(r"[\s_]+", "-", model.lower())
    if any(word in name for word in _OTHERWISE):
        return None
    for family in families:
        if any(part in name for part in family.named) and all(
            token in vocabulary for token in family.tokens
        ):
            return family
    return None


def fill(family: FimFamily, template: str, values: Mapping[str, str]) -> list[PromptPart]:
    """The pieces of `template` with its slots filled; neighbouring texts are one piece."""
    marker = re.compile("|".join(re.escape(token) for token in family.markers))
    parts: list[PromptPart] = []

    def add(kind: str, text: str) -> None:
        if kind == "text" and parts and parts[-1].kind == "text":
            parts[-1] = PromptPart("text", parts[-1].text + text)
        elif text or kind == "suffix":
            parts.append(PromptPart(kind, text))

    def add_literal(text: str) -> None:
        at = 0
        for found in marker.finditer(text):
            add("text", text[at : found.start()])
            add("token", found.group())
            at = found.end()
        add("text", text[at:])

    at = 0
    for slot in _SLOT.finditer(template):
        add_literal(template[at : slot.start()])
        kind = "suffix" if slot.group(1) == "suffix" and family.bare_suffix else "text"
        add(kind, values[slot.group(1)])
        at = slot.end()
    add_literal(template[at:])
    return parts
