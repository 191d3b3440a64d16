"""Open a model directory with mlx-lm, transformers and tokenizers.

`model_files` first checks everything that these libraries would trust, and its `as_error` surrounds
their calls. No code of a model runs, and no module is imported because a model's file names it.
"""

import hashlib
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm import utils
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from akunu_py.errors import DamagedModel, UnsupportedModel
from akunu_py.files import read_bounded
from akunu_py.models.load.model_files import (
    ADVICE,
    MAX_TOKENIZER_BYTES,
    ModelFiles,
    as_error,
    write_settings,
)

# By default, transformers prompts on the terminal whether to run a model's code.
_TOKENIZER_OPTIONS = {"trust_remote_code": False, "local_files_only": True}
_TOKENIZER_CLASS = re.compile(r"\w*(Tokenizer|TokenizerFast|Backend)")
_MODULES = {"chat_template_type": "chat_templates", "tool_parser_type": "tool_parsers"}


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model of mlx-lm. Its weights are read on first use."""

    files: ModelFiles
    model: Any
    config: dict[str, Any]  # as mlx-lm completed it
    vocabulary: int  # the width of the logits


def open_directory(source: Path) -> OpenModel:
    """Open the model in the directory `source`. Raises what `ModelFiles.read` does."""
    files = ModelFiles.read(source)
    with as_error(f"mlx-lm cannot load the model in {source}", UnsupportedModel):
        model, config = utils.load_model(source, lazy=True)
        # A lazy forward pass finds errors that building the model does not.
        logits = model(mx.array([[0]]), cache=make_prompt_cache(model))
    return OpenModel(files, model, config, int(logits.shape[-1]))


def load_tokenizer(files: ModelFiles, vocabulary: int, kept: Iterable[Path] = ()) -> Any:
    """Load the tokenizer as mlx-lm wraps it. Raises UnsupportedModel, DamagedModel, also when used.

    vocabulary: tokens of the weights. Only added tokens may have larger ids: prompts with them are
    refused. kept: files besides the settings, all but weights if empty.
    """
    transformers_logging.set_verbosity_error()  # hide its warnings from users
    source = files.path
    kept = kept or [path for path in source.iterdir() if path.suffix not in (".safetensors", ".py")]
    _check_names(source / "tokenizer_config.json", files.settings.get("tokenizer_config.json", {}))
    with (
        as_error(f"the tokenizer in {source} cannot be loaded", UnsupportedModel),
        _without_code(files, kept) as directory,
    ):
        generation = files.settings.get("generation_config.json", {})
        ends = generation.get("eos_token_id") or files.config.get("eos_token_id")
        loaded = utils.load_tokenizer(directory, _TOKENIZER_OPTIONS, eos_token_ids=ends)
        vocab = loaded.backend_tokenizer.get_vocab(with_added_tokens=False)
        largest = max(vocab.values(), default=0)
        if not all(isinstance(end, int) for end in loaded.eos_token_ids):
            raise TypeError(f"expected integers as eos_token_id, found {ends!r:.60}")
    if largest >= vocabulary:
        raise DamagedModel(
            f"the tokenizer in {source} has token {largest}, but the weights only {vocabulary} "
            f"tokens; {ADVICE}"
        )
    loaded.__class__ = _Tokenizer
    loaded._source = source
    return loaded


@contextmanager
def _without_code(files: ModelFiles, kept: Iterable[Path]) -> Iterator[Path]:
    """Yield a directory with links to the files `kept`, and settings without references to code.

    transformers refuses models whose settings have such references.
    """
    with tempfile.TemporaryDirectory(prefix="akunu-") as name:
        directory = Path(name)
        for path in kept:
            if path.name not in files.settings:
                (directory / path.name).symlink_to(path.resolve())
        write_settings(directory, files.settings)
        yield directory


def _check_names(path: Path, settings: dict[str, Any]) -> None:
    """Raise UnsupportedModel if `settings` name a module for the libraries to import."""
    for key, package in _MODULES.items():
        name = settings.get(key)
        home = Path(mlx_lm.__path__[0], package)
        if name is not None and name not in [module.stem for module in home.glob("[a-z]*.py")]:
            raise UnsupportedModel(f"{path}: mlx-lm has no {key} {name!r:.60}; use another model")
    name = settings.get("tokenizer_class")
    if name is not None and not (isinstance(name, str) and _TOKENIZER_CLASS.fullmatch(name)):
        raise UnsupportedModel(
            f"{path}: expected a tokenizer_class, found {name!r:.60}; use another model"
        )


class _Tokenizer(TokenizerWrapper):
    """A tokenizer whose errors name the file; bad expressions only fail on some texts."""

    _source: Path

    @property
    def digest(self) -> str:
        file = self._source / "tokenizer.json"
        if file.exists():
            text = read_bounded(file, MAX_TOKENIZER_BYTES)
        else:
            text = self.backend_tokenizer.to_str().encode()
        return hashlib.sha256(text).hexdigest()

    @property
    def has_own_renderer(self) -> bool:
        """True if Python code of mlx-lm or transformers renders conversations."""
        plain = PreTrainedTokenizerBase.apply_chat_template
        own = type(self._tokenizer).apply_chat_template is not plain
        return own or self._chat_template is not None

    def encode(self, *args: Any, **options: Any) -> Any:
        with as_error(f"{self._source / 'tokenizer.json'} cannot encode this text"):
            return self._tokenizer.encode(*args, **options)

    def decode(self, *args: Any, **options: Any) -> Any:
        with as_error(f"{self._source / 'tokenizer.json'} cannot decode these tokens"):
            return self._tokenizer.decode(*args, **options)
