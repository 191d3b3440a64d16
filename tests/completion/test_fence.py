"""A Markdown fence around an answer is taken off, letter by letter as it comes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from akunu_py.completion.completer import Completer
from akunu_py.completion.prompt.layout import load_families
from akunu_py.completion.request import CompleteOptions, CompletionRequest
from akunu_py.completion.stops import is_markdown, strip_fence
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.model.engine import Engine
from tests.support.complete import complete
from tests.support.fixed_request import FixedRequest
from tests.support.tiny_fim import byte_level, write_model

MARKERS = [*load_families()["qwen3-coder-chat"].markers]


@pytest.mark.parametrize(
    ("answer", "code", "closed"),
    [
        ("```python\nx = 1\ny = 2\n```", "x = 1\ny = 2", True),
        ("```\nx\n```\nThis is why.", "x", True),
        ("```c++ \nx = '`'\n", "x = '`'\n", False),  # cut off by max_tokens
        ("x = 1\n```\n", "x = 1\n```\n", False),
        ("`${name}`", "`${name}`", False),
        ("`", "`", False),
        ("```pyth", "", False),
        ("", "", False),
    ],
)
def test_a_fence_is_taken_off(answer: str, code: str, closed: bool) -> None:
    assert strip_fence(answer, final=True) == (code, closed)
    given = ""
    for end in range(len(answer) + 1):  # what was given once stays
        now, _ = strip_fence(answer[:end], final=False)
        assert now.startswith(given)
        given = now
    assert code.startswith(given)


def test_markdown_keeps_its_fences() -> None:
    assert is_markdown("docs/README.MD", "")
    assert is_markdown("untitled", "markdown")
    assert not is_markdown("a.py", "python")


class FixedAnswer(Session):
    """A session whose model generates `answer`, one letter a pass."""

    answer = ""

    def generate(
        self, prompt: Sequence[int], options: Any, draft_context: Any = (), stable: Any = None
    ) -> Any:
        return FixedRequest(self.answer)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    directory = Path(tmp_path_factory.mktemp("qwen3"))
    return Engine.load(write_model(directory, byte_level(MARKERS), end="<|im_end|>"))


def test_an_answer_in_a_fence_is_its_code(engine: Engine) -> None:
    completer = Completer(engine, CompleteOptions(fim="qwen3-coder-chat"))
    assert completer.family is load_families()["qwen3-coder-chat"]
    session = completer.session = FixedAnswer(engine)
    parts: list[str] = []
    for path, answer, text in [
        ("a.py", "```python\nreturn a + b\n```\nIt adds them.", "return a + b"),
        ("b.py", "return a + b", "return a + b"),
        ("c.md", "```python\nreturn a + b\n```", "```python"),  # the line
    ]:
        session.answer = answer
        parts.clear()
        done = complete(
            completer, CompletionRequest("def add(a, b):\n    ", "\n", path), on_text=parts.append
        )
        assert (done.text, done.finish_reason) == (text, "stop")
        assert "".join(parts) == text
