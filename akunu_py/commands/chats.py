"""`akunu chats`: the conversations, listed, searched, exported, imported and erased."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from akunu_py import paths
from akunu_py.arguments import Parser
from akunu_py.chats.export import ExportFormat, format_of, render, write_new
from akunu_py.chats.json import as_json, read_json
from akunu_py.chats.search import Hit
from akunu_py.chats.store import ConversationStore, SearchResult
from akunu_py.chats.tree import ConversationInfo
from akunu_py.decoding.prompt_cache.store import forget_conversation
from akunu_py.errors import ConversationError, UsageError
from akunu_py.files import read_bounded, read_stream
from akunu_py.text import collapse, for_output, print_warnings, say

MAX_IMPORT = 256 << 20  # bytes: some 200,000 messages
_ID_DIGITS = 8  # enough to tell conversations apart


def add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(
        dest="action", metavar="ACTION", required=True, parser_class=Parser
    )

    def add(name: str, summary: str) -> argparse.ArgumentParser:
        return actions.add_parser(name, help=summary, description=summary)

    show = add("list", "all conversations, the latest first")
    search = add("search", "the conversations in which all of some words are")
    search.add_argument("words", nargs="+", metavar="WORD", help="words may be unfinished")
    for looking in (show, search):
        looking.add_argument("--format", choices=("text", "json"), default="text")
    export = add("export", "a conversation, or all, as Markdown or JSON")
    export.add_argument("id", nargs="?", metavar="ID", help="as listed; its beginning is enough")
    export.add_argument("--all", action="store_true", help="all conversations (JSON only)")
    export.add_argument("--format", choices=("markdown", "json"), default=None)
    export.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="a new file; else standard output"
    )
    imported = add("import", "take in conversations that were exported as JSON")
    imported.add_argument("file", metavar="FILE", help="the file (256 MiB at most); - reads stdin")
    remove = add("rm", "erase conversations for good")
    remove.add_argument("id", nargs="+", metavar="ID", help="as listed; its beginning is enough")
    remove.add_argument("--yes", action="store_true", help="do not ask")


def run(args: argparse.Namespace) -> int:
    actions = {
        "list": list_chats,
        "search": search,
        "export": export,
        "import": import_chats,
        "rm": remove,
    }
    store = ConversationStore.open(paths.conversations_file())
    try:
        print_warnings(store.warnings)
        actions[args.action](store, args)
    finally:
        store.close()
    return 0


def list_chats(store: ConversationStore, args: argparse.Namespace) -> None:
    _print([SearchResult(info, Hit()) for info in store.list()], args.format)


def search(store: ConversationStore, args: argparse.Namespace) -> None:
    words = " ".join(f'"{word}"' if " " in word else word for word in args.words)
    _print(store.search(words), args.format)


def export(store: ConversationStore, args: argparse.Namespace) -> None:
    if bool(args.id) == args.all:
        raise UsageError("expected an ID or --all; `akunu chats list` shows the ids")
    form = _format(args.format, args.output, "json" if args.all else "markdown")
    if not args.all:
        text = render(store.load(store.resolve(args.id).id), form)
    elif form == "json":
        text = as_json(store.load(info.id) for info in store.list())
    else:
        raise UsageError(f"--all exports JSON, found {form}; name one ID for that format")
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
    infos = [store.resolve(name) for name in dict.fromkeys(args.id)]
    for info in infos:
        title = collapse(info.title)
        if not args.yes:
            if not sys.stdin.isatty():
                raise UsageError("erasing needs a yes: akunu chats rm ID --yes")
            if input(f"Erase {title!r} for good? [y/N] ").strip().lower() not in ("y", "yes"):
                say("kept")
                continue
        store.erase(info.id)
        forget_conversation(info.id)
        say(f"erased {info.id[:_ID_DIGITS]}  {title}")


def _format(
    wanted: ExportFormat | None, output: Path | None, default: ExportFormat
) -> ExportFormat:
    """The one asked for, the one that the file's suffix stands for, or the default."""
    if wanted is not None or output is None:
        return wanted or default
    return format_of(output, default)


def _read(file: str) -> str:
    """Raises ConversationError where the file cannot be read, is too large, or is no text."""
    try:
        if file == "-":
            data = read_stream(sys.stdin.buffer, MAX_IMPORT)
        else:
            data = read_bounded(Path(file), MAX_IMPORT)
        return data.decode("utf-8")
    except OSError as error:
        raise ConversationError(
            f"cannot read {file}: {error.strerror}; name another file"
        ) from error
    except UnicodeDecodeError as error:
        raise ConversationError(
            f"cannot import {file}: expected UTF-8; `akunu chats export --all` makes such files"
        ) from error


def _print(found: Sequence[SearchResult], form: str) -> None:
    if form == "json":
        content = [_values(each) for each in found]
        print(for_output(json.dumps(content, indent=2, ensure_ascii=False)))
        return
    if not found:
        say(f"nothing found in {paths.conversations_file()}", error=True)
        return
    models = [collapse(each.info.model) for each in found]
    width = max(len("MODEL"), *map(len, models))
    say(f"{'ID':<{_ID_DIGITS}}  {'LAST USED':<16}  MESSAGES  {'MODEL':<{width}}  TITLE")
    for each, model in zip(found, models, strict=True):
        info = each.info
        used = (
            f"{datetime.fromtimestamp(info.updated):%Y-%m-%d %H:%M}" if info.updated else "unknown"
        )
        head = f"{info.id[:_ID_DIGITS]:<{_ID_DIGITS}}  {used:<16}  {info.messages:>8}"
        say(f"{head}  {model:<{width}}  {collapse(info.title)}")
        if each.hit.snippet:
            say(f"{'':<{_ID_DIGITS}}  {collapse(each.hit.snippet)}")


def _values(found: SearchResult) -> dict[str, object]:
    info: ConversationInfo = found.info
    return asdict(info) | {"found": found.hit.snippet} if found.hit.snippet else asdict(info)
