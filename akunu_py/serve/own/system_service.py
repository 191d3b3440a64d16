"""`akunu serve` as a service that starts at login: launchd on a Mac, systemd on Linux."""

from __future__ import annotations

import contextlib
import os
import plistlib
import re
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from akunu_py import paths
from akunu_py.errors import StoreError, UsageError, one_line
from akunu_py.files import write_atomically
from akunu_py.models.store.directories import store_errors

# Variables that move files or set options; a service does not inherit them.
_ENVIRONMENT = (
    "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME", "HF_HUB_CACHE",
    "AKUNU_HOST", "AKUNU_PORT", "AKUNU_MODEL",
)  # fmt: skip
_STOP_S = 30  # more than the grace period of running requests
_RESTART_S = 10  # between two starts after a failure


@dataclass(frozen=True, slots=True)
class ServiceCommand:
    """What a service runs."""

    arguments: tuple[str, ...]  # of `akunu serve`
    environment: dict[str, str]

    @property
    def words(self) -> list[str]:
        """The command line. -P: Python imports nothing from the working directory."""
        return [sys.executable, "-P", "-m", "akunu_py", "serve", *self.arguments]


def own_environment() -> dict[str, str]:
    """Return the variables of this process that a service needs."""
    return {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}


class ServiceManager(ABC):
    """The system's manager of services, for the current user."""

    file: Path  # describes the service; it exists while the service is installed
    logs: str  # where the log is, or the command that shows it
    note: str = ""  # for the user, after the installation

    @abstractmethod
    def describe(self, command: ServiceCommand) -> bytes:
        """Return the content of the file. Raises UsageError for text that it cannot contain."""

    @abstractmethod
    def start(self) -> None:
        """Start the installed service, now and at each login. Raises StoreError."""

    @abstractmethod
    def stop(self) -> None:
        """Stop the service, if it runs, and forget it."""

    @abstractmethod
    def state(self) -> str:
        """Return "running" or a reason why it does not run."""

    @property
    def is_installed(self) -> bool:
        return self.file.exists()

    def install(self, command: ServiceCommand) -> None:
        """Install or replace the service and start it. Raises UsageError, StoreError."""
        content = self.describe(command)
        if self.is_installed:
            self.stop()
        with store_errors(f"cannot write {self.file}"):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.file, content)
        try:
            self.start()
        except StoreError as error:
            self.file.unlink(missing_ok=True)
            hint = "log in as this user without su, sudo or SSH, then try again"
            raise StoreError(f"the service cannot start: {error}; {hint}") from error

    def uninstall(self) -> bool:
        """Stop and remove the service. Returns False if it is not installed."""
        if not self.is_installed:
            return False
        self.stop()
        with store_errors(f"cannot remove {self.file}"):
            self.file.unlink(missing_ok=True)
        return True


class Launchd(ServiceManager):
    """launchd, with an agent of the user."""

    LABEL = "akunu.serve"

    def __init__(self) -> None:
        self.file = Path.home() / "Library" / "LaunchAgents" / f"{self.LABEL}.plist"
        self.logs = str(paths.logs_dir() / "serve.log")
        self._domain = f"gui/{os.getuid()}"

    def describe(self, command: ServiceCommand) -> bytes:
        """Return the property list of the launch agent."""
        agent = {
            "Label": self.LABEL,
            "ProgramArguments": command.words,
            "EnvironmentVariables": command.environment,
            "WorkingDirectory": str(Path.home()),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": _RESTART_S,
            "ExitTimeOut": _STOP_S,
            "ProcessType": "Interactive",  # launchd slows other kinds down
            "StandardOutPath": self.logs,
            "StandardErrorPath": self.logs,
        }
        try:
            return plistlib.dumps(agent)
        except ValueError as error:
            raise UsageError(f"a service cannot have these options: {error}") from error

    def start(self) -> None:
        with store_errors(f"cannot write {self.logs}"):
            paths.logs_dir().mkdir(parents=True, exist_ok=True)
        _run("launchctl", "bootstrap", self._domain, str(self.file))

    def stop(self) -> None:
        _run("launchctl", "bootout", f"{self._domain}/{self.LABEL}", may_fail=True)

    def state(self) -> str:
        shown = _run("launchctl", "print", f"{self._domain}/{self.LABEL}", may_fail=True)
        found = re.search(r"^\s*state = (.+)$", shown, re.MULTILINE)
        return found[1] if found else "not loaded"


class Systemd(ServiceManager):
    """systemd, with a unit of the user."""

    UNIT = "akunu.service"
    note = "to keep it running after you log out, run: loginctl enable-linger"

    def __init__(self) -> None:
        config = os.environ.get("XDG_CONFIG_HOME", "")
        base = Path(config) if os.path.isabs(config) else Path.home() / ".config"
        self.file = base / "systemd" / "user" / self.UNIT
        self.logs = f"journalctl --user --unit {self.UNIT}"

    def describe(self, command: ServiceCommand) -> bytes:
        """Return the unit file of the user service."""
        variables = [f"{name}={value}" for name, value in command.environment.items()]
        words = [_quoted(word).replace("$", "$$") for word in command.words]
        lines = [
            "[Unit]",
            "Description=akunu serve, a local LLM server",
            "",
            "[Service]",
            "Type=exec",
            f"ExecStart={' '.join(words)}",
            *(f"Environment={_quoted(variable)}" for variable in variables),
            "WorkingDirectory=%h",
            "Restart=on-failure",
            f"RestartSec={_RESTART_S}",
            f"TimeoutStopSec={_STOP_S}",
            "",
            "[Install]",
            "WantedBy=default.target",
            "",
        ]
        return "\n".join(lines).encode()

    def start(self) -> None:
        _run("systemctl", "--user", "daemon-reload")
        # By its path, because the manager's XDG_CONFIG_HOME may differ from ours.
        _run("systemctl", "--user", "enable", "--now", str(self.file))

    def stop(self) -> None:
        _run("systemctl", "--user", "disable", "--now", self.UNIT, may_fail=True)

    def state(self) -> str:
        shown = _run("systemctl", "--user", "is-active", self.UNIT, may_fail=True).strip()
        return {"active": "running"}.get(shown, shown or "not loaded")


def service_manager() -> ServiceManager:
    """Return the system's service manager. Raises UsageError without one."""
    if sys.platform == "darwin":
        return Launchd()
    if shutil.which("systemctl"):
        return Systemd()
    raise UsageError("services need systemd or launchd; start akunu serve in another way")


def is_installed() -> bool:
    """Return True if the service is installed."""
    with contextlib.suppress(UsageError):
        return service_manager().is_installed
    return False


def _quoted(word: str) -> str:
    """Quote a word of a unit. Raises UsageError for control characters."""
    if any(ord(character) < 0x20 for character in word):
        raise UsageError(f"a service cannot have the option {word!r}, which has control characters")
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def _run(*command: str, may_fail: bool = False) -> str:
    """Run a program and return its output. Raises StoreError with its last line."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise StoreError(f"cannot run {command[0]}: {error.strerror}") from error
    if done.returncode and not may_fail:
        reason = one_line((done.stderr or done.stdout).strip().rpartition("\n")[2])
        raise StoreError(f"{' '.join(command[:3])} failed ({done.returncode}): {reason}")
    return done.stdout
