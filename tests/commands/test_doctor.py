"""`akunu doctor`: each problem is found, with advice, and sets the exit code."""

from pathlib import Path

import pytest

from akunu_py.models.pull import pull
from akunu_py.models.store.model_store import StoredModel
from tests.support.command import assert_one_line_error, run_here

pytestmark = pytest.mark.usefixtures("own_directories")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def findings(*words: str, code: int) -> dict[str, tuple[str, str]]:
    """Run `akunu doctor` and return each line's state and text by its name."""
    done = run_here("doctor", *words)
    assert done.returncode == code, done.stdout + done.stderr
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    return {name: (state, text) for name, state, text in lines}


def test_a_machine_with_a_model_has_no_problem(home: Path, starter: StoredModel) -> None:
    models = home / "data" / "akunu" / "models"
    models.mkdir(parents=True)
    (models / "starter").symlink_to(starter.path)
    (home / ".vimrc").write_text('let g:akunu_command = ["/bin/sh"]\n')
    found = findings(code=0)
    assert {state for state, _ in found.values()} == {"ok"}
    assert found["model"][1].startswith("starter, ")
    assert found.keys() >= {"python", "mlx", "device", "memory", "disk", "server", "editor"}
    assert "hub" not in found


def test_each_problem_is_reported_with_advice(home: Path) -> None:
    damaged = home / "data" / "akunu" / "models" / "broken"
    damaged.mkdir(parents=True)
    (home / ".vimrc").write_text("let g:akunu_command = ['/gone/akunu', 'complete']\n")
    (home / "config" / "akunu").mkdir(parents=True)
    (home / "config" / "akunu" / "settings.toml").write_text('draft_model = "missing"\n')
    (home / "data" / "akunu" / "models" / "models.toml").write_text('[broken]\ndrafter = "gone"\n')
    found = findings(code=1)
    assert found["drafter"][0] == "problem"
    assert "'gone'" in found["drafter"][1]
    assert found["model"][0] == "problem"
    assert "akunu models" in found["model"][1]
    assert found["drafting"][0] == "problem"
    assert "'missing'" in found["drafting"][1]
    assert found["editor"][0] == "problem"
    assert "/gone/akunu: it does not exist" in found["editor"][1]
    assert found["python"][0] == "ok"


def test_problems_of_the_settings_are_on_their_line(home: Path) -> None:
    file = home / "config" / "akunu" / "settings.toml"
    file.parent.mkdir(parents=True)
    for text, word in (('model = "nosuch"', "models pull starter"), ('modle = "x"', "model?")):
        file.write_text(text)
        found = findings(code=1)
        assert found["settings"][0] == "problem"
        assert str(file) in found["settings"][1]
        assert word in found["settings"][1]
        assert found["drafting"][0] == "ok"
    file.write_text('model = "nosuch"')
    assert_one_line_error(run_here("run", "hi"), 1, f"{file}: no model called 'nosuch'")


def test_a_directory_without_write_access_has_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert findings(code=1)["disk"][1].endswith("; give yourself write access")


def test_an_empty_store_names_the_command_that_fills_it() -> None:
    assert findings(code=1)["models"] == (
        "problem",
        "none installed; run: akunu models pull starter",
    )


@pytest.mark.long
def test_the_hub_is_contacted_on_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(pull, "_ATTEMPTS", 1)
    assert "hub" not in findings(code=1)
    assert findings("--hub", code=1)["hub"][0] == "problem"
