"""Promises that hold in every dialect, on a tiny model: the same text as a session without drafts,
cached prompts, structured answers, continued answers."""

import asyncio
import itertools
import random
from functools import partial
from typing import Any

import pytest

from akunu_py.serve.http.guard import IGNORED_HEADER
from akunu_py.serve.ollama import OllamaGenerateBody
from akunu_py.types import DraftMode, Message
from tests.support.dialects import CONVERSATIONS, DIALECTS, DialectClient, DialectRequest, ReplyData
from tests.support.serving import Served, fetch

DRAFTS: tuple[DraftMode, ...] = ("off", "fixed", "auto")
SEEDS = [(0.0, 0), (0.9, 1), (0.9, 2**32 - 1)]
MODES = [*itertools.product((False, True), DRAFTS)]  # streamed or not, with drafts or without
USER = {"role": "user", "content": "x"}


def new_request(dialect: DialectClient, rng: random.Random, draft: DraftMode) -> DialectRequest:
    """Return a request that no other test sends; the answer cache would answer it."""
    temperature, seed = rng.choice(SEEDS) if dialect.seeded else SEEDS[0]
    text = "".join(rng.choices("ab(\n", k=rng.randrange(1, 30))) * 2
    return DialectRequest((f"{text}x{rng.random()}",), 16, temperature, seed, draft)


@pytest.mark.long
@pytest.mark.parametrize("name", DIALECTS)
async def test_text_equals_run_without_drafts(tiny: Served, name: str) -> None:
    """Streamed or not, with and without drafts, alone and in a batch with other clients."""
    rng, dialect = random.Random(f"{name} 1"), DIALECTS[name]

    def expected(draft: DraftMode) -> tuple[DialectRequest, ReplyData]:
        request = new_request(dialect, rng, draft)
        return request, tiny.in_thread(partial(dialect.expected, request))

    async def send(stream: bool, request: DialectRequest, expected: ReplyData) -> int:
        """Check the reply to a request and return its drafted tokens."""
        body = dialect.request_body(request, stream=stream)
        reply = dialect.parse(await fetch(tiny.app_with_draft(request.draft), dialect.path, body))
        assert (reply.text, reply.prompt) == (expected.text, expected.prompt)
        return reply.drafted

    before = tiny.model.host.shared.passes
    for stream in (False, True):
        for _ in range(8):  # answers may end before their first draft
            if await send(stream, *expected("fixed")):
                break
        else:
            pytest.fail("no draft")
    assert tiny.model.host.shared.passes == before
    requests = [(stream, *expected(draft)) for stream, draft in MODES]
    tiny.block_until_queued(len(MODES))
    drafted = await asyncio.gather(*itertools.starmap(send, requests))
    assert tiny.model.host.shared.passes > before
    # The measured costs decide which drafts shared passes have, with "fixed" too.
    modes = [draft for _, draft in MODES]
    assert [count for count, draft in zip(drafted, modes, strict=True) if draft == "off"] == [0, 0]


@pytest.mark.parametrize("name", CONVERSATIONS)
async def test_turn_prefills_only_new_tokens(tiny: Served, name: str) -> None:
    dialect, turns = DIALECTS[name], (f"{name} and more ", "yes", "why?")
    first, second = [
        dialect.parse(
            await fetch(tiny.app, dialect.path, dialect.request_body(request, stream=False))
        )
        for request in (DialectRequest(turns[:1], 1), DialectRequest(turns, 1))
    ]
    assert second.prompt > second.cached >= first.prompt


async def test_count_tokens_equals_usage(tiny: Served) -> None:
    body: dict[str, Any] = {"model": "alias", "system": "be brief"}
    body["messages"] = [{"role": "user", "content": "a b\n"}]
    counted = (await fetch(tiny.app, "/v1/messages/count_tokens", body)).json()
    used = (await fetch(tiny.app, "/v1/messages", body | {"max_tokens": 3})).json()["usage"]
    assert counted == {"input_tokens": used["input_tokens"] + used["cache_read_input_tokens"]}
    assert used["output_tokens"] == 3


SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}
SCHEMA |= {"additionalProperties": False}
FORM = {"type": "json_schema", "schema": SCHEMA}
NAMED_FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
COMPACT = {"structured_outputs": {"disable_any_whitespace": True}}
WORDS = ("left", "right")
JSON = ('{"a":"b"}',)


@pytest.mark.parametrize(("name", "more", "answers"), [
    ("chat", {"response_format": NAMED_FORM}, JSON),
    ("chat", COMPACT | {"response_format": NAMED_FORM}, JSON),
    ("chat", {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, JSON),
    ("chat", {"guided_choice": WORDS}, WORDS),
    ("chat", {"structured_outputs": {"choice": WORDS}}, WORDS),
    ("chat", {"guided_regex": "left|right"}, WORDS),
    ("chat", {"guided_grammar": 'start: "left" | "right"'}, WORDS),
    ("responses", {"text": {"format": FORM | {"name": "n", "strict": True}}}, JSON),
    ("messages", {"output_config": {"format": FORM}}, JSON),
    ("messages", {"output_format": FORM}, JSON),
    ("ollama chat", {"format": SCHEMA}, JSON),
    ("ollama chat", {"format": {"enum": ["yes", "no"]}}, ('"yes"', '"no"')),
])  # fmt: skip
async def test_structured_answers(
    tiny: Served, name: str, more: dict[str, Any], answers: tuple[str, ...]
) -> None:
    spaces = tiny.in_thread(lambda engine: engine.tokens.encode(" \n\t\r"))
    fields = {"logit_bias": dict.fromkeys(map(str, spaces), -99.0)}
    body = DIALECTS[name].request_body(DialectRequest(("x",), 60), stream=False)
    if name == "ollama chat":
        body["options"] |= fields
    else:
        body |= {} if more.keys() & COMPACT.keys() else fields
    data = DIALECTS[name].parse(await fetch(tiny.app, DIALECTS[name].path, body | more))
    assert data.text in answers
    assert data.reason in ("stop", "end_turn", "completed")


async def test_a_custom_tool_takes_input_of_its_grammar(tiny: Served) -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** " ("x" | "y")'}
    body = {
        "model": "alias",
        "input": "x",
        "tools": [{"type": "custom", "name": "patch", "format": grammar}],
        "tool_choice": {"type": "custom", "name": "patch"},
    }
    for stream in (False, True):
        reply = await fetch(tiny.app, "/v1/responses", body | {"stream": stream})
        (item,) = DIALECTS["responses"].whole(reply)["output"]
        assert (item["type"], item["status"]) == ("custom_tool_call", "completed")
        assert item["input"] in ("*** x", "*** y")


BEGUN = [USER, {"role": "assistant", "content": "Once upon "}]


@pytest.mark.parametrize("name", ["chat", "messages", "responses", "ollama chat"])
@pytest.mark.parametrize("turns", [BEGUN, BEGUN[:1]], ids=["answer", "question"])
async def test_an_answer_at_the_end_is_continued(
    tiny: Served, name: str, turns: list[dict[str, Any]]
) -> None:
    dialect = DIALECTS[name]
    body = dialect.request_body(DialectRequest(("x",), 9), stream=False)
    body |= {"input" if name == "responses" else "messages": turns}
    plain = dialect.parse(await fetch(tiny.app, dialect.path, body)).text
    messages = [Message(turn["role"], turn["content"]) for turn in turns]
    prompt = tiny.in_thread(lambda engine: engine.tokens.encode_chat(messages))
    completion = DIALECTS["completions"].request_body(DialectRequest((), 9), stream=False)
    reply = await fetch(tiny.app, "/v1/completions", completion | {"prompt": prompt})
    assert DIALECTS["completions"].parse(reply).text == plain


async def test_options_of_ollama(tiny: Served) -> None:
    body = {"model": "alias", "messages": [USER], "options": {"num_predict": 3, "num_ctx": 64}}
    reply = await fetch(tiny.app, "/api/chat", body)
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert reply.headers[IGNORED_HEADER] == "options.num_ctx"
    data = DIALECTS["ollama chat"].parse(reply)
    assert (data.reason, data.generated) == ("length", 3)
    top = {"prompt": "x", "logprobs": True, "top_logprobs": 2, "stream": False}
    answer = (await fetch(tiny.app, "/api/generate", top)).json()
    assert len(answer["logprobs"]) == answer["eval_count"]
    assert len(answer["logprobs"][0]["top_logprobs"]) == 2
    for path in ("/api/chat", "/api/generate"):  # without a prompt, they load the model
        answer = (await fetch(tiny.app, path, {"model": "alias", "keep_alive": 60})).json()
        assert (answer["done"], answer["done_reason"]) == (True, "load")
    nulls = dict.fromkeys(OllamaGenerateBody.model_fields) | {"prompt": "x"}
    assert (await fetch(tiny.app, "/api/generate", nulls)).status == 200
    system = {"prompt": "x", "system": "s", "options": {"num_predict": 2}, "stream": False}
    with_system, images, raw, infill = [
        DIALECTS["ollama generate"].parse(await fetch(tiny.app, "/api/generate", system | more))
        for more in ({}, {"system": "", "images": ["aaaa"]}, {"raw": True}, {"suffix": ")"})
    ]
    turns = [{"role": "system", "content": "s"}, USER]
    chat = {"messages": turns, "max_tokens": 2}
    expected = DIALECTS["chat"].parse(await fetch(tiny.app, "/v1/chat/completions", chat))
    assert (with_system.text, with_system.prompt) == (expected.text, expected.prompt)
    assert raw.prompt == 1
    assert infill.prompt == len("x)") + 3  # and three markers
    assert images.prompt > with_system.prompt


async def test_the_text_around_a_gap_is_cut_to_the_context(tiny: Served) -> None:
    context = tiny.in_thread(lambda engine: engine.plan.context_length)
    for before, after in itertools.product((1, context), (1, context)):
        body = {"prompt": "x\n" * before, "suffix": "y\n" * after, "max_tokens": 2}
        reply = DIALECTS["completions"].parse(await fetch(tiny.app, "/v1/completions", body))
        assert reply.prompt < context
        assert before + after == 2 or reply.prompt > context // 2


@pytest.mark.parametrize("stream", [False, True])
async def test_infill_ends_at_stop_texts_and_limits(tiny: Served, stream: bool) -> None:
    """The time limit applies once the completion has a line break."""

    async def infill(**more: Any) -> ReplyData:
        body = {"input_prefix": "def f(", "n_predict": 24, "stream": stream, **more}
        return DIALECTS["infill"].parse(await fetch(tiny.app, "/infill", body))

    rng, expected = random.Random(1), ""
    while len(expected) < 4 or "\n" in expected:
        prompt = "".join(rng.choices("ab(\n", k=9))
        expected = (await infill(prompt=prompt)).text
    stop = expected[2:4]
    ended = await infill(prompt=prompt, stop=[stop, ""])
    assert (ended.text, ended.reason) == (expected[: expected.index(stop)], "word")
    assert (await infill(prompt=prompt, t_max_predict_ms=0)).text == expected
    nothing = await infill(n_predict=0, input_prefix="class A")
    assert (nothing.text, nothing.generated) == ("", 0)


async def test_paths_for_get(tiny: Served) -> None:
    name = tiny.model.name
    tiny.model.service()
    paths = ("/v1/models", f"/v1/models/{name}", "/api/tags", "/api/ps", "/api/version", "/health")
    for path in paths:
        reply = await fetch(tiny.app, path)
        assert (reply.status, reply.headers["content-type"]) == (200, "application/json"), path
    assert (await fetch(tiny.app, f"/v1/models/{name}")).json()["id"] == name
    for path in ("/", "/metrics"):
        for method in ("GET", "HEAD"):  # as Ollama's own program does
            reply = await fetch(tiny.app, path, method=method)
            assert reply.status == 200
            assert reply.headers["content-type"].startswith("text/plain;")
    described = (await fetch(tiny.app, "/openapi.json")).json()["paths"]
    posts = {path for path, methods in described.items() if "post" in methods}
    assert {dialect.path for dialect in DIALECTS.values()} <= posts
    assert {"/v1/models", "/api/ps"} <= {*described} - posts
    for path in ("/api/tags", "/api/ps"):
        (listed,) = (await fetch(tiny.app, path)).json()["models"]
        assert listed["model"] == name
        assert len(listed["digest"]) == 64
        assert "size" not in listed  # unknown
    version = (await fetch(tiny.app, "/api/version")).json()["version"]
    assert [*map(int, version.split("."))] >= [0, 6, 4]  # Copilot's minimum
    assert (await fetch(tiny.app, "/api/show", {"name": "none"})).status == 404
    shown = (await fetch(tiny.app, "/api/show", {"model": name})).json()
    assert shown["model_info"]["mlx.context_length"] == 4096
    assert shown["capabilities"] == ["completion", "tools"]
