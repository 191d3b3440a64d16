"""`akunu drafter`: train, list and remove drafters for models on this machine."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from akunu_py import paths
from akunu_py.arguments import add_loading, loading_from
from akunu_py.commands.complete import on_battery
from akunu_py.commands.models import print_stored
from akunu_py.errors import UnknownModel, UsageError
from akunu_py.models.store import model_store
from akunu_py.models.store.directories import directory_size, is_name, lock_model, store_errors
from akunu_py.models.store.names import NameEntry, read_names, set_drafter
from akunu_py.parser import add_actions, add_flags, add_values, positive
from akunu_py.paths import shell_command
from akunu_py.settings import load_settings
from akunu_py.text import confirm, human_duration, human_size, say, table
from akunu_py.types import Message

if TYPE_CHECKING:
    from akunu_py.training.session import Report
    from akunu_py.training.trainer import Trainer

_INTERVAL_S = 10.0  # between two lines of progress
_UNITS = {"s": 1, "m": 60, "h": 3600}
_NICE = 10  # other programs go first
_DISK_BYTES = 10_000_000_000  # for the training data of a model


def add_options(parser: argparse.ArgumentParser) -> None:
    add = add_actions(parser)
    train = add("train", "Train a drafter for a model, or continue its training", train_drafter)
    add("list", "List the models that have a drafter or training data", list_drafters)
    shown = add("show", "Show the drafter of a model", show)
    removed = add("rm", "Remove the trained drafter of a model and its training data", remove)
    for action in (train, shown, removed):
        action.add_argument("model", metavar="MODEL", help="Installed model")
    add_values(
        train,
        ("--time", "TIME", _duration, 3600.0, "Time of this run, e.g. 90m or 8h (default: 60m)"),
        ("--tokens", "N", positive, 1_000_000, "Answer tokens to train on, of all runs together"),
    )
    prompts = "Also train on answers to the prompts in your saved chats, after a confirmation"
    add_flags(train, ("--conversations", prompts))
    for action in (train, removed):
        add_flags(action, ("--yes", "Do not ask for confirmation"))
    add_loading(train)
    train.set_defaults(draft="off", draft_model="", hosts=None)


def train_drafter(args: argparse.Namespace) -> None:
    """Train until the time is over, then install the drafter; Ctrl-C saves the training."""
    model, settings = model_store.resolve(args.model), load_settings()
    if not is_name(model.name):
        raise UsageError(f"{model.name} is not in the store; pull or import it, see akunu models")
    name, source = _drafter_of(model.name)
    if not is_name(name):
        raise UsageError(f"{name} is too long; pull or import the model with a shorter --name")
    if any(each.name == name and each.source != source for each in model_store.list_models()):
        raise UsageError(
            f"another model is installed as {name!r}, the name of the drafter; to train one, run "
            f"`akunu models rm {name}` first"
        )
    prompts = saved_prompts(confirmed=args.yes) if args.conversations else []
    os.nice(_NICE)
    from akunu_py.engine.load import load_stored
    from akunu_py.training.session import Training

    with lock_model(model.name, training=True):
        engine = load_stored(model, loading_from(args), settings)
        waits = partial(why_wait, settings.save_battery)
        training = Training(engine, args.time, _progress_lines(), waits)
        try:
            trainer = training.run(args.tokens, _DISK_BYTES, settings.temperature, prompts)
        except KeyboardInterrupt:
            say(f"stopped; to continue, run: {shell_command()} {args.typed}", error=True)
            raise
        _install(model, trainer)


def why_wait(save_battery: bool) -> str:
    """Return why training has to pause, "" if it may run."""
    from akunu_py.engine.model import device
    from akunu_py.serve.own.client import ServerClient, running_servers

    if save_battery and on_battery():
        return "this machine runs on battery (save_battery in the settings)"
    if device.memory_pressure() != "normal":
        return "the system is short of memory"
    busy = any(ServerClient(each.url, each.token).is_busy() for each in running_servers())
    return "akunu serve is answering requests" if busy else ""


def saved_prompts(*, confirmed: bool) -> list[list[Message]]:
    """Return the saved chats up to each prompt, after a confirmation."""
    from akunu_py.chats.conversation_store import ConversationStore

    with contextlib.closing(ConversationStore.open(paths.conversations_file())) as store:
        branches = [store.load(info.id).active_branch() for info in store.list()]
    chats = [[Message(each.role, each.text) for each in branch] for branch in branches]
    found = [
        chat[: at + 1] for chat in chats for at, each in enumerate(chat) if each.role == "user"
    ]
    question = f"Train on answers to {len(found)} prompts of your chats, copied on this machine?"
    if found and not confirmed and not confirm(question, "akunu drafter train MODEL --yes"):
        return []
    return found


def _drafter_of(model: str) -> tuple[str, str]:
    """Return the name of the drafter that akunu trains for a model, and its source."""
    return f"{model}-drafter", f"{model_store.TRAINED}{model}"


def _install(model: model_store.StoredModel, trainer: Trainer) -> None:
    from akunu_py.models.store.local_import import install

    def build(_: Path, directory: Path) -> NameEntry:
        trainer.write_drafter(directory)
        return NameEntry(source=source, license=model.license)

    (name, source), entry = _drafter_of(model.name), read_names().get(model.name)
    drafter = install(name, build, trainer.drafter_bytes, existing="replace")
    say(f"{name} is ready ({human_size(drafter.size)}): {drafter.path}", error=True)
    if entry is not None and entry.drafter in ("", name):
        set_drafter(model.name, name)
        measure = f"akunu bench --model {model.name} --draft ngram --draft auto"
        say(f"to measure the speedup, run: {measure}", error=True)
    else:
        use = f'akunu run --model {model.name} --draft-model {name} "a question"'
        say(f"to draft with it, run: {use}", error=True)


def _progress_lines() -> Report:
    printed = float("-inf")

    def report(line: str, left: float | None) -> None:
        nonlocal printed
        now = time.monotonic()
        if left is None:
            say(line, error=True)
        elif now - printed >= _INTERVAL_S:
            printed = now
            say(f"{line}, {human_duration(left)} left", error=True)

    return report


def list_drafters(args: argparse.Namespace) -> None:
    """Print the models that have a drafter or training data."""
    from akunu_py.training.session import home_of

    models = {model.name: model for model in model_store.list_models()}
    trained = home_of("").glob("*")  # of removed models, too
    rows = [("MODEL", "DRAFTER", "SIZE", "TRAINING DATA")]
    for name in sorted({*models, *(path.name for path in trained)}):
        data, chosen = directory_size(home_of(name)), models[name].drafter if name in models else ""
        if data or chosen:
            size = human_size(models[chosen].size) if chosen in models else ""
            rows.append((name, chosen or "none yet", size, human_size(data)))
    print(*table(rows), sep="\n")


def show(args: argparse.Namespace) -> None:
    """Print the facts of a model's drafter."""
    if not (name := model_store.get(args.model).drafter):
        raise UnknownModel(f"{args.model} has no drafter; run: akunu drafter train {args.model}")
    print_stored(model_store.get(name))


def remove(args: argparse.Namespace) -> None:
    """Remove a trained drafter and its training data after a confirmation."""
    from akunu_py.training.session import home_of

    (name, source), home = _drafter_of(args.model), home_of(args.model)
    if not is_name(args.model) or not home.is_dir():
        raise UnknownModel(f"no drafter was trained for {args.model!r}; see: akunu drafter list")
    command = f"akunu drafter rm {args.model} --yes"
    if not args.yes and not confirm(f"Remove the drafter of {args.model}?", command):
        print("not removed")
        return
    with lock_model(args.model, training=True), store_errors(f"cannot remove {home}", ""):
        freed = directory_size(home)
        if read_names().get(name, NameEntry()).source == source:
            freed += model_store.remove(name)
        shutil.rmtree(home)
    say(f"removed the drafter of {args.model}, {human_size(freed)} freed")


def _duration(text: str) -> float:
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)([smh])", text)
    if found is None or not float(found[1]):
        raise argparse.ArgumentTypeError(f"expected a time such as 90s, 60m or 8h, got {text!r}")
    return float(found[1]) * _UNITS[found[2]]
