"""`akunu models`: list, pull, show, rm."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from akunu_py import paths
from akunu_py.commands.progress import progress_bar
from akunu_py.commands.sizes import human_size
from akunu_py.errors import DamagedModel, UnknownModel, UsageError
from akunu_py.models import catalogue, store


def run(args: argparse.Namespace) -> int:
    actions = {"list": list_models, "pull": pull, "show": show, "rm": remove, "forget": forget}
    return actions[args.action](args)


def list_models(args: argparse.Namespace) -> int:
    installed = store.list_models()
    rows = [
        (
            model.name,
            human_size(model.size),
            f"{model.context_length} tokens" if model.context_length else "",
            f"damaged: {model.damaged}" if model.damaged else model.source,
        )
        for model in installed
    ]
    _print_table(("NAME", "SIZE", "CONTEXT", "SOURCE"), rows)
    if not rows:
        print(f"no models in {paths.models_dir()}")
    names = {model.name for model in installed}
    more = [entry for entry in catalogue.load_catalogue().values() if entry.name not in names]
    if more:
        print("\nto be pulled with: akunu models pull NAME")
        for entry in more:
            size = human_size(entry.download_bytes)
            print(f"  {entry.name}  {entry.title}, {size}, {entry.licence}. {entry.description}")
    return 0


def pull(args: argparse.Namespace) -> int:
    fetch(args.name, quiet_if_here=args.if_missing)
    return 0


def fetch(name: str, *, quiet_if_here: bool = False) -> None:
    """Fetches a model with a progress bar, unless it is here and whole."""
    from akunu_py.models.pull import pull as pull_model

    try:
        here = store.get(name)
        store.check(here)
    except (UnknownModel, DamagedModel):
        pass  # pulling makes a damaged one whole again
    else:
        if not quiet_if_here:
            print(f"{name} is here already ({human_size(here.size)}): {here.path}")
        return
    with progress_bar() as progress:
        model = pull_model(name, progress)
    print(f"{name} is ready ({human_size(model.size)}): {model.path}", file=sys.stderr)


def show(args: argparse.Namespace) -> int:
    from akunu_py import experience

    model = store.get(args.name)
    if args.verify:
        with progress_bar() as progress:
            store.verify(model, lambda done, total: progress("verifying", done, total))
    else:
        store.check(model)
    rows = [
        ("name", model.name),
        ("path", str(model.path)),
        ("size", human_size(model.size)),
        ("context", f"{model.context_length} tokens"),
        ("weights", model.quantisation),
        ("licence", model.licence),
        ("source", model.source),
        ("created", model.created),
        ("memory", f"{human_size(experience.remembered_bytes(model.path))} of earlier answers"),
        ("files", "verified" if args.verify else "sizes checked; --verify reads every byte"),
    ]
    for name, value in rows:
        print(f"{name:<8}  {value or 'unknown'}")
    return 0


def remove(args: argparse.Namespace) -> int:
    if not args.yes:
        if not sys.stdin.isatty():
            raise UsageError(f"removing {args.name} needs a yes: akunu models rm {args.name} --yes")
        if input(f"Remove {args.name}? [y/N] ").strip().lower() not in ("y", "yes"):
            print("kept")
            return 0
    print(f"removed {args.name}, {human_size(store.remove(args.name))} freed")
    return 0


def forget(args: argparse.Namespace) -> int:
    from akunu_py import experience

    model = store.resolve(args.name)
    freed = experience.forget(model.path)
    print(f"forgot what {model.name} said, {human_size(freed)} freed")
    return 0


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if not rows:
        return
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        print(
            "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        )
