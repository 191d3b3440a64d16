"""Builds a tokenizer from a GGUF file's metadata, with the `tokenizers` library.

Owns the kinds of tokenizer that we know: byte-level BPE ("gpt2" in GGUF) with a pre-tokenizer that
is named in _PRE_TOKENIZERS. Any other is refused (UnsupportedModel), because a tokenizer that
splits a little differently gives worse answers without any error. Metadata that contradicts itself
is DamagedModel.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from akunu_py.errors import DamagedModel, UnsupportedModel
from akunu_py.models.gguf import GgufFile

_CONTROL, _USER_DEFINED = 3, 4


def _smollm() -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {"smollm": _smollm}
_TOKEN_KEYS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


@dataclass(frozen=True, slots=True)
class TokenizerPlan:
    """A checked tokenizer: token texts by id, merges in order of rank, special ids by role."""

    tokens: list[str]
    merges: list[tuple[str, str]]
    control: list[int]
    user_defined: list[int]
    roles: dict[str, int]
    pre_tokenizer: str
    chat_template: str | None
    context_length: int

    @property
    def size(self) -> int:
        return len(self.tokens)

    def config_ids(self) -> dict[str, Any]:
        """The special ids as config.json names them. All that end an answer are under eos."""
        ids: dict[str, Any] = {
            f"{role}_token_id": self.roles[role]
            for role in ("bos", "eos", "pad")
            if role in self.roles
        }
        ends = [self.roles[role] for role in ("eos", "eot") if role in self.roles]
        if len(set(ends)) > 1:
            ids["eos_token_id"] = sorted(set(ends))
        return ids

    def build(self) -> Any:
        """The tokenizer as an object of the `tokenizers` library."""
        from tokenizers import AddedToken, Tokenizer, decoders, models

        vocabulary = {token: index for index, token in enumerate(self.tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=self.merges))
        tokenizer.pre_tokenizer = _PRE_TOKENIZERS[self.pre_tokenizer]()
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(
            [AddedToken(self.tokens[i], special=True, normalized=False) for i in self.control]
        )
        tokenizer.add_tokens(
            [AddedToken(self.tokens[i], special=False, normalized=False) for i in self.user_defined]
        )
        return tokenizer

    def write(self, folder: Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json."""
        (folder / "tokenizer.json").write_text(self.build().to_str(), "utf-8")
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": False,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": self.context_length,
        }
        for role in _TOKEN_KEYS:
            if role in self.roles:
                settings[f"{role}_token"] = self.tokens[self.roles[role]]
        if self.chat_template is not None:
            settings["chat_template"] = self.chat_template
        text = json.dumps(settings, indent=2, ensure_ascii=False)
        (folder / "tokenizer_config.json").write_text(text + "\n", "utf-8")


def plan_tokenizer(file: GgufFile) -> TokenizerPlan:
    """Reads and checks the tokenizer in `file`'s metadata."""
    name, metadata = file.path.name, file.metadata
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise UnsupportedModel(
            f"{name} has a tokenizer of kind {model!r:.40}; akunu imports byte-level BPE ('gpt2')"
        )
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise UnsupportedModel(f"{name} has the pre-tokenizer {pre!r:.40}; akunu knows: {known}")
    if metadata.get("tokenizer.ggml.add_bos_token", False) is not False:
        raise UnsupportedModel(f"{name} asks for a token before every text (add_bos_token)")
    tokens = _texts(file, "tokenizer.ggml.tokens")
    if not tokens or len(set(tokens)) != len(tokens):
        raise _damaged(file, "its vocabulary is empty or names a token twice")
    merges = _merges(file, set(tokens))
    kinds = metadata.get("tokenizer.ggml.token_type", np.ones(len(tokens), np.int32))
    if not isinstance(kinds, np.ndarray) or kinds.shape != (len(tokens),):
        raise _damaged(file, f"expected the kinds of {len(tokens)} tokens")
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise _damaged(file, "its chat template is not text")
    context = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    return TokenizerPlan(
        tokens=tokens,
        merges=merges,
        control=np.flatnonzero(kinds == _CONTROL).tolist(),
        user_defined=np.flatnonzero(kinds == _USER_DEFINED).tolist(),
        roles=_roles(file, len(tokens)),
        pre_tokenizer=pre,
        chat_template=template,
        context_length=context if isinstance(context, int) else 0,
    )


def _roles(file: GgufFile, size: int) -> dict[str, int]:
    roles: dict[str, int] = {}
    for role, key in (_TOKEN_KEYS | {"eot": "eot"}).items():
        value = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < size:
            raise _damaged(file, f"its {key} token is {value!r:.40}, of {size} tokens")
        roles[role] = value
    if "eos" not in roles:
        raise _damaged(file, "it names no token that ends a text")
    return roles


def _merges(file: GgufFile, tokens: set[str]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for text in _texts(file, "tokenizer.ggml.merges"):
        left, _, right = text.partition(" ")
        if left not in tokens or right not in tokens or left + right not in tokens:
            raise _damaged(file, f"the merge {text[:60]!r} is not of its vocabulary")
        merges.append((left, right))
    return merges


def _texts(file: GgufFile, key: str) -> list[str]:
    value = file.metadata.get(key)
    if not isinstance(value, list):
        raise _damaged(file, f"{key} is missing")
    return value


def _damaged(file: GgufFile, what: str) -> DamagedModel:
    return DamagedModel(f"{file.path.name} is damaged: {what}; fetch the file again")
