"""`akunu cache`: what models had read, kept on disk so that it is not read again: listed, checked,
deleted."""

from __future__ import annotations

import argparse
import json
from datetime import datetime
from pathlib import Path
from typing import Any

from akunu_py import paths
from akunu_py.arguments import Parser
from akunu_py.decoding.prompt_cache import cache_file
from akunu_py.decoding.prompt_cache.store import all_files, forget, remove
from akunu_py.errors import AkunuError, DamagedCache, UsageError
from akunu_py.models.store import store
from akunu_py.text import collapse, human_size, say

_FEWEST_LETTERS = 3  # of an id


def add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(
        dest="action", metavar="ACTION", required=True, parser_class=Parser
    )

    def add(name: str, summary: str) -> argparse.ArgumentParser:
        return actions.add_parser(name, help=summary, description=summary)

    listed = add("list", "the prompt caches on disk, the last used first")
    listed.add_argument("--format", choices=("text", "json"), default="text")
    gone = add("rm", "delete prompt caches: nothing is lost but time")
    gone.add_argument("id", nargs="*", metavar="ID", help="as listed; its beginning is enough")
    gone.add_argument("--all", action="store_true", help="all of them")
    gone.add_argument("--model", metavar="NAME", help="those of a model")
    checked = add("verify", "read every byte of them; damaged ones are named")
    checked.add_argument("id", nargs="*", metavar="ID", help="as listed; its beginning is enough")


def run(args: argparse.Namespace) -> int:
    {"list": list_caches, "rm": remove_caches, "verify": verify_caches}[args.action](args)
    return 0


def list_caches(args: argparse.Namespace) -> None:
    found = [_facts(path) for path in all_files()]
    if args.format == "json":
        print(json.dumps(found, indent=2))
        return
    width = max([len("MODEL"), *(len(collapse(str(each["model"]))) for each in found)])
    if found:
        say(f"{'ID':<16}  {'MODEL':<{width}}  {'TOKENS':>7}  {'SIZE':>8}  USED")
    for each in found:
        used = datetime.fromtimestamp(each["used"])
        size = human_size(each["bytes"])
        cells = [
            f"{each['id']:<16}",
            f"{collapse(str(each['model'])):<{width}}",
            f"{each['tokens']:>7}",
            f"{size:>8}",
            f"{used:%Y-%m-%d %H:%M}",
            *filter(None, [each["problem"]]),
        ]
        say("  ".join(cells))
    total = human_size(sum(each["bytes"] for each in found))
    where = f"in {paths.prompt_caches_dir()}"
    say(f"{total} {where}" if found else f"no prompt caches {where}", error=True)


def remove_caches(args: argparse.Namespace) -> None:
    if (bool(args.id) + args.all + bool(args.model)) != 1:
        raise UsageError("expected IDs, --model NAME or --all; `akunu cache list` shows the ids")
    if args.id:
        freed = sum(remove(path) for path in _named(args.id))
    else:
        freed = forget(store.resolve(args.model).path if args.model else None)
    say(f"{human_size(freed)} freed")


def verify_caches(args: argparse.Namespace) -> None:
    damaged = 0
    wanted = _named(args.id) if args.id else all_files()
    for path in wanted:
        try:
            cache_file.read(path)
            cache_file.verify(path)
        except AkunuError as error:
            damaged += 1
            say(f"{path.stem}  {error}")
        else:
            say(f"{path.stem}  {human_size(path.stat().st_size)} verified")
    if damaged:
        raise DamagedCache(
            f"{damaged} of {len(wanted)} prompt caches cannot be used; akunu cache rm ID"
        )


def _named(ids: list[str]) -> list[Path]:
    """The files with these ids. Raises UsageError."""
    there = all_files()
    found = []
    for name in ids:
        these = [path for path in there if path.stem.startswith(name)]
        if len(name) < _FEWEST_LETTERS or len(these) != 1:
            raise UsageError(
                f"expected the id of one prompt cache, {name!r} is that of {len(these)}; "
                "`akunu cache list` shows the ids"
            )
        found += these
    return found


def _facts(path: Path) -> dict[str, Any]:
    """What is known of a file from its header."""
    status = path.stat()
    facts: dict[str, Any] = {"id": path.stem, "model": path.parent.name.rpartition("-")[0]}
    tokens, problem = 0, ""
    try:
        about = cache_file.read(path).about
        facts["model"], tokens = about.model, len(about.tokens)
    except DamagedCache:
        problem = "damaged"
    except AkunuError:
        problem = "of another version"
    sizes = {"tokens": tokens, "bytes": status.st_size, "used": status.st_mtime}
    return facts | sizes | {"problem": problem}
