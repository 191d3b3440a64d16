"""mlx-lm raises the limit of open files when it is imported; that may be forbidden."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from akunu_py.workarounds import open_files

_UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        (64, 256, (256, 256)),
        (1024, 1024, None),
        (256, 4096, (2048, 4096)),
        (256, 1_048_576, (2048, 1_048_576)),
        (4096, 524_288, None),
        (256, _UNLIMITED, (2048, _UNLIMITED)),
        (_UNLIMITED, _UNLIMITED, None),
    ],
)
def test_mlx_lm_gets_what_there_is(
    soft: int, hard: int, expected: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(open_files, "_setrlimit", lambda *call: calls.append(call))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", open_files._raise_soft_limit)
    ask = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (2048, 4096))"
    exec(ask, {"__name__": "somebody.else"})
    exec("import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 1))", {})
    asked = [(resource.RLIMIT_NOFILE, (2048, 4096)), (resource.RLIMIT_CPU, (1, 1))]
    assert calls == asked, "only mlx-lm's call is another"
    exec(ask, {"__name__": "mlx_lm.utils"})
    assert calls[2:] == ([(resource.RLIMIT_NOFILE, expected)] if expected else [])
    assert resource.setrlimit is not open_files._raise_soft_limit


@pytest.mark.long
def test_it_is_imported_below_a_low_hard_limit() -> None:
    code = """if True:
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, 1024))
        import akunu_py
        import mlx_lm.utils
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1024, 1024)
        assert type(resource.setrlimit).__name__ == "builtin_function_or_method"
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
