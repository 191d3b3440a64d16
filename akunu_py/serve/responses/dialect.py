"""Responses: its path, and from a body to what the engine does.

Nothing is kept from one request to the next, so what refers to an earlier response is refused.
"""

from __future__ import annotations

from typing import Any

from akunu_py.decoding.constraint.matcher import compile_constraint, matches
from akunu_py.decoding.scheduling.job import chat_job, text_job
from akunu_py.serve.dialect import Dialect, Endpoint, Prepared
from akunu_py.serve.errors import RequestError
from akunu_py.serve.openai.shapes import error_body
from akunu_py.serve.responses.bodies import ResponsesBody
from akunu_py.serve.responses.conversation import messages_of
from akunu_py.serve.responses.reply import Reply, ResponseEncoder, whole_response
from akunu_py.serve.responses.tools import dictated_job, offered_tools
from akunu_py.serve.sampling import JSON_OBJECT, SamplingBody, generate_options, schema_constraint
from akunu_py.serve.service import Service
from akunu_py.serve.turns import effort_variables
from akunu_py.types import Constraint

_SEALED = "reasoning.encrypted_content"
# What a response could include of tools that a server runs: there are none.
_VACUOUS = ("web_search_call.", "file_search_call.", "code_interpreter_call.", "computer_call")
_STATEFUL = "responses are not kept here, so send the whole conversation as input"


def prepare_response(body: ResponsesBody, service: Service) -> Prepared:
    """Raises RequestError for what cannot be honoured."""
    service.check_model(body.model)
    _refuse(body)
    tools = offered_tools(body.tools or [], body.tool_choice)
    for offered in tools.by_name.values():
        if offered.grammar is not None:
            compile_constraint(service.engine.tokens, offered.grammar)  # or it is refused here
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
        parallel = body.parallel_tool_calls is not False
        job = chat_job(
            engine,
            messages,
            options,
            tools.tools,
            tools.choice,
            parallel=parallel,
            variables=variables,
        )
    reply = Reply(
        _repeated(body, service),
        tools,
        _SEALED in (body.include or ()),
        lambda text: len(engine.tokens.encode(text)),
        lambda grammar, text: matches(engine.tokens, grammar, text),
    )
    encoder = ResponseEncoder(reply) if body.stream else None
    return Prepared([job], lambda answers: whole_response(reply, answers), encoder)


def _refuse(body: ResponsesBody) -> None:
    """Raises RequestError for parameters that would need a server that keeps responses, and for
    those that would change the answer and do not here."""
    refused = {
        "previous_response_id": (body.previous_response_id, _STATEFUL),
        "conversation": (body.conversation, _STATEFUL),
        "prompt": (body.prompt, "templates of prompts are not kept here"),
        "background": (body.background, "a response is made while its client waits"),
        "context_management": (body.context_management, "nothing is left out of an input here"),
        "moderation": (body.moderation, "there is none here"),
        "top_logprobs": (body.top_logprobs, "probabilities are not told here"),
        "truncation": (body.truncation == "auto", "nothing is left out of an input here"),
    }
    for name, (value, reason) in refused.items():
        if value:
            raise RequestError(f"unsupported parameter: {name}: {reason}", param=name)
    for wanted in body.include or ():
        if wanted != _SEALED and not wanted.startswith(_VACUOUS):
            raise RequestError(f"include: {wanted[:100]} is not supported", param="include")


def _constraint(body: ResponsesBody) -> Constraint | None:
    wanted = body.text.format if body.text else None
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return JSON_OBJECT
    if wanted.schema_ is None:
        raise RequestError("text.format.schema: field required", param="text.format.schema")
    return schema_constraint(wanted.schema_)


def _repeated(body: ResponsesBody, service: Service) -> dict[str, Any]:
    """What a response repeats of its request."""
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


RESPONSES = Dialect(
    "responses",
    (Endpoint("/v1/responses", ResponsesBody, prepare_response, "Answers a conversation."),),
    error_body,
)
