"""Completion over stdio, one JSON object per line: docs/complete-protocol.md."""

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, BinaryIO

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from akunu_py.completion.completion_queue import (
    CompletionQueue,
    LoadModel,
    QueueOptions,
    submit_with_alternatives,
)
from akunu_py.completion.completion_request import (
    DEFAULT_COMPLETION_TOKENS,
    MAX_ALTERNATIVES,
    Completion,
    CompletionRequest,
    SourceFile,
)
from akunu_py.completion.tickets import Ticket
from akunu_py.engine.events import Failed
from akunu_py.engine.host import State
from akunu_py.errors import INTERRUPTED, ModelError, UsageError, describe
from akunu_py.interrupts import exit_without_teardown, interruptible
from akunu_py.text import first_problem, print_warnings
from akunu_py.version import __version__

MAX_LINE = 64 << 20  # bytes; longer lines are rejected without being stored
_LARGEST = 10**9  # of a number that is no integer
_FIELDS = {field.name for field in fields(CompletionRequest)}


class Line(BaseModel):
    """The fields of a line that requests a completion, cancels one or reports an acceptance."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    id: int | str = ""
    cancel: int | str = ""
    accepted: int | str = ""
    # Fields of the request.
    prefix: str = ""
    suffix: str = ""
    path: str = ""
    language: str = ""
    root: str = ""
    files: tuple[SourceFile, ...] = ()
    recent: tuple[str, ...] = ()
    max_tokens: int = DEFAULT_COMPLETION_TOKENS
    max_lines: int = 0
    temperature: float = Field(0.0, le=_LARGEST)
    time_ms: float = Field(0.0, le=_LARGEST)
    channel: str = ""
    stream: bool = False
    alternatives: int = Field(0, ge=0, le=MAX_ALTERNATIVES)


class JsonLines:
    """Connects a stream of lines to a queue of completions."""

    def __init__(
        self, queue: CompletionQueue, write: Callable[[bytes], object], defaults: CompletionRequest
    ) -> None:
        """write: gets whole lines, from several threads, one at a time. defaults: limits."""
        self._queue = queue
        self._write = write
        self._defaults = defaults
        self._lock = threading.Lock()
        self._tickets: dict[str | int, Ticket] = {}
        self._write_error: OSError | None = None
        self._ignored: set[str] = set()  # unknown fields that were named

    def hello(self, model: str, *, ready: bool) -> None:
        """Write what the client may need to know before its first request."""
        known = {"version": __version__, "fields": list(Line.model_fields)}
        self._reply({"hello": {**known, "model": model, "ready": ready}})

    def serve(self, stream: BinaryIO) -> None:
        """Answer every line of `stream`. Raises OSError if a reply cannot be written."""
        for line in read_lines(stream):
            self.handle(line)
            if self._write_error:
                break
        else:
            self._queue.close(drain=True)
        if self._write_error:
            raise self._write_error

    def handle(self, line: bytes | None) -> None:
        """Handle one line, None for a line that is too long."""
        try:
            message = parse(line)
            if message is None:
                return
            if unknown := (message.model_extra or {}).keys() - self._ignored:
                self._ignored |= unknown
                print_warnings([f"ignored unknown fields: {', '.join(sorted(unknown))}"])
            if "cancel" in message.model_fields_set:
                with self._lock:
                    ticket = self._tickets.get(message.cancel)
                if ticket is not None:
                    self._queue.cancel(ticket)
            elif "accepted" in message.model_fields_set:
                self._queue.accepted()
            else:
                self._submit(message)
        except UsageError as error:
            self._reply({"id": _id_of(line or b""), "error": str(error)})

    def _submit(self, line: Line) -> None:
        def on_text(text: str) -> None:
            if line.stream:
                self._reply({"id": line.id, "delta": text})

        def on_done(done: Completion | Failed) -> None:
            with self._lock:
                del self._tickets[line.id]
            self._reply({"id": line.id} | _as_dict(done, line))

        request = request_of(line, self._defaults)
        ticket = Ticket(request, on_done, line.channel, on_text)
        with self._lock:
            if line.id in self._tickets:
                raise UsageError(f"id {json.dumps(line.id)} is still being answered")
            self._tickets[line.id] = ticket
        if line.stream and self._queue.host.state in ("loading", "unloaded"):
            self._reply({"id": line.id, "status": "loading"})
        submit_with_alternatives(self._queue, ticket, line.alternatives)

    def _reply(self, message: dict[str, Any]) -> None:
        line = json.dumps(message, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        with self._lock:
            if self._write_error:
                return
            try:
                self._write(line)
            except OSError as error:
                self._write_error = error
                for ticket in self._tickets.values():
                    ticket.cancelled.set()  # `cancel` would reply


def serve_jsonl(
    load: LoadModel, base: CompletionRequest, options: QueueOptions, model: str
) -> None:
    """Answer the lines of stdin on stdout until stdin ends.

    base: the default limits. model: its name before it is loaded. Raises ModelError if loading
    failed.
    """

    def on_state(state: State) -> None:
        if state == "ready" and queue.host.facts:
            lines.hello(queue.host.facts.name, ready=True)

    queue = CompletionQueue(load, options, on_state=on_state)
    lines = JsonLines(queue, _write, base)
    lines.hello(model, ready=False)
    queue.start()
    try:
        with interruptible(sys.stdin.buffer) as stdin:
            lines.serve(stdin)
    except BaseException as error:
        codes = {KeyboardInterrupt: INTERRUPTED, BrokenPipeError: 0}  # 0: the client has left
        code = codes.get(type(error), 1)
        if queue.close_or_exit(code) and type(error) in codes:
            exit_without_teardown(code)
        raise
    if queue.host.state == "failed":
        raise ModelError(describe(queue.host.error))


def _write(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def read_lines(stream: BinaryIO, longest: int = MAX_LINE) -> Iterator[bytes | None]:
    """Yield the lines of `stream` without their ends; None for a line of over `longest` bytes."""
    while line := stream.readline(longest + 1):
        if len(line) <= longest or line.endswith(b"\n"):
            yield line.rstrip(b"\r\n")
            continue
        while line and not line.endswith(b"\n"):
            line = stream.readline(longest + 1)
        yield None


def parse(line: bytes | None) -> Line | None:
    """Return the fields of a line, None for an empty line. Raises UsageError."""
    if line is None:
        raise UsageError(f"the line is longer than {MAX_LINE >> 20} MB; send less of the buffer")
    if not line.strip():
        return None
    try:
        found = Line.model_validate_json(line)
    except ValidationError as error:
        raise UsageError(first_problem(error)) from error
    given = found.model_fields_set & Line.model_fields.keys()
    for name in ("cancel", "accepted"):
        if name in given and given != {name}:
            raise UsageError(f'"{name}" needs a separate line, without other fields')
    if given not in ({"cancel"}, {"accepted"}):
        if "id" not in given:
            raise UsageError('no "id": every request needs one, a string or an integer')
        if "prefix" not in given:
            raise UsageError('no "prefix": the buffer before the cursor')
        if found.alternatives and not found.max_tokens:
            raise UsageError("alternatives need a completion, not a prefill")
    return found


def _id_of(line: bytes) -> int | str | None:
    """Return the id of an invalid request, None if it has no valid one."""
    with contextlib.suppress(ValueError, RecursionError, AttributeError):
        id = json.loads(line).get("id")
        return id if type(id) in (int, str) else None
    return None


def request_of(line: Line, defaults: CompletionRequest) -> CompletionRequest:
    """Return the request of a line; missing fields come from `defaults`."""
    given = {name: getattr(line, name) for name in _FIELDS & line.model_fields_set}
    if "time_ms" in line.model_fields_set:
        given["seconds"] = line.time_ms / 1000
    return replace(defaults, **given)


def _as_dict(done: Completion | Failed, line: Line) -> dict[str, Any]:
    if isinstance(done, Failed):
        return {"error": describe(done.error)}
    stats = {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in done.stats.as_dict().items()
    }
    excluded = {"excluded": True} if done.excluded else {}
    more = {"evidence_tokens": done.draft_context_tokens, "reused": done.reused}
    answer: dict[str, Any] = {"text": done.text}
    if line.alternatives:
        answer["alternatives"] = list(done.alternatives)
    return answer | excluded | {"finish_reason": done.finish_reason, "stats": stats | more}
