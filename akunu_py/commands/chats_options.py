"""The options of `akunu chats`, apart from the command so that `akunu --help` stays fast."""

from __future__ import annotations

import argparse
from pathlib import Path

from akunu_py.arguments import Parser


def add_options(parser: argparse.ArgumentParser) -> None:
    """The actions of `akunu chats`, and their options."""
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
    export = add("export", "a conversation, or all, as Markdown, JSON or a picture")
    export.add_argument("id", nargs="?", metavar="ID", help="as listed; its beginning is enough")
    export.add_argument("--all", action="store_true", help="all conversations (JSON only)")
    export.add_argument("--format", choices=("markdown", "json", "svg"), default=None)
    export.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="a new file; else standard output"
    )
    bring = add("import", "take in conversations that were exported as JSON")
    bring.add_argument("file", metavar="FILE", help="the file; - reads stdin")
    remove = add("rm", "erase conversations for good")
    remove.add_argument("id", nargs="+", metavar="ID", help="as listed; its beginning is enough")
    remove.add_argument("--yes", action="store_true", help="do not ask")
