"""`akunu uninstall`: show how to remove the program, and delete its data."""

import argparse
import shlex
import shutil
import sys
from pathlib import Path

from akunu_py import paths
from akunu_py.errors import StoreError, UsageError
from akunu_py.models.store import model_store
from akunu_py.models.store.directories import directory_size, store_errors
from akunu_py.parser import add_flags
from akunu_py.serve.own import system_service
from akunu_py.text import confirm, human_size, say

_INSTALLERS = (  # part of the path of the environment, and the command that removes it
    ("/uv/tools/akunu-py", "uv tool uninstall akunu-py"),
    ("/pipx/venvs/akunu-py", "pipx uninstall akunu-py"),
    ("/Cellar/akunu/", "brew uninstall akunu"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_flags(
        parser,
        ("--data", "Delete models, chats, caches and settings, after a confirmation"),
        ("--yes", "Do not ask for confirmation"),
    )


def run(args: argparse.Namespace) -> int:
    if args.yes and not args.data:
        raise UsageError("--yes confirms the deletion of data; add --data")
    directories = data_directories()
    for directory, content in directories.items():
        with store_errors(f"cannot read {directory}"):
            say(f"{human_size(directory_size(directory)):>8}  {directory} ({content})")
    if not args.data and system_service.is_installed():
        say("to remove the service, run: akunu serve --uninstall")
    if not directories:
        say("akunu has no data on this machine")
    elif not args.data:
        say("to delete this data, run: akunu uninstall --data")
    else:
        _delete(directories, confirmed=args.yes)
    say(f"to remove the program, run: {removal_command()}")
    return 0


def data_directories() -> dict[Path, str]:
    """Return our existing directories, each with a description of its content."""
    found: dict[Path, str] = {}
    for path, content in (
        (paths.data_dir(), "models and chats"),
        (paths.config_dir(), "settings"),  # on a Mac, in the same directory
        (paths.cache_dir(), "caches"),
        (paths.logs_dir(), "logs"),
    ):
        if path.is_dir():
            found[path] = f"{found[path]}, {content}" if path in found else content
    return found


def removal_command() -> str:
    """Return the command that removes the program, which depends on its installation."""
    for part, command in _INSTALLERS:
        if part in f"{Path(sys.prefix).resolve()}/":
            return command
    return f"{shlex.quote(sys.executable)} -m pip uninstall akunu-py"


def _delete(directories: dict[Path, str], *, confirmed: bool) -> None:
    from akunu_py.serve.own.client import running_servers

    if system_service.is_installed():
        raise UsageError("the service is installed; first run: akunu serve --uninstall")
    if servers := running_servers():
        raise UsageError(
            f"akunu serve is running (process {servers[0].process}); stop it, then try again"
        )
    question, command = "Delete all of it permanently?", "akunu uninstall --data --yes"
    if not confirmed and not confirm(question, command):
        say("nothing was deleted")
        return
    try:
        on_hub = any(model.repository for model in model_store.list_models())
    except StoreError:
        on_hub = False
    for directory in directories:
        with store_errors(f"cannot delete {directory}", ""):
            if directory.is_symlink():
                raise StoreError(f"{directory} is a link; delete it and the directory behind it")
            shutil.rmtree(directory)
    say("deleted")
    if on_hub:
        from huggingface_hub import constants

        say(f"models from the hub remain in its cache, {constants.HF_HUB_CACHE}; see: hf cache ls")
