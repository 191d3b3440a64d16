"""Compiled grammars, shared by all requests with the same constraint.

llguidance releases the GIL and limits its own work, so a compile that is too slow ends later.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

Compiled = tuple["LLMatcher", str]  # at its start; and why it cannot be used, "" if it can

_MOST = 32  # grammars; a request with strict tools has three
_grammars: OrderedDict[Hashable, Future[Compiled]] = OrderedDict()  # least recently used first
_lock = threading.Lock()


def compiled(key: Hashable, work: Callable[[], Compiled]) -> Future[Compiled]:
    """Return the grammar `key`, which `work` compiles in another thread if it is new.

    A failed compile is not kept. Copy the matcher before use.
    """
    with _lock:
        if (known := _grammars.get(key)) is not None:
            _grammars.move_to_end(key)
            return known
        future = _grammars[key] = Future[Compiled]()
        while len(_grammars) > _MOST:
            _grammars.popitem(last=False)

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  (a Rust panic is no Exception)
            with _lock:
                if _grammars.get(key) is future:
                    del _grammars[key]
            future.set_exception(error)

    threading.Thread(target=run, name="grammar", daemon=True).start()
    return future
