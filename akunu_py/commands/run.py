"""`akunu run`: stream one answer to stdout, and print statistics on stderr."""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from akunu_py.arguments import (
    add_constraint,
    add_generation,
    add_hosts,
    add_model,
    check_hosts,
    constraint_from,
    loading_from,
    options_from,
)
from akunu_py.engine.load import open_model
from akunu_py.errors import INTERRUPTED, UsageError
from akunu_py.files import disk_errors, read_stream
from akunu_py.interrupts import cancel_on_interrupt
from akunu_py.parser import add_flags, add_format, add_values
from akunu_py.text import displayable, for_output, print_warnings, say
from akunu_py.types import FinishReason, Message, TextPiece

if TYPE_CHECKING:
    from akunu_py.engine.engine import Engine
    from akunu_py.engine.loop import StepLoop
    from akunu_py.engine.request import Request

_INTERRUPT_S = 3.0  # for a decode step to end after Ctrl-C
_SAVE_S = 0.2  # for saving the prompt cache after the answer

_ENDINGS: dict[FinishReason | None, str] = {
    "length": "cut off at --max-tokens",
    "context": "cut off: the context is full",
    "repetition": "cut off: it repeated itself",
    "cancelled": "interrupted",
}
MAX_PROMPT = 64 << 20  # bytes, more than any context length


def add_options(parser: argparse.ArgumentParser) -> None:
    about = "Prompt, after any piped text; - reads only stdin"
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help=about)
    add_model(parser)
    add_flags(parser, ("--raw", "Continue PROMPT without the chat template"))
    add_format(parser)
    add_flags(parser, ("--quiet", "Do not print statistics"))
    text = "Load cached tokens from FILE if it exists, and save prompt and answer to it"
    add_values(parser, ("--prompt-cache", "FILE", Path, None, text))
    add_constraint(parser)
    add_generation(parser)
    add_hosts(parser)


def run(args: argparse.Namespace) -> int:
    check_hosts(args.hosts, prompt_cache=args.prompt_cache)
    prompt = read_prompt(args.prompt)
    options = options_from(args)
    constraint = constraint_from(args)
    options = replace(options, sampling=replace(options.sampling, constraint=constraint))
    if args.prompt_cache:
        from akunu_py.engine.histories import disk

        disk.check_writable(args.prompt_cache)
    keep = not args.no_answer_cache
    engine, learned = open_model(args.model, loading_from(args), answer_cache=keep)
    # Slow imports, so after all usage errors.
    from akunu_py.engine.answer import prompt_rewrites
    from akunu_py.engine.constraint.answer_limits import can_limit_thinking, compile_rules
    from akunu_py.engine.loop import StepLoop

    encoder = engine.tokens
    tokens = encoder.encode(prompt) if args.raw else encoder.encode_chat([Message("user", prompt)])
    loop = StepLoop(engine, learned)
    if args.prompt_cache:
        loop.runner.disk_caches = None
        if args.prompt_cache.exists():
            loop.runner.caches.release(disk.load(engine, args.prompt_cache))
    compile_rules(encoder, options)
    generation = loop.request(tokens, options, prompt_rewrites(engine, tokens, options))
    if options.draft != "off" and engine.no_draft_reason:
        print_warnings([f"{engine.name} runs without drafting: {engine.no_draft_reason}"])
    if options.thinking_budget is not None and not can_limit_thinking(encoder.tokenizer):
        print_warnings([f"--thinking-budget has no effect: {engine.name} does not think"])
    with cancel_on_interrupt(generation.cancel, _INTERRUPT_S):
        if args.format == "json":
            try:
                for _ in loop.stream(generation):
                    pass
            finally:  # even if another host is lost
                if generation.tokens:
                    line = json.dumps(as_dict(engine, generation), ensure_ascii=False)
                    print(for_output(line))
        else:
            stream(loop, generation)
    learned.flush()
    print_warnings(learned.warnings)
    if constraint and generation.finish_reason in ("length", "context"):
        print_warnings([f"the answer is incomplete: {_ENDINGS[generation.finish_reason]}"])
    if args.prompt_cache:
        disk.save(loop.runner.caches.last, engine, args.prompt_cache)
    if not args.quiet and args.format == "text":
        say(f"[{summary(generation, args.draft)}]", error=True)
    if generation.finish_reason != "cancelled":
        loop.idle_step(seconds=_SAVE_S)
    return INTERRUPTED if generation.finish_reason == "cancelled" else 0


def read_prompt(argument: str | None) -> str:
    """Return piped text and the argument, with two newlines between. Raises UsageError."""
    if argument is None and sys.stdin.isatty():
        raise UsageError('no prompt; run: akunu run "your question", or pipe the prompt in')
    typed = None if argument == "-" else argument
    if any("\ud800" <= character <= "\udfff" for character in typed or ""):
        raise UsageError("the prompt is not UTF-8 text; convert it first")
    piped = _read_stdin() if typed is None or _is_piped() else ""
    prompt = "\n\n".join(part for part in (piped, typed) if part and part.strip())
    if not prompt.strip():
        raise UsageError('the prompt is empty; run: akunu run "your question"')
    return prompt


def _read_stdin() -> str:
    try:
        with disk_errors("cannot read the prompt on stdin", UsageError):
            return read_stream(sys.stdin.buffer, MAX_PROMPT).decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"the prompt on stdin is not UTF-8 text (byte {error.start}); convert it first"
        ) from error


def _is_piped() -> bool:
    """Return True if stdin is a pipe or a file, which end; sockets and devices may never end."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except OSError:  # not a file of the system
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def stream(loop: StepLoop, generation: Request) -> None:
    """Print the answer as it is generated; only terminals get thinking."""
    for piece in loop.stream(generation):
        if not isinstance(piece, TextPiece):
            continue
        if piece.thinking and sys.stderr.isatty():
            sys.stderr.write(f"\x1b[2m{displayable(piece.thinking)}\x1b[0m")
            sys.stderr.flush()
        sys.stdout.write(for_output(piece.text))
        sys.stdout.flush()
    if not generation.text.endswith("\n"):
        print(flush=True)


def as_dict(engine: Engine, generation: Request) -> dict[str, object]:
    """Return the object for `--format json`."""
    return {
        "text": generation.text,
        **({"thinking": generation.thinking} if generation.thinking else {}),
        "tokens": generation.tokens,
        "finish_reason": generation.finish_reason,
        "stats": generation.stats.as_dict() | {"load_s": round(engine.load_s, 4)},
    }


def summary(generation: Request, draft: str) -> str:
    """Return one line of statistics, with the reason if the answer was cut off."""
    stats = generation.stats
    parts = [
        f"{stats.generated_tokens} token{'s' * (stats.generated_tokens != 1)}",
        f"first after {stats.prefill_s:.2f} s",
        f"{stats.prompt_tokens} prompt tokens"
        + (f", {stats.cached_tokens} of them cached" if stats.cached_tokens else ""),
    ]
    if draft != "off" and stats.drafted:
        parts[1:1] = [f"{stats.acceptance_rate:.0%} of {stats.drafted} draft tokens accepted"]
    if draft != "off" and stats.target_passes:
        parts[1:1] = [f"{stats.tokens_per_pass:.2f} tokens/pass"]
    if stats.decoded_tokens:
        parts[1:1] = [f"{stats.tokens_per_s:.1f} tokens/s"]
    if ending := _ENDINGS.get(generation.finish_reason):
        parts.append(ending)
    return " · ".join(parts)
