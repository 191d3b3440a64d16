"""Completion over stdio, one JSON object per line: the protocol of `akunu complete`.

    -> {"id": 1, "prefix": "def f(", "suffix": "", "channel": "a", "stream": true}
    <- {"id": 1, "delta": "x"}
    <- {"id": 1, "text": "x):", "finish_reason": "stop", "stats": {...}}
    -> {"accepted": 1}
    -> {"cancel": 1}
    -> garbage
    <- {"id": null, "error": "the line is not JSON: ..."}

docs/complete-protocol.md describes the protocol. The reply to an invalid line names the error.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, BinaryIO

from akunu_py.completion.completion_queue import (
    DEFAULT_QUEUE_OPTIONS,
    CompletionFailure,
    CompletionQueue,
    QueueOptions,
    Ticket,
    submit_with_alternatives,
)
from akunu_py.completion.request import (
    MAX_ALTERNATIVES,
    BufferEdit,
    Completion,
    CompletionRequest,
    SourceFile,
)
from akunu_py.decoding.generate.model_host import ModelLoop, State
from akunu_py.errors import INTERRUPTED, ModelError, UsageError, describe
from akunu_py.interrupts import exit_without_teardown, interruptible

if TYPE_CHECKING:
    from akunu_py.completion.completer import Completer

MAX_LINE = 64 << 20  # bytes; longer lines are rejected without being stored
_LARGEST = 10**9  # of any number; JSON has no limit, but floats of Python do
_COPIED = {  # fields of a line that are fields of the request: type, and its name in errors
    **dict.fromkeys(("prefix", "suffix", "path", "language", "root"), (str, "a string")),
    **dict.fromkeys(("max_tokens", "max_lines"), (int, "an integer")),
    "temperature": ((int, float), "a number"),
}
_KINDS: dict[str, tuple[Any, str]] = {
    **_COPIED,
    **dict.fromkeys(("files", "recent", "edits"), (list, "a list")),
    **dict.fromkeys(("stream", "explicit"), (bool, "true or false")),  # explicit has no effect
    "time_ms": ((int, float), "a number"),
    "channel": (str, "a string"),
    "alternatives": (int, "an integer"),
}


@dataclass(frozen=True, slots=True)
class RequestLine:
    """A line that requests a completion."""

    id: str | int
    request: CompletionRequest
    channel: str = ""
    stream: bool = False
    alternatives: int = 0


@dataclass(frozen=True, slots=True)
class AcceptedLine:
    """A line that reports the acceptance of a completion, or of a part of it."""

    id: str | int


@dataclass(frozen=True, slots=True)
class CancelLine:
    """A line that cancels a request."""

    id: str | int


class BadLine(UsageError):
    """An invalid line."""

    def __init__(self, message: str, id: str | int | None = None) -> None:
        super().__init__(message)
        self.id = id  # of the request, None if unknown


class JsonLines:
    """Connects a stream of lines to a queue of completions."""

    def __init__(
        self,
        queue: CompletionQueue,
        write: Callable[[bytes], object],
        defaults: CompletionRequest,
    ) -> None:
        """write: gets whole lines, from several threads, one at a time. defaults: limits."""
        self._queue = queue
        self._write = write
        self._defaults = defaults
        self._lock = threading.Lock()
        self._tickets: dict[str | int, Ticket] = {}
        self._write_error: OSError | None = None

    def serve(self, stream: BinaryIO) -> None:
        """Answer every line of `stream`. Raises OSError if a reply cannot be written."""
        for line in read_lines(stream):
            self.handle(line)
            if self._write_error:
                raise self._write_error
        self._queue.close(drain=True)
        if self._write_error:
            raise self._write_error

    def handle(self, line: bytes | None) -> None:
        """Handle one line, None for a line that is too long."""
        try:
            message = parse(line, self._defaults)
            if isinstance(message, CancelLine):
                with self._lock:
                    ticket = self._tickets.get(message.id)
                if ticket is not None:
                    ticket.cancel()
            elif isinstance(message, AcceptedLine):
                self._queue.accepted()
            elif message is not None:
                self._submit(message)
        except BadLine as error:
            self._reply({"id": error.id, "error": str(error)})

    def _submit(self, line: RequestLine) -> None:
        """Queue a request; write its parts and its reply to stdout."""

        def on_text(text: str) -> None:
            if line.stream:
                self._reply({"id": line.id, "delta": text})

        def on_done(done: Completion | CompletionFailure) -> None:
            with self._lock:
                del self._tickets[line.id]
            power = {"battery": True} if self._queue.saves_power() else {}
            self._reply({"id": line.id} | _as_dict(done, line) | power)

        ticket = Ticket(line.request, on_done, line.channel, on_text)
        with self._lock:
            if line.id in self._tickets:
                raise BadLine(f"id {json.dumps(line.id)} is still being answered", line.id)
            self._tickets[line.id] = ticket
        if line.stream and self._queue.host.state == "loading":
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
                    ticket.cancel()


def serve_jsonl(
    load: Callable[[], Completer | ModelLoop],
    base: CompletionRequest,
    options: QueueOptions = DEFAULT_QUEUE_OPTIONS,
) -> None:
    """Answer the lines of stdin on stdout until stdin ends.

    load: see `CompletionQueue`. base: the default limits. Raises ModelError if the model did not
    load.
    """
    failed: list[str] = []

    def on_state(state: State) -> None:
        if state == "ready":
            failed.clear()
        elif state == "failed":
            failed.append(describe(queue.host.error))

    queue = CompletionQueue(load, options, on_state=on_state)
    queue.start()
    try:
        with interruptible(sys.stdin.buffer) as stdin:
            JsonLines(queue, _write, base).serve(stdin)
    except BaseException as error:
        codes = {KeyboardInterrupt: INTERRUPTED, BrokenPipeError: 0}  # 0: the client has left
        code = codes.get(type(error), 1)
        if queue.close_or_exit(code) and type(error) in codes:
            exit_without_teardown(code)
        raise
    if failed:
        raise ModelError(failed[0])


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


def parse(
    line: bytes | None, defaults: CompletionRequest
) -> RequestLine | CancelLine | AcceptedLine | None:
    """Return the message in a line, None for an empty line. Raises BadLine."""
    if line is None:
        raise BadLine(f"the line is longer than {MAX_LINE >> 20} MB; send less of the buffer")
    if not line.strip():
        return None
    try:
        message = json.loads(line.decode(), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise BadLine(f"the line is not UTF-8 text (byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        raise BadLine(f"the line is not JSON: {str(error) or type(error).__name__}") from error
    if not isinstance(message, dict):
        raise BadLine(f"expected an object, found {type(message).__name__}")
    if set(message) == {"cancel"}:
        return CancelLine(_id(message, "cancel"))
    if set(message) == {"accepted"}:
        return AcceptedLine(_id(message, "accepted"))
    id = _id(message, "id")
    for name in ("cancel", "accepted"):
        if name in message:
            raise BadLine(f'"{name}" needs a separate line, without other fields', id)
    try:
        request = _parse_request(message, defaults)
    except UsageError as error:
        raise BadLine(str(error), id) from error
    more = {
        name: message[name] for name in ("channel", "stream", "alternatives") if name in message
    }
    return RequestLine(id, request, **more)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _id(message: dict[str, Any], name: str) -> str | int:
    if name not in message:
        raise BadLine('no "id": every request needs one, a string or an integer')
    value = message[name]
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise BadLine(f"{name}: expected a string or an integer, found {json.dumps(value)[:80]}")
    _check_text(name, value)
    return value


def _parse_request(message: dict[str, Any], defaults: CompletionRequest) -> CompletionRequest:
    """Return the request of a line; missing fields come from `defaults`. Raises UsageError."""
    for name, value in message.items():
        if name == "id":
            continue
        if name not in _KINDS:
            known = ", ".join(["id", "cancel", "accepted", *_KINDS])
            raise UsageError(f"unknown field {name!r}; fields: {known}")
        _check_kind(name, value, *_KINDS[name])
    if "prefix" not in message:
        raise UsageError('no "prefix": the buffer before the cursor')
    fields: dict[str, Any] = {name: message[name] for name in _COPIED if name in message}
    alternatives = message.get("alternatives", 0)
    if not 0 <= alternatives <= MAX_ALTERNATIVES:
        raise UsageError(f"alternatives must be from 0 to {MAX_ALTERNATIVES}, got {alternatives}")
    if alternatives and ("edits" in message or message.get("max_tokens") == 0):
        raise UsageError("alternatives need a completion, not edits or a prefill")
    if "time_ms" in message:
        fields["seconds"] = message["time_ms"] / 1000
    if "edits" in message:
        fields["edits"] = tuple(map(_parse_edit, message["edits"]))
    files = tuple(map(_parse_file, message.get("files", ())))
    recent = tuple(message.get("recent", ()))
    for text in recent:
        _check_kind("recent", text, str, "strings")
    return replace(defaults, files=files, recent=recent, **fields)


def _parse_file(file: Any) -> SourceFile:
    if not isinstance(file, dict) or set(file) != {"path", "text"}:
        raise UsageError('files: expected objects with "path" and "text"')
    for name, value in file.items():
        _check_kind(f"files: {name}", value, str, "a string")
    return SourceFile(**file)


def _parse_edit(edit: Any) -> BufferEdit:
    texts = {"path", "before", "after"}
    if not isinstance(edit, dict) or set(edit) - {"line"} != texts:
        raise UsageError('edits: expected objects with "path", "before", "after" and maybe "line"')
    for name in texts:
        _check_kind(f"edits: {name}", edit[name], str, "a string")
    _check_kind("edits: line", edit.get("line", 0), int, "an integer")
    return BufferEdit(**edit)


def _check_kind(name: str, value: object, kind: Any, words: str) -> None:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise UsageError(f"{name}: expected {words}, found {json.dumps(value)[:80]}")
    if isinstance(value, int | float) and not abs(value) <= _LARGEST:
        words = f"{words} up to {_LARGEST}"
        raise UsageError(f"{name}: expected {words}, found {json.dumps(value)[:80]}")
    _check_text(name, value)


def _check_text(name: str, value: object) -> None:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise BadLine(f"{name}: a lone surrogate at {error.start}") from error


def _as_dict(done: Completion | CompletionFailure, line: RequestLine) -> dict[str, Any]:
    if isinstance(done, CompletionFailure):
        return {"error": done.message}
    stats = {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in done.stats.as_dict().items()
    }
    more = {"evidence_tokens": done.draft_context_tokens, "reused": done.reused}
    answer: dict[str, Any] = {"text": done.text}
    if line.request.edits is not None:
        answer = {"edit": asdict(done.change) if done.change else None}
    elif line.alternatives:
        answer["alternatives"] = list(done.alternatives)
    return answer | {"finish_reason": done.finish_reason, "stats": stats | more}
