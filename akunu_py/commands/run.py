"""`akunu run`: one answer to stdout as it is decoded, statistics to stderr."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from akunu_py.arguments import (
    add_constraint,
    add_generation,
    add_hosts,
    check_hosts,
    constraint_from,
    options_from,
)
from akunu_py.decoding.load import engine_from, load_learned, note_peak
from akunu_py.errors import INTERRUPTED, EmptyPrompt, UsageError
from akunu_py.files import read_stream
from akunu_py.interrupts import ends_within
from akunu_py.text import displayable, for_output, print_warnings, say
from akunu_py.types import FinishReason, Message

if TYPE_CHECKING:
    from akunu_py.decoding.generate.session import Generation
    from akunu_py.decoding.model.engine import Engine

_PATIENCE = 3.0  # seconds that an interrupted pass may take to end
_UNNOTICED = 0.2  # seconds that what was read may take to be kept on disk, when all is said

_ENDINGS: dict[FinishReason | None, str] = {
    "length": "cut off at --max-tokens",
    "context": "cut off: the model's context is full",
    "cancelled": "interrupted",
}
MAX_PROMPT = 64 << 20  # bytes, more than any context holds


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the prompt; - reads stdin")
    parser.add_argument("--model", default=None, metavar="NAME_OR_PATH")
    parser.add_argument("--raw", action="store_true", help="continue PROMPT, without the template")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--quiet", action="store_true", help="no statistics")
    parser.add_argument(
        "--prompt-cache",
        type=Path,
        metavar="FILE",
        help="keep the tokens read and generated in FILE, and do not read again those it has",
    )
    add_constraint(parser)
    add_generation(parser, temperature=0.0, top_p=1.0)
    add_hosts(parser)


def run(args: argparse.Namespace) -> int:
    check_hosts(args.hosts, prompt_cache=args.prompt_cache)
    prompt = read_prompt(args.prompt)
    options = options_from(args)
    constraint = constraint_from(args)
    options = replace(options, sampling=replace(options.sampling, constraint=constraint))
    engine = engine_from(args)
    from akunu_py.decoding.generate.session import (
        Session,  # takes a second, which no mistake should wait for
    )

    learned = load_learned(engine, no_memory=args.no_memory)
    tokens = (
        engine.tokens.encode(prompt)
        if args.raw
        else engine.tokens.encode_chat([Message("user", prompt)])
    )
    session = Session(engine, learned)
    if args.prompt_cache:
        session.recall = None
        if args.prompt_cache.exists():
            session.load_prompt_cache(args.prompt_cache)
    generation = session.generate(tokens, options)
    if options.draft != "off" and engine.no_draft:
        print_warnings([f"{engine.name} runs without drafting: {engine.no_draft}"])
    with cancelled_by_interrupt(generation):
        if args.format == "json":
            try:
                generation.answer()
            finally:  # what was said before another host was lost, too
                if generation.tokens:
                    said = json.dumps(as_dict(engine, generation), ensure_ascii=False)
                    print(for_output(said))
        else:
            stream(generation)
    print_warnings(learned.warnings)
    if constraint and generation.finish_reason in ("length", "context"):
        print_warnings([f"the answer is not whole, it was {_ENDINGS[generation.finish_reason]}"])
    note_peak(engine, generation)
    if args.prompt_cache:
        session.save_prompt_cache(args.prompt_cache)
    if not args.quiet and args.format == "text":
        say(f"[{summary(generation, args.draft)}]", error=True)
    if generation.finish_reason != "cancelled":
        session.save_idle(seconds=_UNNOTICED)
    return INTERRUPTED if generation.finish_reason == "cancelled" else 0


def read_prompt(argument: str | None) -> str:
    """The prompt from the argument, or from stdin where it is `-` or missing and piped in."""
    if argument is None and sys.stdin.isatty():
        raise UsageError('no prompt: akunu run "your question", or pipe a text in')
    if argument is not None and argument != "-":
        prompt = argument
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise UsageError("the prompt is not UTF-8 text; convert it first")
    else:
        try:
            prompt = read_stream(sys.stdin.buffer, MAX_PROMPT).decode()
        except OSError as error:
            raise UsageError(f"cannot read the prompt on stdin: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UsageError(
                f"the prompt on stdin is not UTF-8 text (byte {error.start}); convert it first"
            ) from error
    if not prompt.strip():
        raise EmptyPrompt('the prompt is empty: akunu run "your question"')
    return prompt


@contextlib.contextmanager
def cancelled_by_interrupt(generation: Generation) -> Iterator[None]:
    """The first Ctrl-C ends the answer after the running pass, or the program where that pass does
    not end soon; a second one ends the program."""

    def on_interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        generation.cancel()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        with ends_within(_PATIENCE):
            yield
    finally:
        signal.signal(signal.SIGINT, before)


def stream(generation: Generation) -> None:
    """Prints the answer as it comes, and ends it with a newline. Thinking is for eyes only.

    A terminal shows control codes and does not obey them; a file or a pipe gets the very text.
    """
    for piece in generation:
        if piece.thinking and sys.stderr.isatty():
            sys.stderr.write(f"\x1b[2m{displayable(piece.thinking)}\x1b[0m")
            sys.stderr.flush()
        sys.stdout.write(for_output(piece.text))
        sys.stdout.flush()
    if not generation.text.endswith("\n"):
        print(flush=True)


def as_dict(engine: Engine, generation: Generation) -> dict[str, object]:
    """The object that `--format json` prints."""
    return {
        "text": generation.text,
        **({"thinking": generation.thinking} if generation.thinking else {}),
        "tokens": generation.tokens,
        "finish_reason": generation.finish_reason,
        "stats": generation.stats.as_dict() | {"load_s": round(engine.load_s, 4)},
        **({"hosts": engine.ring.as_dict()} if engine.ring and generation.finish_reason else {}),
    }


def summary(generation: Generation, draft: str) -> str:
    """The statistics in one line, and why the answer ended where that was not its own end."""
    stats = generation.stats
    parts = [
        f"{stats.generated_tokens} tokens",
        f"{stats.tokens_per_s:.1f} tokens/s",
        f"first after {stats.prefill_s:.2f} s",
        f"{stats.prompt_tokens} prompt tokens"
        + (f", {stats.cached_tokens} of them cached" if stats.cached_tokens else ""),
    ]
    if draft != "off":
        parts[2:2] = [
            f"{stats.tokens_per_pass:.2f} tokens/pass",
            f"{stats.acceptance_rate:.0%} of {stats.drafted} drafted accepted",
        ]
    if ending := _ENDINGS.get(generation.finish_reason):
        parts.append(ending)
    return " · ".join(parts)
