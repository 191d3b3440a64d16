"""The service: its description is valid, runs as written, and is removed whole."""

import os
import plistlib
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from akunu_py.serve.own import system_service
from akunu_py.serve.own.client import ServerClient, running_servers
from akunu_py.serve.own.system_service import ServiceCommand, ServiceManager
from tests.support.command import assert_one_line_error, run_here, until
from tests.support.serving import write_served_model

_HOSTILE = ("--alias", "a b", "--alias", "q\"uo'te", "--alias", "100%h", "--alias", "$HOME\\n;|&")


def words_of(manager: ServiceManager, content: bytes) -> list[str]:
    if manager.file.suffix == ".plist":
        return list(plistlib.loads(content)["ProgramArguments"])
    (line,) = [each for each in content.decode().splitlines() if each.startswith("ExecStart=")]
    text = line.removeprefix("ExecStart=").replace("$$", "$").replace("%%", "%")
    return shlex.split(text)


@pytest.fixture(autouse=True)
def home(own_directories: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(params=["darwin", "linux"])
def manager(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, home: Path
) -> ServiceManager:
    """A service manager whose program writes down how it is called, and succeeds."""
    monkeypatch.setattr(sys, "platform", request.param)
    program = home / "bin" / {"darwin": "launchctl", "linux": "systemctl"}[request.param]
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {home}/calls\n'
        'case "$1" in print) echo "	state = running";; esac\n'
        'case "$2" in is-active) echo active;; esac\n'
        f'[ -e {home}/refuse ] && echo "first line\nno bus" >&2 && exit 5\nexit 0\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return system_service.service_manager()


def test_the_description_has_every_word_and_variable(manager: ServiceManager) -> None:
    command = ServiceCommand(_HOSTILE, {"XDG_DATA_HOME": "/with space/100%/$x"})
    content = manager.describe(command)
    assert words_of(manager, content) == command.words
    assert b"/with space/100%" in content
    if manager.file.suffix == ".plist":
        assert plistlib.loads(content)["EnvironmentVariables"] == command.environment
    else:
        assert b'Environment="XDG_DATA_HOME=/with space/100%%/$x"' in content


def test_install_status_and_uninstall(
    manager: ServiceManager, home: Path, tiny_chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = home / "calls"
    monkeypatch.chdir(tiny_chat_model.parent)
    options = ["--alias", "a b", "--alias", "c", "--host", "::1", "--port", "8123"]
    done = run_here("serve", "--install", "--model", tiny_chat_model.name, *options)
    assert done.returncode == 0, done.stderr
    assert f"installed {manager.file}" in done.stdout
    assert "http://[::1]:8123/v1" in done.stdout
    assert f"logs: {manager.logs}" in done.stdout
    words = words_of(manager, manager.file.read_bytes())
    assert words[words.index("serve") + 1 :] == ["--model", str(tiny_chat_model), *options]
    assert manager.file.stat().st_mode & 0o077 == 0
    assert str(manager.file) in calls.read_text()

    status = run_here("serve", "--status").stdout
    assert f"service: running ({manager.file})" in status
    assert "server: none is running" in status

    calls.unlink()
    paths = [str(write_served_model(home / name).resolve()) for name in "ab"]
    monkeypatch.chdir(home)
    done = run_here("serve", "--install", "--model", "./a", "--model", "./b")
    assert done.returncode == 0, done.stderr
    assert "a, b served at http://" in done.stdout
    stop, *_ = calls.read_text().splitlines()
    assert stop.split()[0] == "bootout" or stop.split()[1] == "disable", "the old one ends first"
    words = words_of(manager, manager.file.read_bytes())
    assert words[words.index("serve") + 1 :] == ["--model", paths[0], "--model", paths[1]]

    assert str(manager.file) in run_here("serve", "--uninstall").stdout
    assert not manager.file.exists()
    assert "not installed" in run_here("serve", "--uninstall").stdout
    assert "not installed" in run_here("serve", "--status").stdout


def test_a_refusal_leaves_nothing(
    manager: ServiceManager, home: Path, tiny_chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of options that a service would fail with, of Homebrew's own service, and of the system."""
    model = ("--model", str(tiny_chat_model))
    refused = [
        (("--api-key", "secret"), 2, "settings.toml"), (("--until-eof",), 2, "stdin"),
        (("--host", "0.0.0.0"), 2, "settings.toml"),
        (("--model", "nope"), 1, "nope"), (("--kv-bits", "4", "--hosts", "2"), 2, "--kv-bits"),
    ]  # fmt: skip
    if manager.file.suffix != ".plist":  # a property list can have them
        refused.append(((*model, "--alias", "a\nb"), 2, "control characters"))
    for options, code, word in refused:
        assert_one_line_error(run_here("serve", "--install", *options), code, word)
    with monkeypatch.context() as patch:
        patch.setenv("AKUNU_API_KEY", "secret")
        assert_one_line_error(run_here("serve", "--install", *model), 2, "settings.toml")
    (home / "refuse").touch()
    done = run_here("serve", "--install", *model)
    assert_one_line_error(done, 1, "(5): no bus", "log in as this user")
    monkeypatch.setattr(sys, "prefix", "/opt/homebrew/Cellar/akunu/0.1.0/libexec")
    assert_one_line_error(run_here("serve", "--install"), 2, "brew services start akunu")
    assert not manager.file.exists()


@pytest.mark.e2e
def test_the_described_command_serves(home: Path) -> None:
    options = ("--model", str(write_served_model(home / "a")), "--port", "0", "--quiet")
    manager = system_service.service_manager()
    content = manager.describe(ServiceCommand(options, system_service.own_environment()))
    environment = system_service.own_environment() | {"HOME": str(home), "PATH": "/usr/bin:/bin"}
    (home / "work").mkdir()
    (home / "work" / "akunu_py.py").write_text("raise SystemExit('the decoy was imported')")
    process = subprocess.Popen(words_of(manager, content), env=environment, cwd=home / "work")
    try:
        until(lambda: running_servers() or process.poll() is not None)
        (server,) = running_servers()
        until(lambda: ServerClient(server.url).has_token(server.token))
        assert server.url in run_here("serve", "--status").stdout
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
