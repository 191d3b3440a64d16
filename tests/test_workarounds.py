"""Workarounds of other libraries: each one's form, and its effect."""

import ast
import contextlib
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from transformers.utils import import_utils

from akunu_py import workarounds
from akunu_py.workarounds import open_files
from akunu_py.workarounds.openblas import load_openblas

# Their form


MODULES = sorted(Path(workarounds.__path__[0]).glob("[a-z]*.py"))


@pytest.mark.parametrize("path", MODULES, ids=[path.stem for path in MODULES])
def test_each_module_gives_its_reason_and_its_end(path: Path) -> None:
    lines = (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").splitlines()
    fields = [line.partition(":")[0] for line in lines[2:] if not line.startswith(" ")]
    assert fields == ["Works around", "Upstream", "Remove when"]


# Open files


_UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(("soft", "hard", "expected"), [
    (64, 256, (256, 256)), (1024, 1024, None), (256, 4096, (2048, 4096)),
    (256, 1_048_576, (2048, 1_048_576)), (4096, 524_288, None),
    (256, _UNLIMITED, (2048, _UNLIMITED)), (_UNLIMITED, _UNLIMITED, None),
])  # fmt: skip
def test_mlx_lm_gets_what_there_is(
    soft: int, hard: int, expected: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(open_files, "_setrlimit", lambda *call: calls.append(call))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", open_files._raise_soft_limit)
    enter = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (2048, 4096))"
    exec(enter, {"__name__": "somebody.else"})
    exec("import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 1))", {})
    entered = [(resource.RLIMIT_NOFILE, (2048, 4096)), (resource.RLIMIT_CPU, (1, 1))]
    assert calls == entered, "only mlx-lm's call is another"
    exec(enter, {"__name__": "mlx_lm.utils"})
    assert calls[2:] == ([(resource.RLIMIT_NOFILE, expected)] if expected else [])
    assert resource.setrlimit is not open_files._raise_soft_limit


@pytest.mark.long
def test_it_is_imported_below_a_low_hard_limit() -> None:
    code = """if True:
        import importlib.util, resource, sys
        from unittest import mock
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, 1024))
        import akunu_py
        package = importlib.util.module_from_spec(importlib.util.find_spec("mlx_lm"))
        slow = dict.fromkeys(("huggingface_hub", "mlx_lm.tokenizer_utils"), mock.Mock())
        sys.modules |= {"mlx_lm": package, **slow}
        import mlx_lm.utils
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1024, 1024)
        assert type(resource.setrlimit).__name__ == "builtin_function_or_method"
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# OpenBLAS


def test_importing_mlx_loads_it_first() -> None:
    import mlx.core  # noqa: F401 - with the import of akunu_py above

    assert load_openblas.cache_info().currsize == 1
    assert "imported before" not in load_openblas()


def test_the_finder_imports_nothing() -> None:
    """It runs under the global import lock; a thread that imports ctypes would wait for ever."""
    code = """
import sys, akunu_py
before = set(sys.modules)
import mlx
before.update(each for each in sys.modules if each.startswith("mlx"))
assert sys.meta_path[0].find_spec("mlx.core", mlx.__path__)
print(*set(sys.modules) - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("\n", "", 0)


# Imports of transformers


MODELS = Path(transformers.__path__[0], "models")


@pytest.mark.long
def test_every_file_exports_what_transformers_finds_in_it() -> None:
    quick = import_utils.fetch__all__
    names = 0
    for path in MODELS.rglob("*.py"):
        content = path.read_text(encoding="utf-8")
        found = quick(content)
        assert found == quick.__wrapped__(content), path
        names += len(found)
    assert names > 1000
    for text in ("", "x = 1\n", "__all__ = ['a']", "x\n__all__ = [\n  'a',\n]\ny", " __all__"):
        assert quick(text) == quick.__wrapped__(text)


def test_a_directory_is_read_once_however_it_is_named() -> None:
    scan, auto = import_utils.create_import_structure_from_path, MODELS / "auto"
    assert scan(auto) is scan(os.fspath(auto)) is scan(os.fspath(auto / "__init__.py"))


# The terminal of a chat


@pytest.mark.e2e
@pytest.mark.usefixtures("own_directories")
def test_chat_handles_keys_typed_before_the_start_and_ends_with_its_terminal() -> None:
    """It ends even if no parent passes SIGHUP on."""
    terminal, inside = os.openpty()
    os.write(terminal, b"/settings\r")
    # Without a controlling terminal the kernel sends no signal either.
    chat = subprocess.Popen(
        [sys.executable, "-m", "akunu_py", "chat"],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        start_new_session=True,
    )
    os.close(inside)
    try:
        screen = b""
        while b"all chats" not in screen:
            screen += os.read(terminal, 65536)
        os.close(terminal)
        assert chat.wait(60) == -signal.SIGHUP
    finally:
        with contextlib.suppress(ProcessLookupError):
            chat.kill()
        chat.wait()
