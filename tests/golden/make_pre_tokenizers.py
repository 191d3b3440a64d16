"""Makes pre_tokenizers.json: llama.cpp's tokens under each pre-tokenizer that imports know.

The vocabulary is the starter's and a little more (tests/support/starter_vocabulary.py);
only the way of splitting into words changes. Kept are the texts that tell the ways apart. In an
environment with akunu, its tests and llama-cpp-python 0.3.36, with the starter in the store, from
the checkout:

    python -m tests.golden.make_pre_tokenizers
"""

from __future__ import annotations

import importlib
import json
import tempfile
from pathlib import Path
from typing import Any

from tests.golden.make_smollm2_tokens import CODE, DIGITS, PROSE, SPACES, UNICODE, random_texts
from tests.support.starter_vocabulary import distinct_pre_tokenizers, starter_vocabulary
from tests.support.tiny_gguf import write_file

MAX_CHARACTERS, TEXTS = 60, 70

MORE = [
    "it's 12345 o'clock; we're 1,234.56 late",
    "end.\n\nnext;\nfi(x);\n}\n",
    "a./b//c.\n/d",
    "IT'S ABCdef XMLHttp aBc xY qZ PascalCase",
    "don'T we'RE 2024-01-02",
    "é1 ñ22 中文123字",
]


def tokenizer(llama_cpp: Any, folder: Path, pre: str) -> Any:
    """llama.cpp's tokenizer with the starter's vocabulary and the pre-tokenizer `pre`."""
    tokens, merges = starter_vocabulary()
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "llama.context_length": 100,
        "llama.block_count": 1,
        "llama.embedding_length": 64,
        "llama.attention.head_count": 1,
        "llama.feed_forward_length": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    path = write_file(folder / f"{pre}.gguf", "llama", metadata, {})
    return llama_cpp.Llama(str(path), vocab_only=True, verbose=False)


def main() -> None:
    llama_cpp = importlib.import_module("llama_cpp")  # not among our dependencies
    texts = [*MORE, *PROSE, *DIGITS, *SPACES, *UNICODE, *CODE, *random_texts(600)]
    texts = [text for text in dict.fromkeys(texts) if 0 < len(text) <= MAX_CHARACTERS]
    ids: dict[str, list[list[int]]] = {}
    with tempfile.TemporaryDirectory() as name:
        for pre in distinct_pre_tokenizers():
            model = tokenizer(llama_cpp, Path(name), pre)
            ids[pre] = [model.tokenize(text.encode(), add_bos=False) for text in texts]
    telling = [i for i in range(len(texts)) if len({str(row[i]) for row in ids.values()}) > 1]
    kept = telling[:TEXTS]
    golden = {
        "made_by": f"llama-cpp-python {llama_cpp.__version__}: "
        "python -m tests.golden.make_pre_tokenizers",
        "texts": [texts[i] for i in kept],
        "ids": {pre: [row[i] for i in kept] for pre, row in ids.items()},
    }
    lines = json.dumps(golden, indent=1).replace("\n    ", " ").replace("\n   ]", " ]")
    Path(__file__).with_name("pre_tokenizers.json").write_text(lines + "\n", "utf-8")
    print(len(kept), "texts,", len(ids), "pre-tokenizers")


if __name__ == "__main__":
    main()
