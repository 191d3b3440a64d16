"""settings.toml: loading, saving without losing comments, and errors."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from akunu_py.cli import main
from akunu_py.commands.chat import usable_model
from akunu_py.errors import StoreError, UsageError
from akunu_py.settings import (
    ServeSettings,
    Settings,
    load_settings,
    read_settings,
    save_settings,
    serve_settings,
    settings_file,
)
from akunu_py.text import parse_size

PERSONAS = {"coder": "You write Python.", "poet": "You rhyme."}
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    settings_file().parent.mkdir()
    return settings_file().parent


def test_saved_settings_are_loaded() -> None:
    changes = {"temperature": 0.2, "personas": PERSONAS, "persona": "poet", "theme": "light"}
    changes["completion_exclude"] = (".env*", "private/*")
    saved = save_settings(changes)
    assert saved == load_settings() == Settings(**changes)  # type: ignore[arg-type]
    assert saved.system == "You rhyme."
    settings_file().write_text("temperature = 1\n")
    assert load_settings().temperature == 1.0


@pytest.mark.long
@given(
    changes=st.fixed_dictionaries(
        {"system_prompt": texts, "personas": st.dictionaries(texts, texts, max_size=3)},
        optional={"answer_cache": st.booleans(), "model": texts, "temperature": st.floats(0, 5)},
    )
)
@hypothesis_settings(max_examples=32, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_survives(changes: dict[str, Any]) -> None:
    before = asdict(load_settings())
    assert asdict(save_settings(changes)) == asdict(load_settings()) == before | changes


def test_comments_order_and_other_settings_stay() -> None:
    kept = '# by hand\nanswer_cache = false\nmodel = "starter"  # small\n'
    settings_file().write_text(kept + '\n[personas]\n# codes\na = "A"\n')
    save_settings({"temperature": 0.1, "personas": {"a": "A", "b": "B"}})
    lines = settings_file().read_text().splitlines()
    assert {*kept.splitlines(), "# codes", 'b = "B"'} <= set(lines)
    assert not load_settings().answer_cache


def test_default_values_are_removed_from_the_file() -> None:
    save_settings({"theme": "light", "reduced_motion": True})
    save_settings({"theme": "auto"})
    assert settings_file().read_text() == "reduced_motion = true\n"


@pytest.mark.parametrize(("changes", "message"), [
    ({"temperature": -1}, "0 to 5"),
    ({"temperature": float("nan")}, "0 to 5"),
    ({"temperature": "hot"}, "a number"),
    ({"persona": "nobody"}, "no persona called 'nobody'"),
    ({"personas": {"a": 1}}, "names and texts"),
    ({"completion_exclude": ".env"}, "expected a list of strings for completion_exclude"),
    ({"completion_exclude": [1]}, "a list of strings"),
    ({"colour": "red"}, "unknown setting 'colour'"),
])  # fmt: skip
def test_wrong_values_are_refused_and_nothing_is_written(changes: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        save_settings(changes)
    assert not settings_file().exists()


def test_a_file_without_toml_is_not_overwritten() -> None:
    settings_file().write_text("theme = ")
    with pytest.raises(UsageError, match=r"settings\.toml"):
        save_settings({"answer_cache": False})
    assert settings_file().read_text() == "theme = "


def test_a_link_stays_a_link(directory: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "dotfiles.toml"
    elsewhere.write_text("answer_cache = false\n")
    elsewhere.chmod(0o600)
    settings_file().symlink_to(elsewhere)
    save_settings({"model": "other"})
    assert settings_file().is_symlink()
    assert 'model = "other"' in elsewhere.read_text()
    assert elsewhere.stat().st_mode & 0o777 == 0o600


def test_a_full_disk_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    settings_file().write_text("answer_cache = false\n")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="No space left"):
        save_settings({"answer_cache": True})
    assert settings_file().read_text() == "answer_cache = false\n"
    assert [path.name for path in settings_file().parent.iterdir()] == ["settings.toml"]


def test_info_names_the_file_and_its_settings_but_no_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def shown() -> str:
        assert main(["info"]) == 0
        return next(line for line in capsys.readouterr().out.splitlines() if "settings" in line)

    assert shown().endswith("settings.toml (does not exist)")
    save_settings({"system_prompt": "my secret", "theme": "light"})
    assert shown().endswith("settings.toml (sets system_prompt, theme)")
    settings_file().write_text("theme = ")
    assert "correct or remove it" in shown()


@pytest.mark.parametrize(("content", "wrong", "kept"), [
    ("theme = 'light'\nmodel = = 3", 1, "auto"),
    ("theme = 'light'\nmemmory = true\ntemperature = 9", 2, "light"),
    ("theme = 'light'\nmodel = 3\npersona = 'pirate'", 2, "light"),
    ("theme = 'light'\nmodel = 'nothing-like-it'", 1, "light"),
    ("theme = 'light'", 0, "light"),
    ("theme = 'light'\nanswer_cache = true", 0, "light"),
])  # fmt: skip
def test_a_chat_opens_with_any_settings(content: str, wrong: int, kept: str) -> None:
    """With the valid settings, the starter, and one line for each error."""
    settings_file().parent.mkdir(parents=True, exist_ok=True)
    settings_file().write_text(content)
    settings, problems = read_settings()
    model, _ = usable_model(settings, problems, None)
    assert (settings.theme, len(problems), model) == (kept, wrong, "starter")
    assert all(str(settings_file()) in line and "\n" not in line for line in problems)
    assert settings.temperature == Settings().temperature
    assert settings.answer_cache == ("= =" not in content), "the file may turn the answer cache off"
    model, _ = usable_model(settings, problems, "asked-for")
    assert (problems[-1], model) == (
        "model 'asked-for' is not installed; using starter instead; press F4 for other models",
        "starter",
    )


@pytest.mark.parametrize(("text", "size"), [
    ("0B", 0), ("500 MB", 500_000_000), ("2GB", 2_000_000_000), ("1.5kb", 1500),
    ("1TB", 10**12), ("200M", 200_000_000),
    *((text, None) for text in ("2", "GB", "-1GB", "1e9B", "2 G B", "nanB", "²GB", "9" * 99)),
])  # fmt: skip
def test_sizes(text: str, size: int | None) -> None:
    if size is None:
        with pytest.raises(UsageError, match="expected a size such as 500MB"):
            save_settings({"prompt_cache_memory": text})
    else:
        assert parse_size(text) == size
        assert save_settings({"prompt_cache_memory": text}).prompt_cache_memory == text


def test_serve_settings_come_from_the_environment_then_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert serve_settings() == ServeSettings("127.0.0.1", 8012, "", "")
    settings_file().write_text(
        'model = "chat"\n[serve]\nhost = "10.0.0.1"\nport = 9000\nmodel = "a"\napi_key = "k"\n'
    )
    assert serve_settings() == ServeSettings("10.0.0.1", 9000, "a", "k")
    for name, value in {"HOST": "0.0.0.0", "PORT": "0", "MODEL": "b", "API_KEY": "s"}.items():
        monkeypatch.setenv(f"AKUNU_{name}", value)
    assert serve_settings() == ServeSettings("0.0.0.0", 0, "b", "s")
    for port in ("70000", "-1", "http", "1.5"):
        monkeypatch.setenv("AKUNU_PORT", port)
        with pytest.raises(UsageError, match="a port from 0 to 65535 for AKUNU_PORT, found"):
            serve_settings()
    save_settings({"bell": False})
    assert load_settings().serve == ServeSettings("10.0.0.1", 9000, "a", "k")


@pytest.mark.parametrize(("content", "message"), [
    ("serve = 1", "expected a table for serve, found 1"),
    ("[serve]\nport = 70000", "expected a port from 0 to 65535 for serve.port, found 70000"),
    ("[serve]\nport = true", "expected a port from 0 to 65535 for serve.port, found True"),
    ("[serve]\nhost = 1", "expected a text in quotes for serve.host, found 1"),
    (
        "[serve]\nodd = 1",
        "unknown setting serve.'odd'; settings of [serve]: host, port, model, api_key",
    ),
])  # fmt: skip
def test_invalid_serve_settings_are_named(content: str, message: str) -> None:
    settings_file().write_text(content)
    with pytest.raises(UsageError) as raised:
        load_settings()
    assert str(raised.value) == f"{settings_file()}: {message}"
    assert read_settings()[0].serve == ServeSettings()
