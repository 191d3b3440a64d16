"""Each workaround says what it works around, where that is reported, and when it can go."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from akunu_py import workarounds

MODULES = sorted(Path(workarounds.__path__[0]).glob("[a-z]*.py"))


@pytest.mark.parametrize("path", MODULES, ids=[path.stem for path in MODULES])
def test_each_module_gives_its_reason_and_its_end(path: Path) -> None:
    lines = (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").splitlines()
    fields = [line.partition(":")[0] for line in lines[2:] if not line.startswith(" ")]
    assert fields == ["Works around", "Upstream", "Remove when"]
