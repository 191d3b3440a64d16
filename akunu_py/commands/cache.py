"""`akunu cache`: list, verify and delete prompt caches on disk."""

import argparse
import json
from datetime import datetime
from pathlib import Path
from typing import Any

from akunu_py import paths
from akunu_py.engine.histories import cache_file
from akunu_py.engine.histories.prompt_cache_store import all_files, forget, remove
from akunu_py.errors import AkunuError, DamagedCache, UsageError
from akunu_py.models.store import model_store
from akunu_py.parser import add_actions, add_format
from akunu_py.text import collapse, human_size, say, table

_MIN_DIGITS = 3  # of an abbreviated id


def add_options(parser: argparse.ArgumentParser) -> None:
    add = add_actions(parser)
    add_format(add("list", "List prompt caches on disk, most recently used first", list_caches))
    removed = add("rm", "Delete prompt caches; the next prompt takes longer", remove_caches)
    verified = add("verify", "Verify the data of prompt caches", verify_caches)
    for action, default in ((removed, ""), (verified, " (default: all)")):
        text = f"Id or its beginning, see akunu cache list{default}"
        action.add_argument("id", nargs="*", metavar="ID", help=text)
    removed.add_argument("--all", action="store_true", help="Delete all prompt caches")
    removed.add_argument("--model", metavar="NAME", help="Delete the prompt caches of this model")


def list_caches(args: argparse.Namespace) -> None:
    found = [_facts(path) for path in all_files()]
    if args.format == "json":
        print(json.dumps(found, indent=2))
        return
    rows = [("ID", "MODEL", "TOKENS", "SIZE", "USED", "")]
    for each in found:
        sizes = str(each["tokens"]), human_size(each["bytes"])
        used = f"{datetime.fromtimestamp(each['used']):%Y-%m-%d %H:%M}"
        rows.append((each["id"], collapse(str(each["model"])), *sizes, used, each["problem"]))
    if found:
        print(*table(rows, right=(2, 3)), sep="\n")
    total = human_size(sum(each["bytes"] for each in found))
    where = f"in {paths.prompt_caches_dir()}"
    say(f"{total} {where}" if found else f"no prompt caches {where}", error=True)


def remove_caches(args: argparse.Namespace) -> None:
    if (bool(args.id) + args.all + bool(args.model)) != 1:
        raise UsageError("expected IDs, --model or --all; to list ids, run: akunu cache list")
    if args.id:
        freed = sum(remove(path) for path in _files_with_ids(args.id))
    else:
        freed = forget(model_store.resolve(args.model).path if args.model else None)
    say(f"{human_size(freed)} freed")


def verify_caches(args: argparse.Namespace) -> None:
    damaged = 0
    files = _files_with_ids(args.id) if args.id else all_files()
    for path in files:
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
            f"{damaged} of {len(files)} prompt caches are unusable; run: akunu cache rm ID"
        )


def _files_with_ids(ids: list[str]) -> list[Path]:
    files = all_files()
    found = []
    for name in ids:
        matches = [path for path in files if path.stem.startswith(name)]
        if len(name) < _MIN_DIGITS or len(matches) != 1:
            raise UsageError(
                f"{name!r} matches {len(matches)} prompt caches, expected one; "
                "to list ids, run: akunu cache list"
            )
        found += matches
    return found


def _facts(path: Path) -> dict[str, Any]:
    status = path.stat()
    model, tokens, problem = path.parent.name.rpartition("-")[0], 0, ""
    try:
        about = cache_file.read(path)[0]
        model, tokens = about.model, len(about.tokens)
    except DamagedCache:
        problem = "damaged"
    except AkunuError:
        problem = "other version"
    facts: dict[str, Any] = {"id": path.stem, "model": model, "tokens": tokens}
    return facts | {"bytes": status.st_size, "used": status.st_mtime, "problem": problem}
