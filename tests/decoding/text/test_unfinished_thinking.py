"""A stopped answer goes on where it stopped, in its thinking or behind it.

The prompt that continues it is the prompt and the tokens so far, and the budget counts on.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.text.thinking import unfinished_thinking
from akunu_py.types import GenerateOptions, Message, SamplingOptions
from tests.support.jobs import chat_request
from tests.support.tiny_fim import byte_level, write_model

TURNS = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
CHATML = ("<|im_end|>", "<think>", "<|im_start|>", "</think>")
HARMONY = (
    "<|return|>", "<|channel|>", "<|start|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>"
)  # fmt: skip
TEMPLATES = {
    "opened": (CHATML, TURNS + "<|im_start|>assistant\n<think>{{ '\n' }}"),
    "opened, no newline": (CHATML, TURNS + "<|im_start|>assistant\n<think>"),
    "by itself": (CHATML, TURNS + "<|im_start|>assistant{{ '\n' }}"),
    "channels": (
        HARMONY,
        "{% for message in messages %}<|start|>user<|message|>{{ message.content }}<|end|>"
        "{% endfor %}<|start|>assistant",
    ),
}
# What the model writes before its thinking and between its thinking and its answer.
WRITTEN = {
    "opened": ("", "\n</think>\n\n"),
    "opened, no newline": ("\n", "\n</think>\n\n"),
    "by itself": ("<think>\n", "\n</think>\n\n"),
    "channels": (
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
}
ASKED = [Message("user", "What does <think> mean?")]
THOUGHT, SAID = "First this.\nThen that", "So it is"


@pytest.fixture(scope="module", params=list(TEMPLATES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    markers, template = TEMPLATES[request.param]
    directory = tmp_path_factory.mktemp("model") / "m"
    write_model(directory, byte_level(markers), end=markers[0])
    (directory / "chat_template.jinja").write_text(template)
    return Engine.load(Path(directory), name=request.param)


def partial(thinking: str, content: str = "") -> list[Message]:
    return [*ASKED, Message("assistant", content, thinking=thinking)]


def test_the_prompt_goes_on_where_the_answer_stopped(model: Engine) -> None:
    prompt = model.tokens.encode_chat(ASKED)
    before, between = WRITTEN[model.name]
    for end in range(1, len(THOUGHT) + 1):
        expected = prompt + model.tokens.encode_text(before + THOUGHT[:end])
        assert model.tokens.encode_chat(partial(THOUGHT[:end])) == expected
    for end in range(1, len(SAID) + 1):
        expected = prompt + model.tokens.encode_text(before + THOUGHT + between + SAID[:end])
        assert model.tokens.encode_chat(partial(THOUGHT, SAID[:end])) == expected
        assert unfinished_thinking(model.tokens.tokenizer, expected) is None
    assert unfinished_thinking(model.tokens.tokenizer, prompt) == (
        0 if model.name.startswith("opened") else None
    )


def test_the_rest_is_thinking_and_the_budget_counts_on(model: Engine) -> None:
    """For each place to stop at, greedy: the same text as without a stop."""
    letters = tuple((token, 1000.0) for token in model.tokens.encode_text("abcdefgh"))
    sampling, budget = SamplingOptions(logit_bias=letters), len(THOUGHT) + 8
    options = GenerateOptions(70, "off", sampling=sampling, thinking_budget=budget)
    whole = chat_request(Session(model), partial(THOUGHT), options).answer()
    assert len(whole.thinking) == 8
    for end in range(1, len(whole.thinking)):
        so_far = THOUGHT + whole.thinking[:end]
        left = replace(options, max_tokens=options.max_tokens - end)
        rest = chat_request(Session(model), partial(so_far), left).answer()
        assert whole.thinking[:end] + rest.thinking == whole.thinking
        assert rest.text == whole.text


def test_a_new_line_in_the_middle_of_thinking_is_kept(model: Engine) -> None:
    newline = tuple(model.tokens.encode_text("\n"))
    options = GenerateOptions(3, "off", sampling=SamplingOptions(allowed_tokens=newline))
    assert chat_request(Session(model), partial(THOUGHT), options).answer().thinking == "\n\n\n"


def test_thinking_that_is_off_by_now_is_left_out(model: Engine) -> None:
    if model.name == "channels":
        return
    end = "</think>\n\n"
    text = f"<|im_start|>assistant\n<think>\n\n{end}"
    assert model.tokens._partial_answer(partial(THOUGHT)[-1], text) == ""
    assert model.tokens._partial_answer(partial(THOUGHT, SAID)[-1], text) == SAID
