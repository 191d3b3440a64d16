"""Options shared by several commands."""

import argparse
import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from akunu_py.errors import UsageError
from akunu_py.files import disk_errors, parse_json, read_bounded
from akunu_py.parser import Parser, add_flags, add_values, count, number, positive
from akunu_py.text import parse_size
from akunu_py.types import (
    DEFAULT_DRAFT_TOKENS,
    DEFAULT_MAX_TOKENS,
    DEFAULT_WIRE,
    DRAFT_MODES,
    MAX_TEMPERATURE,
    NEURAL_MODES,
    SWITCH_MODES,
    WEIGHT_MODES,
    WIRE_MODES,
    Constraint,
    GenerateOptions,
    LoadOptions,
    SamplingOptions,
)

MAX_CONSTRAINT_FILE = 4 << 20  # bytes of a schema or a grammar


def as_arguments(
    args: argparse.Namespace, *adders: Callable[[argparse.ArgumentParser], None]
) -> list[str]:
    """Return the options of `adders` that differ from their defaults, for another process."""
    parser = Parser()
    arguments: list[str] = []
    for add in adders:
        add(parser)
    for action in parser._actions:
        value = getattr(args, action.dest, action.default)
        if value == action.default or not action.option_strings:
            continue
        option = action.option_strings[-1]
        for each in value if isinstance(value, list) else [value]:
            text = f"{each / 1e9:.9f}GB" if action.type is _size else str(each)
            arguments += [option] if each is True else [option, text]
    return arguments


def parse_temperature(text: str) -> float:
    """Parse a temperature; 0 is greedy."""
    expected = f"a number from 0 to {MAX_TEMPERATURE:g}"
    return number(text, lambda value: 0 <= value <= MAX_TEMPERATURE, expected)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_model(parser: argparse.ArgumentParser, default: str = "as in the settings") -> None:
    """Add --model. default: described for its help text."""
    add_values(parser, ("--model", "NAME_OR_PATH", str, None, f"Model to use (default: {default})"))


def add_generation(parser: argparse.ArgumentParser, *, chat: bool = False) -> None:
    """Add the options of one answer. chat: the settings have limits and temperature."""
    # A chat is not greedy: small models repeat themselves.
    top_p, temperature, max_tokens = (0.95, None, None) if chat else (1.0, 0.0, DEFAULT_MAX_TOKENS)
    as_set = "(default: as in the settings)"
    limit = f"Maximum tokens to generate {as_set if chat else '(default: %(default)s)'}"
    budget = f"Maximum thinking tokens {as_set if chat else '(default: no limit)'}"
    add_values(
        parser,
        ("--max-tokens", "N", positive, max_tokens, limit),
        ("--thinking-budget", "N", count, None, budget),
    )
    stop = "Stop at this text; repeatable"
    add_values(parser, ("--stop", "TEXT", str, None, stop), action="append")
    drafting = parser.add_argument_group("drafting")
    add_drafting(drafting, tree=chat)
    accept = "Accept more draft tokens, which CHANGES the output;"
    add_values(
        drafting,
        ("--lenience", "L", float, 1.0, f"{accept} below 1: lenient, 1: exact"),
        ("--typical", "E", float, 0.0, f"{accept} above 0: typical acceptance, 0: exact"),
    )
    default = as_set if chat else "(default: %(default)g, greedy)"
    about = f"Sampling temperature, 0 to {MAX_TEMPERATURE:g} {default}"
    add_values(
        parser.add_argument_group("sampling"),
        ("--temperature", "T", parse_temperature, temperature, about),
        ("--top-p", "P", float, top_p, "Sample from tokens up to this total probability; 1: all"),
        ("--top-k", "K", int, 0, "Sample from the K most likely tokens; 0: all"),
        ("--min-p", "P", float, 0.0, "Minimum probability relative to the most likely token"),
        ("--repetition-penalty", "F", float, 1.0, "Divide the logits of repeated tokens by F"),
        ("--presence-penalty", "X", float, 0.0, "Subtract X from the logits of repeated tokens"),
        ("--frequency-penalty", "X", float, 0.0, "Subtract X from a logit for each repetition"),
        ("--seed", "N", int, None, "Random seed (default: random)"),
    )
    bias = "Add X to the logit of a token id; repeatable"
    add_values(parser, ("--logit-bias", "ID=X", _bias, None, bias), action="append")
    add_loading(parser)


def add_loading(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model loading")
    weights = "Data type of the weights; auto: float32 on a CPU, unchanged on a GPU"
    wire = "Memory that macOS may not evict; all: weights and, once idle, KV caches "
    wire += f"(default: {DEFAULT_WIRE}, or as in the settings)"
    kernels = "akunu's Metal kernels; auto: where they are faster and bit-identical to MLX's"
    exact = "Limit drafts to lengths that change no bit of the output"
    caches = "Limit for prompt caches (default: the rest; completions: 1/16 of the memory)"
    add_values(
        group,
        ("--weights", None, WEIGHT_MODES, "auto", weights),
        ("--wire", None, WIRE_MODES, None, wire),
        ("--kernels", None, SWITCH_MODES, "auto", kernels),
        ("--kv-bits", "4|8", int, None, "Quantize the KV cache to 4 or 8 bits (default: off)"),
        ("--context", "N", positive, None, "Context length (default: the longest that fits)"),
        ("--memory-limit", "SIZE", _size, None, "Memory limit, e.g. 12GB (default: all available)"),
        ("--prompt-cache-memory", "SIZE", _size, None, caches),
    )
    force = "Load models and prompts that exceed the memory limit"
    add_flags(group, ("--force", force), ("--exact", exact))


def add_hosts(parser: argparse.ArgumentParser) -> None:
    text = "Split the model over the hosts in an mlx.launch hostfile, starting with this one, "
    text += "or over N local processes (default: no split)"
    add_values(parser, ("--hosts", "FILE|N", str, None, text))


def check_hosts(hosts: str | None, drafts: Iterable[str] = (), **others: object) -> None:
    """Raise UsageError if --hosts conflicts with values of --draft or of other options."""
    conflicts = [f"--{name.replace('_', '-')}" for name, value in others.items() if value]
    conflicts += [f"--draft {mode}" for mode in drafts if mode in NEURAL_MODES]
    if hosts and conflicts:
        raise UsageError(f"{conflicts[0]} cannot be combined with --hosts; remove one of them")


def loading_from(args: argparse.Namespace) -> LoadOptions:
    """Return the options of `add_loading`. Raises UsageError if options conflict."""
    options = LoadOptions(**_values(LoadOptions, args))
    check_hosts(
        options.hosts, [args.draft],
        kv_bits=args.kv_bits, draft_model=args.draft_model, exact=args.exact,
    )  # fmt: skip
    return options


def options_from(args: argparse.Namespace) -> GenerateOptions:
    """Return the options of `add_generation`; generation checks their ranges."""
    bias, stop = tuple(args.logit_bias or ()), tuple(args.stop or ())
    sampling = SamplingOptions(**_values(SamplingOptions, args) | {"logit_bias": bias})
    given = _values(GenerateOptions, args) | {"sampling": sampling, "stop": stop}
    return GenerateOptions(**given)


def _values(options: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Return the values in `args` that have the names of fields of `options`."""
    return {each.name: vars(args)[each.name] for each in fields(options) if each.name in args}


def add_constraint(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("structured output")
    kinds = group.add_mutually_exclusive_group()
    schema = "Generate JSON that matches this JSON schema"
    choice = "Answer with one of the choices; repeatable"
    add_values(kinds, ("--json-schema", "FILE|JSON", str, None, schema))
    add_flags(kinds, ("--json", "Generate JSON of any shape"))
    add_values(kinds, ("--regex", "RE", str, None, "Match this regular expression as a whole"))
    add_values(kinds, ("--choice", "TEXT", str, None, choice), action="append")
    add_values(kinds, ("--grammar", "FILE", str, None, "Match the Lark grammar in this file"))
    others = "Allow other properties where the schema lacks additionalProperties"
    add_flags(
        group,
        ("--compact", "Generate JSON without whitespace, which CHANGES the output"),
        ("--open-objects", others),
    )


def constraint_from(args: argparse.Namespace) -> Constraint | None:
    """Return the constraint of `add_constraint`. Raises UsageError for unreadable files."""
    if args.compact and args.json_schema is None and not args.json:
        raise UsageError("--compact requires --json-schema or --json")
    if args.open_objects and args.json_schema is None:
        raise UsageError("--open-objects requires --json-schema")
    if args.json_schema is not None:
        constraint = json_constraint(args.json_schema, "--json-schema")
        return replace(constraint, compact=args.compact, open_objects=args.open_objects)
    if args.json:
        return Constraint("json", compact=args.compact)
    if args.regex is not None:
        return Constraint("regex", args.regex)
    if args.choice:
        return Constraint("choice", choices=tuple(args.choice))
    if args.grammar is not None:
        return Constraint("grammar", _text_of(args.grammar, "--grammar"))
    return None


def json_constraint(schema: str, option: str) -> Constraint:
    """Return the constraint of a schema: JSON text, or the path of a file. Raises UsageError."""
    text = schema.strip()
    if not text.startswith(("{", "[")):
        text = _text_of(schema, option)
    try:
        parse_json(text)
    except ValueError as error:
        raise UsageError(f"{option}: the JSON schema is not valid JSON: {error}") from error
    return Constraint("json_schema", text)


def _text_of(path: str, option: str) -> str:
    if not path.strip():
        raise UsageError(f"{option}: expected the path of a file, found an empty string")
    try:
        with disk_errors(f"{option}: cannot read {path}", UsageError):
            text = read_bounded(Path(os.path.expanduser(path)), MAX_CONSTRAINT_FILE)
            return text.decode("utf-8-sig")
    except ValueError as error:  # not UTF-8, or a null in the path
        raise UsageError(f"{option}: {path} is not UTF-8 text: {error}") from error


def add_drafting(group: argparse._ArgumentGroup, *, tree: bool = False) -> None:
    """Add the options of drafting. tree: drafts may be token trees."""
    modes = (
        "Drafters to use. auto: all but exit, when expected to be faster; ngram, mtp, model or "
        "exit: only n-grams, MTP heads, the draft model or early exit; fixed: always up to N "
        "draft tokens; off: no drafting"
    )
    add_values(
        group,
        ("--draft", "MODE", DRAFT_MODES, "auto", modes),
        ("--draft-tokens", "N", positive, DEFAULT_DRAFT_TOKENS, "Draft tokens with --draft fixed"),
        ("--draft-model", "NAME_OR_PATH", str, None, "Draft model (default: as in the settings)"),
    )
    if tree:
        about = "Token trees: alternatives verified in one step; auto: when expected to be faster"
        add_values(group, ("--draft-tree", None, SWITCH_MODES, "auto", about))
    no_cache = "Do not use or store earlier answers and prompt caches"
    add_flags(group, ("--no-answer-cache", no_cache))


def _bias(text: str) -> tuple[int, float]:
    token, separator, bias = text.partition("=")
    with contextlib.suppress(ValueError):
        if separator and int(token) >= 0:
            return int(token), float(bias)
    raise argparse.ArgumentTypeError(f"expected a token id and a number, 42=-1.5, got {text!r}")
