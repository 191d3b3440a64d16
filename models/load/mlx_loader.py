"""Open a model directory with mlx-lm, transformers and tokenizers.

`model_files` first checks everything that these libraries would trust, and its `as_error` surrounds
their calls. No code of a model runs, and no module is imported because a model's file names it.
"""

from __future__ import annotations

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
    read_settings,
    write_settings,
)

# By default, transformers prompts on the terminal whether to run a model's code.
_TOKENIZER_OPTIONS = {"trust_remote_code": False, "local_files_only": True}
_TOKENIZER_CLASS = re.compile(r"\w*(Tokenizer|TokenizerFast|Backend)")
_TOKEN_FIELDS = {
    "content", "lstrip", "rstrip", "single_word", "normalized", "special", "id", "__type",
}  # fmt: skip
_MODULES = {"chat_template_type": "chat_templates", "tool_parser_type": "tool_parsers"}


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model of mlx-lm. Its weights are read on first use."""

    files: ModelFiles
    model: Any
    config: dict[str, Any]  # as mlx-lm completed it
    vocabulary: int  # the width of the logits


def open_model(source: Path) -> OpenModel:
    """Open the model in the directory `source`. Raises what `ModelFiles.read` does."""
    files = ModelFiles.read(source)
    with as_error(f"mlx-lm cannot load the model in {source}", UnsupportedModel):
        model, config = utils.load_model(source, lazy=True)
        # A lazy forward pass finds errors that building the model does not.
        logits = model(mx.array([[0]]), cache=make_prompt_cache(model))
    return OpenModel(files, model, config, int(logits.shape[-1]))


def load_tokenizer(files: ModelFiles, vocabulary: int, kept: Iterable[Path] = ()) -> Any:
    """Load the tokenizer as mlx-lm wraps it. Raises UnsupportedModel, DamagedModel, also when used.

    vocabulary: tokens of the weights. Only added tokens may have larger ids: text never encodes to
    them, and sessions refuse them. kept: files besides the settings, all but weights if empty.
    """
    transformers_logging.set_verbosity_error()  # hide its warnings from users
    source, settings = files.path, files.settings
    _check_names(source / "config.json", files.config)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        _check_names(source / name, settings.get(name, {}))
        _check_tokens(source / name, settings.get(name, {}))
    content = {}
    if (source / "tokenizer.json").exists():
        content = read_settings(source / "tokenizer.json", MAX_TOKENIZER_BYTES)
        _check_tokens(source / "tokenizer.json", {"added_tokens": content.get("added_tokens")})
    with (
        as_error(f"the tokenizer in {source} cannot be loaded", UnsupportedModel),
        _without_code(files, kept or files.others()) as directory,
    ):
        ends = files.end_tokens
        loaded = utils.load_tokenizer(directory, _TOKENIZER_OPTIONS, eos_token_ids=ends)
        largest = _largest_token(content.get("model"), loaded)
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


def _largest_token(model: Any, tokenizer: Any) -> int:
    """Return the largest token id, not counting added tokens.

    model: from tokenizer.json, if present; the library needs 100 ms for 49,152 tokens.
    """
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # pairs of text and score
        return len(vocabulary) - 1
    if not isinstance(vocabulary, dict):
        vocabulary = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
    return int(max(vocabulary.values(), default=0))


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


def _check_tokens(path: Path, settings: dict[str, Any]) -> None:
    """Raise DamagedModel for a token field unknown to `tokenizers`.

    The library would print the field's name to stdout.
    """
    pending: list[tuple[str, Any]] = list(settings.items())
    while pending:
        key, value = pending.pop()
        if not isinstance(value, dict | list):
            continue
        pending += value.items() if isinstance(value, dict) else [(key, item) for item in value]
        token = key.isdigit() or key.endswith(("_token", "_tokens")) or "__type" in value
        if isinstance(value, dict) and token and not value.keys() <= _TOKEN_FIELDS:
            if key == "extra_special_tokens":  # tokens by name
                continue
            unknown = sorted(value.keys() - _TOKEN_FIELDS)[0]
            raise DamagedModel(f"{path}: a token has an unknown field {unknown!r:.60}; {ADVICE}")


class _Tokenizer(TokenizerWrapper):
    """A tokenizer whose errors name the file; bad expressions only fail on some texts."""

    _source: Path

    @property
    def digest(self) -> str:
        """A hash that identifies the tokenizer."""
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
