"""`python -m tests.reliability.dependencies` writes docs/dependencies.md: what akunu stands on.

From pyproject.toml and from what the installed packages say of themselves. Versions are left to
pyproject.toml, so the page changes only when a dependency does. What those bring along is listed
as it is on the system where the page is made.
"""

from __future__ import annotations

import itertools
import platform
import re
import tomllib
from collections import defaultdict
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.paths import ROOT

FILE = "docs/dependencies.md"
PERMISSIVE = ("mit", "apache", "bsd", "isc", "psf", "mpl", "python software", "unlicense", "0bsd")

_HEAD = """# Dependencies

What akunu installs, with the licenses that the packages name. Made by
`python -m tests.reliability.dependencies`; a test holds it against pyproject.toml.

| package | where | license | what for |
|---|---|---|---|
"""
_MORE = """
## What they bring along

On {system}:

| license | packages |
|---|---|
"""
_PLAIN = {"MIT License": "MIT", "Apache Software License": "Apache-2.0", "BSD License": "BSD"}
_FOR = {
    "mlx": "arrays on the GPU: everything that is computed",
    "mlx-lm": "model architectures, weights and KV caches",
    "cmeel-openblas": "fast products of matrices on the CPU",
    "numpy": "weights on their way from GGUF",
    "gguf": "the quantizations of GGUF files",
    "textual": "the chat",
    "rich": "text with styles, and its width in a terminal",
    "huggingface-hub": "pulls from the hub",
    "httpx2": "the errors of pulls",
    "filelock": "the locks of the hub's cache",
    "tokenizers": "tokenizers of imported models",
    "llguidance": "structured output: which tokens a grammar allows",
    "platformdirs": "standard directories of each system",
    "starlette": "akunu serve: routes and middleware",
    "uvicorn": "akunu serve: HTTP",
    "pydantic": "akunu serve: the bodies of requests",
    "mcp": "tools of MCP servers in the chat",
    "markdown-it-py": "Markdown in the chat",
    "pygments": "colors of code in the chat",
    "transformers": "tokenizers and chat templates",
    "jinja2": "chat templates, in a process of their own",
    "pydantic-core": "errors of wrong bodies",
    "tqdm": "progress bars",
    "shtab": "scripts of akunu completions",
    "tomlkit": "writing settings with their comments",
    "pip": "fetching the starter from the package index",
}


@dataclass(frozen=True, slots=True)
class Facts:
    """Of one dependency. where: the systems it is installed on."""

    name: str
    where: str
    license: str
    purpose: str


def declared() -> dict[str, str]:
    """The dependencies in pyproject.toml by name, each with the marker of its systems."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    found: dict[str, set[str]] = {}
    for requirement in project["dependencies"]:
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        assert name is not None, requirement
        system = re.search(r"sys_platform == '(\w+)'", requirement)
        found.setdefault(name[0].lower(), set()).add(system[1] if system else "")
    names = {"darwin": "Mac", "linux": "Linux"}
    return {
        name: "everywhere" if len(systems) > 1 or "" in systems else names[min(systems)]
        for name, systems in found.items()
    }


def facts(name: str) -> Facts:
    """What pyproject.toml and the installed package say of it."""
    return Facts(name, declared()[name], license_of(name), _FOR.get(name, ""))


def render() -> str:
    """The page."""
    rows = [facts(name) for name in sorted(declared())]
    lines = [f"| {row.name} | {row.where} | {row.license} | {row.purpose} |" for row in rows]
    named = sorted((license_of(name), name) for name in brought_along())
    groups = itertools.groupby(named, key=lambda pair: pair[0])
    more = [f"| {license} | {', '.join(name for _, name in group)} |" for license, group in groups]
    return (
        _HEAD + "\n".join(lines) + _MORE.format(system=platform.system()) + "\n".join(more) + "\n"
    )


def brought_along() -> set[str]:
    """What is installed because a dependency wants it, by name."""
    found: set[str] = set()
    extras: dict[str, set[str]] = defaultdict(set)  # wanted, by package
    waiting = list(declared())
    while waiting:
        parent = waiting.pop()
        for text in (requires(parent) or []) if _is_here(parent) else []:
            requirement = Requirement(text)
            name = canonicalize_name(requirement.name)
            wanted = requirement.marker is None or any(
                requirement.marker.evaluate({"extra": each}) for each in ("", *extras[parent])
            )
            is_new = name not in found or not requirement.extras <= extras[name]
            if wanted and is_new and _is_here(name):
                extras[name] |= requirement.extras
                found.add(name)
                waiting.append(name)
    return found - set(declared())


def _is_here(name: str) -> bool:
    try:
        metadata(name)
    except PackageNotFoundError:
        return False
    return True


def license_of(name: str) -> str:
    """What the installed package says of itself; "?" where it says nothing, or is not here."""
    if not _is_here(name):
        return "?"
    about: Any = metadata(name)  # a mail's header, whose type says less than it can
    expression, text = about.get("License-Expression"), about.get("License") or "?"
    classifiers = [
        line.rpartition(" :: ")[2]
        for line in about.get_all("Classifier") or []
        if line.startswith("License :: OSI Approved ::")
    ]
    page = expression or ", ".join(classifiers) or text.strip().splitlines()[0][:60]
    return _PLAIN.get(page, str(page))


if __name__ == "__main__":
    (ROOT / FILE).write_text(render(), "utf-8")
