"""Request logs and Prometheus counters, without content by default."""

import contextlib
import json
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from akunu_py.engine import events
from akunu_py.engine.job import JobHandle
from akunu_py.serve.dialect.interface import statistics
from akunu_py.serve.dialect.request_errors import RequestError
from akunu_py.text import displayable, on_one_line
from akunu_py.types import Stats

_MAX_NAMED = 1000  # ignored fields in the log
_MAX_PATH = 200  # characters
_MAX_ERRORS = 20  # kept
_MAX_REASON = 500  # characters
_DISCONNECTED = 499  # nginx's status for a disconnected client
_STATS_COUNTERS = {  # metric: (field of Stats, help)
    "prompt_tokens": ("prompt_tokens", "Prompt tokens, including cached ones."),
    "cached_tokens": ("cached_tokens", "Prompt tokens from prompt caches."),
    "generated_tokens": ("generated_tokens", "Generated tokens."),
    "target_passes": ("target_passes", "Decode steps after the first tokens."),
    "drafted_tokens": ("drafted", "Draft tokens."),
    "accepted_tokens": ("accepted", "Accepted draft tokens."),
    "prefill_seconds": ("prefill_s", "Seconds of prefill."),
    "decode_seconds": ("decode_s", "Seconds of decoding after the first tokens."),
}
_LIVE = (
    *("prompt_tokens", "cached_tokens", "generated_tokens"),
    *("tokens_per_s", "drafted", "accepted"),
)
_MODEL_HELP = {
    "model_loaded": ("gauge", "Whether the model is loaded."),
    "model_batched": ("gauge", "Whether the model is loaded and requests share passes."),
    "model_acceptance_percent": ("gauge", "How often a neural drafter's first token is accepted."),
    "model_loads_total": ("counter", "Loads of the model."),
    "model_requests": ("gauge", "Requests that use the model, waiting ones included."),
}
_HELP = {
    "requests": "Requests by path and status; 499: the client disconnected.",
    "request_seconds": "Duration of requests by path.",
    "answers": "Answers by finish reason.",
    **{name: help for name, (_, help) in _STATS_COUNTERS.items()},
}


@dataclass(slots=True)
class RequestRecord:
    """One request."""

    path: str
    started: float = field(default_factory=time.monotonic)
    status: int = _DISCONNECTED
    error: str = ""  # why the request failed
    model: str = ""  # if the server has several
    arrived: bool = False  # the whole body
    running: bool = False  # the model has produced an event
    answers: list[events.Finished] = field(default_factory=list)
    jobs: list[JobHandle] = field(default_factory=list)
    keeps_content: bool = False
    body: str = ""  # if content is kept
    answer: str = ""  # if content is kept
    ignored: list[str] = field(default_factory=list)  # fields without effect
    first_ignored: list[str] = field(default_factory=list)  # those that no earlier request ignored

    def add(self, event: events.Event) -> None:
        self.running = True
        match event:
            case events.Finished():
                self.answers.append(event)
            case (
                events.TextDelta(text) | events.ThinkingDelta(text) | events.ToolCallArguments(text)
            ):
                self.answer += text if self.keeps_content else ""
            case events.ToolCallStarted() if self.keeps_content:
                self.answer += f"\n{event.name} "

    def live(self) -> dict[str, Any]:
        """Return the state and the counts so far. The model's thread changes them meanwhile."""
        requests = [found for each in self.jobs if (found := each.request) is not None]
        state = "finished" if self.answers else "waiting" if self.arrived else "arriving"
        state = requests[-1].status.value if requests else state
        total = Stats()
        for stats in [each.stats for each in requests] + [each.stats for each in self.answers]:
            total.include(stats)
        counts = {name: getattr(total, name) for name in _LIVE}
        place = {"path": self.path, "model": self.model, "state": state, "seconds": self.seconds}
        return place | counts

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def line(self) -> str:
        status = "client disconnected" if self.status == _DISCONNECTED else self.status
        parts = [f"{self.path} {status}", *filter(None, [self.model])]
        if self.answers:
            first, drafts = self.answers[0].stats, statistics(*self.answers)
            cached = f", {first.cached_tokens} cached" if first.cached_tokens else ""
            parts += [f"{first.prompt_tokens} prompt tokens{cached}"]
            parts += [f"{sum(each.stats.generated_tokens for each in self.answers)} tokens"]
            if drafts["target_passes"] and drafts["decode_s"] > 0:
                speed, per_pass = drafts["tokens_per_s"], drafts["tokens_per_pass"]
                parts += [f"{speed:.1f} tokens/s, {per_pass:.2f} tokens/pass"]
        whole = [*parts, f"{self.seconds:.1f} s", *filter(None, [self.error])]
        return displayable(on_one_line(" · ".join(whole)))


class RequestRecords:
    """All requests since the start; used in the event loop only."""

    def __init__(
        self,
        on_done: Callable[[RequestRecord], None] = lambda record: None,
        *,
        keep_content: bool = False,
    ) -> None:
        self._on_done = on_done
        self._keep_content = keep_content
        self._sums: dict[str, float] = defaultdict(float)
        self._open: list[RequestRecord] = []
        self._named: set[str] = set()  # ignored fields so far
        self._errors: deque[dict[str, Any]] = deque(maxlen=_MAX_ERRORS)  # newest first

    @property
    def running(self) -> int:
        """Number of requests that the model has started on."""
        return sum(record.running for record in self._open)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for the model."""
        return sum(record.arrived and not record.running for record in self._open)

    @contextlib.contextmanager
    def request(self, path: str) -> Iterator[RequestRecord]:
        """Record one request while the block runs."""
        record = RequestRecord(path, keeps_content=self._keep_content)
        self._open.append(record)
        try:
            yield record
        finally:
            self._open = [each for each in self._open if each is not record]
            record.jobs.clear()  # they refer to KV caches
            self._count(record)
            if len(self._named) < _MAX_NAMED:
                record.first_ignored = [name for name in record.ignored if name not in self._named]
                self._named.update(record.first_ignored)
            self._end(record)

    def refuse(self, path: str, error: RequestError) -> None:
        """Log a request that reached no endpoint."""
        self._end(RequestRecord(path[:_MAX_PATH], status=error.status, error=error.message))

    def _end(self, record: RequestRecord) -> None:
        if record.error:
            place = {"time": time.time(), "path": record.path, "status": record.status}
            self._errors.appendleft(place | {"reason": record.error[:_MAX_REASON]})
        self._on_done(record)

    def status(self) -> dict[str, Any]:
        """Return the running and waiting requests, the sums of the others, and the last errors."""
        totals = {field: self._sums[name] for name, (field, _) in _STATS_COUNTERS.items()}
        return {
            "requests": [record.live() for record in self._open],
            "totals": totals,
            "errors": list(self._errors),
        }

    def _count(self, record: RequestRecord) -> None:
        self._sums[f'requests{{path="{record.path}",status="{record.status}"}}'] += 1
        self._sums[f'request_seconds{{path="{record.path}"}}'] += record.seconds
        for answer in record.answers:
            self._sums[f'answers{{reason="{answer.reason}"}}'] += 1
            for name, (attribute, _) in _STATS_COUNTERS.items():
                self._sums[name] += getattr(answer.stats, attribute)

    def metrics(
        self, shared: events.SharedPasses, models: Mapping[str, Mapping[str, int]] = {}
    ) -> str:
        """Return the metrics in Prometheus's text format. models: their metrics by name."""
        lines: list[str] = []

        def add(name: str, kind: str, help: str, values: Mapping[str, object]) -> None:
            """Add a metric. values: by their labels."""
            full = f"akunu_{name}"
            lines.extend([f"# HELP {full} {help}", f"# TYPE {full} {kind}"])
            lines.extend(f"{full}{labels} {value}" for labels, value in values.items())

        add("requests_running", "gauge", "Running requests.", {"": self.running})
        add("requests_waiting", "gauge", "Waiting requests.", {"": self.waiting})
        passes, requests = {"": shared.passes}, {"": shared.requests}
        add("shared_passes_total", "counter", "Decode passes of several requests.", passes)
        add("shared_pass_requests_total", "counter", "Requests in these passes.", requests)
        for name, help in _HELP.items():
            sums = {
                series.removeprefix(name): f"{value:.9g}"
                for series, value in self._sums.items()
                if series.partition("{")[0] == name
            }
            add(f"{name}_total", "counter", help, sums)
        for name, (kind, help) in _MODEL_HELP.items():
            values = {
                f"{{model={json.dumps(key, ensure_ascii=False)}}}": each[name]
                for key, each in models.items()
            }
            add(name, kind, help, values)
        return "\n".join(lines) + "\n"
