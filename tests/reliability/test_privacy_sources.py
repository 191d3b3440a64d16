"""What SECURITY.md promises of the sources: no file can make the program run code of its own, and
what is installed is listed, with its license."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.reliability.dependencies import FILE, PERMISSIVE, declared, facts
from tests.support.paths import ROOT

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


def test_no_pickle_no_shell_no_code_from_files() -> None:
    assert len(SOURCES) > 100
    assert [problem for path in SOURCES for problem in problems(path)] == []


def problems(path: Path) -> list[str]:
    """The places in a source that do what none may."""
    tree = ast.parse(path.read_text("utf-8"))
    return [
        f"{path.name}:{node.lineno}: {ast.unparse(node).replace(chr(10), ' ')}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Call) and is_forbidden(node)
    ]


def is_forbidden(node: ast.Import | ast.ImportFrom | ast.Call) -> bool:
    if isinstance(node, ast.Import):
        return any(name.name.partition(".")[0] in RUNS_CODE for name in node.names)
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").partition(".")[0] in RUNS_CODE
    options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    return (
        (ast.unparse(node.func) in CALLS and ast.unparse(node) != ITSELF)
        or options.get("trust_remote_code") == "True"
        or options.get("allow_pickle") == "True"
        or options.get("shell", "False") != "False"
    )


# Dependencies


def listed() -> dict[str, tuple[str, str]]:
    """The page's first table: where each is installed, and its license."""
    page = (ROOT / FILE).read_text("utf-8").partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return {name: (where, license) for name, where, license, _ in rows[1:]}


def test_the_list_of_dependencies_is_that_of_the_project() -> None:
    """`python -m tests.reliability.dependencies` writes it anew."""
    assert {name: where for name, (where, _) in listed().items()} == declared()
    assert all(facts(name).purpose for name in declared())


def test_licenses_are_permissive() -> None:
    named = listed()
    for name in declared():
        found = facts(name).license  # "?": not on this system
        for license in (named[name][1], found if found != "?" else "mit"):
            assert any(word in license.lower() for word in PERMISSIVE), (name, license)


def test_the_tests_that_security_names_exist() -> None:
    text = (ROOT / "SECURITY.md").read_text("utf-8")
    named = {name for name in re.findall(r"`([\w/]+\.py)`", text) if "test_" in name}
    assert len(named) > 15
    for name in named:
        place = ROOT / name if "/" in name else ROOT / "tests" / "reliability" / name
        assert place.is_file(), name
