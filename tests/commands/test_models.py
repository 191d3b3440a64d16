"""`akunu models` as a program: processes of their own against a hub of our own."""

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from huggingface_hub import constants

from akunu_py.cli import main
from akunu_py.commands.models import progress_display
from akunu_py.models.store.progress import Progress
from akunu_py.paths import shell_command
from tests.support.command import AKUNU, printed, run_here, until
from tests.support.hub_home import WEIGHTS
from tests.support.hub_home import server as server  # a fixture
from tests.support.hub_server import REPOSITORY, Fault, Hub
from tests.support.paths import ROOT
from tests.support.tiny_model import tiny_files

Out = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return tiny_files(tmp_path_factory.mktemp("made"))


@pytest.fixture
def environment(tmp_path: Path, server: Hub, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Empty places and the server for the hub, for this process too."""
    places = {
        "XDG_DATA_HOME": str(tmp_path / "data"), "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"), "HF_HOME": str(tmp_path / "hf"),
        "HF_ENDPOINT": server.url, "HF_TOKEN": "hf_secret", "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip
    for name, value in places.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    return os.environ | places


@pytest.mark.long
def test_a_model_of_the_catalog_from_pull_to_rm(
    environment: dict[str, str], server: Hub, tmp_path: Path
) -> None:
    server.repository = "mlx-community/Qwen3-0.6B-4bit"
    pulled = run_here("models", "pull", "qwen3-0.6b")
    assert pulled.returncode == 0, pulled.stderr
    assert "qwen3-0.6b is ready" in pulled.stderr
    assert (tmp_path / "hf" / "hub" / "models--mlx-community--Qwen3-0.6B-4bit").is_dir()
    assert "already installed" in printed("models", "pull", "qwen3-0.6b")
    assert printed("run", "--raw", "--model", "qwen3-0.6b", "--max-tokens", "3", "a b")
    assert "verified" in printed("models", "verify", "qwen3-0.6b")
    shown = printed("models", "show", "qwen3-0.6b")
    facts = dict(line.split(maxsplit=1) for line in shown.splitlines())
    assert facts["hub"] == f"{server.repository}@{server.commit}"
    assert facts["license"] == "Apache-2.0"  # the catalog's word, not the card's
    assert f"{server.repository}" in printed("models", "list").splitlines()[1]
    assert "remain in the hub's cache" in printed("models", "rm", "qwen3-0.6b", "--yes")
    assert list((tmp_path / "hf").rglob(WEIGHTS))


@pytest.mark.e2e
def test_ctrl_c_and_a_kill_leave_something_to_go_on_from(
    environment: dict[str, str], server: Hub, tmp_path: Path
) -> None:
    pull = ["models", "pull", REPOSITORY, "--name", "mine"]
    for number, code in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        server.faults[WEIGHTS].append(Fault(pause=0.2))
        with subprocess.Popen(
            [*AKUNU, *pull], env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True
        ) as process:
            before = _partial_bytes(tmp_path)
            until(lambda before=before: _partial_bytes(tmp_path) > before + 5000)  # type: ignore[misc]
            process.send_signal(number)
            _, stderr = process.communicate(timeout=60)
        assert process.returncode == code
        assert (f"to resume, run: {shell_command()} {' '.join(pull)}\n" in stderr) == (
            number == signal.SIGINT
        )
    assert f"to resume, run: akunu {' '.join(pull)}\n" in printed("models", "list")
    server.requests.clear()
    printed(*pull)
    (wanted,) = server.requested(WEIGHTS)
    assert int(wanted.removeprefix("bytes=").rstrip("-")) > 5000
    assert "unfinished" not in printed("models", "list")


def _partial_bytes(tmp_path: Path) -> int:
    size = 0
    for path in (tmp_path / "hf").rglob("*.incomplete"):
        with contextlib.suppress(FileNotFoundError):  # it is complete
            size += path.stat().st_size
    return size


@pytest.mark.long
def test_a_failure_is_one_line_and_gc_cleans_up(
    environment: dict[str, str], server: Hub, tmp_path: Path
) -> None:
    server.faults[WEIGHTS].extend([Fault(cut=9000), *[Fault(status=403)] * 3])
    failed = run_here("models", "pull", REPOSITORY)
    assert failed.returncode == 1
    (line,) = [text for text in failed.stderr.splitlines() if text.startswith("akunu:")]
    assert "HF_TOKEN" in line
    assert "hf_secret" not in failed.stdout + failed.stderr
    assert f"an unfinished pull of {REPOSITORY}" in printed("models", "gc", "--dry-run")
    assert _partial_bytes(tmp_path) == 9000
    assert "freed" in printed("models", "gc")
    assert _partial_bytes(tmp_path) == 0
    assert "nothing to remove" in printed("models", "gc")


def test_a_model_that_does_not_fit_is_refused_with_the_figures(
    files: dict[str, bytes], environment: dict[str, str], tmp_path: Path, capsys: Out
) -> None:
    directory = tmp_path / "vast"
    directory.mkdir()
    config = json.loads(files["config.json"]) | {"max_position_embeddings": 10**9}
    for name, content in (files | {"config.json": json.dumps(config).encode()}).items():
        (directory / name).write_bytes(content)
    run = ["run", "--raw", "--quiet", "--model", str(directory), "--max-tokens", "2", "a b"]
    assert main([*run, "--context", "900000000"]) == 1
    error = capsys.readouterr().err
    assert "KV cache" in error
    assert "--context" in error
    assert "--force" in error
    assert main(run) == 0
    assert "tokens of context" in capsys.readouterr().err
    assert main([*run, "--context", "900000000", "--force"]) == 0
    assert main([*run, "--context", "2000000000"]) == 2
    assert main([*run, "--context", "2"]) == 1
    assert "the context of vast holds 2" in capsys.readouterr().err


@pytest.mark.usefixtures("environment")
def test_list_and_recommend() -> None:
    assert "akunu models recommend" in printed("models", "list")
    recommend = ("models", "recommend", "--memory")
    text = printed(*recommend, "16G")
    found = json.loads(printed(*recommend, "16GB", "--format", "json"))
    for purpose in ("chat", "code"):
        assert f"{purpose}: {found[purpose]['name']}" in text
        assert found[purpose]["why"] in text
    for same in ("16384M", "16777216k", "0.015625T", "16 gb"):  # powers of 1,024
        assert json.loads(printed(*recommend, same, "--format", "json")) == found, same
    for wrong in ("16", "G", "0G", "-3G", "1e999G", "16X"):
        assert main(["models", "recommend", f"--memory={wrong}"]) == 2
    assert "akunu models pull qwen3-8b" in printed("models", "show", "qwen3-8b")


def test_progress_is_a_line_of_each_phase_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress_display() as show:
        for progress in (
            Progress("look up"),
            Progress("download", 5, 9),
            Progress("download", 9, 9),
        ):
            show(progress)
    first, second, end = capsys.readouterr().err.split("\n")
    assert [line.split("\r\x1b[K")[-1] for line in (first, second)] == [
        "look up", "download: 9 B of 9 B",
    ]  # fmt: skip
    assert end == ""
