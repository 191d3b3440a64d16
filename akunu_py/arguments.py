"""The argument parser, and the options that several commands share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from akunu_py.errors import UsageError
from akunu_py.files import parse_json, read_bounded
from akunu_py.text import on_one_line, parse_size
from akunu_py.types import (
    DEFAULT_DRAFT_TOKENS,
    DEFAULT_MAX_TOKENS,
    DRAFT_MODES,
    NETWORK_MODES,
    WEIGHT_MODES,
    Constraint,
    GenerateOptions,
    LoadOptions,
    SamplingOptions,
)


class Parser(argparse.ArgumentParser):
    """Reports wrong usage on one line. Options are never guessed from their beginnings."""

    def __init__(self, **options: object) -> None:
        super().__init__(**({"allow_abbrev": False} | options))  # type: ignore[arg-type]
        # Suppressed where it is not given: the parser of a command would unset its parent's.
        self.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{on_one_line(f'{self.prog}: {message}')}; see: {self.prog} --help\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        """argparse's own takes a full disk for success."""
        (file or sys.stderr).write(message)


def as_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[str]:
    """Return the options in `args` that differ from the parser's defaults, for another process."""
    found: list[str] = []
    for action in parser._actions:
        value = getattr(args, action.dest, action.default)
        if value == action.default or not action.option_strings:
            continue
        shown = f"{value / 1e9:.9f}GB" if action.type is _size else str(value)
        found += action.option_strings[-1:] if value is True else [action.option_strings[-1], shown]
    return found


def positive(text: str) -> int:
    """The type of an option that must be an integer above 0."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of 1 or more, got {text!r}")
    return value


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_generation(
    parser: argparse.ArgumentParser, *, temperature: float | None, top_p: float
) -> None:
    """Adds how an answer is generated. temperature: None for the one in the settings."""
    parser.add_argument("--max-tokens", type=positive, default=DEFAULT_MAX_TOKENS, metavar="N")
    parser.add_argument(
        "--stop", action="append", metavar="TEXT", help="ends the answer; may be repeated"
    )
    drafting = parser.add_argument_group("drafting")
    add_drafting(drafting)
    _add_leniency(drafting)
    _add_sampling(parser.add_argument_group("sampling"), temperature, top_p)
    add_loading(parser)


def add_loading(parser: argparse.ArgumentParser) -> None:
    """Adds how a model is loaded."""
    parser.add_argument(
        "--weights",
        choices=WEIGHT_MODES,
        default="auto",
        help="auto: float32 on a CPU, the model's own format on a GPU",
    )
    parser.add_argument(
        "--kv-bits", type=int, default=None, metavar="4|8", help="quantize the KV cache"
    )
    parser.add_argument(
        "--context",
        type=positive,
        default=None,
        metavar="N",
        help="tokens to hold at most (default: the model's own, or what fits into memory)",
    )
    parser.add_argument(
        "--memory",
        type=_size,
        default=None,
        metavar="SIZE",
        help="for the model and all it reads, such as 12GB (default: what this machine has)",
    )
    parser.add_argument(
        "--force", action="store_true", help="load a model, or read a prompt, that will not fit"
    )
    parser.add_argument(
        "--cache-memory",
        type=_size,
        default=None,
        metavar="SIZE",
        help="for the KV caches of several texts, such as 2GB (default: as much as the fit leaves)",
    )


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """Adds that a model is divided among several."""
    parser.add_argument(
        "--hosts",
        default=None,
        metavar="FILE|N",
        help="divide the model among the hosts of mlx.launch's hostfile, the first of which is "
        "this one, or among N processes here",
    )


def check_hosts(hosts: str | None, drafts: Iterable[str] = (), **others: object) -> None:
    """Raises UsageError where a model is to be divided, and what does not go with that is asked
    for. drafts: modes of drafting. others: what other options were given, by their names."""
    given = [f"--{name.replace('_', '-')}" for name, value in others.items() if value]
    given += [f"--draft {mode}" for mode in drafts if mode in NETWORK_MODES]
    if hosts and given:
        raise UsageError(f"{given[0]} and --hosts do not go together; leave one of them out")


def loading_from(args: argparse.Namespace) -> LoadOptions:
    """How a model shall be loaded. Raises UsageError for what does not go together."""
    hosts = getattr(args, "hosts", None)
    check_hosts(hosts, [args.draft], kv_bits=args.kv_bits, draft_model=args.draft_model)
    return LoadOptions(
        args.weights,
        args.kv_bits,
        args.context,
        args.force,
        args.cache_memory,
        args.memory,
        args.draft_model,
        hosts,
    )


def options_from(args: argparse.Namespace) -> GenerateOptions:
    """The options of an answer. Their ranges are checked where they are used."""
    defaults = SamplingOptions()
    sampling = SamplingOptions(
        temperature=args.temperature,
        top_p=args.top_p,
        min_p=args.min_p,
        top_k=args.top_k,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        penalty_window=defaults.penalty_window,
        logit_bias=tuple(args.logit_bias or ()),
        seed=args.seed,
        lenience=args.lenience,
        typical=args.typical,
    )
    return GenerateOptions(
        max_tokens=args.max_tokens,
        draft=args.draft,
        draft_tokens=args.draft_tokens,
        sampling=sampling,
        stop=tuple(args.stop or ()),
    )


MAX_CONSTRAINT_FILE = 4 << 20  # bytes of a schema or a grammar


def add_constraint(parser: argparse.ArgumentParser) -> None:
    """Adds what an answer must match."""
    group = parser.add_argument_group("structured output: the answer matches, or is cut off")
    kinds = group.add_mutually_exclusive_group()
    kinds.add_argument("--json-schema", metavar="FILE|JSON", help="JSON that fits a JSON schema")
    kinds.add_argument("--json", action="store_true", help="any JSON")
    kinds.add_argument("--regex", metavar="RE", help="the whole answer matches RE")
    kinds.add_argument(
        "--choice", action="append", metavar="TEXT", help="one of these; may be repeated"
    )
    kinds.add_argument("--grammar", metavar="FILE", help="a Lark grammar in a file")
    group.add_argument(
        "--compact",
        action="store_true",
        help="JSON without whitespace, which CHANGES what a model would write",
    )


def constraint_from(args: argparse.Namespace) -> Constraint | None:
    """What `add_constraint` was given. Raises UsageError for files that cannot be read."""
    if args.compact and args.json_schema is None and not args.json:
        raise UsageError("--compact is for JSON: use it with --json-schema or --json")
    if args.json_schema is not None:
        return json_constraint(args.json_schema, "--json-schema", compact=args.compact)
    if args.json:
        return Constraint("json", compact=args.compact)
    if args.regex is not None:
        return Constraint("regex", args.regex)
    if args.choice:
        return Constraint("choice", choices=tuple(args.choice))
    if args.grammar is not None:
        return Constraint("grammar", _text_of(args.grammar, "--grammar"))
    return None


def json_constraint(given: str, name: str, *, compact: bool = False) -> Constraint:
    """given: a JSON schema, or the path of a file with one. name: who was given it. Raises
    UsageError."""
    text = given.strip()
    if not text.startswith(("{", "[")):
        text = _text_of(given, name)
    try:
        parse_json(text)
    except ValueError as error:
        raise UsageError(f"{name}: the JSON schema is not JSON: {error}") from error
    return Constraint("json_schema", text, compact=compact)


def _text_of(path: str, option: str) -> str:
    if not path.strip():
        raise UsageError(f"{option}: expected the path of a file, found an empty text")
    try:
        return read_bounded(Path(path), MAX_CONSTRAINT_FILE).decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"{option}: cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # not UTF-8, or a null in the path
        raise UsageError(f"{option}: {path} is not UTF-8 text: {error}") from error


def add_drafting(group: argparse._ArgumentGroup) -> None:
    """Adds how drafts are made."""
    group.add_argument(
        "--draft",
        choices=DRAFT_MODES,
        default="auto",
        help="auto: as many tokens as pay, from all there is but exit; ngram, mtp, model, exit: "
        "the same from n-grams, heads of the model, --draft-model or first layers alone; fixed: "
        "always up to --draft-tokens; off: none",
    )
    group.add_argument("--draft-tokens", type=positive, default=DEFAULT_DRAFT_TOKENS, metavar="N")
    group.add_argument(
        "--draft-model",
        default=None,
        metavar="NAME_OR_PATH",
        help="a smaller model with the same tokens, which drafts where that pays",
    )
    group.add_argument(
        "--no-memory",
        action="store_true",
        help="neither use nor keep earlier answers of the model, nor what it had read",
    )


def _add_leniency(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--lenience",
        type=float,
        default=1.0,
        metavar="L",
        help="below 1 accepts more of a draft, and CHANGES the output (1: exact)",
    )
    group.add_argument(
        "--typical",
        type=float,
        default=0.0,
        metavar="E",
        help="above 0 accepts typical tokens of a draft, and CHANGES the output (0: exact)",
    )


def _add_sampling(group: argparse._ArgumentGroup, temperature: float | None, top_p: float) -> None:
    group.add_argument(
        "--temperature",
        type=float,
        default=temperature,
        metavar="T",
        help=f"0: greedy (default: {'as in the settings' if temperature is None else temperature})",
    )
    group.add_argument(
        "--top-p", type=float, default=top_p, metavar="P", help="1: off (default: %(default)s)"
    )
    group.add_argument("--top-k", type=int, default=0, metavar="K")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P")
    group.add_argument("--repetition-penalty", type=float, default=1.0, metavar="F")
    group.add_argument("--presence-penalty", type=float, default=0.0, metavar="X")
    group.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X")
    group.add_argument(
        "--logit-bias", type=_bias, action="append", metavar="TOKEN=X", help="may be repeated"
    )
    group.add_argument("--seed", type=int, default=None, metavar="N", help="makes it repeatable")


def _bias(text: str) -> tuple[int, float]:
    token, separator, bias = text.partition("=")
    try:
        if separator and int(token) >= 0:
            return int(token), float(bias)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected a token id and a number, 42=-1.5, got {text!r}")
