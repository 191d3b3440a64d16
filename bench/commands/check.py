"""`akunu bench check`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from akunu_py.bench.commands.arguments import add_format
from akunu_py.bench.commands.output import FAILED, exit_code, progress, show, was_interrupted

SUMMARY = "what only this machine can show, judged line by line; exit code 1 where a line fails"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        action="append",
        metavar="NAME_OR_PATH",
        help="beside the starter; may be repeated (default: the largest 4-bit model of the store "
        "up to 3.5 GB)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=_json_file,
        default="akunu-check.json",
        metavar="FILE.json",
        help="all figures; a page, FILE.html, is written beside it (default: %(default)s)",
    )
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    from akunu_py.bench import check
    from akunu_py.bench.report.pages import check_to_html
    from akunu_py.bench.report.printing import print_check
    from akunu_py.bench.result import json_text, write_text

    models = check.choose_models(options.model or [])
    found = check.Check(options.command_line)
    interrupted = was_interrupted(
        lambda: check.run_check(models, check.default_plan(), found, progress)
    )
    page = options.output.with_suffix(".html")
    write_text(options.output, json_text(found.as_dict()), parents=True)
    write_text(page, check_to_html(found))
    show(options, found.as_dict(), lambda: print_check(found))
    print(f"{options.output}: every figure; {page}: the same to read", file=sys.stderr)
    return exit_code(interrupted, "checked") or FAILED * found.failed


def _json_file(text: str) -> Path:
    if not text.endswith(".json"):
        raise argparse.ArgumentTypeError(f"expected a name that ends in .json, got {text!r}")
    return Path(text)
