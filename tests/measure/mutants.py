"""Measure what the tests notice: run each wing's tests against one-line mutants of its source.

Each mutant changes one comparison, constant, statement or branch. A mutant is killed if a test of
its wing fails or hangs. Coverage selects the tests that execute the changed line, quickest first,
up to a budget of recorded seconds; the whole wing runs where no test executes the line in its own
process. The sample depends on the seed and on the text of the lines, not on their numbers, so two
commits are compared on mostly the same mutants.
"""

import argparse
import ast
import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from xml.etree import ElementTree

import coverage
import hypothesis
from hypothesis import Phase

ROOT = Path(__file__).resolve().parents[2]
# Each wing: its sources, then the folders of its tests.
WINGS = {
    "ngram": (["ngram"], ["tests/ngram"]),
    "engine": (
        [f"akunu_py/engine/{part}" for part in
         ("host.py", "loop.py", "request.py", "runner.py", "scheduler.py", "prefill.py",
          "answer.py", "engine.py", "model", "constraint", "tools", "kv_cache.py",
          "sampling.py")],
        ["tests/engine"],
    ),
    "json_schema": (["akunu_py/json_schema"], ["tests/json_schema", "tests/engine/constraint"]),
    "completion": (["akunu_py/completion"], ["tests/completion"]),
    "chats": (["akunu_py/chats"], ["tests/chats"]),
    "serve": (["akunu_py/serve"], ["tests/serve"]),
    "models": (["models"], ["tests/models"]),
}  # fmt: skip
SWAPPED: dict[type[ast.AST], type[Any]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot,
    ast.IsNot: ast.Is, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One changed line of one file."""

    wing: str
    path: str
    line: int
    before: str
    after: str


def mutants_of(wing: str, path: str, source: str) -> Iterator[Mutant]:
    """Yield every mutant of a file. Expressions over several lines are left out."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        for part, new in _changes(node):
            if part.lineno != part.end_lineno:
                continue
            line = lines[part.lineno - 1].encode()
            after = line[: part.col_offset] + new.encode() + line[part.end_col_offset :]
            yield Mutant(wing, path, part.lineno, line.decode(), after.decode())


def _changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield the parts of a node to replace, each with its new source."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in SWAPPED:
            new = SWAPPED[type(op)]()
            yield node, ast.unparse(ast.Compare(left, [new], [right]))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in SWAPPED:
            yield node, f"({ast.unparse(ast.BinOp(left, SWAPPED[type(op)](), right))})"
        case ast.BoolOp(op=op, values=values):
            yield node, f"({ast.unparse(ast.BoolOp(SWAPPED[type(op)](), values))})"
        case ast.Constant(value=bool(value)):
            yield node, str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield node, repr(value + 1)
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield test, f"not ({ast.unparse(test)})"
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Assign(targets=[ast.Attribute()]):
            yield node, "pass"
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield node, "return None"


def sample(tree: Path, count: int, seed: int) -> list[Mutant]:
    """Return `count` mutants that compile, about equally many of each wing."""

    def rank(mutant: Mutant) -> bytes:
        key = f"{seed} {Path(mutant.path).name} {mutant.before} {mutant.after}"
        return hashlib.sha256(key.encode()).digest()

    chosen: list[Mutant] = []
    for at, (wing, (sources, _)) in enumerate(WINGS.items()):
        found: list[Mutant] = []
        for path in (tree / source for source in sources):
            for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
                name = str(file.relative_to(tree))
                found += mutants_of(wing, name, file.read_text(encoding="utf-8"))
        size = count // len(WINGS) + (at < count % len(WINGS))
        ranked = sorted(found, key=rank)
        chosen += islice((each for each in ranked if _compiles(mutated(tree, each))), size)
    return chosen


def mutated(tree: Path, mutant: Mutant) -> str:
    """Return the source of the mutant's file with the changed line."""
    lines = (tree / mutant.path).read_text(encoding="utf-8").splitlines()
    lines[mutant.line - 1] = mutant.after
    return "\n".join(lines) + "\n"


def _compiles(source: str) -> bool:
    with contextlib.suppress(SyntaxError):
        compile(source, "mutant", "exec")
        return True
    return False


class Tree:
    """A copy of a commit in which one mutant at a time is tested."""

    def __init__(self, directory: Path, commit: str) -> None:
        self.directory = directory
        archive = subprocess.run(
            ["git", "archive", commit], cwd=ROOT, check=True, capture_output=True
        ).stdout
        subprocess.run(["tar", "-x", "-C", str(directory)], input=archive, check=True)
        shutil.copy(__file__, directory / "tests" / "measure" / "mutants.py")

    def pytest(self, *words: str, limit: float | None = None) -> int:
        """Run pytest here and return its exit code; its output is shown only without a limit.

        Raises TimeoutExpired after `limit` seconds.
        """
        command = [sys.executable, "-m", "pytest", "-p", "tests.measure.mutants", "-m", "not slow"]
        output = subprocess.DEVNULL if limit else sys.stderr
        with subprocess.Popen(
            [*command, *words], cwd=self.directory, stdin=subprocess.DEVNULL, stdout=output,
            stderr=output, env=os.environ | {"PYTHONPATH": str(self.directory)},
            start_new_session=True,
        ) as process:  # fmt: skip
            try:
                return process.wait(limit)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def covered(
        self, wings: Collection[str], workers: int
    ) -> tuple[dict[str, dict[int, list[str]]], dict[str, float]]:
        """Run the tests of wings once. Return the tests of each line, and each test's seconds."""
        folders = sorted({folder for wing in wings for folder in WINGS[wing][1]})
        sources = sorted({source for wing in wings for source in WINGS[wing][0]})
        covered = [f"--cov={Path(source).parent if source.endswith('.py') else source}"
                   for source in sources]  # fmt: skip
        words = ["-n", str(workers), "--dist", "loadfile", "--cov-context=test", "--cov-report="]
        report = ["--junitxml=report.xml", "-o", "junit_family=xunit1"]
        self.pytest(*folders, *words, *covered, *report)
        seconds = {
            f"{case.attrib['file']}::{case.attrib['name']}": float(case.attrib["time"])
            for case in ElementTree.parse(self.directory / "report.xml").iter("testcase")
            if len(case) == 0  # neither failed nor skipped
        }
        data = coverage.CoverageData(str(self.directory / ".coverage"))
        data.read()
        lines: dict[str, dict[int, list[str]]] = {}
        for file in data.measured_files():
            path = Path(file).resolve()
            if path.is_relative_to(self.directory.resolve()):
                name = str(path.relative_to(self.directory.resolve()))
                found = data.contexts_by_lineno(file)
                lines[name] = {
                    line: [context.partition("|")[0] for context in contexts if context]
                    for line, contexts in found.items()
                }
        return lines, seconds


def verdict(tree: Tree, mutant: Mutant, tests: list[str], limit: float) -> str:
    """Test one mutant. Return "killed", "hung" (killed, too) or "survived"."""
    file = tree.directory / mutant.path
    before = file.read_bytes()
    file.write_text(mutated(tree.directory, mutant), encoding="utf-8")
    try:
        code = tree.pytest("-x", "--timeout=120", *tests, limit=limit)
    except subprocess.TimeoutExpired:
        return "hung"
    finally:
        file.write_bytes(before)
        for cached in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
            cached.unlink()  # it may have the modification time of the restored file
    return "killed" if code else "survived"


def affordable(tests: Collection[str], seconds: dict[str, float], budget: float) -> list[str]:
    """Return the quickest tests, up to `budget` seconds together, but at least one."""
    quickest = sorted(tests, key=lambda test: seconds[test])
    totals = accumulate(seconds[test] for test in quickest)
    count = sum(total <= budget for total in totals)
    return quickest[: max(1, count)]


def pytest_configure() -> None:
    """As a plugin: do not minimize the failing examples of hypothesis, which takes minutes."""
    phases = (Phase.explicit, Phase.reuse, Phase.generate)
    hypothesis.settings.register_profile("mutants", hypothesis.settings(), phases=phases)
    hypothesis.settings.load_profile("mutants")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.measure.mutants", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument("--commit", default="HEAD", help="commit to measure (default: HEAD)")
    parser.add_argument("--count", type=int, default=150, help="mutants (default: 150)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the sample (default: 1)")
    parser.add_argument("--wing", choices=WINGS, action="append", help="only these wings")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--budget", type=float, default=60,
                        help="seconds of tests for one mutant (default: 60)")  # fmt: skip
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        trees: SimpleQueue[Tree] = SimpleQueue()
        for number in range(options.workers):
            directory = Path(scratch, str(number))
            directory.mkdir()
            tree = Tree(directory, options.commit)
            trees.put(tree)
        mutants = [
            mutant for mutant in sample(tree.directory, options.count, options.seed)
            if not options.wing or mutant.wing in options.wing
        ]  # fmt: skip
        lines, seconds = tree.covered({mutant.wing for mutant in mutants}, options.workers)

        def judge(mutant: Mutant) -> str:
            folders = tuple(f"{folder}/" for folder in WINGS[mutant.wing][1])
            wing = [test for test in seconds if test.startswith(folders)]
            covering = set(lines.get(mutant.path, {}).get(mutant.line, ()))
            tests = affordable(covering.intersection(wing) or wing, seconds, options.budget)
            tree = trees.get()
            try:
                return verdict(tree, mutant, tests, options.budget * 3 + 60)
            finally:
                trees.put(tree)

        killed = Counter[str]()
        with ThreadPoolExecutor(options.workers) as pool:
            for mutant, result in zip(mutants, pool.map(judge, mutants), strict=True):
                killed[mutant.wing] += result != "survived"
                place = f"{mutant.path}:{mutant.line}"
                change = f"{mutant.before.strip()}  ->  {mutant.after.strip()}"
                print(f"{result:8} {place}  {change}", flush=True)
    print(f"\n{'wing':12} killed survived")
    for wing, size in Counter(mutant.wing for mutant in mutants).items():
        print(f"{wing:12} {killed[wing]:6} {size - killed[wing]:8}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
