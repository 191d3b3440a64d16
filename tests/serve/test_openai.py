"""Chat Completions and Completions on a tiny model."""

import json
from functools import partial
from typing import Any

import pytest

from akunu_py.engine.job import ModelLoop
from akunu_py.serve.dialect.bodies import parse
from akunu_py.serve.dialect.fields import generate_options
from akunu_py.serve.http.model_pool import ModelPool, ServedModel
from akunu_py.serve.openai import ChatBody
from akunu_py.types import SamplingOptions
from tests.support.dialects import DIALECTS, DialectRequest
from tests.support.serving import Served, fetch

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TURNS = [{"role": "user", "content": "x"}]


def encode(model: Served, text: str) -> list[int]:
    return list(model.in_thread(lambda engine: engine.tokens.encode(text)))


async def test_sampling_fields_set_the_options(tiny: Served) -> None:
    """Each choice has its own seed. Choices share passes."""
    fields: dict[str, Any] = {"temperature": 0.8, "top_p": 0.5, "top_k": 20, "min_p": 0.1}
    fields |= {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.2}
    body = {"messages": TURNS, "max_tokens": 7} | fields
    parsed = parse(json.dumps(body).encode(), ChatBody)
    options = generate_options(parsed, tiny.model.service(), 7)
    assert options.sampling == SamplingOptions(**fields)
    before = tiny.scheduler.shared.requests
    tiny.block_until_queued(2)
    both, *each = [
        (await fetch(tiny.app, CHAT, body | more)).json()
        for more in ({"seed": 5, "n": 2}, {"seed": 5}, {"seed": 6})
    ]
    assert tiny.scheduler.shared.requests > before
    texts = [choice["message"]["content"] for choice in both["choices"]]
    assert texts == [reply["choices"][0]["message"]["content"] for reply in each]
    assert texts[0] != texts[1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("as_tokens", [False, True])
async def test_completions_of_several_prompts(
    tiny: Served, as_tokens: bool, echo: bool, stream: bool
) -> None:
    prompts, dialect = ("abc", "de\nde ", "a"), DIALECTS["completions"]
    requests = [DialectRequest((prompt,), 6) for prompt in prompts]
    answers = [tiny.in_thread(partial(dialect.expected, request)) for request in requests]
    given = [encode(tiny, prompt) for prompt in prompts]
    body = {"prompt": given if as_tokens else prompts, "max_tokens": 6, "echo": echo}
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    whole = dialect.whole(await fetch(tiny.app, COMPLETIONS, body | more))
    expected = [echo * text + answer.text for text, answer in zip(prompts, answers, strict=True)]
    assert [choice["text"] for choice in whole["choices"]] == expected
    assert whole["usage"]["prompt_tokens"] == sum(map(len, given))


async def test_suffix_uses_fill_in_the_middle_format(tiny: Served) -> None:
    prompt = "<|fim_prefix|>def f(<|fim_suffix|>):<|fim_middle|>"
    ends = encode(tiny, "<|fim_prefix|><|file_sep|>")
    plain = {"prompt": prompt, "max_tokens": 8, "stop_token_ids": ends}
    body = {"prompt": "def f(", "suffix": "):", "max_tokens": 8}
    found, expected = [(await fetch(tiny.app, COMPLETIONS, each)).json() for each in (body, plain)]
    assert found["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
    assert found["choices"] == expected["choices"]


async def test_prediction_saves_steps_and_changes_no_text(tiny: Served) -> None:
    app = tiny.app_with_draft("fixed")  # with "auto", a busy machine may draft less
    body = {"messages": [{"role": "user", "content": "say it"}], "max_tokens": 40}
    plain = (await fetch(app, CHAT, body)).json()
    text = plain["choices"][0]["message"]["content"]
    other = {"messages": [{"role": "user", "content": "another"}], "max_tokens": 1}
    await fetch(app, CHAT, other)
    parts = [{"type": "text", "text": text[:15]}, {"type": "text", "text": text[15:]}]
    accepted = []
    for content in (text, parts):
        prediction = {"prediction": {"type": "content", "content": content}}
        drafted = (await fetch(app, CHAT, body | prediction)).json()
        assert drafted["choices"] == plain["choices"]
        accepted.append(drafted["akunu"]["accepted"])
    assert min(accepted) > plain["akunu"]["accepted"]


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(tiny: Served, stream: bool) -> None:
    more = {"max_tokens": 6, "stream": stream}
    top = {"messages": TURNS, "logprobs": True, "top_logprobs": 2}
    chat = await fetch(tiny.app, CHAT, top | more)
    plain = await fetch(tiny.app, COMPLETIONS, {"prompt": "x", "logprobs": 2} | more)
    for reply in (chat, plain):  # usage in a stream is optional
        assert not stream or all("usage" not in chunk for chunk in reply.chunks())
    found = DIALECTS["chat"].whole(chat)["choices"][0]["logprobs"]["content"]
    assert len(found) == 6
    for each in found:  # greedy
        assert each["token"] == each["top_logprobs"][0]["token"]
        assert each["logprob"] == each["top_logprobs"][0]["logprob"] <= 0
        assert len(each["top_logprobs"]) == 2
    (choice,) = DIALECTS["completions"].whole(plain)["choices"]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert "".join(tokens) == (text := choice["text"])
    assert [text[at:][: len(token)] for at, token in zip(offsets, tokens, strict=True)] == tokens


async def test_listing_models_does_not_load_the_model(tiny: Served) -> None:
    """Programs that poll the list must not reload a model that was unloaded when idle."""
    names, options = ("tiny", "alias"), tiny.options
    pool = ModelPool([ServedModel(names, never_load, options.service, context_length=64)])
    app = tiny.application(pool=pool)
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
    turns: list[dict[str, Any]] = [*TURNS]
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
