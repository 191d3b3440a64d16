"""Chat Completions and Completions on a tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akunu_py.decoding.generate.model_host import ModelLoop
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.model.engine import Engine
from akunu_py.serve.http.asgi import create_app
from akunu_py.serve.http.guard import AccessRules
from akunu_py.serve.http.model_pool import ModelPool, ServedModel
from akunu_py.serve.http.record import RequestRecords
from akunu_py.serve.openai.bodies import MessageBody, messages_of
from akunu_py.types import Answer, GenerateOptions, Message, SamplingOptions
from tests.support.serving import Served, ask

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WORDS = st.text("abc de\n", min_size=1, max_size=40)
SAMPLING = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.8, 1.5]),
        "top_p": st.sampled_from([0.5, 1.0]),
        "top_k": st.sampled_from([0, 20]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "presence_penalty": st.sampled_from([0.0, 0.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.5]),
        "repetition_penalty": st.sampled_from([1.0, 1.2]),
    },
)


def run(
    model: Served,
    prompt: Callable[[Engine], Sequence[int]],
    sampling: dict[str, Any],
    **options: Any,
) -> Answer:
    """Return the text of `akunu run --draft off`."""
    asked = GenerateOptions(
        max_tokens=options.pop("max_tokens", 16),
        draft="off",
        sampling=SamplingOptions(**sampling),
        **options,
    )
    answer: Answer = model.in_thread(
        lambda engine: Session(engine).generate(prompt(engine), asked).answer()
    )
    return answer


def continued(model: Served, text: str) -> Answer:
    return run(model, lambda engine: engine.tokens.encode(text), {}, max_tokens=6)


def encode(model: Served, text: str) -> list[int]:
    return list(model.in_thread(lambda engine: engine.tokens.encode(text)))


@pytest.mark.long
@settings(max_examples=5)
@given(WORDS, WORDS, SAMPLING, st.integers(0, 2**32 - 2), st.integers(1, 2))
async def test_chat_equals_run(
    tiny: Served, system: str, said: str, sampling: dict[str, Any], seed: int, count: int
) -> None:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": said}]
    body = {"messages": messages, "seed": seed, "n": count, **sampling}
    turns = [Message("system", system), Message("user", said)]
    expected = [
        run(
            tiny,
            lambda engine: engine.tokens.encode_chat(turns),
            sampling | {"seed": seed + number},
        )
        for number in range(count)
    ]
    replies = await asyncio.gather(
        ask(tiny.app, CHAT, body), ask(tiny.app, CHAT, body | {"stream": True})
    )
    whole, streamed = replies[0].json(), replies[1].chunks()
    assert [choice["message"]["content"] for choice in whole["choices"]] == [
        answer.text for answer in expected
    ]
    texts = [""] * count
    for chunk in streamed:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == [answer.text for answer in expected]
    used = whole["usage"]
    assert used["completion_tokens"] == sum(len(answer.tokens) for answer in expected)
    assert used["prompt_tokens"] == expected[0].stats.prompt_tokens


@settings(max_examples=5)
@given(st.lists(WORDS, min_size=1, max_size=3), st.booleans(), st.booleans(), st.booleans())
async def test_completions_of_several_prompts(
    tiny: Served, prompts: list[str], as_tokens: bool, echo: bool, stream: bool
) -> None:
    expected = [(prompt if echo else "") + continued(tiny, prompt).text for prompt in prompts]
    given = [encode(tiny, prompt) for prompt in prompts]
    body = {"prompt": given if as_tokens else prompts, "max_tokens": 6, "echo": echo}
    if not stream:
        whole = (await ask(tiny.app, COMPLETIONS, body)).json()
        assert [choice["text"] for choice in whole["choices"]] == expected
        return
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = (await ask(tiny.app, COMPLETIONS, body | options)).chunks()
    texts = [""] * len(prompts)
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == expected
    assert chunks[-1]["usage"]["prompt_tokens"] == sum(map(len, given))


async def test_suffix_uses_fill_in_the_middle_format(tiny: Served) -> None:
    body = {"prompt": "def f(", "suffix": "):\n    pass", "max_tokens": 8}
    whole = (await ask(tiny.app, COMPLETIONS, body)).json()

    def prompt(engine: Engine) -> list[int]:
        text = "<|fim_prefix|>def f(<|fim_suffix|>):\n    pass<|fim_middle|>"
        return engine.tokens.encode(text)

    ends = tiny.in_thread(lambda engine: tuple(engine.tokens.encode("<|fim_prefix|><|file_sep|>")))
    expected = run(tiny, prompt, {}, max_tokens=8, stop_tokens=ends)
    assert whole["usage"]["prompt_tokens"] == expected.stats.prompt_tokens
    assert whole["choices"][0]["text"] == expected.text


async def test_stop_token_of_request_ends_only_its_answer(tiny: Served) -> None:
    """Such as a fill-in-the-middle token, which a chat answer may contain."""
    free = run(tiny, lambda engine: engine.tokens.encode("abc"), {}, max_tokens=12)
    end = free.tokens[5]
    asked = run(
        tiny, lambda engine: engine.tokens.encode("abc"), {}, max_tokens=12, stop_tokens=(end,)
    )
    assert asked.tokens == free.tokens[: free.tokens.index(end) + 1]
    assert asked.finish_reason == "stop"


async def test_structured_answers_and_their_limits(tiny: Served) -> None:
    messages = [{"role": "user", "content": "x"}]
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "required": ["a"],
        "additionalProperties": False,
    }
    named = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    compact = {"structured_outputs": {"disable_any_whitespace": True}}
    for more, wanted in (
        ({"guided_choice": ["left", "right"]}, ("left", "right")),
        ({"guided_regex": "[0-9]{3}x"}, None),
        ({"guided_grammar": 'start: "yes" | "no"'}, ("yes", "no")),
        ({"structured_outputs": {"choice": ["left", "right"]}}, ("left", "right")),
        (compact | {"response_format": named}, ('{"a":1}',)),
        ({"structured_outputs": {"json": schema, "disable_any_whitespace": True}}, ('{"a":1}',)),
    ):
        reply = await ask(tiny.app, CHAT, {"messages": messages, **more})
        text = reply.json()["choices"][0]["message"]["content"]
        assert text in wanted if wanted else text[:3].isdigit() and text.endswith("x")
    reply = await ask(
        tiny.app, CHAT, {"messages": messages, "response_format": named, "max_tokens": 400}
    )
    choice = reply.json()["choices"][0]
    text = choice["message"]["content"].split()
    assert choice["finish_reason"] == "length" or "".join(text) == '{"a":1}'
    both = {"messages": messages, "response_format": named, "guided_regex": "a"}
    assert (await ask(tiny.app, CHAT, both)).json()["error"]["param"] == "guided_regex"


async def test_prediction_changes_passes_but_not_text(tiny: Served) -> None:
    body = {"messages": [{"role": "user", "content": "say it"}], "max_tokens": 40}
    plain = (await ask(tiny.app, CHAT, body)).json()
    text = plain["choices"][0]["message"]["content"]
    other = {"messages": [{"role": "user", "content": "another"}], "max_tokens": 1}
    await ask(tiny.app, CHAT, other)
    parts = [{"type": "text", "text": text[:15]}, {"type": "text", "text": text[15:]}]
    for content in (text, parts):
        prediction = {"prediction": {"type": "content", "content": content}}
        drafted = (await ask(tiny.app, CHAT, body | prediction)).json()
        assert drafted["choices"] == plain["choices"]
        assert drafted["akunu"]["accepted"] > plain["akunu"]["accepted"]


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(tiny: Served, stream: bool) -> None:
    more = {"max_tokens": 6, "stream": stream}
    messages = [{"role": "user", "content": "x"}]
    chat = await ask(
        tiny.app, CHAT, {"messages": messages, "logprobs": True, "top_logprobs": 2} | more
    )
    plain = await ask(tiny.app, COMPLETIONS, {"prompt": "x", "logprobs": 2} | more)
    choices = [
        [choice for chunk in chunks for choice in chunk["choices"]]
        for chunks in ([each.chunks() if stream else [each.json()] for each in (chat, plain)])
    ]
    told = [choice["logprobs"] for choice in choices[0] if choice["logprobs"]]
    found = [token for each in told for token in each["content"]]
    assert len(found) == 6
    for each in found:  # greedy
        assert each["token"] == each["top_logprobs"][0]["token"]
        assert each["logprob"] == each["top_logprobs"][0]["logprob"] <= 0
        assert len(each["top_logprobs"]) == 2
    told = [choice["logprobs"] for choice in choices[1] if choice["logprobs"]]
    tokens = [token for each in told for token in each["tokens"]]
    text = "".join(choice["text"] for choice in choices[1])
    offsets = [offset for each in told for offset in each["text_offset"]]
    assert "".join(tokens) == text
    assert [text[at:][: len(token)] for at, token in zip(offsets, tokens, strict=True)] == tokens


async def test_second_turn_prefills_only_new_tokens(tiny: Served) -> None:
    first = {"messages": [{"role": "user", "content": "one two three " * 20}]}
    answer = (await ask(tiny.app, CHAT, first)).json()["choices"][0]["message"]
    more = [*first["messages"], answer, {"role": "user", "content": "on"}]
    used = (await ask(tiny.app, CHAT, {"messages": more})).json()["usage"]
    assert used["prompt_tokens_details"]["cached_tokens"] > 280
    assert used["prompt_tokens"] - used["prompt_tokens_details"]["cached_tokens"] < 60


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
REFUSED = [
    (CHAT, {"tools": [TOOL, TOOL]}, 400, "tools.1.function.name"),
    (CHAT, {"tool_choice": "required"}, 400, "tool_choice"),
    (CHAT, {"tools": [TOOL], "tool_choice": "maybe"}, 400, "tool_choice"),
    (
        CHAT,
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        400,
        "tool_choice",
    ),
    (
        CHAT,
        {"tools": [TOOL], "guided_grammar": "start: /a/"},
        400,
        None,
    ),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages.0.content"),
    (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages.0.role"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, 400, "messages.0.tool_call_id"),
    (CHAT, {"response_format": {"type": "xml"}}, 400, "response_format"),
    (CHAT, {"temperature": "hot"}, 400, "temperature"),
    (CHAT, {"temperature": -1}, 400, "temperature"),
    (CHAT, {"stream_options": {"include_usage": True}}, 400, "stream_options"),
    (CHAT, {"logit_bias": {"x": 1}}, 400, "logit_bias.x"),
    (CHAT, {"logit_bias": {"99999": 1}}, 400, None),
    (CHAT, {"max_tokens": 1.5}, 400, "max_tokens"),
    (CHAT, {"guided_regex": "("}, 400, None),
    (
        COMPLETIONS,
        {"prompt": [1], "structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
        400,
        "structured_outputs.disable_any_whitespace",
    ),
    (COMPLETIONS, {"prompt": [-1]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [10**6]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": []}, 400, "prompt"),
    (COMPLETIONS, {"echo": True, "logprobs": 1}, 400, "echo"),
    (CHAT, {"top_logprobs": 1}, 400, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    (COMPLETIONS, {"prompt": [1], "suffix": "x"}, 400, "suffix"),
    (COMPLETIONS, {"n": 16, "prompt": ["x"] * 9}, 400, "prompt"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "change", "status", "param"), REFUSED)
async def test_errors_name_the_refused_parameter(
    tiny: Served, path: str, change: dict[str, Any], status: int, param: str | None, stream: bool
) -> None:
    good: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [{"role": "user", "content": "x"}]},
        COMPLETIONS: {"prompt": "x"},
    }
    body = {**(good[path] if change else {}), **({"stream": True} if stream else {}), **change}
    if stream and "stream_options" in change:
        return
    reply = await ask(tiny.app, path, body)
    assert reply.status == status
    error = reply.json()["error"]
    assert error["param"] == param
    assert error["message"]
    assert "\n" not in error["message"]
    assert reply.headers["x-request-id"].startswith("req_")


async def test_too_long_prompt_is_refused(tiny: Served) -> None:
    asked: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": [{"role": "user", "content": "x" * 5000}]}),
        (COMPLETIONS, {"prompt": "x" * 5000}),
    ]
    for path, body in asked:
        for stream in (False, True):
            reply = await ask(tiny.app, path, body | {"stream": stream})
            error = reply.json()["error"]
            assert reply.status == 400
            assert error["code"] == "context_length_exceeded"
            found = error["message"].split()
            assert found[:4] == ["prompt", "is", "too", "long:"]
            assert int(found[4]) >= 5000
            assert found[5:] == ["tokens", ">", "4095", "maximum"]


async def test_parameters_without_effect_are_accepted(tiny: Served) -> None:
    """Parameters that describe the caller, and messages as clients send them back."""
    body = {
        "model": "alias",
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "be"}]},
            {"role": "user", "content": "x", "name": "me"},
            {"role": "assistant", "content": "y", "reasoning_content": "so", "refusal": None,
             "annotations": [], "audio": None, "function_call": None, "tool_calls": None},
            {"role": "user", "content": "z"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function",
             "function": {"name": "look", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "nothing"},
        ],
        "tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True,
        "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto",
        "n": 1.0, "stop": None, "max_tokens": 4.0, "top_k": -1,
    }  # fmt: skip
    reply = await ask(tiny.app, CHAT, body)
    assert reply.status == 200, reply.body


def test_default_options(tiny: Served) -> None:
    defaults = tiny.model.service().defaults
    assert replace(defaults, sampling=SamplingOptions(temperature=0.0)) == defaults


async def test_listing_models_does_not_load_the_model(tiny: Served) -> None:
    """Programs that poll the list must not reload a model that was unloaded when idle."""
    names, options = ("tiny", "alias"), tiny.options
    pool = ModelPool([ServedModel(names, never_load, options.service, context_length=64)])
    app = create_app(options.backend(pool, RequestRecords()), AccessRules())
    [listed] = (await ask(app, "/v1/models")).json()["data"]
    assert (listed["id"], listed["state"], listed["context_length"]) == ("tiny", "unloaded", 64)
    assert (await ask(app, "/v1/models/alias")).json() == listed
    assert (await ask(app, "/v1/models/other")).status == 404
    assert (await ask(app, "/health")).status == 200
    assert pool.models[0].host.state == "unloaded"


def never_load(reserved: int) -> ModelLoop:
    raise AssertionError("loaded")


FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"const": "x"}},
            "required": ["at"], "additionalProperties": False}}  # fmt: skip


async def test_functions_are_the_older_form_of_tools(tiny: Served) -> None:
    """The same prompt and call as with tools; the reply has `function_call`."""
    said: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
    tool = {"type": "function", "function": FUNCTION}
    named = {"type": "function", "function": {"name": "look"}}
    spaces = tiny.in_thread(lambda engine: engine.tokens.encode(" \n\t\r"))
    common = {
        "messages": said,
        "max_tokens": 99,
        "logit_bias": dict.fromkeys(map(str, spaces), -99),
    }
    new = common | {"tools": [tool], "tool_choice": named}
    old = common | {"functions": [FUNCTION], "function_call": {"name": "look"}}
    replies = [(await ask(tiny.app, CHAT, body)).json() for body in (new, old)]
    choices = [reply["choices"][0] for reply in replies]
    call = choices[0]["message"]["tool_calls"][0]["function"]
    assert choices[1]["message"]["function_call"] == call
    assert "tool_calls" not in choices[1]["message"]
    assert [each["finish_reason"] for each in choices] == ["tool_calls", "function_call"]
    assert replies[0]["usage"]["prompt_tokens"] == replies[1]["usage"]["prompt_tokens"]
    chunks = (await ask(tiny.app, CHAT, old | {"stream": True})).chunks()
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    parts = [delta["function_call"] for delta in deltas if "function_call" in delta]
    assert parts[0] == {"name": "look", "arguments": ""}
    assert "".join(part["arguments"] for part in parts) == call["arguments"]
    assert not any("tool_calls" in delta for delta in deltas)
    assert chunks[-1]["choices"][0]["finish_reason"] == "function_call"
    said += [choices[1]["message"], {"role": "function", "name": "look", "content": "seen"}]
    refused = await ask(tiny.app, CHAT, old | {"function_call": {"name": "other"}})
    assert (refused.status, "'other'" in refused.json()["error"]["message"]) == (400, True)
    after = await ask(tiny.app, CHAT, old | {"function_call": "none", "max_tokens": 3})
    assert after.json()["choices"][0]["finish_reason"] == "length"


def test_results_of_functions_belong_to_their_calls() -> None:
    call = {"name": "look", "arguments": "{}"}
    bodies = [
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "look", "content": "seen"},
    ]
    asked, result = messages_of([MessageBody.model_validate(each) for each in bodies])
    assert [(each.name, each.arguments) for each in asked.tool_calls] == [("look", "{}")]
    assert (result.role, result.content, result.name) == ("tool", "seen", "look")
    assert result.tool_call_id == asked.tool_calls[0].id
