"""Models that other programs downloaded, in the Hugging Face cache and in LM Studio's directories.

They are used in place, as `OWNER/REPOSITORY`, and never changed. Only complete models in MLX's
format count; other formats can be imported.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from akunu_py.errors import DamagedModel
from akunu_py.files import open_regular, read_bounded, read_json
from akunu_py.models.load.model_files import context_length, read_settings
from akunu_py.models.manifest import StoredModel
from akunu_py.models.store.hub_cache import CachedRepository, parse_reference

HUB_CACHE = "Hugging Face cache"
LM_STUDIO = "LM Studio"
REMOVAL = {  # how to remove a model of each program
    HUB_CACHE: "run: hf cache rm model/{name}",
    LM_STUDIO: "remove it in LM Studio",
}
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")
_SHARD = re.compile(r"model-\d{5}-of-(\d{5})\.safetensors")
_MLX_FORMAT = re.compile(
    rb'.{8}\s*\{\s*"__metadata__"\s*:\s*\{[^}]*"format"\s*:\s*"mlx"', re.DOTALL
)
_BEGINNING = 4096  # bytes of a weight file; the metadata comes first
_MAX_SETTINGS_BYTES = 1_000_000


def find_models() -> list[StoredModel]:
    """Return the models of other programs by name. Skips what is incomplete or unreadable."""
    found: dict[str, StoredModel] = {}
    for name, path, program, commit in (*_in_hub_cache(), *_in_lm_studio()):
        if name not in found and (model := _read(name, path, program, commit)):
            found[name] = model
    return [found[name] for name in sorted(found)]


def _in_hub_cache() -> Iterator[tuple[str, Path, str, str]]:
    """Yield name, directory, program and commit of each repository's current snapshot."""
    from huggingface_hub import constants

    for root in _directories(Path(constants.HF_HUB_CACHE)):
        kind, *parts = root.name.split("--")
        name = "/".join(parts)
        if kind == "models" and _is_name(name):
            commit = CachedRepository(name).commit_of("main") or _newest(root / "snapshots")
            yield name, root / "snapshots" / commit, HUB_CACHE, commit


def _newest(snapshots: Path) -> str:
    """Return the newest commit, for a repository whose branch was never fetched."""
    found = sorted(_directories(snapshots), key=lambda path: path.stat().st_mtime)
    return found[-1].name if found else ""


def _in_lm_studio() -> Iterator[tuple[str, Path, str, str]]:
    for models in dict.fromkeys(_lm_studio_directories()):
        for owner in _directories(models):
            for path in _directories(owner):
                if _is_name(name := f"{owner.name}/{path.name}"):
                    yield name, path, LM_STUDIO, ""


def _lm_studio_directories() -> Iterator[Path]:
    """Yield the models directory in LM Studio's settings, then the default ones."""
    user = Path.home()
    homes = [user / ".lmstudio", user / ".cache" / "lm-studio"]
    with contextlib.suppress(OSError, ValueError):
        pointer = read_bounded(user / ".lmstudio-home-pointer", _BEGINNING).decode().strip()
        if os.path.isabs(pointer):
            homes.insert(0, Path(pointer))
    for home in homes:
        with contextlib.suppress(OSError, ValueError):
            settings = read_json(home / "settings.json", _MAX_SETTINGS_BYTES)
            folder = settings.get("downloadsFolder") if isinstance(settings, dict) else None
            if isinstance(folder, str) and os.path.isabs(folder):
                yield Path(folder)
        yield home / "models"


def _directories(path: Path) -> list[Path]:
    """Return the directories in `path` by name, those behind links too; [] if unreadable."""
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        return sorted(Path(entry.path) for entry in entries if entry.is_dir())
    return []


def _is_name(name: str) -> bool:
    return parse_reference(name) == (name, None)


def _read(name: str, path: Path, program: str, commit: str) -> StoredModel | None:
    """Return the model in `path`, None if it is incomplete or in another format."""
    with contextlib.suppress(OSError, ValueError, DamagedModel):
        files = {file.name: file.stat().st_size for file in os.scandir(path) if file.is_file()}
        weights = sorted(file for file in files if re.fullmatch(r"model.*\.safetensors", file))
        counts = [int(found[1]) for file in weights if (found := _SHARD.fullmatch(file))]
        complete = weights and all(count == len(counts) for count in counts)
        if not complete or not files.keys() & set(_TOKENIZERS):
            return None
        config = read_settings(path / "config.json")
        if not _is_mlx(path / weights[0], config.get("quantization")):
            return None
        size, context = sum(files.values()), context_length(config)
        return StoredModel(name, path, size, context, program, commit=commit, program=program)
    return None


def _is_mlx(weights: Path, quantization: object) -> bool:
    """Return True if MLX wrote the file, or `quantization` in the config is in MLX's form."""
    if isinstance(quantization, dict) and "group_size" in quantization:
        return True
    with open_regular(weights) as file:
        return _MLX_FORMAT.match(file.read(_BEGINNING)) is not None
