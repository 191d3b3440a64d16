"""Completions: continuations of texts, or the text between a prompt and a suffix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field

from akunu_py.engine import events
from akunu_py.engine.answer import prompt_rewrites, text_job
from akunu_py.engine.constraint.answer_limits import compile_rules
from akunu_py.engine.job import Job
from akunu_py.serve.dialect.fields import (
    SamplingBody,
    choice_options,
    generate_options,
    plan_thinking,
)
from akunu_py.serve.dialect.interface import CollectedAnswer, PreparedRequest
from akunu_py.serve.dialect.request_errors import invalid
from akunu_py.serve.dialect.service import Service, TextPrompt
from akunu_py.serve.openai.shapes import (
    ChunkEncoder,
    CountTokens,
    ReplyHead,
    completion_logprobs,
    finish_reason,
    texts_of,
)

_MAX_TOKENS = 16  # OpenAI's default here
_MAX_CHOICES = 128
_SHORT_ANSWER, _SHORT_PROMPTS = 64, 4096  # maximum tokens of a short request


class CompletionsBody(SamplingBody):
    """The body of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    suffix: str | None = None
    echo: bool | None = None  # begin the text with the prompt
    logprobs: int | None = Field(default=None, ge=0, le=20)


def prepare_completions(body: CompletionsBody, service: Service) -> PreparedRequest:
    """Return the prepared request. Raises RequestError."""
    count = body.n or 1
    texts = texts_of(body.prompt)
    if not texts:
        raise invalid("prompt", "expected at least one prompt")
    prompts = [_prompt(text, body.suffix, service) for text in texts]
    if len(prompts) * count > _MAX_CHOICES:
        raise invalid("prompt", f"expected at most {_MAX_CHOICES} choices")
    if body.logprobs is not None and body.echo:
        raise invalid("echo", "cannot be combined with logprobs")
    thinking = plan_thinking(body, service)
    options = generate_options(
        body, service, body.max_tokens, None, body.logprobs, thinking.budget, _MAX_TOKENS
    )
    jobs: list[Job] = []
    for prompt in prompts:
        context = [*prompt.draft_context, *prompt_rewrites(service.engine, prompt.tokens, options)]
        each = replace(options, stop_tokens=(*options.stop_tokens, *prompt.stop_tokens))
        rules = compile_rules(service.engine.tokens, each)  # raises if a rule is invalid
        jobs += [
            text_job(prompt.tokens, chosen, context, rules)
            for chosen in choice_options(each, count)
        ]
    echoes = [_echo(text, service) if body.echo else "" for text in texts for _ in range(count)]
    head = ReplyHead(service.name, "cmpl")
    return PreparedRequest(
        jobs,
        lambda answers: build_completions(head, answers, echoes, count, service.count_tokens),
        lambda encoder: encoder.prepare(echoes, service.count_tokens),
        short=options.max_tokens <= _SHORT_ANSWER
        and sum(len(each.tokens) for each in prompts) <= _SHORT_PROMPTS,
        shows_thinking=thinking.shown,
    )


def completions_encoder(body: CompletionsBody, name: str) -> CompletionsEncoder:
    """Return the encoder of a streamed reply. name: the model's."""
    return CompletionsEncoder(ReplyHead(name, "cmpl"), body.n or 1, usage=body.includes_usage)


def _prompt(prompt: str | list[int], suffix: str | None, service: Service) -> TextPrompt:
    """Return the prompt for a text or token ids. Raises RequestError."""
    tokens = service.engine.tokens
    if suffix:
        if not isinstance(prompt, str):
            raise invalid("suffix", "requires a prompt of text")
        return service.infill_prompt(prompt, suffix)
    if isinstance(prompt, str):
        service.check_length([prompt])
        return TextPrompt(tokens.encode(prompt))
    if any(not 0 <= token < tokens.vocabulary for token in prompt):
        raise invalid("prompt", f"expected token ids from 0 to {tokens.vocabulary - 1}")
    return TextPrompt(prompt)


def _echo(prompt: str | list[int], service: Service) -> str:
    """Return the text of a prompt."""
    text = prompt if isinstance(prompt, str) else service.engine.tokens.tokenizer.decode(prompt)
    return str(text)


class CompletionsEncoder(ChunkEncoder):
    """Encodes a stream of chunks, with thinking in the field `reasoning_content`."""

    object_name = "text_completion"
    _echoes: Sequence[str] = ("",)

    def prepare(self, echoes: Sequence[str], count_tokens: CountTokens) -> None:
        """Set the text before each choice (its prompt, or ""), and see `set_count_tokens`."""
        self.set_count_tokens(count_tokens)
        self._echoes, self._offsets = echoes, [len(text) for text in echoes]

    def heartbeat(self) -> bytes:
        """Return an empty text: clients do not count comments as progress."""
        return self._frame(_choice(min(len(self._finished), len(self._echoes) - 1), ""))

    def encode(self, event: events.Event, choice: int) -> list[bytes]:
        match event:
            case events.PromptProcessed() if self._echoes[choice]:
                return [self._frame(_choice(choice, self._echoes[choice]))]
            case events.TextDelta(text):
                return [self._frame(_choice(choice, text))]
            case events.ThinkingDelta(text):
                self._thinking += text
                return [self._frame(_choice(choice, "", text))]
            case events.Logprobs(tokens):  # sent in a separate chunk before the text
                logprobs = completion_logprobs(tokens, self._offsets[choice])
                self._offsets[choice] += sum(len(token.text) for token in tokens)
                return [self._frame(_choice(choice, "") | {"logprobs": logprobs})]
            case events.Finished():
                last = _choice(choice, "", "", finish_reason(event, calls=False))
                return self._end(event, last, len(self._echoes))
            case _:
                return []


def build_completions(
    head: ReplyHead,
    answers: Sequence[CollectedAnswer],
    echoes: Sequence[str],
    count: int = 1,
    count_tokens: CountTokens = len,
) -> dict[str, Any]:
    """Return the body of a reply that is not streamed, with `count` answers to each prompt."""
    choices = []
    for number, (answer, echo) in enumerate(zip(answers, echoes, strict=True)):
        reason = finish_reason(answer.finished, calls=False)
        choices.append(_choice(number, echo + answer.text, answer.thinking, reason))
        if answer.logprobs:
            choices[-1]["logprobs"] = completion_logprobs(answer.logprobs, len(echo))
    return head.reply("text_completion", choices, answers, count, count_tokens)


def _choice(index: int, text: str, thinking: str = "", reason: str | None = None) -> dict[str, Any]:
    return {
        "text": text,
        "index": index,
        "logprobs": None,
        "finish_reason": reason,
        **({"reasoning_content": thinking} if thinking else {}),
    }
