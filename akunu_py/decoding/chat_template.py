"""A model's chat template: a small program that came with the model, run in Jinja's sandbox.

transformers renders it, in an environment that reaches neither Python's internals nor files. What
the sandbox leaves open is closed here: whatever a template raises becomes one clear line, one that
does not come to an end is stopped, and what it writes is bounded. Not bounded is the memory that a
single expression asks for: a template has to be trusted that far.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from akunu_py.errors import UnsupportedModel, one_line

TIME_LIMIT_S = 10.0  # long conversations take milliseconds
LONGEST = 64 << 20  # characters; far more than any context holds


def render(tokenizer: Any, turns: Sequence[Mapping[str, str]], model: str) -> str:
    """The text that the model reads for a conversation, up to where its answer starts.

    Raises UnsupportedModel where its template fails, takes too long or writes too much.
    """
    try:
        with _within(TIME_LIMIT_S):
            text = tokenizer.apply_chat_template(
                list(turns), add_generation_prompt=True, tokenize=False
            )
            text.encode()  # a lone surrogate would only show in the tokenizer
    except Exception as error:  # a template can raise whatever Python raises
        raise UnsupportedModel(
            f"the chat template of {model} does not take this conversation: {one_line(error)}; "
            "continue a text instead (akunu run --raw), or use another model"
        ) from error
    if len(text) > LONGEST:
        raise UnsupportedModel(
            f"the chat template of {model} writes {len(text)} characters; use another model"
        )
    return str(text)


class _Overdue(Exception):
    def __str__(self) -> str:
        return f"it did not come to an end within {TIME_LIMIT_S:g} seconds"


@contextlib.contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raises _Overdue in the middle of the block where that takes longer.

    Python checks for such an exception between two of its own instructions; that is where a
    template that loops is nearly always.
    """
    thread = ctypes.c_ulong(threading.get_ident())
    set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
    lock, over = threading.Lock(), False

    def end() -> None:
        with lock:
            if not over:
                set_exception(thread, ctypes.py_object(_Overdue))

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:  # from here on it comes too late, and nobody else is to be interrupted
            over = True
        timer.cancel()
