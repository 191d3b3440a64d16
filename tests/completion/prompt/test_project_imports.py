"""Closed files that a buffer imports: found within the project, read once, never outside."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

import pytest

from akunu_py.completion.completer import Completer
from akunu_py.completion.completion_queue import CompletionQueue
from akunu_py.completion.prompt import project_imports
from akunu_py.completion.prompt.layout import Prompt
from akunu_py.completion.prompt.project_imports import imported_files
from akunu_py.completion.request import CompletionRequest, SourceFile
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.model.engine import Engine
from tests.support.tiny_fim import sentence_piece, write_model

END = "<|endoftext|>"
TWO = ["shop/tax.py", "shop/money.py"]
# The buffer's path and text, and the files that it imports.
PROJECTS = {
    "python": ("shop/cart.py", "import shop.tax\n", ["shop/tax.py"]),
    "python from": ("shop/cart.py", "from shop.tax import rate, other\n", ["shop/tax.py"]),
    "python relative": ("shop/a/cart.py", "from ..tax import rate\n", ["shop/tax.py"]),
    "python sibling": ("shop/cart.py", "from . import tax, money as m\n", TWO),
    "python lines": ("shop/cart.py", "from shop import (\n  tax,\n  money,\n)\n", TWO),
    "python package": ("cart.py", "from shop.util import x\n", ["shop/util/__init__.py"]),
    "python src": ("tests/test_cart.py", "from shop.tax import x\n", ["src/shop/tax.py"]),
    "typescript": ("web/cart.ts", 'import { rate } from "./tax";\n', ["web/tax.ts"]),
    "typescript js": ("web/cart.ts", "import rate from '../lib/tax.js'\n", ["lib/tax.ts"]),
    "typescript index": ("web/cart.tsx", 'export * from "./tax"\n', ["web/tax/index.ts"]),
    "javascript": ("web/cart.js", "const tax = require('./tax')\n", ["web/tax.js"]),
    "c": ("src/cart.c", '#include <stdio.h>\n#include "tax.h"\n', ["src/tax.h"]),
    "c include": ("src/cart.c", '#include "shop/tax.h"\n', ["include/shop/tax.h"]),
    "rust mod": ("src/main.rs", "mod tax;\npub mod money;\n", ["src/tax.rs", "src/money/mod.rs"]),
    "rust use": ("src/a/cart.rs", "use crate::shop::tax::Rate;\n", ["src/shop/tax.rs"]),
    "ruby": ("lib/cart.rb", "require_relative 'shop/tax'\n", ["lib/shop/tax.rb"]),
    "scss": ("css/cart.scss", '@use "base/tax";\n', ["css/base/_tax.scss"]),
    "shell": ("bin/cart.sh", ". ./tax.sh\n", ["bin/tax.sh"]),
    "lua": ("cart.lua", 'local tax = require("shop.tax")\n', ["shop/tax.lua"]),
    "java": ("src/main/java/a/Cart.java", "import a.b.Tax;\n", ["src/main/java/a/b/Tax.java"]),
    "php": ("cart.php", "require_once __DIR__ . '/lib/tax.php';\n", ["lib/tax.php"]),
}


def write(root: Path, *names: str, text: str = "def rate():\n    return 7\n") -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def asked(root: Path, name: str, prefix: str, *files: SourceFile) -> CompletionRequest:
    return CompletionRequest(prefix, path=str(root / name), root=str(root), files=files)


@pytest.mark.parametrize("name", PROJECTS)
def test_imports_are_found(name: str, tmp_path: Path) -> None:
    path, text, expected = PROJECTS[name]
    write(tmp_path, path, *expected)
    found = imported_files(asked(tmp_path, path, text + "\n\nx = "))
    assert [os.path.relpath(file.path, tmp_path) for file in found] == expected
    # Without a root, version control has it; without that, nothing is read.
    request = CompletionRequest(text, path=str(tmp_path / path))
    assert imported_files(request) == ()


def test_open_files_and_the_buffer_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, "a.py", "b.py", "c.py")
    text = "import a, b, c\n"
    opened = SourceFile(str(tmp_path / "b.py"), "newer = 1\n")
    found = imported_files(asked(tmp_path, "a.py", text, opened))
    assert [Path(file.path).name for file in found] == ["c.py"]


def test_nothing_outside_the_project_is_read(tmp_path: Path) -> None:
    root = tmp_path / "project"
    write(tmp_path, "outside.py", "project/a/main.py", "project2/tax.py")
    (root / "link.py").symlink_to(tmp_path / "outside.py")
    (root / "tree").symlink_to(tmp_path / "project2")
    os.mkfifo(root / "pipe.py")
    text = "import link, pipe\nfrom ...outside import x\nfrom tree import tax\nimport outside\n"
    assert imported_files(asked(root, "a/main.py", text)) == ()
    script = 'import x from "../../outside.py"\nimport "./\0.ts"\n'
    assert imported_files(asked(root, "a/main.ts", script)) == ()


def test_files_are_read_again_only_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    head = project_imports._read_head

    def count(path: str, characters: int, version: tuple[int, int]) -> str:
        read.append(Path(path).name)
        return head.__wrapped__(path, characters, version)

    monkeypatch.setattr(project_imports, "_read_head", lru_cache(count))
    write(tmp_path, "main.py", "tax.py", "money.py")
    request = asked(tmp_path, "main.py", "import tax, money\n")
    for _ in range(3):
        assert len(imported_files(request)) == 2
    assert read == ["tax.py", "money.py"]
    write(tmp_path, "tax.py", text="def other_rate(): ...\n")
    assert "other_rate" in imported_files(request)[0].text
    assert read == ["tax.py", "money.py", "tax.py"]
    (tmp_path / "tax.py").unlink()
    assert len(imported_files(request)) == 1


def test_long_and_binary_files_and_many_imports(tmp_path: Path) -> None:
    names = [f"m{number}.py" for number in range(20)]
    write(tmp_path, "main.py", *names, text="x = 1\n" * 9000)
    (tmp_path / "m0.py").write_bytes(b"\0" * 100)
    text = "".join(f"import m{number}\n" for number in range(20))
    found = imported_files(asked(tmp_path, "main.py", text))
    assert len(found) == 8
    assert "m0.py" not in {Path(file.path).name for file in found}
    assert all(len(file.text) <= 16_000 and file.text.endswith("\n") for file in found)


def test_completions_get_them_but_none_with_secrets(tmp_path: Path) -> None:
    seen: list[CompletionRequest] = []
    directory = write_model(tmp_path / "model", sentence_piece([END]), end=END)

    def load() -> Completer:
        completer = Completer(Engine.load(directory))
        prompt = completer.prompt

        def record(request: CompletionRequest, session: Session | None = None) -> Prompt:
            seen.append(request)
            return prompt(request, session)

        completer.prompt = record  # type: ignore[method-assign]
        return completer

    write(tmp_path, "main.py", "tax.py", "secrets.py")
    queue = CompletionQueue(load)
    queue.start()
    queue.complete(asked(tmp_path, "main.py", "import tax, secrets\nx = [[[["))
    assert queue.close(60)
    assert {Path(file.path).name for each in seen for file in each.files} == {"tax.py"}
