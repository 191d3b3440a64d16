"""`akunu models pull`: brings a model in, and says how far it is."""

from __future__ import annotations

import argparse
import sys

from akunu_py.commands.progress import watched
from akunu_py.models.pull import find_installed, pull
from akunu_py.text import human_size


def run(args: argparse.Namespace) -> int:
    fetch(args.name, name=args.as_name, quiet_if_here=args.if_missing)
    return 0


def fetch(reference: str, *, name: str | None = None, quiet_if_here: bool = False) -> None:
    """Fetches a model with progress, unless it is here and whole. Ctrl-C keeps what came."""
    if here := find_installed(reference, name):
        if not quiet_if_here:
            print(f"{here.name} is here already ({human_size(here.size)}): {here.path}")
        return
    try:
        with watched() as on_progress:
            model = pull(reference, on_progress, name=name)
    except KeyboardInterrupt:
        print(f"stopped; to go on: akunu models pull {reference}", file=sys.stderr)
        raise
    print(f"{model.name} is ready ({human_size(model.size)}): {model.path}", file=sys.stderr)
