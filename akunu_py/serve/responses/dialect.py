"""Responses: the endpoint, and jobs from bodies. The server stores no responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from akunu_py.decoding.constraint.matcher import compile_constraint, matches
from akunu_py.decoding.scheduling.job import chat_job, text_job
from akunu_py.serve.dialect.bodies import BETWEEN, joined
from akunu_py.serve.dialect.errors import RequestError, invalid
from akunu_py.serve.dialect.interface import Dialect, Endpoint, Prepared
from akunu_py.serve.dialect.sampling import (
    JSON_OBJECT,
    SamplingBody,
    effort_variables,
    generate_options,
    schema_constraint,
)
from akunu_py.serve.dialect.service import Service, check_model
from akunu_py.serve.openai.shapes import error_body
from akunu_py.serve.responses.bodies import (
    CustomToolCallItem,
    FunctionCallItem,
    InputItem,
    ItemOther,
    ItemRefusal,
    ItemText,
    MessageItem,
    OutputItem,
    ReasoningItem,
    ResponsesBody,
)
from akunu_py.serve.responses.reply import (
    ResponseContext,
    ResponseEncoder,
    unsealed,
    whole_response,
)
from akunu_py.serve.responses.tools import as_arguments, dictated_job, known_name, offered_tools
from akunu_py.types import Constraint, Message, ToolCall

_SEALED = "reasoning.encrypted_content"
# Accepted without effect: results of tools that servers run.
_UNUSED = ("web_search_call.", "file_search_call.", "code_interpreter_call.", "computer_call")
_STATEFUL = "responses are not stored; send the whole conversation as input"


def prepare_response(body: ResponsesBody, service: Service) -> Prepared:
    """Return the job and the encoder. Raises RequestError."""
    check_model(body.model, service.names)
    _refuse(body)
    tools = offered_tools(body.tools or [], body.tool_choice)
    for offered in tools.by_name.values():
        if offered.grammar is not None:
            compile_constraint(service.engine.tokens, offered.grammar)  # raises if invalid
    sampling = SamplingBody(temperature=body.temperature, top_p=body.top_p, seed=body.seed)
    limit = body.max_output_tokens or service.most_tokens
    dictated, constraint = tools.dictated, _constraint(body)
    grammar = dictated.grammar if dictated else constraint
    options = generate_options(sampling, service, limit, grammar)
    engine, messages = service.engine, messages_of(body)
    effort = body.reasoning.effort if body.reasoning else None
    variables = effort_variables(service, effort, "reasoning.effort")
    if dictated is not None:
        prompt = engine.tokens.encode_chat(messages, tools.tools, variables)
        job = dictated_job(text_job(prompt, options), dictated)
    else:
        job = chat_job(
            engine,
            messages,
            options,
            tools.tools,
            tools.choice,
            parallel=body.parallel_tool_calls is not False,
            variables=variables,
        )
    reply = ResponseContext(
        _repeated(body, service),
        tools,
        _SEALED in (body.include or ()),
        lambda text: len(engine.tokens.encode(text)),
        lambda grammar, text: matches(engine.tokens, grammar, text),
    )
    encoder = ResponseEncoder(reply) if body.stream else None
    return Prepared([job], lambda answers: whole_response(reply, answers), encoder)


def _refuse(body: ResponsesBody) -> None:
    """Raise RequestError for unsupported parameters."""
    refused = {
        "previous_response_id": (body.previous_response_id, _STATEFUL),
        "conversation": (body.conversation, _STATEFUL),
        "prompt": (body.prompt, "prompt templates are not stored"),
        "background": (body.background, "responses run only while the client is connected"),
        "context_management": (body.context_management, "inputs are never truncated"),
        "moderation": (body.moderation, "moderation is not available"),
        "top_logprobs": (body.top_logprobs, "log probabilities are not available"),
        "truncation": (body.truncation == "auto", "inputs are never truncated"),
    }
    for name, (value, reason) in refused.items():
        if value:
            raise RequestError(f"unsupported parameter: {name}: {reason}", param=name)
    for wanted in body.include or ():
        if wanted != _SEALED and not wanted.startswith(_UNUSED):
            raise invalid("include", f"{wanted[:100]} is not supported")


def _constraint(body: ResponsesBody) -> Constraint | None:
    wanted = body.text.format if body.text else None
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return JSON_OBJECT
    if wanted.schema_ is None:
        raise invalid("text.format.schema", "field required")
    return schema_constraint(wanted.schema_)


def _repeated(body: ResponsesBody, service: Service) -> dict[str, Any]:
    """Return the request's parameters that the response repeats."""
    sent = body.model_dump(mode="json", by_alias=True, exclude_unset=True)
    sampling = service.defaults.sampling
    given = {
        "temperature": sampling.temperature if body.temperature is None else body.temperature,
        "top_p": sampling.top_p if body.top_p is None else body.top_p,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
    }
    return {
        "model": service.name,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "previous_response_id": None,
        "reasoning": sent.get("reasoning") or {"effort": None, "summary": None},
        "store": False,
        "text": sent.get("text") or {"format": {"type": "text"}},
        "tool_choice": sent.get("tool_choice") or "auto",
        "tools": sent.get("tools") or [],
        "truncation": "disabled",
        **given,
    }


def messages_of(body: ResponsesBody) -> list[Message]:
    """Return the conversation. Raises RequestError for an unsupported item."""
    found = [Message("system", body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        return [*found, Message("user", body.input)]
    names: dict[str, str] = {}  # of tools, by the id of the call
    found += [_message(item, f"input.{number}", names) for number, item in enumerate(body.input)]
    return joined(found, "input")


def _message(item: InputItem, place: str, names: dict[str, str]) -> Message:
    if isinstance(item, MessageItem):
        role = "system" if item.role == "developer" else item.role
        return Message(role, _text(item.content, f"{place}.content"))
    if isinstance(item, FunctionCallItem | CustomToolCallItem):
        name = names[item.call_id] = known_name(item.name, item.namespace)
        written = item.arguments if isinstance(item, FunctionCallItem) else as_arguments(item.input)
        return Message("assistant", "", tool_calls=(ToolCall(name, written, item.call_id),))
    if isinstance(item, OutputItem):
        text = _text(item.output, f"{place}.output")
        return Message("tool", text, tool_call_id=item.call_id, name=names.get(item.call_id, ""))
    if isinstance(item, ReasoningItem):
        written = "".join(part.text for part in item.content or [])
        return Message("assistant", "", thinking=written or unsealed(item.encrypted_content or ""))
    if item.type == "item_reference":
        raise invalid(place, "responses are not stored; send the whole item")
    message = f"{place}: unsupported item type {item.type[:100]}"
    raise RequestError(message, param=f"{place}.type")


def _text(content: str | Sequence[ItemText | ItemRefusal | ItemOther], place: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        if isinstance(part, ItemOther):
            raise invalid(f"{place}.{number}", f"{part.type[:100]} is not supported; send text")
        texts.append(part.text if isinstance(part, ItemText) else part.refusal)
    return BETWEEN.join(text for text in texts if text)


RESPONSES = Dialect(
    "responses",
    (Endpoint("/v1/responses", ResponsesBody, prepare_response, "Answer a conversation."),),
    error_body,
)
