"""`akunu info`: versions, hardware and paths for a bug report."""

import argparse
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from akunu_py import paths
from akunu_py.commands.uninstall import removal_command
from akunu_py.errors import AkunuError, StoreError, UsageError
from akunu_py.models.store import model_store
from akunu_py.serve.own.client import RunningServer, running_servers
from akunu_py.settings import Settings, load_settings, settings_file
from akunu_py.text import human_size, table
from akunu_py.version import __version__, package_version

_PACKAGES = ("mlx", "mlx-lm", "numpy", "textual", "tokenizers", "transformers", "huggingface-hub")


def add_options(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace) -> int:
    from akunu_py.engine.model import device
    from akunu_py.kernels import probe

    try:
        models, code = model_store.list_models(), 0
        size = human_size(sum(each.size for each in models))
        store = f"{paths.models_dir()} (models: {len(models)}, {size})"
    except StoreError as error:
        store, code = str(error), error.exit_code
    rows = [
        ("akunu", __version__),
        ("system", platform.platform()),
        ("python", platform.python_version()),
        ("device", device.device_name()),
        ("memory", describe_memory()),
        ("blas", describe_blas()),
        ("kernels", probe.describe()),
        *((package, package_version(package)) for package in _PACKAGES),
        *(
            ("server", describe_server(server) or f"{server.url} (does not answer)")
            for server in running_servers()
        ),
        ("store", store),
        ("chats", str(paths.conversations_file())),
        ("cache", str(paths.cache_dir())),
        ("settings", _settings()),
        ("program", f"{sys.prefix} (to remove it: {removal_command()})"),
    ]
    print(*table(rows), sep="\n")
    return code


def describe_memory() -> str:
    """Return the memory of this machine, and how much of it models may use now."""
    from akunu_py.engine.model import device

    total, free = human_size(device.total_memory()), human_size(device.available_memory())
    return f"{total}, {free} available for models"


def describe_blas() -> str:
    """Return the BLAS behind MLX's CPU backend, and its threads; "" without one."""
    from akunu_py.workarounds import openblas

    name, threads = openblas.load_openblas(), openblas.threads()
    return f"{name}, {threads} threads (at most one for each idle core)" if threads else name


def describe_server(server: RunningServer) -> str | None:
    """Return the address of a running server, and its models; None if it does not answer."""
    from akunu_py.serve.own.client import ServerClient

    try:
        models = ServerClient(server.url, server.token).models()
    except (AkunuError, KeyError, TypeError):
        return None
    return f"{server.url} serves {', '.join(map(_served, models))}"


def _served(model: Mapping[str, Any]) -> str:
    why, drafter = model.get("not_batched"), model.get("drafter")
    described = [f"requests take turns: {why}" if why else str(model["state"])]
    if drafter:
        rates = ", ".join(f"{rate:.2f}" for rate in model.get("acceptance", ()))
        described.append(f"drafts with {drafter}" + (f", accepted: {rates}" if rates else ""))
    return f"{model['id']} ({'; '.join(described)})"


def _settings() -> str:
    """Return the path and the names of changed settings; their values may be private."""
    path = settings_file()
    try:
        settings = load_settings()
    except UsageError as error:
        return str(error)
    if not path.exists():
        return f"{path} (does not exist)"
    defaults = asdict(Settings())
    changed = [name for name, value in asdict(settings).items() if value != defaults[name]]
    return f"{path} (sets {', '.join(changed) or 'nothing'})"
