"""`akunu doctor`: check what akunu needs on this machine, with advice for each problem."""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from akunu_py import paths
from akunu_py.commands.info import describe_blas, describe_memory, describe_server
from akunu_py.errors import AkunuError
from akunu_py.files import read_bounded
from akunu_py.models.store import model_store
from akunu_py.parser import add_flags
from akunu_py.serve.own.discovery import running_servers
from akunu_py.settings import load_settings, settings_file
from akunu_py.text import human_size, say, table
from akunu_py.types import DEFAULT_MODEL
from akunu_py.version import __version__, package_version

_MIN_MEMORY = 1 << 30  # bytes: the starter, its KV cache, and the program
_MIN_DISK = 2 << 30  # bytes: a small model and its prompt caches
_MAX_CONFIG = 1 << 20  # bytes of an editor's configuration
_SMALL_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"  # looked up on the hub
# Configurations of editors, below the home directory.
_EDITOR_FILES = {
    "Vim": (".vimrc", ".vim/vimrc"),
    "Neovim": (".config/nvim/init.lua", ".config/nvim/init.vim"),
    "Emacs": (".emacs", ".emacs.d/init.el", ".config/emacs/init.el"),
    "VS Code": (
        ".config/Code/User/settings.json",
        "Library/Application Support/Code/User/settings.json",
        ".vscode-server/data/Machine/settings.json",
    ),
}
_PROGRAM = re.compile(r"""["'](/[^"'\n]*/akunu)["']""")


class Finding(NamedTuple):
    """One line of the report."""

    name: str
    state: Literal["ok", "problem"]
    text: str


Check = Callable[[], Iterator[Finding]]


def add_options(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, ("--hub", "Connect to the Hugging Face hub (default: stay offline)"))


def run(args: argparse.Namespace) -> int:
    checks = [_program, _hardware, _disk, _models, _drafting, _servers, _editors]
    found = [finding for check in checks for finding in _run(check)]
    if args.hub:
        found += _run(_hub)
    print(*table(found), sep="\n")
    problems = sum(finding.state == "problem" for finding in found)
    if problems:
        say(f"{problems} problem{'s' if problems > 1 else ''} found", error=True)
    return 1 if problems else 0


def _run(check: Check) -> Iterator[Finding]:
    """Yield the findings of a check; an error ends it as a problem."""
    try:
        yield from check()
    except (AkunuError, ImportError, OSError) as error:
        yield Finding(check.__name__.strip("_"), "problem", str(error))


def _program() -> Iterator[Finding]:
    yield Finding("akunu", "ok", f"{__version__} in {sys.prefix}")
    python = f"{platform.python_version()} ({platform.machine()})"
    if sys.platform == "darwin" and platform.machine() != "arm64":
        advice = "MLX needs an arm64 Python; install one: brew install python@3.13"
        yield Finding("python", "problem", f"{python}: {advice}")
    else:
        yield Finding("python", "ok", python)
    yield Finding("mlx", "ok", package_version("mlx"))


def _hardware() -> Iterator[Finding]:
    import mlx.core as mx

    from akunu_py.engine.model import device

    total = float(mx.arange(1024).sum())  # the first kernel fails where the device does not work
    if total != 1024 * 1023 / 2:
        yield Finding("device", "problem", f"{device.device_name()} computes wrong sums")
    elif sys.platform == "darwin" and not device.on_metal():
        yield Finding("device", "problem", f"{device.device_name()}: MLX does not use the GPU")
    else:
        yield Finding("device", "ok", device.device_name())
    if device.available_memory() < _MIN_MEMORY:
        yield Finding("memory", "problem", f"{describe_memory()}: close other programs")
    else:
        yield Finding("memory", "ok", describe_memory())
    if device.on_cpu() and (blas := describe_blas()):
        yield Finding("blas", "ok", blas)


def _disk() -> Iterator[Finding]:
    for name, directory in (("models", paths.models_dir()), ("caches", paths.cache_dir())):
        existing = next(path for path in (directory, *directory.parents) if path.exists())
        free = shutil.disk_usage(existing).free
        text = f"{human_size(free)} free for {name} in {directory}"
        if not os.access(existing, os.W_OK):
            yield Finding("disk", "problem", f"no permission to write in {existing}")
        elif free < _MIN_DISK:
            yield Finding("disk", "problem", f"{text}: delete models with akunu models rm")
        else:
            yield Finding("disk", "ok", text)


def _models() -> Iterator[Finding]:
    found = model_store.list_models()
    if not found:
        advice = f"none installed; run: akunu models pull {DEFAULT_MODEL}"
        yield Finding("models", "problem", advice)
    for model in found:
        try:
            model_store.check(model_store.get(model.name))
        except AkunuError as error:
            yield Finding("model", "problem", str(error))
        else:
            kind = f", a drafter ({model.kind})" if model.kind else ""
            yield Finding("model", "ok", f"{model.name}, {human_size(model.size)}{kind}")
        if model.drafter:
            try:
                model_store.check(model_store.get(model.drafter))
            except AkunuError as error:
                advice = f"or pull it again: akunu models pull {model.name} --with-drafter"
                yield Finding("drafter", "problem", f"{model.name}: {error}; {advice}")
            else:
                yield Finding("drafter", "ok", f"{model.drafter} drafts for {model.name}")


def _drafting() -> Iterator[Finding]:
    settings = load_settings()
    if settings_file().exists():
        yield Finding("settings", "ok", str(settings_file()))
    if settings.draft_model:
        model_store.check(model_store.resolve(settings.draft_model))
        yield Finding("drafting", "ok", f"n-grams and the draft model {settings.draft_model}")
    else:
        yield Finding(
            "drafting", "ok", "n-grams, and the drafters and MTP heads of models that have them"
        )


def _servers() -> Iterator[Finding]:
    servers = running_servers()
    if not servers:
        yield Finding("server", "ok", "not running (start: akunu serve)")
    for server in servers:
        if text := describe_server(server):
            yield Finding("server", "ok", text)
        else:
            yield Finding("server", "problem", f"{server.url} does not answer; restart akunu serve")


def _editors() -> Iterator[Finding]:
    configured = False
    for editor, files in _EDITOR_FILES.items():
        for file in (Path.home() / name for name in files):
            try:
                text = read_bounded(file, _MAX_CONFIG).decode("utf-8", "replace")
            except OSError:
                continue
            for program in _PROGRAM.findall(text):
                configured = True
                if Path(program).exists():
                    yield Finding("editor", "ok", f"{editor} starts {program}")
                else:
                    name = editor.lower().replace(" ", "")
                    advice = f"print a new one: akunu complete --print-config {name}"
                    missing = f"{file} starts {program}, which does not exist"
                    yield Finding("editor", "problem", f"{missing}; {advice}")
    if not configured:
        yield Finding("editor", "ok", "none configured (akunu complete --help)")


def _hub() -> Iterator[Finding]:
    from akunu_py.models.pull.pull import Hub
    from akunu_py.models.store.progress import no_callback

    with Hub(no_callback) as hub:
        hub.look_up(_SMALL_MODEL, None)
    yield Finding("hub", "ok", "the Hugging Face hub answers")
