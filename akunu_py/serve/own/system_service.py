"""`akunu serve` as a service that starts at login: launchd on a Mac, systemd on Linux."""

import contextlib
import os
import plistlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
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
_LABEL, _UNIT = "akunu.serve", "akunu.service"
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


@dataclass(frozen=True, slots=True)
class ServiceManager:
    """The system's manager of services, for the current user."""

    file: Path  # describes the service; it exists while the service is installed
    logs: str  # where the log is, or the command that shows it
    # Returns the content of the file. Raises UsageError for text that it cannot contain.
    describe: Callable[[ServiceCommand], bytes]
    start: Sequence[Sequence[str]]  # commands; they start the service now and at each login
    stop: Sequence[str]  # a command; it also forgets the service
    status: Sequence[str]  # a command that prints the state
    state_pattern: str  # finds the state in its output
    directories: Sequence[Path] = ()  # that must exist
    note: str = ""  # for the user, after the installation

    @property
    def is_installed(self) -> bool:
        return self.file.exists()

    def state(self) -> str:
        """Return "running" or a reason why it does not run."""
        found = re.search(self.state_pattern, _run(*self.status, may_fail=True), re.MULTILINE)
        state = found[1] if found else "not loaded"
        return "running" if state == "active" else state

    def install(self, command: ServiceCommand) -> None:
        """Install or replace the service and start it. Raises UsageError, StoreError."""
        content = self.describe(command)
        if self.is_installed:
            _run(*self.stop, may_fail=True)
        with store_errors(f"cannot write {self.file}"):
            for directory in (self.file.parent, *self.directories):
                directory.mkdir(parents=True, exist_ok=True)
            write_atomically(self.file, content)
        try:
            for each in self.start:
                _run(*each)
        except StoreError as error:
            self.file.unlink(missing_ok=True)
            hint = "log in as this user without su, sudo or SSH, then try again"
            raise StoreError(f"the service cannot start: {error}; {hint}") from error

    def uninstall(self) -> bool:
        """Stop and remove the service. Returns False if it is not installed."""
        if not self.is_installed:
            return False
        _run(*self.stop, may_fail=True)
        with store_errors(f"cannot remove {self.file}", ""):
            self.file.unlink(missing_ok=True)
        return True


def service_manager() -> ServiceManager:
    """Return the system's service manager. Raises UsageError without one."""
    if sys.platform == "darwin":
        file = Path.home() / "Library" / "LaunchAgents" / f"{_LABEL}.plist"
        domain = f"gui/{os.getuid()}"
        return ServiceManager(
            file,
            str(_agent_log()),
            _launch_agent,
            start=[("launchctl", "bootstrap", domain, str(file))],
            stop=("launchctl", "bootout", f"{domain}/{_LABEL}"),
            status=("launchctl", "print", f"{domain}/{_LABEL}"),
            state_pattern=r"^\s*state = (.+)$",
            directories=[paths.logs_dir()],
        )
    if shutil.which("systemctl"):
        config = os.environ.get("XDG_CONFIG_HOME", "")
        base = Path(config) if os.path.isabs(config) else Path.home() / ".config"
        file = base / "systemd" / "user" / _UNIT
        control = ("systemctl", "--user")
        # By its path, because the manager's XDG_CONFIG_HOME may differ from ours.
        enable = (*control, "enable", "--now", str(file))
        return ServiceManager(
            file,
            f"journalctl --user --unit {_UNIT}",
            _systemd_unit,
            start=[(*control, "daemon-reload"), enable],
            stop=(*control, "disable", "--now", _UNIT),
            status=(*control, "is-active", _UNIT),
            state_pattern="(.+)",
            note="to keep it running after you log out, run: loginctl enable-linger",
        )
    raise UsageError("services need systemd or launchd; start akunu serve in another way")


def _agent_log() -> Path:
    return paths.logs_dir() / "serve.log"


def _launch_agent(command: ServiceCommand) -> bytes:
    agent = {
        "Label": _LABEL,
        "ProgramArguments": command.words,
        "EnvironmentVariables": command.environment,
        "WorkingDirectory": str(Path.home()),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": _RESTART_S,
        "ExitTimeOut": _STOP_S,
        "ProcessType": "Interactive",  # launchd slows other kinds down
        "StandardOutPath": str(_agent_log()),
        "StandardErrorPath": str(_agent_log()),
    }
    try:
        return plistlib.dumps(agent)
    except ValueError as error:
        raise UsageError(f"a service cannot have these options: {error}") from error


def _systemd_unit(command: ServiceCommand) -> bytes:
    words = " ".join(_quoted(word).replace("$", "$$") for word in command.words)
    variables = [f"{name}={value}" for name, value in command.environment.items()]
    environment = "\n".join(f"Environment={_quoted(variable)}" for variable in variables)
    return f"""\
[Unit]
Description=akunu serve, a local LLM server

[Service]
Type=exec
ExecStart={words}
{environment}
WorkingDirectory=%h
Restart=on-failure
RestartSec={_RESTART_S}
TimeoutStopSec={_STOP_S}

[Install]
WantedBy=default.target
""".encode()


def is_installed() -> bool:
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
