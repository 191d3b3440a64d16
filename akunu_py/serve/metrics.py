"""Counts of what was asked and answered, in Prometheus's text format (version 0.0.4)."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from akunu_py.decoding.events import Ended

_GONE = 499  # the status that nginx logs where the client went away first
_HELP = {
    "requests": "Requests by path and status; 499: the client went away.",
    "request_seconds": "Seconds that requests took, by path.",
    "answers": "Answers by how they ended.",
    "prompt_tokens": "Tokens of prompts, those that were cached among them.",
    "cached_tokens": "Tokens of prompts that were not read again.",
    "generated_tokens": "Tokens of answers.",
    "target_passes": "Passes of the model for the tokens behind the first ones.",
    "drafted_tokens": "Tokens that were drafted.",
    "accepted_tokens": "Drafted tokens that the model accepted.",
    "prefill_seconds": "Seconds spent on reading prompts.",
    "decode_seconds": "Seconds spent on answers behind their first tokens.",
}


@dataclass(slots=True)
class Record:
    """One request. status: of its reply."""

    status: int = _GONE


class Metrics:
    """All counts since the start. For the thread of the event loop alone."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()  # by name and labels
        self.running = 0

    @contextlib.contextmanager
    def request(self, path: str) -> Iterator[Record]:
        """Counts a request while it lasts."""
        record, started = Record(), time.monotonic()
        self.running += 1
        try:
            yield record
        finally:
            self.running -= 1
            self._counts["requests", f'{{path="{path}",status="{record.status}"}}'] += 1
            seconds = time.monotonic() - started
            self._counts["request_seconds", f'{{path="{path}"}}'] += seconds  # type: ignore[assignment]

    def ended(self, event: Ended) -> None:
        """Counts an answer."""
        stats = event.stats
        self._counts["answers", f'{{reason="{event.reason}"}}'] += 1
        for name, value in {
            "prompt_tokens": stats.prompt_tokens,
            "cached_tokens": stats.cached_tokens,
            "generated_tokens": stats.generated_tokens,
            "target_passes": stats.target_passes,
            "drafted_tokens": stats.drafted,
            "accepted_tokens": stats.accepted,
            "prefill_seconds": stats.prefill_s,
            "decode_seconds": stats.decode_s,
        }.items():
            self._counts[name, ""] += value  # type: ignore[assignment]

    def text(self) -> str:
        """What Prometheus scrapes."""
        lines = ["# HELP akunu_running_requests Requests being answered or waiting."]
        lines += ["# TYPE akunu_running_requests gauge", f"akunu_running_requests {self.running}"]
        for name, words in _HELP.items():
            full = f"akunu_{name}_total"
            lines += [f"# HELP {full} {words}", f"# TYPE {full} counter"]
            found = [(labels, value) for (of, labels), value in self._counts.items() if of == name]
            lines += [f"{full}{labels} {value:.9g}" for labels, value in found]
        return "\n".join(lines) + "\n"
