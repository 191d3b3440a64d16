"""`akunu doctor`: check what akunu needs on this machine, with advice for each problem."""

import argparse
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from akunu_py import paths
from akunu_py.commands.info import describe_blas, describe_memory, describe_server
from akunu_py.engine.load import find_model
from akunu_py.errors import AkunuError
from akunu_py.files import read_bounded
from akunu_py.models.store import model_store
from akunu_py.models.store.directories import free_space
from akunu_py.parser import add_flags
from akunu_py.serve.own.client import running_servers
from akunu_py.settings import load_settings, read_settings, settings_file
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
    text: str
    problem: str = ""  # with advice; "" if all is well


def add_options(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, ("--hub", "Connect to the Hugging Face hub (default: stay offline)"))


def run(args: argparse.Namespace) -> int:
    checks = [_program, _hardware, _disk, _models, _settings, _drafting, _servers, _editors]
    if args.hub:
        checks.append(_hub)
    found = [finding for check in checks for finding in _run(check)]
    rows = [
        (each.name, "problem" if each.problem else "ok", ": ".join(filter(None, each[1:])))
        for each in found
    ]
    print(*table(rows), sep="\n")
    problems = sum(bool(each.problem) for each in found)
    if problems:
        say(f"{problems} problem{'s' if problems > 1 else ''} found", error=True)
    return 1 if problems else 0


def _run(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except (AkunuError, ImportError, OSError) as error:
        yield Finding(check.__name__.strip("_"), "", str(error))


def _program() -> Iterator[Finding]:
    yield Finding("akunu", f"{__version__} in {sys.prefix}")
    advice = "MLX needs an arm64 Python; install one: brew install python@3.13"
    is_wrong = sys.platform == "darwin" and platform.machine() != "arm64"
    python = f"{platform.python_version()} ({platform.machine()})"
    yield Finding("python", python, advice if is_wrong else "")
    yield Finding("mlx", package_version("mlx"))


def _hardware() -> Iterator[Finding]:
    import mlx.core as mx

    from akunu_py.engine.model import device

    # The first kernel fails where the device does not work.
    problem = "" if float(mx.arange(1024).sum()) == 1024 * 1023 / 2 else "it computes wrong sums"
    if sys.platform == "darwin" and not device.on_metal():
        problem = "MLX does not use the GPU"
    yield Finding("device", device.device_name(), problem)
    is_low = device.available_memory() < _MIN_MEMORY
    yield Finding("memory", describe_memory(), "close other programs" if is_low else "")
    if device.on_cpu() and (blas := describe_blas()):
        yield Finding("blas", blas)


def _disk() -> Iterator[Finding]:
    for name, directory in (("models", paths.models_dir()), ("caches", paths.cache_dir())):
        existing, free = free_space(directory)
        problem = "delete models with akunu models rm" if free < _MIN_DISK else ""
        if not os.access(existing, os.W_OK):
            problem = f"no permission to write in {existing}; give yourself write access"
        yield Finding("disk", f"{human_size(free)} free for {name} in {directory}", problem)


def _models() -> Iterator[Finding]:
    found = model_store.list_models()
    if not found:
        advice = f"none installed; run: akunu models pull {DEFAULT_MODEL}"
        yield Finding("models", "", advice)
    for model in found:
        kind = f", a drafter ({model.kind})" if model.kind else ""
        size = f"{human_size(model.size)}{kind}"
        yield Finding("model", f"{model.name}, {size}", _problem_of(model.name))
        if model.drafter:
            text = f"{model.drafter} drafts for {model.name}"
            yield Finding("drafter", text, _problem_of(model.drafter))


def _problem_of(model: str) -> str:
    try:
        model_store.check(model_store.get(model))
    except AkunuError as error:
        return str(error)
    return ""


def _settings() -> Iterator[Finding]:
    settings = load_settings()
    for name in (settings.model, settings.completion_model, *settings.serve.models):
        if name not in ("", DEFAULT_MODEL):
            find_model(None, name)
    if settings_file().exists():
        yield Finding("settings", str(settings_file()))


def _drafting() -> Iterator[Finding]:
    settings, _ = read_settings()  # `_settings` reports the errors
    others = "n-grams, and the drafters and MTP heads of models that have them"
    if settings.draft_model:
        model_store.check(model_store.resolve(settings.draft_model))
        others = f"n-grams and the draft model {settings.draft_model}"
    yield Finding("drafting", others)


def _servers() -> Iterator[Finding]:
    servers = running_servers()
    if not servers:
        yield Finding("server", "not running (start: akunu serve)")
    for server in servers:
        text = describe_server(server)
        problem = "" if text else "it does not answer; restart akunu serve"
        yield Finding("server", text or server.url, problem)


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
                name = editor.lower().replace(" ", "")
                advice = f"correct {file}: akunu complete --print-config {name}"
                problem = "" if Path(program).exists() else f"it does not exist; {advice}"
                yield Finding("editor", f"{editor} starts {program}", problem)
    if not configured:
        yield Finding("editor", "none configured (akunu complete --help)")


def _hub() -> Iterator[Finding]:
    from akunu_py.models.pull.pull import Hub
    from akunu_py.models.store.progress import no_callback

    with Hub(no_callback) as hub:
        hub.look_up(_SMALL_MODEL, None)
    yield Finding("hub", "the Hugging Face hub answers")
