"""What SECURITY.md promises of the sources: no file can make the program run code of its own, and
what is installed is listed, with its license."""

import ast
import re
import tomllib
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.support.paths import ROOT
from tests.support.syntax_trees import nodes_of

SOURCES = sorted(
    path
    for directory in ("akunu_py", "ngram", "tui", "models", "bench")
    for path in (ROOT / directory).rglob("*.py")
    if not any(parent.is_symlink() for parent in path.parents)
)
RUNS_CODE = {"pickle", "cPickle", "marshal", "shelve", "dill", "joblib", "cloudpickle", "code"}
ITSELF = "os.execv(sys.executable, sys.orig_argv)"  # a server that starts again
CALLS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "os.execv", "os.execvp",
    "os.spawnv", "np.load", "numpy.load", "torch.load", "yaml.load", "tempfile.mktemp",
    "subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell",
}  # fmt: skip
LAST_NAMES = {name.rpartition(".")[2] for name in CALLS}


def test_no_pickle_no_shell_no_code_from_files() -> None:
    assert len(SOURCES) > 100
    assert [problem for path in SOURCES for problem in problems(path)] == []


def problems(path: Path) -> list[str]:
    """The places in a source that do what none may."""
    return [
        f"{path.name}:{node.lineno}: {ast.unparse(node).replace(chr(10), ' ')}"
        for node in nodes_of(path.read_text("utf-8"))
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Call) and is_forbidden(node)
    ]


def is_forbidden(node: ast.Import | ast.ImportFrom | ast.Call) -> bool:
    if isinstance(node, ast.Import):
        return any(name.name.partition(".")[0] in RUNS_CODE for name in node.names)
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").partition(".")[0] in RUNS_CODE
    names = ("trust_remote_code", "allow_pickle", "shell")
    options = {each.arg: ast.unparse(each.value) for each in node.keywords if each.arg in names}
    last = getattr(node.func, "attr", getattr(node.func, "id", ""))  # unparsing is slow
    return (
        (last in LAST_NAMES and ast.unparse(node.func) in CALLS and ast.unparse(node) != ITSELF)
        or options.get("trust_remote_code") == "True"
        or options.get("allow_pickle") == "True"
        or options.get("shell", "False") != "False"
    )


# Dependencies

PERMISSIVE = ("mit", "apache", "bsd", "isc", "psf", "mpl", "python software", "unlicense", "0bsd")


def declared() -> dict[str, str]:
    """Return the dependencies in pyproject.toml by name, each with its systems."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    found: dict[str, set[str]] = {}
    for requirement in map(Requirement, project["dependencies"]):
        marker = str(requirement.marker or "")
        system = "Mac" if "darwin" in marker else "Linux" if "linux" in marker else "everywhere"
        found.setdefault(requirement.name.lower(), set()).add(system)
    return {
        name: systems.pop() if len(systems) == 1 else "everywhere"
        for name, systems in found.items()
    }


def license_of(name: str) -> str:
    """Return the license that the installed package names, "MIT" if it is not installed here."""
    try:
        about: Any = metadata(name)  # a mail's header, whose type says less than it can
    except PackageNotFoundError:
        return "MIT"
    classifiers = [each for each in about.get_all("Classifier", []) if "OSI Approved" in each]
    return str(about["License-Expression"] or classifiers or about["License"])


def listed() -> dict[str, list[str]]:
    """Return the rows of the page: where each is installed, its license and its purpose."""
    page = (ROOT / "docs/dependencies.md").read_text("utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return {name: row for name, *row in rows[1:]}


def test_the_page_lists_every_dependency_and_its_purpose() -> None:
    rows = listed()
    assert {name: where for name, (where, _, purpose) in rows.items() if purpose} == declared()


@pytest.mark.parametrize("name", declared())
def test_licenses_are_permissive(name: str) -> None:
    for license in (listed()[name][1], license_of(name)):
        assert any(word in license.lower() for word in PERMISSIVE), license


def test_the_tests_that_security_names_exist() -> None:
    text = (ROOT / "SECURITY.md").read_text("utf-8")
    named = {name for name in re.findall(r"`([\w/]+\.py)`", text) if "test_" in name}
    assert len(named) > 15
    for name in named:
        place = ROOT / name if "/" in name else ROOT / "tests" / "reliability" / name
        assert place.is_file(), name
