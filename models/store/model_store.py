"""The store: pulled models in the Hugging Face cache, and imports in `paths.models_dir()`.

models.toml has their names. A broken model is listed as damaged and never hides the others.
"""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from akunu_py import paths
from akunu_py.errors import DamagedModel, StoreError, UnknownModel
from akunu_py.models import catalog
from akunu_py.models.store.directories import is_name, lock_model, remove_directory, store_errors
from akunu_py.models.store.hub_cache import digest_of, hash_file, parse_reference
from akunu_py.models.store.migration import migrate
from akunu_py.models.store.names import NameEntry, read_names, remove_entry
from akunu_py.models.store.progress import ProgressCallback, counting, no_callback
from akunu_py.models.store.scan import StoredModel as StoredModel
from akunu_py.models.store.scan import find_models, find_problem, read_model
from akunu_py.text import did_you_mean

_HINT = "run `akunu models list` to see the installed models"
_GIT_DIGITS = 40
TRAINED = "trained for "  # begins the source of a drafter that akunu trained, before the model


def list_models() -> list[StoredModel]:
    """Return all models of the store by name, including damaged ones. Raises StoreError."""
    migrate()
    root = paths.models_dir()
    with store_errors(f"cannot read {root}"):
        if not root.exists():
            return []
        names = {each.name for each in os.scandir(root) if each.is_dir() and each.name[0] != "."}
    entries = read_names()
    names |= {name for name, entry in entries.items() if _is_model(entry)}
    return [_read(name, entries.get(name, NameEntry())) for name in sorted(names)]


def all_models() -> list[StoredModel]:
    """Return the models of the store, then those of other programs. Raises StoreError."""
    stored = list_models()
    return [*stored, *external_models(stored)]


def external_models(stored: Sequence[StoredModel]) -> list[StoredModel]:
    """Return the models of other programs that are not among those of the store, by name."""
    repositories = {model.repository for model in stored}
    return [model for model in find_models() if model.name not in repositories]


def get(name: str) -> StoredModel:
    """Return the model called `name`. Raises UnknownModel, or DamagedModel for unreadable files."""
    if not is_name(name):
        raise UnknownModel(
            f"invalid model name {name[:80]!r} (use letters, digits, '.', '_', '+', '-'); {_HINT}"
        )
    migrate()
    if (model := _find(name)) is None:
        raise _unknown_error(name)
    if model.damaged:
        raise _damaged_error(model, model.damaged)
    return model


def resolve(name_or_path: str) -> StoredModel:
    """Return a model by its name, its hub repository (`owner/repo`) or its path.

    A text with a path separator, or with a leading `.` or `~`, is a path if that exists. A path
    must lead to a directory with config.json. Raises UnknownModel or DamagedModel.
    """
    path = Path(os.path.expanduser(name_or_path))
    looks_like_path = os.sep in name_or_path or name_or_path.startswith((".", "~"))
    if not looks_like_path:
        in_store = is_name(name_or_path) and _find(name_or_path) is not None
        if in_store or not (path / "config.json").is_file():
            return get(name_or_path)
    target = path.resolve()
    if target.parent == paths.models_dir().resolve() and is_name(target.name):
        return get(target.name)
    if not path.exists() and (reference := parse_reference(name_or_path)):
        return _find_by_repository(*reference)
    if not (path / "config.json").is_file():
        found = "no config.json" if path.is_dir() else "a file" if path.is_file() else "nothing"
        raise UnknownModel(f"expected a model directory at {path}, found {found} there; {_HINT}")
    model = read_model(StoredModel(target.name, path, source=f"folder {path}", outside=True))
    if model.damaged:
        raise _damaged_error(model, model.damaged)
    return model


def remove(name: str) -> int:
    """Remove a model, except hub files; return bytes freed. Raises UnknownModel, StoreError."""
    migrate()
    if not is_name(name) or _find(name) is None:
        raise _unknown_error(name)
    with store_errors(f"cannot remove {name}", ""), lock_model(name):
        freed = remove_directory(name)
        remove_entry(name)
    return freed


def check(model: StoredModel) -> StoredModel:
    """Return the model if names and sizes of its files are right. Raises DamagedModel."""
    if problem := find_problem(model):
        raise _damaged_error(model, problem)
    return model


def verify(model: StoredModel, progress: ProgressCallback = no_callback) -> None:
    """Compare the hashes of all files; those without one only pass `check`. Raises DamagedModel."""
    check(model)
    count = counting(progress, f"verifying {model.name}", model.size)
    for name, expected in known_hashes(model).items():
        path = model.path / name
        try:
            found = hash_file(path, count, git=len(expected) == _GIT_DIGITS)
        except OSError as error:
            raise _damaged_error(model, f"{name} is unreadable ({error.strerror})") from error
        if found != expected:
            raise _damaged_error(model, f"{name} was altered; delete {path.resolve()}")


def known_hashes(model: StoredModel) -> dict[str, str]:
    """Return hashes by file name: SHA-256, or git's SHA-1 of small files. LM Studio has none."""
    if model.sha256:
        return model.sha256
    return {path.name: digest for path in model.path.iterdir() if (digest := digest_of(path))}


def _find(name: str) -> StoredModel | None:
    entry = read_names().get(name, NameEntry())
    path = paths.models_dir() / name
    if _is_model(entry) or path.is_dir() or path.is_symlink():
        return _read(name, entry)
    return None


def _is_model(entry: NameEntry) -> bool:
    return bool(entry.problem or (entry.repository and not entry.unfinished))


def _read(name: str, entry: NameEntry) -> StoredModel:
    entry = NameEntry() if entry.unfinished else entry
    path = entry.snapshot if entry.repository else paths.models_dir() / name
    shared = ("source", "quantization", "license", "repository", "pinned", "sha256", "drafter")
    facts = {key: getattr(entry, key) for key in shared} | {"commit": entry.revision}
    damaged = entry.problem if is_name(name) else f"invalid model name {name[:80]!r}"
    return read_model(StoredModel(name, path, damaged=damaged, **facts))


def _find_by_repository(repository: str, revision: str | None) -> StoredModel:
    """Return the model from `repository`, at `revision` unless that is None; the store's first."""
    stored = list_models()
    for model in stored:
        if model.repository == repository and revision in (None, model.commit):
            return model
    for model in external_models(stored):
        if model.name == repository and revision in (None, model.commit):
            return model
    reference = repository + (f"@{revision}" if revision else "")
    raise UnknownModel(
        f"no directory {repository}, and no model from that hub repository is on this machine; run "
        f"`akunu models pull {reference}`, or `akunu models list` to see the installed models"
    )


def _unknown_error(name: str) -> UnknownModel:
    if name in catalog.load_catalog():
        return UnknownModel(f"model {name!r} is not installed; run `akunu models pull {name}`")
    try:
        installed_names = [model.name for model in list_models()]
    except StoreError:
        installed_names = []
    hint = did_you_mean(name, [*installed_names, *catalog.load_catalog()])
    if not installed_names:
        return UnknownModel(
            f"no model called {name!r}{hint}, the store is empty; run `akunu models pull starter`"
        )
    shown = ", ".join(installed_names[:8]) + (", ..." if len(installed_names) > 8 else "")
    return UnknownModel(
        f"no model called {name!r}{hint}; installed: {shown}; run `akunu models list` to see "
        "what can be downloaded"
    )


def _damaged_error(model: StoredModel, problem: str) -> DamagedModel:
    return DamagedModel(f"model {model.name!r} is damaged: {problem}; {_repair_advice(model)}")


def _repair_advice(model: StoredModel) -> str:
    if model.outside or model.program:
        return "download that file again"
    if model.repository:
        return f"run `{catalog.pull_command(model.repository, model.name, model.pinned)}`"
    remove = f"akunu models rm {model.name}"
    if model.name in catalog.load_catalog():
        return f"run `{remove} && akunu models pull {model.name}`"
    if model.source.startswith(TRAINED):
        return f"run `akunu drafter train {model.source.removeprefix(TRAINED)}`"
    kind, _, origin = model.source.partition(" ")
    if kind in ("file", "folder"):  # as imports record it
        return f"run `{remove} && akunu models import {shlex.quote(origin)} --name {model.name}`"
    return f"run `{remove}`, then pull or import it again"


def find_intact(name: str) -> StoredModel | None:
    """Return the model `name` if it is in the store and passes `check`."""
    try:
        return check(get(name))
    except (UnknownModel, DamagedModel):
        return None
