"""Clients as their packages are used: each streams an answer that calls a tool, and the answer to
its result. Run by `record.py`, with the Python that has the packages: clients.py CLIENT URL MODEL.
"""

# mypy: ignore-errors
# The packages are no dependencies, so their types are not known here.
from __future__ import annotations

import json
import sys
from typing import Any

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Where"}},
    "required": ["city"],
}
WEATHER = {"name": "weather", "description": "The weather in a city.", "parameters": SCHEMA}
FUNCTION = {"type": "function", "function": WEATHER}
QUESTION = "What is the weather in Paris?"
RESULT = "18 degrees, light rain"


def openai(url: str, model: str) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    assert client.models.list().data[0].id == model
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with client.chat.completions.stream(
        model=model, messages=messages, tools=[FUNCTION], max_tokens=64,
        stream_options={"include_usage": True},
    ) as stream:  # fmt: skip
        for _ in stream:
            pass
        answer = stream.get_final_completion()
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert answer.usage.prompt_tokens > 0
    messages += [answer.choices[0].message.model_dump(exclude_none=True, exclude={"parsed"})]
    messages += [{"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    whole = client.chat.completions.create(model=model, messages=messages, max_tokens=8)
    assert whole.choices[0].finish_reason in ("stop", "length")
    done = client.completions.create(model=model, prompt="def f(", max_tokens=4, stream=True)
    assert [*done][-1].choices[0].finish_reason in ("stop", "length")


def openai_responses(url: str, model: str) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked: list[Any] = [{"role": "user", "content": QUESTION}]
    tools: list[Any] = [{"type": "function", "strict": True, **WEATHER}]
    common: dict[str, Any] = {"model": model, "instructions": "Be short.", "tools": tools}
    with client.responses.stream(input=asked, max_output_tokens=64, **common) as stream:
        names = [event.type for event in stream]
        answer = stream.get_final_response()
    assert "response.function_call_arguments.delta" in names
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"city": "Paris"}
    asked += [item.to_dict() for item in answer.output]
    for item in asked:
        item.pop("parsed_arguments", None)
    asked += [{"type": "function_call_output", "call_id": call.call_id, "output": RESULT}]
    whole = client.responses.create(input=asked, max_output_tokens=8, store=False, **common)
    assert whole.status in ("completed", "incomplete")
    assert whole.usage.input_tokens_details.cached_tokens > 0
    common["tools"] = [{"type": "custom", "name": "patch", "description": "Changes a file."}]
    with client.responses.stream(input="Change a file.", max_output_tokens=64, **common) as stream:
        (call,) = stream.get_final_response().output
    assert (call.type, call.input) == ("custom_tool_call", "*** Begin Patch\n")


def anthropic(url: str, model: str) -> None:
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key="none", max_retries=0)
    tool: Any = {"name": "weather", "description": "The weather in a city.", "input_schema": SCHEMA}
    system: Any = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    common: dict[str, Any] = {"model": model, "system": system, "tools": [tool]}
    counted = client.messages.count_tokens(messages=messages, **common).input_tokens
    with client.messages.stream(max_tokens=64, messages=messages, **common) as stream:
        answer = stream.get_final_message()
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert (answer.stop_reason, call.input) == ("tool_use", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": RESULT}
    messages += [{"role": "assistant", "content": answer.content}]
    messages += [{"role": "user", "content": [result]}]
    whole = client.messages.create(max_tokens=8, messages=messages, **common)
    assert whole.stop_reason in ("end_turn", "max_tokens")
    assert whole.usage.cache_read_input_tokens > 0


def litellm(url: str, model: str) -> None:
    import litellm

    for name, base in ((f"openai/{model}", f"{url}/v1"), (f"anthropic/{model}", url)):
        common: dict[str, Any] = {"model": name, "api_base": base, "api_key": "none"}
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        chunks = litellm.completion(
            messages=messages, tools=[FUNCTION], stream=True, max_tokens=64, **common
        )
        answer = litellm.stream_chunk_builder([*chunks]).choices[0].message
        (call,) = answer.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Paris"}
        messages += [answer.model_dump(exclude_none=True)]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": RESULT}]
        whole = litellm.completion(messages=messages, tools=[FUNCTION], max_tokens=8, **common)
        assert whole.choices[0].finish_reason in ("stop", "length")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
