"""Makes family_tokens.json: what llama.cpp says with the tiny model of each family.

For every position of a fixed prompt the token that llama.cpp finds most likely, its margin (top
logit minus the second) and, for the last position, some logits. In an environment with akunu's
development dependencies and llama-cpp-python 0.3.36, from the checkout:

    python -m tests.golden.make_family_tokens
"""

from __future__ import annotations

import importlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.golden.make_smollm2_greedy import load
from tests.support.tiny_gguf_families import CASES, prompt, weights_of, write_gguf


def evaluate(llama_cpp: Any, path: Path, ids: list[int]) -> dict[str, Any]:
    model = load(llama_cpp, path, context=256)
    model.eval(ids)
    logits = np.array(model.scores[: len(ids)])
    first = logits.argmax(-1)
    ranked = np.sort(logits, -1)
    return {
        "tokens": first.tolist(),
        "margins": [round(float(margin), 3) for margin in ranked[:, -1] - ranked[:, -2]],
        "logits": [round(float(value), 4) for value in logits[-1, :16]],
    }


def main() -> None:
    llama_cpp = importlib.import_module("llama_cpp")  # not among our dependencies
    cases = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, case) in enumerate(CASES.items()):
            path = write_gguf(Path(folder) / f"{number}.gguf", case, weights_of(case))
            cases[name] = evaluate(llama_cpp, path, prompt())
    golden = {
        "made_by": f"llama-cpp-python {llama_cpp.__version__}, float32 weights and KV cache: "
        "python -m tests.golden.make_family_tokens",
        "cases": cases,
    }
    text = json.dumps(golden, indent=1).replace("\n    ", " ").replace("\n   ]", " ]")
    Path(__file__).with_name("family_tokens.json").write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
