"""Reasoning effort in each dialect: variables of the chat template, a budget of thinking tokens, or
no effect, which is named."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any, get_args

import pytest

from akunu_py.commands import serve
from akunu_py.decoding.chat_format.effort import EFFORT_BUDGETS, Effort
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.model.tokens import TokenCodec
from akunu_py.serve import messages
from akunu_py.serve.dialect import bodies, thinking_plan
from akunu_py.serve.dialect.bodies import Body
from akunu_py.serve.dialect.request_errors import RequestError
from akunu_py.serve.dialect.service import Service
from akunu_py.serve.messages import CountBody, MessagesBody, count_tokens, prepare_message
from akunu_py.serve.openai import chat_completions
from akunu_py.serve.openai.bodies import ChatBody
from akunu_py.serve.openai.chat_completions import prepare_chat
from akunu_py.serve.responses import dialect
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
DEGREE_PROMPT = "(medium)"
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
    return Service(Engine.load(directory, name="tiny"), "tiny", GenerateOptions())


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


def parsed(service: Service, path: str, *, strict: bool = False, **more: Any) -> Body:
    """Prepare a request and return its body."""
    asked: dict[str, Any] = {"model": "tiny"} | more
    kinds: dict[str, tuple[type[Body], dict[str, Any], Any]] = {
        "chat": (ChatBody, {"messages": SAID}, prepare_chat),
        "responses": (ResponsesBody, {"input": "x"}, prepare_response),
        "count": (CountBody, {"messages": SAID}, count_tokens),
        "messages": (MessagesBody, {"messages": SAID, "max_tokens": 1}, prepare_message),
    }
    kind, common, prepare = kinds[path]
    body = bodies.parse(json.dumps(common | asked).encode(), kind, strict=strict)
    prepare(body, service)
    return body


def expected(kind: str, effort: Effort) -> str | None:
    _, _, off, on = KINDS[kind]
    found = off if effort == "none" else on
    return found.format(degree=DEGREES.get(effort, "high")) if found is not None else None


@pytest.fixture
def budgets(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The thinking budgets of the prepared requests."""
    found: list[int | None] = []
    plan = thinking_plan.plan_thinking

    def spy(*args: Any) -> thinking_plan.ThinkingPlan:
        made = plan(*args)
        found.append(made.budget)
        return made

    for module in (chat_completions, dialect, messages):
        monkeypatch.setattr(module, "plan_thinking", spy)
    return found


@pytest.mark.parametrize("effort", EFFORTS)
def test_openai_reasoning_effort(
    kind: str, service: Service, prompts: list[str], budgets: list[int | None], effort: Effort
) -> None:
    thinks = KINDS[kind][1]
    parsed(service, "chat")
    plain, expected_prompt = prompts.pop(), expected(kind, effort)
    asked: dict[str, dict[str, Any]] = {
        "chat": {"reasoning_effort": effort},
        "responses": {"reasoning": {"effort": effort, "summary": "auto"}},
    }
    for path, more in asked.items():
        body = parsed(service, path, **more)
        assert prompts.pop() == (plain if expected_prompt is None else expected_prompt)
        name = "reasoning_effort" if path == "chat" else "reasoning.effort"
        useless = expected_prompt is None and not thinks
        assert body.ignored == ([name] if useless else [])
        if useless:
            with pytest.raises(RequestError, match=name):
                parsed(service, path, strict=True, **more)
            prompts.clear()
    by_effort = thinks and kind != "both" and (effort != "none" or expected_prompt is None)
    assert budgets[1] == (EFFORT_BUDGETS.get(effort) if by_effort else None)
    assert not prompts


def test_variables_of_the_template(kind: str, service: Service, prompts: list[str]) -> None:
    """`chat_template_kwargs` reach the template in every dialect; other switches do the same."""
    template, _, off, _ = KINDS[kind]
    name = (
        "thinking" if "thinking }}" in template and "enable" not in template else "enable_thinking"
    )
    for path in ("chat", "responses", "messages"):
        parsed(service, path, chat_template_kwargs={name: False, "reasoning_effort": "x"})
        found = prompts.pop()
        assert ("(x)" in found) == ("reasoning_effort" in template)
        assert ("(off)" in found) == ("(off)" in template)
        assert "(on)" not in found
        for more in ({"enable_thinking": False}, {"think": False}, {"think": "none"}):
            parsed(service, path, **more)
            assert prompts.pop() == (off or (DEGREE_PROMPT if kind == "degrees" else ""))
        with pytest.raises(RequestError, match=r"chat_template_kwargs\.messages"):
            parsed(service, path, chat_template_kwargs={"messages": []})


def test_anthropic_thinking_and_effort(kind: str, service: Service, prompts: list[str]) -> None:
    """Anthropic's clients request thinking from any model; models without a switch ignore it."""
    parsed(service, "chat", reasoning_effort=None)
    plain = prompts.pop()
    asked: list[tuple[dict[str, Any], Effort | None]] = [
        ({}, None),
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "medium"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, "low"),
        ({"output_config": {"effort": "max"}}, "max"),
    ]
    for more, effort in asked:
        for path in ("count", "messages"):
            assert parsed(service, path, **more).ignored == []
        expected_prompt = None if effort is None else expected(kind, effort)
        assert (
            prompts == [plain if expected_prompt is None else expected_prompt] * 2
        )  # as it is counted, too
        prompts.clear()


ENABLED = {"type": "enabled", "budget_tokens": 5}
# Requests for at most 5 thinking tokens, in the words of each dialect and of other servers.
BUDGETS: list[tuple[str, dict[str, Any], int | None]] = [
    *(
        (path, {name: 5}, 5)
        for path in ("chat", "responses", "messages")
        for name in ("thinking_budget", "thinking_token_budget", "reasoning_budget")
    ),
    ("messages", {"thinking": ENABLED}, 5),
    ("chat", {"thinking": ENABLED}, 5),
    ("chat", {"reasoning": {"max_tokens": 5}}, 5),
    ("responses", {"reasoning": {"max_tokens": 5, "summary": "auto"}}, 5),
    ("chat", {}, 3),
    ("messages", {"thinking": {"type": "adaptive"}}, 3),
    ("chat", {"thinking_budget": -1}, None),
]


@pytest.mark.parametrize(("path", "more", "budget"), BUDGETS)
def test_thinking_budget_of_requests_and_of_the_server(
    service: Service, budgets: list[int | None], path: str, more: dict[str, Any], budget: int | None
) -> None:
    """The server's (`--thinking-budget 3`) holds for requests without one."""
    parser = ArgumentParser()
    serve.add_options(parser)
    args = parser.parse_args(["--thinking-budget", "3"])
    options = serve._options(args, "", [], "http://127.0.0.1:8012")
    parsed(options.service(service.engine, "tiny"), path, **more)
    assert budgets == [budget]
