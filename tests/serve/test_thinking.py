"""Reasoning effort in each dialect: variables of the chat template, a budget of thinking tokens, or
no effect, which is named."""

import json
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import pytest

from akunu_py.commands import serve
from akunu_py.engine.loop import StepLoop
from akunu_py.engine.template.effort import EFFORT_BUDGETS, Effort
from akunu_py.serve.dialect import bodies
from akunu_py.serve.dialect.bodies import Body
from akunu_py.serve.dialect.fields import ThinkingFields, plan_thinking
from akunu_py.serve.dialect.interface import PreparedRequest
from akunu_py.serve.dialect.request_errors import RequestError
from akunu_py.serve.dialect.service import Service
from akunu_py.serve.messages import MessagesBody, PromptBody, count_tokens, prepare_message
from akunu_py.serve.openai import ChatBody, prepare_chat
from akunu_py.serve.responses import ResponsesBody, prepare_response
from akunu_py.types import GenerateOptions
from tests.support.dialects import DIALECTS, DialectRequest
from tests.support.serving import TEMPLATE, Served, fetch, served
from tests.support.tiny_fim import byte_level, load_tiny, write_model

END, THINKING = "<|end|>", ("<think>", "</think>")
EFFORTS: Sequence[Effort] = get_args(Effort)
USER = [{"role": "user", "content": "x"}]
# As Qwen 3's, DeepSeek V3.1's, gpt-oss's, one with both, DeepSeek R1's and SmolLM2's: the template,
# whether the model thinks, and the prompt without thinking and with an effort, None if refused.
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
PATHS: dict[str, tuple[type[Body], dict[str, Any], Any]] = {
    "chat": (ChatBody, {"messages": USER}, prepare_chat),
    "responses": (ResponsesBody, {"input": "x"}, prepare_response),
    "messages": (MessagesBody, {"messages": USER, "max_tokens": 1}, prepare_message),
    "count": (PromptBody, {"messages": USER}, count_tokens),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def service(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Service:
    template, thinks, _, _ = KINDS[kind]
    markers = [END, *(THINKING if thinks else ()), "<|im_start|>"]
    engine = load_tiny(tmp_path_factory.mktemp("tiny"), markers, template=template + TEMPLATE)
    return Service(engine, "tiny", GenerateOptions())


def prepared(service: Service, path: str, *, strict: bool = False, **more: Any) -> tuple[str, Body]:
    """Prepare a request; return its prompt up to the conversation, and its body."""
    kind, common, prepare = PATHS[path]
    data = json.dumps({"model": "tiny"} | common | more).encode()
    body = bodies.parse(data, kind, strict=strict)
    found = prepare(body, service)
    if not isinstance(found, PreparedRequest):
        return "x" * (found["input_tokens"] - len(TOKENS)), body
    (job,) = found.jobs
    begin: Any = job
    request = begin(StepLoop(service.engine)).request
    text: str = service.engine.tokens.tokenizer.decode(request.prompt)
    return text.partition("<|im_start|>")[0], body


# The conversation and the start of the answer, one token each.
TOKENS = ["<|im_start|>", *"user\nx\n", "<|im_start|>", *"assistant\n"]


def budget_of(service: Service, path: str, more: dict[str, Any]) -> int | None:
    kind, common, _ = PATHS[path]
    body = bodies.parse(json.dumps({"model": "tiny"} | common | more).encode(), kind)
    assert isinstance(body, ThinkingFields)
    return plan_thinking(body, service).budget


def expected(kind: str, effort: Effort) -> str | None:
    _, _, off, on = KINDS[kind]
    found = off if effort == "none" else on
    return found.format(degree=DEGREES.get(effort, "high")) if found is not None else None


@pytest.mark.parametrize("effort", EFFORTS)
def test_openai_reasoning_effort(kind: str, service: Service, effort: Effort) -> None:
    thinks = KINDS[kind][1]
    plain, _ = prepared(service, "chat")
    prompt = expected(kind, effort)
    fields: dict[str, dict[str, Any]] = {
        "chat": {"reasoning_effort": effort},
        "responses": {"reasoning": {"effort": effort, "summary": "auto"}},
    }
    by_budget = thinks and kind != "both" and (effort != "none" or prompt is None)
    for path, more in fields.items():
        found, body = prepared(service, path, **more)
        assert found == (plain if prompt is None else prompt)
        name = "reasoning_effort" if path == "chat" else "reasoning.effort"
        useless = prompt is None and not thinks
        assert body.ignored == ([name] if useless else [])
        if useless:
            with pytest.raises(RequestError, match=name):
                prepared(service, path, strict=True, **more)
        budget = EFFORT_BUDGETS.get(effort) if by_budget else None
        assert budget_of(service, path, more) == budget


def test_variables_of_the_template(kind: str, service: Service) -> None:
    """`chat_template_kwargs` reach the template in every dialect; other switches do the same."""
    template, _, off, _ = KINDS[kind]
    name = "thinking" if kind == "other switch" else "enable_thinking"
    for path in ("chat", "responses", "messages"):
        variables = {name: False, "reasoning_effort": "x"}
        found, _ = prepared(service, path, chat_template_kwargs=variables)
        assert ("(x)" in found) == ("reasoning_effort" in template)
        assert ("(off)" in found) == ("(off)" in template)
        assert "(on)" not in found
        for more in ({"enable_thinking": False}, {"think": False}, {"think": "none"}):
            found, _ = prepared(service, path, **more)
            assert found == (off or ("(medium)" if kind == "degrees" else ""))
        with pytest.raises(RequestError, match=r"chat_template_kwargs\.messages"):
            prepared(service, path, chat_template_kwargs={"messages": []})


def test_anthropic_thinking_and_effort(kind: str, service: Service) -> None:
    """Anthropic's clients request thinking from any model; models without a switch ignore it."""
    plain, _ = prepared(service, "chat", reasoning_effort=None)
    requests: list[tuple[dict[str, Any], Effort | None]] = [
        ({}, None),
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "medium"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, "low"),
        ({"output_config": {"effort": "max"}}, "max"),
    ]
    for more, effort in requests:
        prompt = None if effort is None else expected(kind, effort)
        found, body = prepared(service, "messages", **more)
        assert (found, body.ignored) == (plain if prompt is None else prompt, [])
        counted, body = prepared(service, "count", **more)
        assert (len(counted), body.ignored) == (len(found), [])


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


def test_thinking_budget_of_requests_and_of_the_server(service: Service) -> None:
    """The server's (`--thinking-budget 3`) holds for requests without one."""
    parser = ArgumentParser()
    serve.add_options(parser)
    args = parser.parse_args(["--thinking-budget", "3"])
    options = serve._options(args, "", [], "http://127.0.0.1:8012")
    limited = options.service(service.engine, "tiny")
    for path, more, budget in BUDGETS:
        assert budget_of(limited, path, more) == budget


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve a model whose answers begin with thinking."""
    markers = [END, *THINKING, "<|im_start|>"]
    directory, template = tmp_path_factory.mktemp("thinker"), TEMPLATE + "<think>"
    write_model(directory, byte_level(markers), end=END, template=template)
    with served(directory) as model:
        yield model


@pytest.mark.parametrize("name", ["chat", "messages", "responses", "ollama chat"])
async def test_a_budget_ends_the_thinking_of_an_answer(thinker: Served, name: str) -> None:
    dialect = DIALECTS[name]
    body = dialect.request_body(DialectRequest(("x",)), stream=False)
    for more, is_limited in (({}, False), ({"thinking_budget": 2}, True)):
        data = dialect.parse(await fetch(thinker.app, dialect.path, body | more))
        assert data.thinking or is_limited
        assert bool(data.text) == is_limited
