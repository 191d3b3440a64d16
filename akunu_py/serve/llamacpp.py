"""The /infill API of llama.cpp's server, for llama.vim and llama.vscode."""

import time
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from akunu_py.completion.completion_request import (
    MAX_COMPLETION_TOKENS,
    CompleteOptions,
    CompletionReason,
    CompletionRequest,
    SourceFile,
)
from akunu_py.engine.events import Event, Finished, PrefillProgress, PromptProcessed, TextDelta
from akunu_py.engine.loop import StepLoop
from akunu_py.engine.request import Request, Step
from akunu_py.engine.text.reader import StopText
from akunu_py.serve.dialect.bodies import Body
from akunu_py.serve.dialect.fields import SamplingBody, generate_options
from akunu_py.serve.dialect.interface import (
    CollectedAnswer,
    Dialect,
    Encoder,
    Endpoint,
    PreparedRequest,
    statistics,
)
from akunu_py.serve.dialect.request_errors import RequestError
from akunu_py.serve.dialect.service import Service
from akunu_py.serve.openai import error_body as openai_error
from akunu_py.types import SamplingOptions


class ExtraBody(Body):
    """A part of another file; llama.vim omits the name."""

    text: str
    filename: str = ""


class InfillBody(Body):
    """The body of /infill. The file is input_prefix + prompt + cursor + input_suffix."""

    input_prefix: str = ""
    input_suffix: str = ""
    prompt: str = ""
    input_extra: list[ExtraBody] = Field(default=[])
    model: str | None = None
    n_predict: int = -1  # 0: prefill only; below 0: no limit
    stream: bool = False
    stop: list[str] = Field(default=[])
    temperature: float = Field(default=0.0, ge=0, le=100)  # 0: greedy
    top_k: int | None = None
    top_p: float | None = Field(default=None, ge=0, le=1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int = -1
    t_max_predict_ms: float | None = None  # from the first token; applies after the first line
    response_fields: list[str] | None = None  # paths of the values to return


def prepare_infill(body: InfillBody, service: Service) -> PreparedRequest:
    """Complete text at a cursor."""
    limit = body.n_predict if body.n_predict >= 0 else MAX_COMPLETION_TOKENS
    request = CompletionRequest(
        body.input_prefix + body.prompt,
        body.input_suffix,
        files=tuple(SourceFile(extra.filename, extra.text) for extra in body.input_extra),
        max_tokens=min(limit, MAX_COMPLETION_TOKENS),
        temperature=body.temperature,
    )
    fields = SamplingBody(
        temperature=body.temperature,
        top_k=None if body.top_k is None else max(0, body.top_k),
        top_p=body.top_p,
        min_p=body.min_p,
        seed=body.seed,
    )
    sampling = generate_options(fields, service, 1).sampling
    return PreparedRequest(
        [lambda loop: _InfillRun(loop, service, request, sampling, body)], short=True
    )


class _InfillRun:
    """A completion that ends at stop sequences and time limits, as a `RunningJob`."""

    def __init__(
        self,
        loop: StepLoop,
        service: Service,
        request: CompletionRequest,
        sampling: SamplingOptions,
        body: InfillBody,
    ) -> None:
        self._limit_ms = body.t_max_predict_ms
        self._stops = StopText(tuple(filter(None, body.stop)))
        self._new: list[str] = []
        self._has_line = False
        self._prefilled_at: float | None = None  # monotonic seconds
        defaults = service.defaults
        options = CompleteOptions(draft=defaults.draft, draft_tokens=defaults.draft_tokens)
        completer = service.completer(loop, options)
        self._inner = completer.begin(loop, request, self._end_reason, self._add_text, sampling)

    @property
    def request(self) -> Request | None:
        return self._inner.request

    def _add_text(self, text: str) -> None:
        """Add new text before the next call of `_end_reason`."""
        self._new += [run.text for run in self._stops.add(text)]
        self._has_line = self._has_line or "\n" in text

    def _end_reason(self) -> CompletionReason | None:
        if self._stops.found:
            return "cancelled"
        if self._limit_ms is None or self._prefilled_at is None or not self._has_line:
            return None
        return "time" if 1000 * (time.monotonic() - self._prefilled_at) > self._limit_ms else None

    def add(self, steps: Sequence[Step]) -> list[Event]:
        found = self._inner.add(steps)
        events = [each for each in found if isinstance(each, PrefillProgress | PromptProcessed)]
        if any(isinstance(each, PromptProcessed) for each in events):
            self._prefilled_at = time.monotonic()
        end = [each for each in found if isinstance(each, Finished)]
        if end:
            self._new += [run.text for run in self._stops.finish()]
        text, self._new = "".join(self._new), []
        stop = self._stops.found
        return [
            *events,
            *([TextDelta(text)] if text else []),
            *(Finished("stop" if stop else each.reason, each.stats, stop) for each in end),
        ]


def error_body(error: RequestError, request_id: str = "") -> dict[str, Any]:
    kind = openai_error(error)["error"]["type"]
    return {"error": {"code": error.status, "message": error.message, "type": kind}}


def _select_fields(values: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    selected = {}
    for path in fields:
        value: Any = values
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            selected[path] = value
    return selected


def _end_fields(model: str, finished: Finished) -> dict[str, Any]:
    stats = finished.stats
    limited = finished.reason in ("length", "context")
    prefilled = stats.prompt_tokens - stats.cached_tokens
    return {
        "index": 0,
        "id_slot": 0,
        "stop": True,
        "model": model,
        "tokens_predicted": stats.generated_tokens,
        "tokens_evaluated": stats.prompt_tokens,
        "truncated": False,
        "stop_type": "limit" if limited else "word" if finished.stop else "eos",
        "stopping_word": finished.stop,
        "tokens_cached": stats.prompt_tokens + stats.generated_tokens,
        "timings": {
            "cache_n": stats.cached_tokens,
            **_timings("prompt", prefilled, stats.prefill_s),
            **_timings("predicted", stats.generated_tokens, stats.decode_s),
        },
        "akunu": statistics(finished),
    }


def _timings(name: str, tokens: int, seconds: float) -> dict[str, float]:
    return {
        f"{name}_n": tokens,
        f"{name}_ms": round(1000 * seconds, 3),
        f"{name}_per_token_ms": round(1000 * seconds / tokens, 3) if tokens else 0.0,
        f"{name}_per_second": round(tokens / seconds, 3) if seconds > 0 else 0.0,
    }


class InfillEncoder(Encoder):
    def __init__(self, body: InfillBody, name: str) -> None:
        super().__init__(body, name)
        self._fields = body.response_fields

    def whole(self, answers: Sequence[CollectedAnswer]) -> dict[str, Any]:
        (answer,) = answers
        values = {"content": answer.text} | _end_fields(self._model, answer.finished)
        values["has_new_line"] = "\n" in answer.text
        return values if self._fields is None else _select_fields(values, self._fields)

    def add(self, event: Event, choice: int) -> None:
        if isinstance(event, TextDelta):
            self.emit({"index": 0, "content": event.text, "stop": False, "id_slot": 0})
        elif isinstance(event, Finished):
            self.emit({"content": ""} | _end_fields(self._model, event))


LLAMACPP = Dialect((Endpoint("/infill", InfillBody, prepare_infill, InfillEncoder),), error_body)
