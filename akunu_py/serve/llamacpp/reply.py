"""From the events of a completion to what llama.cpp's server says of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from akunu_py.decoding.generate.events import Ended, Event, Text
from akunu_py.serve import sse
from akunu_py.serve.dialect import CommentHeartbeat, WholeAnswer
from akunu_py.serve.errors import RequestError
from akunu_py.serve.openai.shapes import error_body as openai_error
from akunu_py.serve.statistics import statistics
from akunu_py.types import Stats


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
            return [sse.frame({"index": 0, "content": event.text, "stop": False, "id_slot": 0})]
        if isinstance(event, Ended):
            return [sse.frame({"content": ""} | _end(self._model, event))]
        return []

    def fail(self, error: RequestError) -> list[bytes]:
        """See `Encoder`."""
        return [sse.frame(error_body(error))]
