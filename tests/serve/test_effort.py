"""Reasoning effort in each dialect: passed in the chat template's variables, or refused if the
template has none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, get_args

import pytest

from akunu_py.decoding.chat_format.effort import Effort
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.model.tokens import TokenCodec
from akunu_py.serve.dialect import bodies
from akunu_py.serve.dialect.request_errors import RequestError
from akunu_py.serve.dialect.service import Service
from akunu_py.serve.messages import CountBody, MessagesBody, count_tokens, prepare_message
from akunu_py.serve.openai.bodies import ChatBody
from akunu_py.serve.openai.chat_completions import prepare_chat
from akunu_py.serve.responses.bodies import ResponsesBody
from akunu_py.serve.responses.dialect import prepare_response
from akunu_py.types import GenerateOptions
from tests.support.serving import TEMPLATE
from tests.support.tiny_fim import byte_level, write_model

END, THINKING = "<|end|>", ("<think>", "</think>")
EFFORTS: Sequence[Effort] = get_args(Effort)
SAID = [{"role": "user", "content": "x"}]
# As Qwen 3's, DeepSeek V3.1's, gpt-oss's, one with both, DeepSeek R1's and SmolLM2's: what they
# write, the model's words for thinking, and what comes of no thinking and of each degree of it,
# None where that is refused.
DEGREES = {"minimal": "low", "low": "low", "medium": "medium", "xhigh": "high"}
SWITCH = "{{ '(off)' if enable_thinking is defined and not enable_thinking }}"
DEGREE = "({{ reasoning_effort or 'medium' }})"
KINDS: dict[str, tuple[str, bool, str | None, str | None]] = {
    "switch": (SWITCH, True, "(off)", ""),
    "other switch": ("{{ '(on)' if thinking }}", True, "", "(on)"),
    "degrees": (DEGREE, False, None, "({degree})"),
    "both": (SWITCH + DEGREE, True, "(off)(medium)", "({degree})"),
    "always": ("", True, None, None),
    "never": ("", False, "", None),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def service(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Service:
    template, thinks, _, _ = KINDS[kind]
    markers = [END, *(THINKING if thinks else ()), "<|im_start|>"]
    directory = write_model(tmp_path_factory.mktemp("tiny") / "m", byte_level(markers), end=END)
    (directory / "chat_template.jinja").write_text(template + TEMPLATE)
    return Service(Engine.load(directory, name="tiny"), ("tiny",), GenerateOptions())


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The rendered prompts, up to the conversation."""
    found: list[str] = []
    encode = TokenCodec.encode_chat

    def spy(self: TokenCodec, *args: Any) -> list[int]:
        tokens = encode(self, *args)
        found.append(self.tokenizer.decode(tokens).partition("<|im_start|>")[0])
        return tokens

    monkeypatch.setattr(TokenCodec, "encode_chat", spy)
    return found


def prepare(service: Service, path: str, **more: Any) -> None:
    asked: dict[str, Any] = {"model": "tiny"} | more
    if path == "chat":
        body = {"messages": SAID} | asked
        prepare_chat(bodies.parse(json.dumps(body).encode(), ChatBody), service)
    elif path == "responses":
        body = {"input": "x"} | asked
        prepare_response(bodies.parse(json.dumps(body).encode(), ResponsesBody), service)
    else:
        body = {"messages": SAID} | asked
        count_tokens(bodies.parse(json.dumps(body).encode(), CountBody), service)
        body["max_tokens"] = 1
        prepare_message(bodies.parse(json.dumps(body).encode(), MessagesBody), service)


def expected(kind: str, effort: Effort) -> str | None:
    _, _, off, on = KINDS[kind]
    found = off if effort == "none" else on
    return found.format(degree=DEGREES.get(effort, "high")) if found is not None else None


@pytest.mark.parametrize("effort", EFFORTS)
def test_openai_reasoning_effort(
    kind: str, service: Service, prompts: list[str], effort: Effort
) -> None:
    expected_prompt = expected(kind, effort)
    asked: dict[str, dict[str, Any]] = {
        "chat": {"reasoning_effort": effort},
        "responses": {"reasoning": {"effort": effort, "summary": "auto"}},
    }
    for path, more in asked.items():
        if expected_prompt is None:
            with pytest.raises(RequestError, match="tiny does not support") as refused:
                prepare(service, path, **more)
            assert refused.value.param in ("reasoning_effort", "reasoning.effort")
        else:
            prepare(service, path, **more)
            assert prompts.pop() == expected_prompt
    assert not prompts


def test_anthropic_thinking_and_effort(kind: str, service: Service, prompts: list[str]) -> None:
    """Anthropic's clients request thinking from any model; models without a switch ignore it."""
    prepare(service, "chat", reasoning_effort=None)
    plain = prompts.pop()
    asked: list[tuple[dict[str, Any], Effort | None]] = [
        ({}, None),
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "medium"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, "low"),
        ({"output_config": {"effort": "max"}}, "max"),
    ]
    for more, effort in asked:
        prepare(service, "messages", **more)
        expected_prompt = None if effort is None else expected(kind, effort)
        assert (
            prompts == [plain if expected_prompt is None else expected_prompt] * 2
        )  # as it is counted, too
        prompts.clear()
