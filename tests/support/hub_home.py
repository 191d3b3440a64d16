"""A hub on this machine with a tiny model, and empty directories.

Import `files`, `home` and `server` to have the fixtures; `server` offers `files`.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from akunu_py.errors import FetchError
from akunu_py.models.pull import pull as pull_module
from akunu_py.models.pull import worker
from tests.support.hub_server import REPOSITORY, Fault, Hub, running
from tests.support.tiny_model import tiny_files

WEIGHTS = "model.safetensors"
NAME = "tiny-model"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A model and files that no pull needs."""
    content = tiny_files(tmp_path_factory.mktemp("made"))
    return content | {"README.md": b"# tiny", "modeling_tiny.py": b"raise SystemExit", "a/b": b"x"}


@pytest.fixture
def server(files: dict[str, bytes]) -> Iterator[Hub]:
    with running(dict(files)) as running_hub:
        yield running_hub


@pytest.fixture(autouse=True)
def home(tmp_path: Path, server: Hub, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty directories, with the server as the hub."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    # Here, and in the processes that talk to the hub.
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(pull_module, "_FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(pull_module, "_LONGEST_WAIT_S", 0.0)
    return tmp_path


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the worker of pulls in this process; waits take at most 10 ms."""
    sent: list[dict[str, Any]] = []
    sleep = time.sleep

    def messages(self: pull_module.Hub, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        sent.clear()
        worker._handle(json.loads(json.dumps(request)))
        for each in sent:
            yield json.loads(json.dumps(each))

    monkeypatch.setattr(worker, "_send", lambda **what: sent.append(what))
    monkeypatch.setattr(pull_module.Hub, "_messages", messages)
    monkeypatch.setattr(pull_module.Hub, "start", lambda self: None)
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.01)))


def everything(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob("*") if path.is_file())


def partials(home: Path) -> list[Path]:
    return sorted((home / "hub").rglob("*.incomplete"))


def stop_in_the_weights(server: Hub, home: Path) -> Path:
    """Make a pull fail after 30,000 bytes of the weights; return the partial file."""
    server.faults[WEIGHTS].extend([Fault(cut=30_000), *[Fault(status=500)] * 5])
    with pytest.raises(FetchError):
        pull_module.pull(REPOSITORY)
    server.requests.clear()
    server.faults.clear()
    (partial,) = partials(home)
    assert partial.stat().st_size == 30_000
    return partial
