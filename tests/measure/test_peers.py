"""Adapters of other programs' loops, with fakes instead of their packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from akunu_py.bench.runners import Conditions
from akunu_py.decoding.model.engine import Engine
from tests.measure import peers
from tests.support.bench_fakes import workload

pytestmark = pytest.mark.rotating

END = 2


class Llama:
    """A fake of llama-cpp-python's class; its output is 11, 12, 13 and the end token."""

    made: ClassVar[list[Llama]] = []

    def __init__(self, path: str, **options: Any) -> None:
        if not path.endswith(".gguf"):
            raise ValueError("Failed to load model from file")
        self.options = options
        self.prompt = b""
        self.sampling: dict[str, Any] = {}
        Llama.made.append(self)

    def tokenize(self, text: bytes, add_bos: bool, special: bool) -> list[int]:
        assert special
        assert not add_bos
        self.prompt = text
        return list(text[:4])

    def reset(self) -> None:
        pass

    def set_seed(self, seed: int) -> None:
        self.seed = seed

    def generate(self, tokens: list[int], **options: Any) -> Iterator[int]:
        self.sampling = options
        yield from (11, 12, 13, END, 99)

    def token_eos(self) -> int:
        return END

    def detokenize(self, tokens: list[int]) -> bytes:
        return b" said "


@pytest.fixture
def llama_cpp(monkeypatch: pytest.MonkeyPatch) -> list[Llama]:
    module, speculative = ModuleType("llama_cpp"), ModuleType("llama_cpp.llama_speculative")
    module.Llama = Llama  # type: ignore[attr-defined]
    speculative.LlamaPromptLookupDecoding = lambda num_pred_tokens: num_pred_tokens  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", speculative)
    Llama.made = []
    return Llama.made


def test_llama_cpp_gets_the_same_text_unfiltered(
    llama_cpp: list[Llama], starter_engine: Engine
) -> None:
    plain, lookup = peers.llama_cpp(starter_engine, Path("model.gguf"))
    assert (plain.name, lookup.name) == ("llama.cpp", "llama.cpp + lookup")
    assert plain.baseline == lookup.baseline == plain.name
    assert [one.options["draft_model"] for one in llama_cpp] == [None, 10]
    run = lookup.run(workload(), Conditions(20, 0.7, 5))
    model = llama_cpp[1]
    assert model.prompt.decode().endswith(
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [model.sampling[name] for name in ("temp", "top_k", "top_p")] == [0.7, 0, 1.0]
    assert model.seed == 5
    assert run.turns[0][1] == [11, 12, 13, END]  # nothing after the end
    assert (run.decoded, run.text) == (3, "said")
    cut = plain.run(workload(), Conditions(2))
    assert cut.turns[0][1] == [11, 12]
    assert plain.reference(0) is None
    assert lookup.reference(0) == "llama.cpp"
    assert lookup.reference(0.7) is None


def test_a_missing_peer_fails_with_the_reason(
    llama_cpp: list[Llama], starter_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (damaged,) = peers.llama_cpp(starter_engine, Path("model.bin"))
    with pytest.raises(Exception, match=r"cannot load model\.bin"):
        damaged.run(workload(), Conditions(4))
    monkeypatch.setitem(sys.modules, "llama_cpp", None)  # as if it were not installed
    (missing,) = peers.llama_cpp(starter_engine, Path("model.gguf"))
    with pytest.raises(Exception, match="pip install llama-cpp-python"):
        missing.run(workload(), Conditions(4))
    monkeypatch.setitem(sys.modules, "torch", None)
    (missing,) = peers.transformers(starter_engine, Path("directory"))
    with pytest.raises(Exception, match="pip install torch"):
        missing.run(workload(), Conditions(4))


def test_a_first_pass_that_yields_several_tokens_counts_the_rest(starter_engine: Engine) -> None:
    """transformers drafts in the pass that reads the prompt, too."""

    def generate(text: str, conditions: Conditions, emit: peers.Emit) -> list[int]:
        emit([1, 2, 3])
        emit([4])
        return [0]

    peer = peers.Peer("peer", "peer", starter_engine, generate, lambda tokens: f"{tokens}")
    run = peer.run(workload(), Conditions(8))
    assert (run.decoded, run.text) == (1, "[1, 2, 3, 4]")
