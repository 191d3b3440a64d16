"""Tiny models of random weights whose chat templates show tools, one of each kind of markup."""

from pathlib import Path
from typing import Any

import pytest

from akunu_py.engine import answer
from akunu_py.engine.engine import Engine
from akunu_py.engine.text import thinking as channels
from akunu_py.engine.tools.formats import FORMATS
from akunu_py.engine.tools.rendering import format_of
from akunu_py.types import GenerateOptions, SamplingOptions, ToolChoice
from tests.support.tiny_fim import load_tiny

END = "<|endoftext|>"
SIGNS = {
    "hermes": "<tool_call>tool_call.name",
    "qwen3_coder": "<tool_call>\n<function=",
    "mistral": "[TOOL_CALLS][ARGS]",
    "harmony": "",
}
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}"
    "{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}\n"
    "{% endfor %}{# SIGN #}assistant:"
)


def load_family(directory: Path, family: str) -> Engine:
    """A model whose markers are special tokens, every second of them."""
    markers = FORMATS[family].all_markers
    if family == "harmony":
        markers = channels.channel_markers(channels.HARMONY)
    added = [END, *(each for i, text in enumerate(markers) for each in (f"<|filler{i}|>", text))]
    engine = load_tiny(directory, added, family, template=TEMPLATE.replace("SIGN", SIGNS[family]))
    assert format_of(engine.tokens.tokenizer).name == family
    return engine


def options(engine: Engine, seed: int = 1, **more: Any) -> GenerateOptions:
    """The fillers are no part of any text, and thinking is short."""
    find = engine.tokens.tokenizer.backend_tokenizer.token_to_id
    fillers = [find(f"<|filler{i}|>") for i in range(9)]
    biased = tuple((token, -1e4) for token in fillers if token is not None)
    if (ending := find("<|end|>")) is not None:
        biased += ((ending, 20.0),)
    sampling = SamplingOptions(temperature=1.0, seed=seed, logit_bias=biased)
    return GenerateOptions(max_tokens=600, sampling=sampling, **more)


def force_calls(monkeypatch: pytest.MonkeyPatch, forced: ToolChoice, **options: Any) -> None:
    """Force a choice of tools on all jobs of a chat that make none."""
    job = answer.chat_job

    def chat_job(
        engine: Any, messages: Any, requested: Any, tools: Any, choice: Any = None, **more: Any
    ) -> Any:
        return job(engine, messages, requested, tools, choice or forced, **more, **options)

    monkeypatch.setattr(answer, "chat_job", chat_job)
