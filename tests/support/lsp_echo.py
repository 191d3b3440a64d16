"""A language server like the real one, but for the model: it completes with what it was asked.

Run as `python -m tests.support.lsp_echo [FILE]`; the prefixes that it reads ahead go to the file,
as JSON lines, and what is accepted is counted in FILE.counts. A prefix that ends with "wait" is
completed only when that is cancelled; one with "print" is printed to stdout first, as a careless
library might.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from akunu_py.completion.acceptance import Acceptance
from akunu_py.completion.completion_cache import CompletionCache
from akunu_py.completion.protocols.lsp import serve_lsp
from akunu_py.completion.request import Completion, CompletionRequest, EndCheck
from akunu_py.types import Stats
from tests.support.command import AKUNU
from tests.support.scripted_loop import ScriptedLoop

ECHO = [sys.executable, "-m", "tests.support.lsp_echo"]
_TIME = ["--time-ms", "200000"]  # on a busy machine too
STARTER = [*AKUNU, "complete", "--lsp", *_TIME, "--model", "starter"]


class Echo:
    samples = 0  # two of which are the same

    def complete(
        self,
        request: CompletionRequest,
        ended: EndCheck,
        on_text: Callable[[str], None],
    ) -> Completion:
        if not request.max_tokens:
            if sys.argv[1:]:
                with Path(sys.argv[1]).open("a") as file:
                    file.write(json.dumps(request.prefix) + "\n")
            return Completion("", "length", Stats())
        while request.prefix.endswith("wait") and not ended():
            time.sleep(0.01)
        if request.prefix.endswith("print"):
            print("Content-Length: 1000000", flush=True)
        self.samples += request.temperature > 0
        text = json.dumps(asdict(request) | {"sample": (self.samples + 1) // 2}, ensure_ascii=False)
        return Completion(text, ended() or "stop", Stats())


if __name__ == "__main__":
    CompletionCache.find = lambda self, request: None  # type: ignore[method-assign]
    kept = Acceptance(Path(sys.argv[1] + ".counts")) if sys.argv[1:] else None
    loop = ScriptedLoop("echo", Echo().complete)
    serve_lsp(lambda: loop, CompletionRequest("", max_lines=7), kept)
