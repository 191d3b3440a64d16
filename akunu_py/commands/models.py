"""`akunu models`: what is in the store, and what can be put into it, checked or removed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from akunu_py import paths
from akunu_py.arguments import Parser, positive
from akunu_py.errors import DamagedModel, UnknownModel, UsageError
from akunu_py.models import catalog
from akunu_py.models.catalog import Recommendation, describe_speed, recommend
from akunu_py.models.load.fit import GIB, usable_memory
from akunu_py.models.store import cleanup, hub_cache, store
from akunu_py.models.store.store import Usage, read_usage
from akunu_py.text import human_size, on_one_line, say

_UNITS = {"G": GIB, "GB": GIB, "GIB": GIB, "M": 1 << 20, "MB": 1 << 20, "MIB": 1 << 20}


def add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(
        dest="action", metavar="ACTION", required=True, parser_class=Parser
    )

    def add(name: str, summary: str) -> argparse.ArgumentParser:
        return actions.add_parser(name, help=summary, description=summary)

    add("list", "models that are here, and models that can be pulled")
    pull = add("pull", "fetch a model")
    pull.add_argument(
        "name",
        metavar="NAME",
        help="of the catalog, or owner/repository of the hub; either with @revision",
    )
    pull.add_argument("--name", dest="as_name", metavar="NAME", help="what to call it here")
    pull.add_argument("--if-missing", action="store_true", help="say nothing where it is here")
    pull.add_argument(
        "--hosts", metavar="FILE", help="then on the other hosts of mlx.launch's hostfile, by ssh"
    )
    suited = add("recommend", "the best models for this machine's memory, and why")
    suited.add_argument("--memory", metavar="16G", help="for a Mac with so much memory")
    suited.add_argument("--format", choices=("text", "json"), default="text")
    imported = add("import", "take in a directory or a GGUF file of this machine")
    imported.add_argument(
        "path", metavar="PATH", help="a directory with config.json, or a .gguf file"
    )
    imported.add_argument("--name", metavar="NAME", help="what to call it (else after the file)")
    imported.add_argument(
        "--quantize", type=int, choices=(4, 8), metavar="4|8", help="bits for plain weights"
    )
    show = add("show", "everything known about a model")
    show.add_argument("name", metavar="NAME")
    show.add_argument("--verify", action="store_true", help="read and check every byte")
    verify = add("verify", "read every byte of a model, or of all, and compare")
    verify.add_argument("name", nargs="?", metavar="NAME")
    clean = add("gc", "remove what interrupted pulls and removed models left behind")
    clean.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    forget = add("forget", "delete what was remembered of a model's answers, and what it had read")
    forget.add_argument("name", metavar="MODEL")
    warm = add("warm", "let a model answer prompts of ours, so that drafts know its habits")
    warm.add_argument("name", metavar="MODEL")
    warm.add_argument(
        "--tokens", type=positive, metavar="N", help="that it shall remember (default: 100,000)"
    )
    warm.add_argument("--now", action="store_true", help="even while the machine is busy")
    remove = add("rm", "remove a model")
    remove.add_argument("name", metavar="NAME")
    remove.add_argument("--yes", action="store_true", help="do not ask")
    remove.add_argument(
        "--hub-files", action="store_true", help="delete its files from the hub's cache too"
    )


def run(args: argparse.Namespace) -> int:
    actions = {
        "list": list_models,
        "pull": pull_model,
        "recommend": recommend_models,
        "import": import_model,
        "show": show,
        "verify": verify,
        "gc": remove_leftovers,
        "forget": forget,
        "warm": warm_up,
        "rm": remove,
    }
    actions[args.action](args)
    return 0


def list_models(args: argparse.Namespace) -> None:
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
    say(f"{'no models in' if not rows else 'in'} {paths.models_dir()}")
    names = {model.name for model in installed}
    for pull in cleanup.unfinished_pulls():
        if pull.name not in names:
            share = f"{human_size(pull.done)} of {human_size(pull.total)}"
            say(f"unfinished: {pull.reference}, {share}; akunu models pull {pull.reference}")
    more = [entry for entry in catalog.load_catalog().values() if entry.name not in names]
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


def pull_model(args: argparse.Namespace) -> None:
    """Fetches a model with progress, unless it is here and whole; then other hosts do. Ctrl-C keeps
    what came."""
    from akunu_py.commands.progress import progress_bar, watched
    from akunu_py.models.pull.pull import find_installed, pull

    if args.hosts:
        from akunu_py.commands.pull_hosts import pull_on_hosts
        from akunu_py.decoding.hosts.hostfile import read_hosts

        hosts = read_hosts(args.hosts)
    try:
        if model := find_installed(args.name, args.as_name):
            if not args.if_missing:
                say(f"{model.name} is here already ({human_size(model.size)}): {model.path}")
        else:
            with watched() as on_progress:
                model = pull(args.name, on_progress, name=args.as_name)
            say(f"{model.name} is ready ({human_size(model.size)}): {model.path}", error=True)
        if args.hosts:
            with progress_bar() as progress:
                pull_on_hosts(hosts, model, progress)
    except KeyboardInterrupt:
        say(f"stopped; to go on: akunu models pull {args.name}", error=True)
        raise


def recommend_models(args: argparse.Namespace) -> None:
    memory = parse_memory(args.memory) if args.memory else None
    if memory is None:
        from akunu_py.decoding import device  # loads MLX, which knows what the GPU takes

        machine = device.machine()
        usable = machine.memory
        found = recommend(usable, machine.suits)
    else:
        machine = None
        usable = usable_memory(memory)
        found = recommend(usable)
    if args.format == "json":
        print(json.dumps({"usable_bytes": usable, **{r.purpose: _as_dict(r) for r in found}}))
        return
    for number, recommendation in enumerate(found):
        if number:
            print()
        entry = recommendation.entry
        if entry is None:
            say(f"{recommendation.purpose}: {recommendation.why}")
            continue
        say(f"{recommendation.purpose}: {entry.name}  ({entry.title}, {entry.licence})")
        say(f"  {entry.description}")
        say(f"  why: {recommendation.why}")
        if machine is not None:
            say(f"  speed: {describe_speed(machine.tokens_per_s(entry))}, without drafting")
        say(f"  akunu models pull {entry.name}  ({human_size(entry.download_bytes)})")


def import_model(args: argparse.Namespace) -> None:
    from akunu_py.commands.progress import progress_bar
    from akunu_py.models.store import local_import

    with progress_bar() as progress:
        model = local_import.import_model(
            Path(args.path), name=args.name, bits=args.quantize, progress=progress
        )
    say(f"{model.name} is ready ({human_size(model.size)}): {model.path}", error=True)


def show(args: argparse.Namespace) -> None:
    """What is known of a model: one of the store, or one of the catalog."""
    try:
        model = store.get(args.name)
    except UnknownModel:
        if args.name not in catalog.load_catalog():
            raise
        _print_facts(_catalog_facts(catalog.find(args.name)))
        return
    if args.verify:
        verify_model(model)
    else:
        store.check(model)
    _print_facts(_stored_facts(model, verified=args.verify))


def verify(args: argparse.Namespace) -> None:
    """Reads every byte of one model, or of all; a damaged one does not end it."""
    models = [store.get(args.name)] if args.name else store.list_models()
    damaged = []
    for model in models:
        try:
            if model.damaged:
                raise DamagedModel(f"model {model.name!r} is damaged: {model.damaged}")
            verify_model(model)
        except DamagedModel as error:
            if args.name:
                raise
            damaged.append(model.name)
            say(f"{model.name}: {error}")
        else:
            say(f"{model.name}: {human_size(model.size)} verified")
    if damaged:
        raise DamagedModel(f"{len(damaged)} of {len(models)} models are damaged; see above")


def verify_model(model: store.StoredModel) -> None:
    """Compares all hashes, with a progress bar."""
    from akunu_py.commands.progress import progress_bar

    with progress_bar() as progress:
        store.verify(model, lambda done, total: progress(f"verifying {model.name}", done, total))


def remove_leftovers(args: argparse.Namespace) -> None:
    """Removes what is of no use any more, or lists it."""
    found = cleanup.find_leftovers()
    if not found:
        print("nothing to remove")
        return
    freed = 0
    for leftover in found:
        say(f"{human_size(leftover.size):>8}  {leftover.what}")
        freed += leftover.size if args.dry_run else cleanup.remove_leftover(leftover)
    say(f"{human_size(freed)} {'would be freed' if args.dry_run else 'freed'}")


def forget(args: argparse.Namespace) -> None:
    from akunu_py.decoding import learned
    from akunu_py.decoding.prompt_cache.store import forget

    model = store.resolve(args.name)
    freed = learned.forget(model.path) + forget(model.path)
    say(f"forgot the answers of {model.name}, {human_size(freed)} freed")


def warm_up(args: argparse.Namespace) -> None:
    from akunu_py.commands import warm

    warm.run(args)


def remove(args: argparse.Namespace) -> None:
    linked, origin = _in_hub_cache(args.name)
    also = bool(args.hub_files)
    if not args.yes:
        if not sys.stdin.isatty():
            raise UsageError(f"removing {args.name} needs a yes: akunu models rm {args.name} --yes")
        if not _agrees(f"Remove {args.name}?"):
            print("kept")
            return
        if linked and not also:
            also = _agrees(
                f"Delete its {human_size(linked)} from the hub's cache too? Other programs may "
                "use them."
            )
    from akunu_py.decoding.prompt_cache.store import forget

    freed = forget(paths.models_dir() / args.name)
    freed += store.remove(args.name)
    if origin and also:
        freed += hub_cache.delete(*origin)
    say(f"removed {args.name}, {human_size(freed)} freed")
    if linked and origin and not also:
        where = hub_cache.CachedRepository(origin[0]).root
        say(f"its {human_size(linked)} stay in the hub's cache: {where}")
        say(f"to delete them too: hf cache rm model/{origin[0]}")


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


def _in_hub_cache(name: str) -> tuple[int, tuple[str, str] | None]:
    """How many bytes of the model are in the hub's cache, and of which repository and commit."""
    try:
        model = store.get(name)
    except DamagedModel:
        return 0, None
    if not model.repository:
        return 0, None
    return hub_cache.linked_bytes(model.path), (model.repository, model.commit)


def _agrees(question: str) -> bool:
    return input(f"{on_one_line(question)} [y/N] ").strip().lower() in ("y", "yes")


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

    usage = read_usage(model.name)
    where = [("path", str(model.path))]
    if model.repository:
        where += [
            ("hub", f"{model.repository}@{model.commit}"),
            (
                "files",
                f"{human_size(hub_cache.linked_bytes(model.path))} in the hub's cache, linked",
            ),
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


def _catalog_facts(entry: catalog.CatalogEntry) -> list[tuple[str, str]]:
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
        say(f"{name:<8}  {value or 'unknown'}")


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
