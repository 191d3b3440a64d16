"""`akunu models rm`, `verify`, `gc` and `forget`: what changes or checks the store."""

from __future__ import annotations

import argparse
import sys

from akunu_py.commands.progress import progress_bar
from akunu_py.decoding import learned
from akunu_py.errors import DamagedModel, UsageError
from akunu_py.models import cleanup, store
from akunu_py.models.hub import cache
from akunu_py.text import human_size, on_one_line


def run(args: argparse.Namespace) -> int:
    actions = {"rm": remove, "verify": verify, "gc": collect, "forget": forget}
    return actions[args.action](args)


def remove(args: argparse.Namespace) -> int:
    linked, origin = _in_hub_cache(args.name)
    also = bool(args.hub_files)
    if not args.yes:
        if not sys.stdin.isatty():
            raise UsageError(f"removing {args.name} needs a yes: akunu models rm {args.name} --yes")
        if not _agrees(f"Remove {args.name}?"):
            print("kept")
            return 0
        if linked and not also:
            also = _agrees(
                f"Delete its {human_size(linked)} from the hub's cache too? Other programs may "
                "use them."
            )
    freed = store.remove(args.name)
    if origin and also:
        freed += cache.delete(*origin)
    print(f"removed {args.name}, {human_size(freed)} freed")
    if linked and origin and not also:
        where = cache.CachedRepository(origin[0]).root
        print(f"its {human_size(linked)} stay in the hub's cache: {where}")
        print(f"to delete them too: hf cache rm model/{origin[0]}")
    return 0


def verify(args: argparse.Namespace) -> int:
    """Reads every byte of one model, or of all; a damaged one does not end it."""
    models = [store.get(args.name)] if args.name else store.list_models()
    damaged = []
    for model in models:
        try:
            if model.damaged:
                raise DamagedModel(f"model {model.name!r} is damaged: {model.damaged}")
            verify_model(model)
        except DamagedModel as error:
            if args.name:
                raise
            damaged.append(model.name)
            print(on_one_line(f"{model.name}: {error}"))
        else:
            print(f"{model.name}: {human_size(model.size)} verified")
    if damaged:
        raise DamagedModel(f"{len(damaged)} of {len(models)} models are damaged; see above")
    return 0


def verify_model(model: store.StoredModel) -> None:
    """Compares all hashes, with a progress bar."""
    with progress_bar() as progress:
        store.verify(model, lambda done, total: progress(f"verifying {model.name}", done, total))


def collect(args: argparse.Namespace) -> int:
    """Removes what is of no use any more, or says what that would be."""
    found = cleanup.find_leftovers()
    if not found:
        print("nothing to remove")
        return 0
    freed = 0
    for garbage in found:
        print(f"{human_size(garbage.size):>8}  {on_one_line(garbage.what)}")
        freed += garbage.size if args.dry_run else cleanup.remove_leftover(garbage)
    print(f"{human_size(freed)} {'would be freed' if args.dry_run else 'freed'}")
    return 0


def forget(args: argparse.Namespace) -> int:
    model = store.resolve(args.name)
    freed = learned.forget(model.path)
    print(f"forgot what {model.name} said, {human_size(freed)} freed")
    return 0


def _in_hub_cache(name: str) -> tuple[int, tuple[str, str] | None]:
    """How many bytes of the model are in the hub's cache, and of which repository and commit."""
    try:
        model = store.get(name)
    except DamagedModel:
        return 0, None
    if not model.repository:
        return 0, None
    return cache.linked_bytes(model.path), (model.repository, model.commit)


def _agrees(question: str) -> bool:
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
