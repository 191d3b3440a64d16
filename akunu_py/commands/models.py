"""`akunu models`: the actions' names, and those that only look: list, show, recommend."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Sequence
from datetime import datetime

from akunu_py import paths
from akunu_py.errors import UnknownModel, UsageError
from akunu_py.models import catalogue, cleanup, store
from akunu_py.models.catalogue import Recommendation, recommend
from akunu_py.models.fit import GIB, usable_memory
from akunu_py.models.usage import Usage, read_usage
from akunu_py.text import human_size, on_one_line

_UNITS = {"G": GIB, "GB": GIB, "GIB": GIB, "M": 1 << 20, "MB": 1 << 20, "MIB": 1 << 20}


def run(args: argparse.Namespace) -> int:
    here = {"list": list_models, "show": show, "recommend": recommend_models}
    if args.action in here:
        return here[args.action](args)
    # Each of the others in a module of its own, some with imports that take a second.
    module = {"pull": "models_pull", "import": "models_import"}.get(args.action, "models_store")
    command = importlib.import_module(f"akunu_py.commands.{module}")
    code: int = command.run(args)
    return code


def list_models(args: argparse.Namespace) -> int:
    installed = store.list_models()
    rows = [
        (
            model.name,
            human_size(model.size),
            f"{model.context_length:,}" if model.context_length else "",
            _day(read_usage(model.name).used),
            f"damaged: {model.damaged}" if model.damaged else model.repository or model.source,
        )
        for model in installed
    ]
    _print_table(("NAME", "SIZE", "CONTEXT", "USED", "FROM"), rows)
    print(f"{'no models in' if not rows else 'in'} {paths.models_dir()}")
    names = {model.name for model in installed}
    for pull in cleanup.unfinished_pulls():
        if pull.name not in names:
            share = f"{human_size(pull.done)} of {human_size(pull.total)}"
            print(f"unfinished: {pull.reference}, {share}; akunu models pull {pull.reference}")
    more = [entry for entry in catalogue.load_catalogue().values() if entry.name not in names]
    if more:
        print("\nto be pulled with: akunu models pull NAME, or any owner/repository of the hub")
        _print_table(
            ("NAME", "DOWNLOAD", "MEMORY", "FOR", "LICENCE"),
            [
                (
                    entry.name,
                    human_size(entry.download_bytes),
                    human_size(entry.memory_8k),
                    ", ".join(entry.purpose),
                    entry.licence,
                )
                for entry in more
            ],
        )
        print("which one suits this machine: akunu models recommend")
    return 0


def show(args: argparse.Namespace) -> int:
    """What is known of a model: one of the store, or one of the catalogue."""
    try:
        model = store.get(args.name)
    except UnknownModel:
        if args.name not in catalogue.load_catalogue():
            raise
        _print_facts(_catalogue_facts(catalogue.find(args.name)))
        return 0
    if args.verify:
        from akunu_py.commands.models_store import verify_model

        verify_model(model)
    else:
        store.check(model)
    _print_facts(_stored_facts(model, verified=args.verify))
    return 0


def recommend_models(args: argparse.Namespace) -> int:
    memory = parse_memory(args.memory) if args.memory else None
    if memory is None:
        from akunu_py.decoding import device  # MLX, which says what the GPU takes

        usable = device.available_memory()
    else:
        usable = usable_memory(memory)
    found = recommend(usable)
    if args.format == "json":
        print(json.dumps({"usable_bytes": usable, **{r.purpose: _as_dict(r) for r in found}}))
        return 0
    for number, recommendation in enumerate(found):
        if number:
            print()
        entry = recommendation.entry
        if entry is None:
            print(f"{recommendation.purpose}: {recommendation.why}")
            continue
        print(f"{recommendation.purpose}: {entry.name}  ({entry.title}, {entry.licence})")
        print(f"  {entry.description}")
        print(f"  why: {recommendation.why}")
        print(f"  akunu models pull {entry.name}  ({human_size(entry.download_bytes)})")
    return 0


def parse_memory(text: str) -> int:
    """Bytes of `16G`, `16GB` or `512M`; as memory is sold, a G is 2**30. Raises UsageError."""
    digits = text.rstrip("GgMmIiBb ")
    unit = _UNITS.get(text[len(digits) :].strip().upper())
    try:
        size = int(float(digits) * (unit or 0))
    except (ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise UsageError(f"--memory: expected a size such as 16G, got {text!r}")
    return size


def _as_dict(recommendation: Recommendation) -> dict[str, object]:
    entry = recommendation.entry
    if entry is None:
        return {"name": None, "why": recommendation.why}
    return {
        "name": entry.name,
        "title": entry.title,
        "repository": entry.repository,
        "download_bytes": entry.download_bytes,
        "memory_8k": entry.memory_8k,
        "licence": entry.licence,
        "why": recommendation.why,
    }


def _stored_facts(model: store.StoredModel, *, verified: bool) -> list[tuple[str, str]]:
    from akunu_py.decoding import learned
    from akunu_py.models.hub.cache import linked_bytes

    usage = read_usage(model.name)
    where = [("path", str(model.path))]
    if model.repository:
        where += [
            ("hub", f"{model.repository}@{model.commit}"),
            ("files", f"{human_size(linked_bytes(model.path))} in the hub's cache, linked"),
        ]
    return [
        ("name", model.name),
        *where,
        ("size", human_size(model.size)),
        ("context", f"{model.context_length} tokens" if model.context_length else ""),
        ("weights", model.quantization),
        ("licence", model.licence),
        ("source", model.source),
        ("created", model.created),
        ("used", usage.used or "never"),
        *_measured_facts(usage),
        ("memory", f"{human_size(learned.remembered_bytes(model.path))} of earlier answers"),
        ("checked", "every byte" if verified else "sizes; --verify reads every byte"),
    ]


def _measured_facts(usage: Usage) -> list[tuple[str, str]]:
    """Estimates of memory beside what was measured; nothing before the model was used."""
    facts = []
    if usage.measured_weights:
        compared = _compared(usage.estimated_weights, usage.measured_weights)
        facts.append(("loaded", f"{compared} ({usage.weights})"))
    if usage.measured_peak:
        compared = _compared(usage.estimated_peak, usage.measured_peak)
        facts.append(("peak", f"{compared}, at {usage.tokens} tokens"))
    return facts


def _compared(estimate: int, measured: int) -> str:
    error = (estimate - measured) / measured
    return f"{human_size(estimate)} estimated, {human_size(measured)} measured, {error:+.1%}"


def _catalogue_facts(entry: catalogue.CatalogueEntry) -> list[tuple[str, str]]:
    return [
        ("name", entry.name),
        ("title", entry.title),
        ("good at", entry.description),
        ("for", ", ".join(entry.purpose)),
        ("from", entry.repository or entry.requirement),
        ("download", human_size(entry.download_bytes)),
        ("weights", f"{entry.parameters / 1e9:.2f} billion"),
        ("context", f"{entry.context} tokens"),
        ("memory", f"{human_size(entry.memory_8k)} with 8,192 tokens of context"),
        ("suits", f"Macs with {entry.minimum_ram} GB or more"),
        ("licence", entry.licence),
        ("homepage", entry.homepage),
        ("here", f"no; akunu models pull {entry.name}"),
    ]


def _print_facts(facts: Sequence[tuple[str, str]]) -> None:
    for name, value in facts:
        print(f"{name:<8}  {on_one_line(value) or 'unknown'}")


def _day(moment: str) -> str:
    try:
        return datetime.fromisoformat(moment).astimezone().strftime("%Y-%m-%d")
    except ValueError:
        return "never"


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if not rows:
        return
    rows = [[on_one_line(cell) for cell in row] for row in rows]  # files may be called anything
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        print(
            "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        )
