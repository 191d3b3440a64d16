"""Models on disk, and a scan for those of other programs, used in place and never changed."""

import contextlib
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from akunu_py.errors import DamagedModel, ModelError, UnsupportedModel
from akunu_py.files import open_regular, read_bounded, read_json
from akunu_py.models.drafters.drafter_config import parse_config
from akunu_py.models.load import safetensors
from akunu_py.models.load.model_files import context_length, read_settings
from akunu_py.models.store.hub_cache import CachedRepository, parse_reference
from akunu_py.models.store.mlx_directory import TOKENIZERS

HUB_CACHE = "Hugging Face cache"
LM_STUDIO = "LM Studio"
REMOVAL = {  # how to remove a model of each program
    HUB_CACHE: "run: hf cache rm model/{name}",
    LM_STUDIO: "remove it in LM Studio",
}
_PARTS = (".json", ".safetensors", ".jinja", ".model", ".txt", ".tiktoken")
_SHARD = re.compile(r"model-\d{5}-of-(\d{5})\.safetensors")
_MLX_FORMAT = re.compile(
    rb'.{8}\s*\{\s*"__metadata__"\s*:\s*\{[^}]*"format"\s*:\s*"mlx"', re.DOTALL
)
_BEGINNING = 4096  # bytes of a weight file; the metadata comes first
_MAX_SETTINGS_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class StoredModel:
    name: str
    path: Path
    size: int = 0  # bytes
    context_length: int = 0  # tokens, 0 if unknown
    source: str = ""
    quantization: str = ""
    license: str = ""
    damaged: str = ""  # the problem, if one is known without reading the weights
    repository: str = ""  # on the hub; `path` is then a snapshot in the hub's cache
    commit: str = ""
    pinned: str = ""  # the revision that the user named
    program: str = ""  # that downloaded and manages the model, if it is not akunu
    outside: bool = False  # named by its path
    sha256: dict[str, str] = field(default_factory=dict)  # of an import's files
    kind: str = ""  # of a drafter, such as "dflash"; "" for a model
    drafter: str = ""  # the name of its drafter in the store

    @property
    def reference(self) -> str:
        """The name of a model of the store, the path of any other."""
        return str(self.path.resolve()) if self.outside or self.program else self.name


def read_model(model: StoredModel) -> StoredModel:
    """Add size and context length to `model`, or what is wrong with its files."""
    try:
        size = sum(_sizes(model.path).values())
        path = model.path / "config.json"
        settings = read_settings(path)
        if drafter := parse_config(path, settings):
            return replace(model, size=size, kind=drafter.kind)
        return replace(model, size=size, context_length=context_length(settings))
    except (OSError, DamagedModel, UnsupportedModel) as error:
        return replace(model, damaged=model.damaged or _describe(error))


def find_problem(model: StoredModel) -> str:
    """Return why a model cannot be used, without reading its weights; "" if it can."""
    if model.damaged:
        return model.damaged
    try:
        for name in model.sha256:
            (model.path / name).stat()
        sizes = _sizes(model.path)
        if not (model.outside or model.kind) and not sizes.keys() & set(TOKENIZERS):
            return "tokenizer.json is missing"
        if not (weights := _weights(sizes)):
            return "model*.safetensors is missing or incomplete"
        for name in weights:
            safetensors.read_header(model.path / name)
    except (OSError, DamagedModel) as error:
        return _describe(error)
    return ""


def _describe(error: OSError | ModelError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{error.filename} is missing"
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)


def _sizes(path: Path) -> dict[str, int]:
    """Return the sizes of a model's files by name. Raises OSError for a link to nothing."""
    with os.scandir(path) as entries:
        return {each.name: each.stat().st_size for each in entries if each.name.endswith(_PARTS)}


def _weights(names: Collection[str]) -> list[str]:
    """Return the files of weights among `names`; [] if one of a series is missing."""
    found = sorted(name for name in names if re.fullmatch(r"model.*\.safetensors", name))
    counts = [int(shard[1]) for name in found if (shard := _SHARD.fullmatch(name))]
    return found if all(count == len(counts) for count in counts) else []


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
            commit = CachedRepository(name).commit_of("main")
            if commit is None:  # The branch was never fetched: the newest one.
                found = sorted(_directories(root / "snapshots"), key=lambda it: it.stat().st_mtime)
                commit = found[-1].name if found else ""
            yield name, root / "snapshots" / commit, HUB_CACHE, commit


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
    with contextlib.suppress(OSError, DamagedModel):
        found = read_model(StoredModel(name, path, source=program, commit=commit, program=program))
        names = os.listdir(path)
        weights = _weights(names) if {*names} & {*TOKENIZERS} else []
        if not found.damaged and weights and _is_mlx(path, weights[0]):
            return found
    return None


def _is_mlx(directory: Path, weights: str) -> bool:
    """Return True if MLX wrote the file, or the config has a quantization in MLX's form."""
    quantization = read_settings(directory / "config.json").get("quantization")
    if isinstance(quantization, dict) and "group_size" in quantization:
        return True
    with open_regular(directory / weights) as file:
        return _MLX_FORMAT.match(file.read(_BEGINNING)) is not None
