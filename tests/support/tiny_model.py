"""A whole tiny model with random weights, as a directory or as the files that a hub offers."""

from pathlib import Path

from akunu_py.models.gguf.convert import plan_import
from tests.support.tiny_gguf import Tiny, write_tiny


def tiny_directory(work: Path, tiny: Tiny | None = None) -> Path:
    """Import a model to a directory in `work`."""
    directory = work / "model"
    directory.mkdir()
    plan_import(write_tiny(work / "tiny.gguf", tiny)).write(directory)
    return directory


def tiny_files(work: Path) -> dict[str, bytes]:
    """The content of its files by name; `work` is where they are made."""
    return {path.name: path.read_bytes() for path in sorted(tiny_directory(work).iterdir())}
