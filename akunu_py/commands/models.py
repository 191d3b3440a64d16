"""`akunu models`: list, download, import, verify and remove models."""

import argparse
import contextlib
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from akunu_py.errors import DamagedModel, UnknownModel, UsageError
from akunu_py.models import catalog
from akunu_py.models.catalog.recommend import Machine, Recommendation, describe_speed, recommend
from akunu_py.models.drafters.drafter_config import TRAINING_KEY
from akunu_py.models.load.fit import usable_memory
from akunu_py.models.load.model_files import read_settings
from akunu_py.models.store import cleanup, hub_cache, model_store
from akunu_py.models.store.hub_cache import parse_reference
from akunu_py.models.store.progress import Progress, ProgressMeter
from akunu_py.models.store.scan import REMOVAL
from akunu_py.parser import add_actions, add_flags, add_format, add_values
from akunu_py.paths import shell_command
from akunu_py.text import confirm, human_size, on_one_line, parse_size, say, table

_INTERVAL_S, _LIVE_S = 10.0, 0.1  # between two lines of progress, and on a terminal


def add_options(parser: argparse.ArgumentParser) -> None:
    add = add_actions(parser)
    add("list", "List installed and available models", list_models)
    pull = add("pull", "Download a model", pull_model)
    model = "Catalog name or OWNER/REPOSITORY on the Hugging Face hub; append @REVISION to pin it"
    pull.add_argument("model", metavar="MODEL", help=model)
    add_flags(
        pull,
        ("--if-missing", "Print nothing if the model is installed"),
        ("--with-drafter", "Also download the drafter that the catalog names, and use it"),
    )
    add_values(
        pull,
        ("--name", "NAME", str, None, "Local name (default: derived from MODEL)"),
        ("--hosts", "FILE", str, None, "Also download it on the hosts of an mlx.launch hostfile"),
    )
    suited = add("recommend", "Recommend models for this machine's memory", recommend_models)
    this = "Memory of the machine, such as 16G (default: this machine's)"
    add_values(suited, ("--memory", "SIZE", parse_memory, None, this))
    add_format(suited)
    imported = add("import", "Import a model from a local directory or GGUF file", import_local)
    imported.add_argument("path", metavar="PATH", help="Directory with config.json, or GGUF file")
    imported.add_argument("--name", metavar="NAME", help="Local name (default: the name of PATH)")
    quantize = "Quantize the weights to 4 or 8 bits (default: not quantized)"
    imported.add_argument("--quantize", type=int, choices=(4, 8), metavar="4|8", help=quantize)
    shown = add("show", "Show details of a model", show)
    shown.add_argument("name", metavar="NAME", help="Installed model or catalog name")
    shown.epilog = "To check the hashes of its files, run: akunu models verify NAME"
    verified = add("verify", "Verify the hashes of one model or all models", verify)
    verified.add_argument("name", nargs="?", metavar="NAME", help="Model (default: all models)")
    clean = add("gc", "Delete files of interrupted downloads and removed models", remove_leftovers)
    add_flags(clean, ("--dry-run", "Only list the files"))
    forgotten = add("forget", "Delete the answer cache and prompt caches of a model", forget)
    forgotten.add_argument("name", metavar="NAME", help="Model name or path")
    removed = add("rm", "Remove a model", remove)
    removed.add_argument("name", metavar="NAME", help="Installed model")
    add_flags(
        removed,
        ("--yes", "Do not ask for confirmation"),
        ("--hub-files", "Also delete its files from the hub's cache"),
    )


def list_models(args: argparse.Namespace) -> None:
    installed = model_store.list_models()
    others = model_store.external_models(installed)
    rows = [("NAME", "SIZE", "CONTEXT", "FROM")]
    for model in (*installed, *others):
        context = f"{model.context_length:,}" if model.context_length else model.kind and "drafter"
        origin = f"damaged: {model.damaged}" if model.damaged else model.repository or model.source
        rows.append((model.name, human_size(model.size), context, origin))
    if len(rows) > 1:
        print(*table(rows), sep="\n")
    more = f", and {len(others)} of other programs" if others else ""
    word = "model" if len(installed) == 1 else "models"
    say(f"{len(installed) or 'no'} {word} of akunu{more}")
    names = {model.name for model in installed}
    for each in cleanup.unfinished_pulls():
        say(f"{each.what}; to resume, run: {each.pull_command}")
    available = [entry for entry in catalog.load_catalog().values() if entry.name not in names]
    if available:
        print("\nAvailable (akunu models pull NAME, or any OWNER/REPOSITORY on the hub):")
        offered = [("NAME", "DOWNLOAD", "MEMORY", "FOR", "LICENSE")]
        for entry in available:
            sizes = human_size(entry.download_bytes), human_size(entry.memory_8k)
            offered.append((entry.name, *sizes, ", ".join(entry.purpose), entry.license))
        print(*table(offered), sep="\n")
        print("For models that suit this machine, run: akunu models recommend")


def pull_model(args: argparse.Namespace) -> None:
    """Download a model unless it is installed, then on other hosts; Ctrl-C keeps partial files."""
    from akunu_py.models.pull.pull import find_installed, pull, pull_drafter

    if args.hosts:
        from akunu_py.engine.hosts.hostfile import pull_on_hosts, read_hosts

        hosts = read_hosts(args.hosts)
    try:
        if model := find_installed(args.model, args.name):
            if not args.if_missing:
                say(f"{model.name} is already installed ({human_size(model.size)}): {model.path}")
        else:
            with progress_display() as on_progress:
                model = pull(args.model, on_progress, name=args.name)
            say(f"{model.name} is ready ({human_size(model.size)}): {model.path}", error=True)
        if args.with_drafter:
            with progress_display() as on_progress:
                drafter = pull_drafter(model, on_progress)
            say(f"{drafter.name} drafts for {model.name} ({human_size(drafter.size)})", error=True)
        if args.hosts:
            pull_on_hosts(hosts, model)
    except KeyboardInterrupt:
        say(f"stopped; to resume, run: {shell_command()} {args.typed}", error=True)
        raise


def recommend_models(args: argparse.Namespace) -> None:
    if args.memory:
        machine = Machine(usable_memory(args.memory), math.inf)
    else:
        from akunu_py.engine.model import device  # loads MLX, which knows the limit of the GPU

        machine = device.machine()
    found = recommend(machine)
    if args.format == "json":
        facts = {each.purpose: _as_dict(each) for each in found}
        print(json.dumps({"usable_bytes": machine.memory, **facts}))
        return
    for number, recommendation in enumerate(found):
        if number:
            print()
        entry = recommendation.entry
        if entry is None:
            say(f"{recommendation.purpose}: {recommendation.why}")
            continue
        say(f"{recommendation.purpose}: {entry.name}  ({entry.title}, {entry.license})")
        say(f"  {entry.description}")
        say(f"  why: {recommendation.why}")
        if not args.memory:
            say(f"  speed: {describe_speed(machine.tokens_per_s(entry))}, without drafting")
        say(f"  akunu models pull {entry.name}  ({human_size(entry.download_bytes)})")


def import_local(args: argparse.Namespace) -> None:
    from akunu_py.models.store.local_import import import_model

    with progress_display() as on_progress:
        progress, path = ProgressMeter(on_progress), Path(args.path)
        model = import_model(path, name=args.name, bits=args.quantize, progress=progress)
    say(f"{model.name} is ready ({human_size(model.size)}): {model.path}", error=True)


def show(args: argparse.Namespace) -> None:
    try:
        model = _named(args.name)
    except UnknownModel:
        if args.name not in catalog.load_catalog():
            raise
        _print_facts(_catalog_facts(catalog.find(args.name)))
        return
    model_store.check(model)
    print_stored(model)


def verify(args: argparse.Namespace) -> None:
    models = [_named(args.name)] if args.name else model_store.list_models()
    damaged = []
    for model in models:
        try:
            with progress_display() as on_progress:
                model_store.verify(model, ProgressMeter(on_progress))
        except DamagedModel as error:
            if args.name:
                raise
            damaged.append(model.name)
            say(f"{model.name}: {error}")
        else:
            say(f"{model.name}: {human_size(model.size)} verified")
    if damaged:
        raise DamagedModel(f"{len(damaged)} of {len(models)} models are damaged; see above")


def remove_leftovers(args: argparse.Namespace) -> None:
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
    from akunu_py.engine.drafters import learned_state
    from akunu_py.engine.histories.prompt_cache_store import forget

    model = model_store.resolve(args.name)
    freed = learned_state.delete_answer_cache(model.path) + forget(model.path)
    say(f"deleted the answer cache and prompt caches of {model.name}, {human_size(freed)} freed")


def remove(args: argparse.Namespace) -> None:
    stored = model_store.list_models()
    others = model_store.external_models(stored) if "/" in args.name else []
    known = [*stored, *others]
    named = [each for each in known if each.name == args.name]
    named = named or [each for each in known if args.name and each.repository == args.name]
    if len(named) > 1:
        names = ", ".join(each.name for each in named)
        raise UsageError(f"{args.name} is installed as {names}; name one of them")
    model = named[0] if named else model_store.get(args.name)  # raises UnknownModel
    if model.program:
        removal = REMOVAL[model.program].format(name=model.name)
        raise UsageError(
            f"model {model.name!r} is managed by {model.program}: {model.path}; {removal}"
        )
    shared = any(other.path == model.path for other in stored if other.name != model.name)
    in_hub_cache = bool(model.repository) and not shared and model.path.exists()
    delete_hub_files, size = bool(args.hub_files), human_size(model.size)
    if not args.yes:
        command = f"akunu models rm {args.name} --yes"
        if not confirm(f"Remove {model.name}?", command):
            print("not removed")
            return
        if in_hub_cache and not delete_hub_files:
            question = f"Also delete {size} from the hub's cache? Other programs may use it."
            delete_hub_files = confirm(question, command)
    from akunu_py.engine.histories.prompt_cache_store import forget

    freed = model_store.remove(model.name)
    if not shared:
        freed += forget(model.path)
    if in_hub_cache and delete_hub_files:
        freed += hub_cache.delete(model.path)
    say(f"removed {model.name}, {human_size(freed)} freed")
    if in_hub_cache and not delete_hub_files:
        say(f"{size} remain in the hub's cache: {model.path}")
        say(f"to delete them, run: hf cache rm model/{model.repository}")


def parse_memory(text: str) -> int:
    """Parse the value of an option that must be a machine's memory, such as 16G."""
    with contextlib.suppress(ValueError):
        if size := parse_size(text, 1024):
            return size
    raise argparse.ArgumentTypeError(f"expected a size such as 16G, got {text!r}")


def _named(name: str) -> model_store.StoredModel:
    return model_store.resolve(name) if parse_reference(name) else model_store.get(name)


def _as_dict(recommendation: Recommendation) -> dict[str, object]:
    names = ("name", "title", "repository", "download_bytes", "memory_8k", "license")
    entry = recommendation.entry
    facts = {name: getattr(entry, name) for name in names} if entry else {"name": None}
    return facts | {"why": recommendation.why}


def print_stored(model: model_store.StoredModel) -> None:
    from akunu_py.engine.drafters import learned_state

    where = [("path", str(model.path))]
    if model.program:
        where += [("managed", f"by {model.program}; akunu never changes it")]
    if model.repository:
        where += [("hub", f"{model.repository}@{model.commit}")]
    trained = read_settings(model.path / "config.json").get(TRAINING_KEY, {})
    facts = [
        ("name", model.name),
        *where,
        ("size", human_size(model.size)),
        ("context", f"{model.context_length} tokens" if model.context_length else ""),
        ("weights", model.quantization),
        ("drafter", model.drafter or (f"is one ({model.kind})" if model.kind else "none")),
        ("license", model.license),
        ("source", model.source),
        ("memory", f"{human_size(learned_state.answer_cache_bytes(model.path))} of cached answers"),
        ("checked", f"the headers of the weights; for hashes: akunu models verify {model.name}"),
        *((name.replace("_", " "), str(value)) for name, value in trained.items()),
    ]
    _print_facts(facts)


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
        ("license", entry.license),
        ("homepage", entry.homepage),
        ("drafter", entry.drafter_facts or "none is known; akunu drafts with n-grams"),
        ("status", f"not installed; akunu models pull {entry.name}"),
    ]


def _print_facts(facts: Sequence[tuple[str, str]]) -> None:
    print(*table([(name, value or "unknown") for name, value in facts]), sep="\n")


@contextlib.contextmanager
def progress_display() -> Iterator[Callable[[Progress], None]]:
    """Yield a function that shows a Progress: each phase is one line on a terminal."""
    live, phase, printed = sys.stderr.isatty(), "", 0.0

    def show(progress: Progress) -> None:
        nonlocal phase, printed
        now, begins, text = time.monotonic(), progress.phase != phase, progress.describe(", ")
        interval = _LIVE_S * (progress.done < progress.total) if live else _INTERVAL_S
        if not begins and (now - printed < interval or not progress.total):
            return
        if live:
            width = shutil.get_terminal_size().columns - 1
            end = "\n" if begins and phase else ""
            print(f"{end}\r\x1b[K{on_one_line(text)[:width]}", end="", file=sys.stderr, flush=True)
        else:
            say(f"{progress.phase} ..." if begins else text, error=True)
        phase, printed = progress.phase, now

    try:
        yield show
    finally:
        if live and phase:
            print(file=sys.stderr)
