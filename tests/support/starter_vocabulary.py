"""The starter's vocabulary, to try other ways of splitting texts with."""

import json
import string
from functools import cache

from akunu_py.models.gguf.tokenizer import PRE_TOKENIZERS
from akunu_py.models.store import model_store


@cache
def starter_vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    """Its tokens by id and its merges, and more: numbers, and what only merges where a word goes
    on behind a letter or a sign. The starter must be in the store."""
    text = (model_store.get("starter").path / "tokenizer.json").read_text("utf-8")
    model = json.loads(text)["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [tuple(pair) for pair in model["merges"]]
    digits = string.digits
    more = [(a, b) for a in digits for b in digits]
    more += [(a + b, c) for a in digits for b in digits for c in digits]
    more += [(letter, end) for letter in string.ascii_lowercase for end in ("'s", "'t", "'re")]
    more += [(sign, end) for sign in ".,:;)}!?/" for end in ("Ċ", "ĊĊ", "/")]
    more += [(a, b) for a in string.ascii_lowercase for b in string.ascii_uppercase]
    known = set(tokens)
    more = [pair for pair in more if "".join(pair) not in known]
    return [*tokens, *map("".join, more)], [*merges, *more]


def distinct_pre_tokenizers() -> list[str]:
    """One name for each kind."""
    first = {kind: name for name, kind in reversed(PRE_TOKENIZERS.items())}
    return list(first.values())[::-1]
