"""`akunu bench chat`."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from akunu_py.arguments import positive
from akunu_py.bench.commands.arguments import add_format, add_model
from akunu_py.bench.commands.output import exit_code, progress, show, was_interrupted
from akunu_py.bench.workloads import load_workloads
from akunu_py.types import DRAFT_MODES

SUMMARY = "how soon the chat answers a key, and what drawing takes from decoding"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=positive, default=4, metavar="N")
    parser.add_argument("--max-tokens", type=positive, default=96, metavar="N", help="an answer")
    parser.add_argument(
        "--keys", type=positive, default=24, metavar="N", help="typed while it decodes, a repeat"
    )
    parser.add_argument(
        "--long",
        action="store_true",
        help="also type in a chat that has a long answer, and in one of 300 turns, with a table of "
        "200 rows and a prompt of 250,000 characters",
    )
    parser.add_argument("--workload", default="chat", metavar="NAME", help="its last turn is asked")
    parser.add_argument("--draft", choices=DRAFT_MODES, default="auto")
    parser.add_argument("--force", action="store_true", help="load a model that will not fit")
    add_model(parser)
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    from akunu_py.bench.chat import ChatBench, ChatOptions, ChatResult
    from akunu_py.bench.report.printing import print_chat
    from akunu_py.bench.result import describe_machine, today
    from akunu_py.models.store import store

    (workload,) = load_workloads([options.workload])
    model = store.resolve(options.model)
    store.check(model)
    chat_options = ChatOptions(
        model.path.absolute(),
        workload.turns[-1].user,
        options.repeats,
        options.max_tokens,
        options.keys,
        options.long,
        options.draft,
        options.weights,
        options.force,
    )
    result = ChatResult()
    with tempfile.TemporaryDirectory(prefix="akunu-bench-") as directory:
        bench = ChatBench(chat_options, Path(directory), progress)
        interrupted = was_interrupted(lambda: bench.measure(result))
    as_json = {
        "command": options.command_line,
        "date": today(),
        "model": model.name,
        "draft": options.draft,
        "machine": describe_machine(),
    }
    as_json |= result.as_dict()
    show(options, as_json, lambda: print_chat(model.name, options.draft, result))
    return exit_code(interrupted)
