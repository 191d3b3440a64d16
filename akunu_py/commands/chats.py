"""`akunu chats`: list, search, export, import and delete saved chats."""

import argparse
import contextlib
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from akunu_py import paths
from akunu_py.chats.conversation_store import ConversationStore, SearchResult
from akunu_py.chats.export import ExportFormat, format_of, render, write_new
from akunu_py.chats.json import as_json, read_json
from akunu_py.chats.search import SearchHit
from akunu_py.engine.histories.prompt_cache_store import forget_conversation
from akunu_py.errors import ConversationError, UsageError
from akunu_py.files import disk_errors, read_bounded, read_stream
from akunu_py.parser import add_actions, add_flags, add_format
from akunu_py.text import collapse, confirm, for_output, print_warnings, say, table

MAX_IMPORT = 256 << 20  # bytes, about 200,000 messages
_ID_DIGITS = 8  # shown of an id


def add_options(parser: argparse.ArgumentParser) -> None:
    add = add_actions(parser)
    add_format(add("list", "List saved chats, most recent first", list_chats))
    searched = add("search", "Search for chats that contain all words", search)
    searched.add_argument("words", nargs="+", metavar="WORD", help="Word or its beginning")
    add_format(searched)
    exported = add("export", "Export one chat or all chats as Markdown or JSON", export)
    id_text = "Id or its beginning, see akunu chats list"
    exported.add_argument("id", nargs="?", metavar="ID", help=id_text)
    add_flags(exported, ("--all", "Export all chats, as JSON only"))
    form = "Output format (default: by the suffix of FILE, otherwise markdown; json with --all)"
    exported.add_argument("--format", choices=("markdown", "json"), help=form)
    new_file = "New file (default: standard output)"
    exported.add_argument("-o", "--output", type=Path, metavar="FILE", help=new_file)
    imported = add("import", "Import chats that were exported as JSON", import_chats)
    imported.add_argument("file", metavar="FILE", help="JSON file of up to 256 MiB; - reads stdin")
    removed = add("rm", "Delete chats permanently", remove)
    removed.add_argument("id", nargs="+", metavar="ID", help=id_text)
    add_flags(removed, ("--yes", "Do not ask for confirmation"))


def run(args: argparse.Namespace) -> int:
    with contextlib.closing(ConversationStore.open(paths.conversations_file())) as store:
        print_warnings(store.warnings)
        args.act(store, args)
    return 0


def list_chats(store: ConversationStore, args: argparse.Namespace) -> None:
    _print_results([SearchResult(info, SearchHit()) for info in store.list()], args.format)


def search(store: ConversationStore, args: argparse.Namespace) -> None:
    words = " ".join(
        f'"{word}"' if " " in word and '"' not in word else word for word in args.words
    )
    _print_results(store.search(words), args.format)


def export(store: ConversationStore, args: argparse.Namespace) -> None:
    if bool(args.id) == args.all:
        raise UsageError("expected an ID or --all; to list ids, run: akunu chats list")
    form: ExportFormat = args.format or ("json" if args.all else "markdown")
    if args.output is not None and args.format is None:
        form = format_of(args.output, form)
    if not args.all:
        text = render(store.load(store.resolve(args.id).id), form)
    elif form == "json":
        text = as_json(store.load(info.id) for info in store.list())
    else:
        raise UsageError(f"--all exports only JSON, not {form}; for {form}, export one ID")
    if args.output is None:
        print(for_output(text), end="")
    else:
        say(f"exported to {write_new(args.output, text)}", error=True)


def import_chats(store: ConversationStore, args: argparse.Namespace) -> None:
    trees = read_json(_read(args.file), args.file)
    for tree in trees:
        new = store.save_tree(tree)
        title = collapse(tree.title)
        say(f"{tree.conversation[:_ID_DIGITS]}  {new} of {len(tree)} messages are new  {title}")
    say(f"{len(trees)} conversations imported", error=True)


def remove(store: ConversationStore, args: argparse.Namespace) -> None:
    command = shlex.join(["akunu", "chats", "rm", *args.id, "--yes"])
    for info in dict.fromkeys([store.resolve(name) for name in args.id]):
        title = collapse(info.title)
        question = f"Delete {title!r} permanently?"
        if not args.yes and not confirm(question, command):
            say("not deleted")
            continue
        store.erase(info.id)
        forget_conversation(info.id)
        say(f"deleted {info.id[:_ID_DIGITS]}  {title}")


def _read(file: str) -> str:
    """Return the text of the file. Raises ConversationError if that fails."""
    try:
        with disk_errors(f"cannot read {file}", ConversationError):
            if file == "-":
                return read_stream(sys.stdin.buffer, MAX_IMPORT).decode("utf-8")
            return read_bounded(Path(file), MAX_IMPORT).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConversationError(
            f"cannot import {file}: not UTF-8; expected a file of: akunu chats export --all"
        ) from error


def _print_results(results: Sequence[SearchResult], form: str) -> None:
    if form == "json":
        found = [{"found": each.hit.snippet} if each.hit.snippet else {} for each in results]
        content = [asdict(each.info) | more for each, more in zip(results, found, strict=True)]
        print(for_output(json.dumps(content, indent=2, ensure_ascii=False)))
        return
    if not results:
        say(f"no chats found in {paths.conversations_file()}", error=True)
        return
    rows = [("ID", "LAST USED", "MESSAGES", "MODEL", "TITLE")]
    for each in results:
        info = each.info
        used = datetime.fromtimestamp(info.updated) if info.updated else None
        when = f"{used:%Y-%m-%d %H:%M}" if used else "unknown"
        names = collapse(info.model), collapse(info.title)
        rows.append((info.id[:_ID_DIGITS], when, str(info.messages), *names))
    head, *lines = table(rows, right=(2,))
    say(head)
    for each, line in zip(results, lines, strict=True):
        say(line)
        if each.hit.snippet:
            say(f"{'':<{_ID_DIGITS}}  {collapse(each.hit.snippet)}")
