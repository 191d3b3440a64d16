"""Chat Completions and Completions on a tiny model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from akunu_py.types import Answer, GenerateOptions, Message, SamplingOptions
from tests.support.serving import Served, fetch

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
    requested = GenerateOptions(
        max_tokens=options.pop("max_tokens", 16),
        draft="off",
        sampling=SamplingOptions(**sampling),
        **options,
    )
    answer: Answer = model.in_thread(
        lambda engine: Session(engine).generate(prompt(engine), requested).answer()
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
    tiny: Served, system: str, text: str, sampling: dict[str, Any], seed: int, count: int
) -> None:
    """Each choice has its own seed."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    body = {"messages": messages, "seed": seed, "n": count, **sampling}
    turns = [Message("system", system), Message("user", text)]
    expected = [
        run(
            tiny,
            lambda engine: engine.tokens.encode_chat(turns),
            sampling | {"seed": seed + number},
        )
        for number in range(count)
    ]
    whole = (await fetch(tiny.app, CHAT, body)).json()
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert texts == [answer.text for answer in expected]
    assert whole["usage"]["completion_tokens"] == sum(len(answer.tokens) for answer in expected)
    assert whole["usage"]["prompt_tokens"] == expected[0].stats.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
@settings(max_examples=2)
@given(prompts=st.lists(WORDS, min_size=1, max_size=3), as_tokens=st.booleans())
async def test_completions_of_several_prompts(
    tiny: Served, prompts: list[str], as_tokens: bool, echo: bool, stream: bool
) -> None:
    expected = [(prompt if echo else "") + continued(tiny, prompt).text for prompt in prompts]
    given = [encode(tiny, prompt) for prompt in prompts]
    body = {"prompt": given if as_tokens else prompts, "max_tokens": 6, "echo": echo}
    if not stream:
        whole = (await fetch(tiny.app, COMPLETIONS, body)).json()
        assert [choice["text"] for choice in whole["choices"]] == expected
        return
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = (await fetch(tiny.app, COMPLETIONS, body | options)).chunks()
    texts = [""] * len(prompts)
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == expected
    assert chunks[-1]["usage"]["prompt_tokens"] == sum(map(len, given))


async def test_suffix_uses_fill_in_the_middle_format(tiny: Served) -> None:
    prompt = "<|fim_prefix|>def f(<|fim_suffix|>):<|fim_middle|>"
    ends = encode(tiny, "<|fim_prefix|><|file_sep|>")
    plain = {"prompt": prompt, "max_tokens": 8, "stop_token_ids": ends}
    body = {"prompt": "def f(", "suffix": "):", "max_tokens": 8}
    found, expected = [(await fetch(tiny.app, COMPLETIONS, each)).json() for each in (body, plain)]
    assert found["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
    assert found["choices"] == expected["choices"]


async def test_prediction_saves_steps_and_changes_no_text(tiny: Served) -> None:
    body = {"messages": [{"role": "user", "content": "say it"}], "max_tokens": 40}
    plain = (await fetch(tiny.app, CHAT, body)).json()
    text = plain["choices"][0]["message"]["content"]
    other = {"messages": [{"role": "user", "content": "another"}], "max_tokens": 1}
    await fetch(tiny.app, CHAT, other)
    parts = [{"type": "text", "text": text[:15]}, {"type": "text", "text": text[15:]}]
    for content in (text, parts):
        prediction = {"prediction": {"type": "content", "content": content}}
        drafted = (await fetch(tiny.app, CHAT, body | prediction)).json()
        assert drafted["choices"] == plain["choices"]
        assert drafted["akunu"]["accepted"] > plain["akunu"]["accepted"]


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(tiny: Served, stream: bool) -> None:
    more = {"max_tokens": 6, "stream": stream}
    messages = [{"role": "user", "content": "x"}]
    chat = await fetch(
        tiny.app, CHAT, {"messages": messages, "logprobs": True, "top_logprobs": 2} | more
    )
    plain = await fetch(tiny.app, COMPLETIONS, {"prompt": "x", "logprobs": 2} | more)
    choices = [
        [choice for chunk in chunks for choice in chunk["choices"]]
        for chunks in ([each.chunks() if stream else [each.json()] for each in (chat, plain)])
    ]
    found_logprobs = [choice["logprobs"] for choice in choices[0] if choice["logprobs"]]
    found = [token for each in found_logprobs for token in each["content"]]
    assert len(found) == 6
    for each in found:  # greedy
        assert each["token"] == each["top_logprobs"][0]["token"]
        assert each["logprob"] == each["top_logprobs"][0]["logprob"] <= 0
        assert len(each["top_logprobs"]) == 2
    found_logprobs = [choice["logprobs"] for choice in choices[1] if choice["logprobs"]]
    tokens = [token for each in found_logprobs for token in each["tokens"]]
    text = "".join(choice["text"] for choice in choices[1])
    offsets = [offset for each in found_logprobs for offset in each["text_offset"]]
    assert "".join(tokens) == text
    assert [text[at:][: len(token)] for at, token in zip(offsets, tokens, strict=True)] == tokens


async def test_listing_models_does_not_load_the_model(tiny: Served) -> None:
    """Programs that poll the list must not reload a model that was unloaded when idle."""
    names, options = ("tiny", "alias"), tiny.options
    pool = ModelPool([ServedModel(names, never_load, options.service, context_length=64)])
    app = create_app(options.backend(pool, RequestRecords()), AccessRules())
    [listed] = (await fetch(app, "/v1/models")).json()["data"]
    assert (listed["id"], listed["state"], listed["context_length"]) == ("tiny", "unloaded", 64)
    assert (await fetch(app, "/v1/models/alias")).json() == listed
    assert (await fetch(app, "/v1/models/other")).status == 404
    assert (await fetch(app, "/health")).status == 200
    assert pool.models[0].host.state == "unloaded"


def never_load(reserved: int) -> ModelLoop:
    raise AssertionError("loaded")


NAMED = {"name": "look"}
FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"const": "x"}},
            "required": ["at"], "additionalProperties": False}}  # fmt: skip


async def test_functions_are_the_older_form_of_tools(tiny: Served) -> None:
    """The same prompt and call as with tools; the reply has `function_call`."""
    turns: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
    spaces = dict.fromkeys(map(str, encode(tiny, " \n\t\r")), -99)
    common = {"messages": turns, "max_tokens": 99, "logit_bias": spaces}
    tool = {"type": "function", "function": FUNCTION}
    new = common | {"tools": [tool], "tool_choice": {"type": "function", "function": NAMED}}
    old = common | {"functions": [FUNCTION], "function_call": NAMED}
    replies = [(await fetch(tiny.app, CHAT, body)).json() for body in (new, old)]
    choices = [reply["choices"][0] for reply in replies]
    call = choices[0]["message"]["tool_calls"][0]["function"]
    assert choices[1]["message"]["function_call"] == call
    assert "tool_calls" not in choices[1]["message"]
    assert [each["finish_reason"] for each in choices] == ["tool_calls", "function_call"]
    assert replies[0]["usage"]["prompt_tokens"] == replies[1]["usage"]["prompt_tokens"]
    chunks = (await fetch(tiny.app, CHAT, old | {"stream": True})).chunks()
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    parts = [delta["function_call"] for delta in deltas if "function_call" in delta]
    assert parts[0] == {"name": "look", "arguments": ""}
    assert "".join(part["arguments"] for part in parts) == call["arguments"]
    assert not any("tool_calls" in delta for delta in deltas)
    assert chunks[-1]["choices"][0]["finish_reason"] == "function_call"
    turns += [choices[1]["message"], {"role": "function", "name": "look", "content": "seen"}]
    after = await fetch(tiny.app, CHAT, old | {"function_call": "none", "max_tokens": 3})
    assert after.json()["choices"][0]["finish_reason"] == "length"
