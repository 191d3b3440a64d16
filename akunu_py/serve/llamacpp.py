"""/infill: its paths, and from a body to a job."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pydantic import Field

from akunu_py.completion.completer import Completer
from akunu_py.completion.types import (
    FINISH_REASONS,
    MAX_COMPLETION_TOKENS,
    CompleteOptions,
    Completion,
    CompletionReason,
    CompletionRequest,
    SourceFile,
)
from akunu_py.decoding.events import Begun, Ended, Event, Text
from akunu_py.decoding.scheduling.job import Job
from akunu_py.decoding.session import Session
from akunu_py.decoding.text.stop_sequences import StopText
from akunu_py.serve.dialect.bodies import Body, Ignored
from akunu_py.serve.dialect.errors import RequestError
from akunu_py.serve.dialect.interface import (
    CommentHeartbeat,
    Dialect,
    Endpoint,
    Prepared,
    WholeAnswer,
    frame,
    statistics,
)
from akunu_py.serve.dialect.sampling import SamplingBody, generate_options
from akunu_py.serve.dialect.service import Service
from akunu_py.serve.openai.shapes import error_body as openai_error
from akunu_py.types import SamplingOptions, Stats


def prepare_infill(body: InfillBody, service: Service) -> Prepared:
    """Raises RequestError for what cannot be honoured."""
    if body.model and body.model.strip():
        service.check_model(body.model)
    wanted = body.n_predict if body.n_predict >= 0 else MAX_COMPLETION_TOKENS
    request = CompletionRequest(
        body.input_prefix + body.prompt,
        body.input_suffix,
        files=tuple(SourceFile(extra.filename, extra.text) for extra in body.input_extra),
        max_tokens=min(wanted, MAX_COMPLETION_TOKENS),
        temperature=body.temperature,
    )
    defaults = service.defaults
    options = CompleteOptions(draft=defaults.draft, draft_tokens=defaults.draft_tokens)
    asked = SamplingBody(
        temperature=body.temperature,
        top_k=None if body.top_k is None else max(0, body.top_k),
        top_p=body.top_p,
        min_p=body.min_p,
        seed=body.seed if body.seed >= 0 else None,
    )
    job = completion_job(
        lambda session: service.completer(session, options),
        request,
        generate_options(asked, service, 1).sampling,
        tuple(filter(None, body.stop)),
        None if body.t_max_predict_ms is None else body.t_max_predict_ms / 1000,
    )
    return Prepared(
        [job],
        lambda answers: whole_completion(service.name, body.response_fields, answers),
        InfillEncoder(service.name) if body.stream else None,
        short=True,
    )


class ExtraBody(Body):
    """A piece of another file. llama.vim has it without a name, too."""

    text: str
    filename: str = ""
    time: Ignored = None


class InfillBody(Body):
    """The buffer is input_prefix, prompt, the cursor, input_suffix. n_predict: 0 to only read,
    below 0 for as many as may be. A completion is greedy unless `temperature` is above 0; what
    comes then of top_k and its like is as with a chat. t_max_predict_ms: once it has a whole line,
    so long after its first token. response_fields: what of the reply is wanted."""

    input_prefix: str = ""
    input_suffix: str = ""
    prompt: str = ""
    input_extra: list[ExtraBody] = Field(default=[])
    model: str | None = None
    n_predict: int = -1
    stream: bool = False
    stop: list[str] = Field(default=[])
    temperature: float = Field(default=0.0, ge=0, le=100)
    top_k: int | None = None
    top_p: float | None = Field(default=None, ge=0, le=1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int = -1
    t_max_predict_ms: float | None = None
    response_fields: list[str] | None = None
    cache_prompt: Ignored = None
    id_slot: Ignored = None
    n_indent: Ignored = None
    n_probs: Ignored = None
    samplers: Ignored = None
    t_max_prompt_ms: Ignored = None  # neither does llama.cpp stop reading: the next one would too


def completion_job(
    completer: Callable[[Session], Completer],
    request: CompletionRequest,
    sampling: SamplingOptions,
    stop: tuple[str, ...] = (),
    seconds: float | None = None,
) -> Job:
    """completer: for a session, called in its thread. stop: texts that end the completion, and are
    no part of it. seconds: from its first token on, after which it ends if it has a line."""

    def events(session: Session) -> Iterator[Event | None]:
        making = _PartialCompletion(session, stop, seconds)
        made = completer(session)
        steps = made.steps(made.share(session), request, making.ended, making.add, sampling)
        completion: Completion | None = None
        while completion is None:
            try:
                step = next(steps)
            except StopIteration as last:
                completion = last.value
            else:
                if isinstance(step, Begun):
                    making.since = time.monotonic()
                yield step
            yield from making.new()
        assert completion is not None
        yield from making.rest()
        reason = "stop" if making.found else FINISH_REASONS[completion.finish_reason]
        yield Ended(reason, completion.stats, making.found)

    return events


class _PartialCompletion:
    """A completion while it is made. since: its first token, by the monotonic clock."""

    def __init__(self, session: Session, stop: tuple[str, ...], seconds: float | None) -> None:
        self._session, self._seconds = session, seconds
        self._stops = StopText(stop)
        self._new: list[str] = []
        self._has_line = False
        self.since: float | None = None

    @property
    def found(self) -> str:
        """The stop sequence that ended it, "" for none."""
        return self._stops.found or ""

    def add(self, text: str) -> None:
        """More of it."""
        self._new += [run.text for run in self._stops.add(text)]
        self._has_line = self._has_line or "\n" in text

    def ended(self) -> CompletionReason | None:
        """Why to end now."""
        # What a stop sequence of this request ended is no completion to be kept for others.
        if self.found or self._session.turn.cancelled:
            return "cancelled"
        if self._seconds is None or self.since is None or not self._has_line:
            return None
        return "time" if time.monotonic() - self.since > self._seconds else None

    def new(self) -> list[Text]:
        """What is certain now."""
        text, self._new = "".join(self._new), []
        return [Text(text)] if text else []

    def rest(self) -> list[Text]:
        """What was held back because a stop sequence might have begun with it."""
        text = "".join(run.text for run in self._stops.finish())
        return [Text(text)] if text else []


def error_body(error: RequestError, request_id: str = "") -> dict[str, Any]:
    """An error as llama.cpp's clients read it."""
    told = openai_error(error)["error"]
    return {"error": {"code": error.status, "message": error.message, "type": told["type"]}}


def whole_completion(
    model: str, fields: Sequence[str] | None, answers: Sequence[WholeAnswer]
) -> dict[str, Any]:
    """fields: the only ones that are wanted, each a path, by which they are named then."""
    ended = answers[0].ended
    assert ended is not None
    values = {"content": answers[0].text} | _end(model, ended)
    values["has_new_line"] = "\n" in answers[0].text
    return values if fields is None else _chosen(values, fields)


def _chosen(values: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    chosen = {}
    for path in fields:
        value: Any = values
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            chosen[path] = value
    return chosen


def _end(model: str, ended: Ended) -> dict[str, Any]:
    stats = ended.stats
    limited = ended.reason in ("length", "context")
    return {
        "index": 0,
        "id_slot": 0,
        "stop": True,
        "model": model,
        "tokens_predicted": stats.generated_tokens,
        "tokens_evaluated": stats.prompt_tokens,
        "truncated": False,
        "stop_type": "limit" if limited else "word" if ended.stop else "eos",
        "stopping_word": ended.stop,
        "tokens_cached": stats.prompt_tokens + stats.generated_tokens,
        "timings": _timings(stats),
        "akunu": statistics(ended),
    }


def _timings(stats: Stats) -> dict[str, float]:
    read = stats.prompt_tokens - stats.cached_tokens
    return {
        "cache_n": stats.cached_tokens,
        **_timed("prompt", read, stats.prefill_s),
        **_timed("predicted", stats.generated_tokens, stats.decode_s),
    }


def _timed(name: str, tokens: int, seconds: float) -> dict[str, float]:
    return {
        f"{name}_n": tokens,
        f"{name}_ms": round(1000 * seconds, 3),
        f"{name}_per_token_ms": round(1000 * seconds / tokens, 3) if tokens else 0.0,
        f"{name}_per_second": round(tokens / seconds, 3) if seconds > 0 else 0.0,
    }


class InfillEncoder(CommentHeartbeat):
    """Writes a completion down as it comes."""

    def __init__(self, model: str) -> None:
        self._model = model

    def encode(self, event: Event, choice: int) -> list[bytes]:
        """See `Encoder`."""
        if isinstance(event, Text):
            return [frame({"index": 0, "content": event.text, "stop": False, "id_slot": 0})]
        if isinstance(event, Ended):
            return [frame({"content": ""} | _end(self._model, event))]
        return []

    def fail(self, error: RequestError) -> list[bytes]:
        """See `Encoder`."""
        return [frame(error_body(error))]


LLAMACPP = Dialect(
    "llamacpp",
    (Endpoint("/infill", InfillBody, prepare_infill, "Completes at a cursor."),),
    error_body,
)
