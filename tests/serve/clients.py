"""Clients as their packages are used: each streams an answer that calls a tool, and the answer to
its result. Run by `record.py`, with the Python that has the packages: clients.py CLIENT URL MODEL.
"""

# mypy: ignore-errors
# The packages are no dependencies, so their types are not known here.
from __future__ import annotations

import json
import sys
from typing import Any

CITIES = ["Paris", "Rome"]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": CITIES, "description": "Where"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": "The weather in a city.", "parameters": SCHEMA}
WEATHER |= {"strict": True}
NAMED = {"type": "function", "function": {"name": "weather"}}
FUNCTION = {"type": "function", "function": WEATHER}
QUESTION = "What is the weather in Paris?"
RESULT = "18 degrees, light rain"


def openai(url: str, model: str) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    assert client.models.list().data[0].id == model
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with client.chat.completions.stream(
        model=model, messages=messages, tools=[FUNCTION], tool_choice=NAMED, max_tokens=64,
        stream_options={"include_usage": True},
    ) as stream:  # fmt: skip
        for _ in stream:
            pass
        answer = stream.get_final_completion()
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in CITIES
    assert answer.usage.prompt_tokens > 0
    messages += [answer.choices[0].message]
    messages += [{"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    whole = client.chat.completions.create(model=model, messages=messages, max_tokens=8)
    assert whole.choices[0].finish_reason in ("stop", "length")
    done = client.completions.create(model=model, prompt="def f(", max_tokens=4, stream=True)
    assert [*done][-1].choices[0].finish_reason in ("stop", "length")


def openai_responses(url: str, model: str) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    tools: list[Any] = [{"type": "function", **WEATHER}]
    common: dict[str, Any] = {"model": model, "instructions": "Be short.", "tools": tools}
    named: Any = {"type": "function", "name": "weather"}
    with client.responses.stream(
        input=turns, max_output_tokens=64, tool_choice=named, **common
    ) as stream:
        names = [event.type for event in stream]
        answer = stream.get_final_response()
    assert "response.function_call_arguments.delta" in names
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert json.loads(call.arguments)["city"] in CITIES
    turns += answer.output
    turns += [{"type": "function_call_output", "call_id": call.call_id, "output": RESULT}]
    whole = client.responses.create(input=turns, max_output_tokens=8, store=False, **common)
    assert whole.status in ("completed", "incomplete")
    assert whole.usage.input_tokens_details.cached_tokens > 0
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "a" | "b"'}
    common["tools"] = [{"type": "custom", "name": "patch", "format": grammar}]
    named = {"type": "custom", "name": "patch"}
    with client.responses.stream(
        input="Change it.", max_output_tokens=64, tool_choice=named, **common
    ) as stream:
        (call,) = stream.get_final_response().output
    assert (call.type, call.input in ("a", "b")) == ("custom_tool_call", True)


def anthropic(url: str, model: str) -> None:
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key="none", max_retries=0)
    tool: Any = {"name": "weather", "input_schema": SCHEMA, "strict": True}
    system: Any = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    common: dict[str, Any] = {"model": model, "system": system, "tools": [tool]}
    counted = client.messages.count_tokens(messages=messages, **common).input_tokens
    named: Any = {"type": "tool", "name": "weather"}
    with client.messages.stream(
        max_tokens=64, messages=messages, tool_choice=named, **common
    ) as stream:
        answer = stream.get_final_message()
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == "tool_use"
    assert call.input["city"] in CITIES
    result = {"type": "tool_result", "tool_use_id": call.id, "content": RESULT}
    messages += [{"role": "assistant", "content": answer.content}]
    messages += [{"role": "user", "content": [result]}]
    whole = client.messages.create(max_tokens=8, messages=messages, **common)
    assert whole.stop_reason in ("end_turn", "max_tokens")
    assert whole.usage.cache_read_input_tokens > 0


def ollama(url: str, model: str) -> None:
    from ollama import Client

    client = Client(host=url)
    assert client.generate(model=model).done_reason == "load"
    assert client.list().models[0].model == client.ps().models[0].model == model
    assert "tools" in client.show(model).capabilities
    options: dict[str, Any] = {"num_predict": 64, "temperature": 0, "seed": 1}
    common: dict[str, Any] = {"model": model, "tools": [FUNCTION], "options": options}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    parts = [*client.chat(messages=messages, stream=True, **common)]
    (call,) = [each for part in parts for each in part.message.tool_calls or ()]
    assert call.function.arguments["city"] in CITIES
    assert parts[-1].done_reason == "stop"
    messages += [{"role": "assistant", "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_name": call.function.name, "content": RESULT}]
    whole = client.chat(messages=messages, think=False, keep_alive="5m", **common)
    assert whole.done_reason in ("stop", "length")
    schema = {"type": "object", "properties": {"city": {"enum": CITIES}}, "required": ["city"]}
    schema |= {"additionalProperties": False}
    found = client.chat(model=model, messages=messages[:1], format=schema, options=options)
    assert json.loads(found.message.content)["city"] in CITIES
    done = client.generate(model=model, prompt="def f(", raw=True, options={"num_predict": 4})
    assert done.eval_count <= 4


def litellm(url: str, model: str) -> None:
    import litellm

    for name, base in ((f"openai/{model}", f"{url}/v1"), (f"anthropic/{model}", url)):
        common: dict[str, Any] = {"model": name, "api_base": base, "api_key": "none"}
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        chunks = litellm.completion(
            messages=messages, tools=[FUNCTION], tool_choice=NAMED, stream=True, max_tokens=64,
            **common,
        )  # fmt: skip
        answer = litellm.stream_chunk_builder([*chunks]).choices[0].message
        (call,) = answer.tool_calls
        assert json.loads(call.function.arguments)["city"] in CITIES
        messages += [answer.model_dump(exclude_none=True)]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": RESULT}]
        whole = litellm.completion(messages=messages, tools=[FUNCTION], max_tokens=8, **common)
        assert whole.choices[0].finish_reason in ("stop", "length")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
