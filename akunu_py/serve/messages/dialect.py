"""Messages: its paths, and from a body to what the engine does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from akunu_py.decoding.chat_format.effort import thinking_variables
from akunu_py.decoding.scheduling.job import chat_job
from akunu_py.serve.dialect import Dialect, Endpoint, Prepared
from akunu_py.serve.messages.bodies import CountBody, MessagesBody, PromptBody, ThinkingBody
from akunu_py.serve.messages.conversation import choice_of, constraint_of, messages_of, tools_of
from akunu_py.serve.messages.reply import MessageEncoder, error_body, whole_message
from akunu_py.serve.sampling import SamplingBody, generate_options
from akunu_py.serve.service import Service


def prepare_message(body: MessagesBody, service: Service) -> Prepared:
    """Raises RequestError for what cannot be honoured."""
    service.check_model(body.model)
    sampling = SamplingBody(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        stop=body.stop_sequences,
    )
    options = generate_options(sampling, service, body.max_tokens, constraint_of(body))
    tools = tools_of(body)
    choice, parallel = choice_of(body, tools)
    job = chat_job(
        service.engine,
        messages_of(body),
        options,
        tools,
        choice,
        parallel=parallel,
        variables=variables_of(body, service),
    )
    shown = shows_thinking(body.thinking)
    return Prepared(
        [job],
        lambda answers: whole_message(service.name, answers, shows_thinking=shown),
        MessageEncoder(service.name, shows_thinking=shown) if body.stream else None,
    )


def count_tokens(body: CountBody, service: Service) -> Mapping[str, Any]:
    """How many tokens the model would read. Raises RequestError."""
    service.check_model(body.model)
    variables = variables_of(body, service)
    prompt = service.engine.tokens.encode_chat(messages_of(body), tools_of(body), variables)
    return {"input_tokens": len(prompt)}


def variables_of(body: PromptBody, service: Service) -> dict[str, Any]:
    """The chat template's variables for how much to think, as far as it has any: Anthropic's
    clients ask for thinking whatever the model. One that cannot but think is not shown thinking,
    where none is asked for."""
    asked = body.thinking.type if body.thinking else None
    known = thinking_variables(service.engine.tokens.tokenizer)
    if asked == "disabled":
        return known.off() or {}
    effort = body.output_config.effort if body.output_config else None
    return (known.on(effort) or {}) if asked or effort else {}


def shows_thinking(asked: ThinkingBody | None) -> bool:
    """Whether what a reasoning model thinks is told."""
    return asked is None or not (asked.type == "disabled" or asked.display == "omitted")


MESSAGES = Dialect(
    "messages",
    (
        Endpoint("/v1/messages", MessagesBody, prepare_message, "Answers a conversation."),
        Endpoint("/v1/messages/count_tokens", CountBody, count_tokens, "Counts its tokens."),
    ),
    error_body,
)
