"""Render chat templates, programs in Jinja that come with models.

They run in a separate process (`template_process`) with limits on time, memory and output, because
Python can neither interrupt an expression nor limit its memory. One process serves all models.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from akunu_py.errors import UnsupportedModel, one_line

_START_S = 60.0  # on a busy machine
_POLL_S = 0.05  # between two checks of the memory of the process


def render(
    tokenizer: Any,
    turns: Sequence[Mapping[str, Any]],
    model: str,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] = {},
) -> str:
    """Render turns and tools in OpenAI's format, up to the answer. Raises UnsupportedModel."""
    try:
        if tokenizer.has_own_renderer:  # Python code of mlx-lm or transformers
            options = {"add_generation_prompt": True, "tokenize": False, **variables}
            text = tokenizer.apply_chat_template(list(turns), tools=list(tools) or None, **options)
        else:
            text = _process.render(
                tokenizer.get_chat_template(tools=list(tools) or None),
                tokenizer.special_tokens_map
                | {"enable_thinking": tokenizer.has_thinking, "add_generation_prompt": True}
                | {"messages": list(turns), "tools": list(tools) or None, "documents": None}
                | dict(variables),
            )
        text.encode()  # reports lone surrogates before the tokenizer does
    except Exception as error:  # a tokenizer's renderer raises any exception
        raise UnsupportedModel(
            f"the chat template of {model} does not accept this conversation: {one_line(error)}; "
            "continue a text instead (akunu run --raw), or use another model"
        ) from error
    return str(text)


def start() -> None:
    """Start the process before the first conversation is rendered."""
    with _process.lock:
        _process.start()


class TemplateProcess:
    """Runs `template_process`: starts it on demand, ends it after a failure and at exit."""

    time_limit_s = 10.0  # long conversations take milliseconds
    memory_limit = 512 << 20  # bytes, of which Python and Jinja use 30 million
    limits_itself = True  # set the memory limit in the process, which macOS does not support

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None
        self._ready = False

    def start(self) -> None:
        if self._running is not None and self._running.poll() is None:
            return
        self.end()
        directories = {str(distribution(name).locate_file("")) for name in ("jinja2", "markupsafe")}
        program = Path(__file__).with_name("template_process.py")
        limit = self.memory_limit if self.limits_itself else 1 << 40
        self._running = subprocess.Popen(
            [sys.executable, "-I", "-S", str(program), str(limit), *sorted(directories)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # not interrupted by Ctrl-C
        )
        self._ready = False

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """Render a template. Raises RuntimeError with the reason if that fails."""
        request = {"template": template, "variables": variables}
        line = json.dumps(request, default=str).encode() + b"\n"
        with self.lock:
            self.start()
            try:
                if not self._ready:
                    self._read(_START_S)
                    self._ready = True
                assert self._running is not None
                assert self._running.stdin is not None
                self._running.stdin.write(line)
                self._running.stdin.flush()
                reply = json.loads(self._read(self.time_limit_s))
            except BaseException:  # after an interrupt, the next request would get this reply
                self.end()
                raise
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return str(reply["text"])

    def _read(self, seconds: float) -> bytes:
        assert self._running is not None
        assert self._running.stdout is not None
        output = select.poll()
        output.register(self._running.stdout, select.POLLIN)
        deadline = time.monotonic() + seconds
        while not output.poll(_POLL_S * 1000):
            if time.monotonic() > deadline:
                raise RuntimeError(f"it did not finish within {seconds:g} seconds")
            if _resident_bytes(self._running.pid) > self.memory_limit:  # macOS sets no limit
                raise RuntimeError("it requests more memory than a template needs")
        line = self._running.stdout.readline()
        if not line.endswith(b"\n"):
            raise RuntimeError("it crashed the process that renders it")
        return line

    def end(self) -> None:
        if self._running is not None:
            self._running.kill()
            # Unread input may remain in a pipe.
            with contextlib.suppress(OSError), self._running:  # closes its pipes and waits
                self._running = None


def _resident_bytes(process: int) -> int:
    """Return the memory of a process in bytes; 0 if unknown."""
    if sys.platform == "darwin":
        # proc_pid_rusage(pid, RUSAGE_INFO_V0, ...), <sys/resource.h>: ri_phys_footprint is the
        # eighth of the ten 64-bit numbers behind 16 bytes of ri_uuid.
        found = (ctypes.c_uint64 * 12)()
        failed = ctypes.CDLL(None).proc_pid_rusage(process, 0, ctypes.byref(found))
        return 0 if failed else int(found[9])
    try:
        pages = Path(f"/proc/{process}/statm").read_text().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


_process = TemplateProcess()
atexit.register(_process.end)
