"""Jobs that answer chats and plain prompts, and their events. Does not import MLX."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from akunu_py.engine.events import (
    Event,
    Finished,
    Logprobs,
    PrefillProgress,
    PromptProcessed,
    TextDelta,
    ThinkingDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from akunu_py.engine.job import BeginJob
from akunu_py.engine.template.effort import ThinkingChoice, choose_thinking, thinking_variables
from akunu_py.engine.tools.tool_call_parser import ToolCallParser, parser_for
from akunu_py.errors import UsageError
from akunu_py.types import FinishReason, GenerateOptions, Message, TextPiece, Tool, ToolChoice

if TYPE_CHECKING:
    from akunu_py.engine.engine import Engine
    from akunu_py.engine.loop import StepLoop
    from akunu_py.engine.request import Request, Step

_SPEEDUP_INTERVAL_S = 1 / 16  # between two updates


@dataclass(frozen=True, slots=True)
class ChatJob:
    """A job of akunu's chat: answer the last message, or continue it if it is an answer."""

    messages: Sequence[Message]
    options: GenerateOptions
    tools: Sequence[Tool] = ()  # that the answer may call

    def prepare(self, engine: Engine) -> BeginJob:
        """Encode the conversation, and compile the grammar of the answer."""
        thinking = thinking_for(engine, self.options)
        options = replace(self.options, thinking_budget=thinking.budget, loop_guard=True)
        return chat_job(
            engine,
            self.messages,
            options,
            self.tools,
            ToolChoice("none") if options.side_request else None,
            variables=thinking.variables,
            enforce=True,
            details=True,
        )


def thinking_for(engine: Engine, options: GenerateOptions) -> ThinkingChoice:
    """Return how an answer thinks. Raises UsageError if the model cannot do without thinking."""
    from akunu_py.engine.constraint.answer_limits import can_limit_thinking

    mode, budget = options.thinking, options.thinking_budget
    if mode == "default":
        return ThinkingChoice({}, budget, has_effect=True)
    tokenizer = engine.tokens.tokenizer
    choice = choose_thinking(
        thinking_variables(tokenizer),
        enabled=mode != "off",
        effort=None if mode in ("on", "off") else mode,  # type: ignore[arg-type]
        budget=budget,
        has_budget=can_limit_thinking(tokenizer),
    )
    if mode == "off" and not choice.has_effect:
        raise UsageError(f"{engine.name} cannot answer without thinking; set thinking to default")
    return choice


def chat_job(
    engine: Engine,
    messages: Sequence[Message],
    options: GenerateOptions,
    tools: Sequence[Tool] = (),
    choice: ToolChoice | None = None,
    *,
    parallel: bool = True,
    enforce: bool = False,
    predicted: str = "",
    variables: Mapping[str, Any] = {},
    details: bool = False,
) -> BeginJob:
    """Return a job that answers a conversation.

    choice: default "auto". parallel: allow several calls; otherwise the answer ends after one.
    enforce: see `constrained`. predicted: text the answer may repeat, to draft from. variables: of
    the chat template. details: with drafts and statistics. Raises UsageError or UnsupportedModel at
    once, before the job runs.
    """
    from akunu_py.engine.constraint.answer_limits import compile_rules
    from akunu_py.engine.constraint.tool_calls import constrained

    chosen = choice or ToolChoice()
    codec, stable = engine.tokens, None
    prompt = codec.encode_chat(messages, tools, variables)
    if engine.needs_checkpoints or options.side_request:
        side = options.side_request
        stable = codec.stable_prefix(messages, prompt, tools, variables, side_request=side)
    context = [codec.encode_text(predicted)] if predicted else []
    context += prompt_rewrites(engine, prompt, options)
    sampling = constrained(
        codec, options.sampling, tools, chosen, parallel=parallel, enforce=enforce
    )
    markers = parser_for(codec.tokenizer, tools).markers
    asked = replace(options, sampling=sampling, markers=(*options.markers, *markers))
    compile_rules(codec, asked)  # here, because the model's thread answers others, too
    exclusive = options.sampling.constraint is not None and chosen.mode in ("auto", "none")
    one_call = not parallel or chosen.mode == "named"

    def begin(loop: StepLoop) -> AnswerEvents:
        allowed = chosen.mode != "none"
        parser = parser_for(codec.tokenizer, tools, allowed=allowed, exclusive=exclusive)
        request = loop.request(prompt, asked, context, stable)
        may_call = bool(tools) and allowed and not exclusive
        thought = parser_for(codec.tokenizer, tools) if may_call else None
        shown = AnswerDetails(loop, request) if details else None
        return AnswerEvents(request, parser, thought, shown, one_call=one_call)

    return begin


def prompt_rewrites(
    engine: Engine, prompt: Sequence[int], options: GenerateOptions
) -> list[list[int]]:
    """Return the rewrites of `prompt`, if n-grams draft for the answer."""
    if options.draft not in ("auto", "ngram") or engine.no_draft_reason:
        return []
    return engine.tokens.prompt_rewrites.of(prompt)


def prompt_job(
    engine: Engine,
    prompt: Sequence[int],
    options: GenerateOptions,
    draft_context: Sequence[Sequence[int]] = (),
) -> BeginJob:
    """Compile the grammar; return a job that continues token ids. draft_context: see `Request`."""
    from akunu_py.engine.constraint.answer_limits import compile_rules

    compile_rules(engine.tokens, options)
    context = [*draft_context, *prompt_rewrites(engine, prompt, options)]

    def begin(loop: StepLoop) -> AnswerEvents:
        request = loop.request(prompt, options, context)
        return AnswerEvents(request, parser_for(engine.tokens.tokenizer, ()), one_call=False)

    return begin


@dataclass(eq=False)
class AnswerEvents:
    """The events of one request.

    Some models call tools before they close their thinking. Such calls count if the answer has no
    text and no call; otherwise the model only planned them.
    """

    request: Request
    parser: ToolCallParser
    thought: ToolCallParser | None = None  # parses thinking
    details: AnswerDetails | None = None  # adds details to the events
    _: KW_ONLY
    one_call: bool  # the answer ends after its first tool call
    _called: bool = field(default=False, init=False)  # the one call is complete
    _answered: bool = field(default=False, init=False)  # with text or a call
    _begun: bool = field(default=False, init=False)
    _delivered: int = field(default=0, init=False)  # logprobs

    def add(self, steps: Sequence[Step]) -> list[Event]:
        events = [event for step in steps for event in self._events(step)]
        if (reason := self.request.finish_reason) is not None:
            events += self._end("stop" if self._called else reason)
        return events

    def _events(self, step: Step) -> list[Event]:
        if isinstance(step, PrefillProgress):
            return [step]
        request, events = self.request, list[Event]()
        if not self._begun:
            self._begun = True
            stats = request.stats
            events.append(PromptProcessed(stats.prompt_tokens, stats.cached_tokens))
        found: list[Event] = [ThinkingDelta(step.thinking)] if step.thinking else []
        if not self._called:
            found += self._parse(step)
        if fresh := tuple(request.logprobs[self._delivered :]):
            self._delivered += len(fresh)
            events.append(Logprobs(fresh))
        if self.details is not None:
            self.details.add(found, step)
        return events + found

    def _parse(self, step: TextPiece) -> list[Event]:
        """Parse the text of a step; after the first call, drop the tokens behind it if required."""
        if not self.one_call:
            drafted = step.drafted if self.details is not None else ()
            return self._answer(self.parser.add(step.text, drafted))
        found, start = list[Event](), 0
        for count, end in enumerate(step.ends or [len(step.text)], 1):
            found += self._answer(self.parser.add(step.text[start:end]))
            start = end
            if last := _first_end(found):
                self._called = True
                self.request.cancel()
                self.request.drop(step.piece, count)
                return found[:last]
        return found

    def _end(self, reason: FinishReason) -> list[Event]:
        request = self.request
        rest = [] if self._called else self._answer(self.parser.finish())
        if self.thought and not self._answered and reason == "stop":
            planned = self.thought.add(request.thinking) + self.thought.finish()
            rest += _complete_calls(planned)
            rest = rest[: _first_end(rest) or None] if self.one_call else rest
        if self.details is not None:
            rest.append(self.details.last())
        return [*rest, Finished(reason, replace(request.stats), request.stop_sequence)]

    def _answer(self, events: Sequence[Event]) -> list[Event]:
        """Note whether `events` belong to an answer, and return them."""
        self._answered = self._answered or any(
            not isinstance(event, TextDelta) or not event.text.isspace() for event in events
        )
        return list(events)


class AnswerDetails:
    """Adds drafts, statistics and the speedup to the events of an answer, for akunu's chat."""

    def __init__(self, loop: StepLoop, request: Request) -> None:
        self._loop, self._request = loop, request
        self._rows: Counter[int] = Counter()  # passes by rows
        self._speedup_time = 0.0  # of the last update

    def add(self, events: list[Event], step: TextPiece) -> None:
        """Add the details of a step to its events: to the text at the end, if there is any."""
        piece, text = step.piece, TextDelta("")
        if events and isinstance(last := events[-1], TextDelta):
            text = last
            del events[-1]
        decoded = bool(piece.tokens and self._request.stats.target_passes)
        if decoded:
            self._rows[1 + piece.drafted] += 1
        place = text.drafted[-1][1] if text.drafted else 0
        rejected = [self._draft_text(step, draft) for draft in (piece.rejected, *piece.branches)]
        speedup = None
        if time.monotonic() - self._speedup_time >= _SPEEDUP_INTERVAL_S:
            self._speedup_time, speedup = time.monotonic(), self._speedup()
        events.append(
            replace(
                text,
                rejected=tuple((place, draft) for draft in rejected[:1] if draft),
                passes=(len(piece.tokens),) if decoded else (),
                stats=replace(self._request.stats),
                speedup=speedup,
                branches=tuple((place, draft) for draft in rejected[1:] if draft),
            )
        )

    def last(self) -> TextDelta:
        """Return the details at the end of the answer."""
        return TextDelta("", stats=replace(self._request.stats), speedup=self._speedup())

    def _draft_text(self, step: TextPiece, rejected: Sequence[int]) -> str:
        """Return rejected tokens as text after the accepted ones, "" in thinking."""
        piece = step.piece
        if not rejected or (step.thinking and not step.text):
            return ""
        tokenizer, tokens = self._loop.engine.tokens.tokenizer, self._request.tokens
        # A draft may reach beyond the end of the answer.
        decode = partial(tokenizer.decode, skip_special_tokens=True)
        before = len(tokens) - len(piece.tokens) + piece.accepted
        anchor = tokens[before - 1 : before]
        return str(decode([*anchor, *rejected]))[len(decode(anchor)) :]

    def _speedup(self) -> float | None:
        """Return the plain cost of the tokens over the cost of the passes; None if unknown."""
        stats, curve = self._request.stats, self._loop.runner.curve
        if not curve.measured(1) or not stats.drafted:
            return None
        costs = curve.table(stats.prompt_tokens + stats.generated_tokens)
        spent = sum(costs[min(each, len(costs)) - 1] * count for each, count in self._rows.items())
        spent += self._request.drafter.neural_seconds
        return stats.decoded_tokens * costs[0] / spent


def _complete_calls(events: Sequence[Event]) -> list[Event]:
    calls: list[Event] = []
    call: list[Event] = []
    for event in events:
        call = [event] if isinstance(event, ToolCallStarted) else [*call, event]
        if isinstance(event, ToolCallFinished):
            calls += [each for each in call if not isinstance(each, TextDelta)]
    return calls


def _first_end(events: Sequence[Event]) -> int:
    """Return the index after the first end of a call, 0 if there is none."""
    ends = (index for index, event in enumerate(events) if isinstance(event, ToolCallFinished))
    return next(ends, -1) + 1
