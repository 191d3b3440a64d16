"""A language server like the real one, whose model is told by files what to do.

Run as `python -m tests.support.lsp_ghost DIRECTORY`. Loading waits for the file `model` there, and
fails while there is one called `missing`; what is accepted is counted in `counts`. It completes
lines that are empty, with "uno" as an alternative; on others it runs until cancelled, and
where "die" was written it is killed. Behind "slow" it says TEXT word by word, each when a file
`word1`, `word2`... is there, and behind "teh" two words. The next edit is to write "new" for "old"
in the next line where that is, once somebody did. With --jsonl it speaks JSON lines.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from akunu_py.completion.acceptance import Acceptance
from akunu_py.completion.completion_cache import CompletionCache
from akunu_py.completion.protocols.json_lines import serve_jsonl
from akunu_py.completion.protocols.lsp import serve_lsp
from akunu_py.completion.request import Change, Completion, CompletionRequest, EndCheck
from akunu_py.errors import UsageError
from akunu_py.types import Stats
from tests.support.scripted_loop import ScriptedLoop

GHOST = [sys.executable, "-m", "tests.support.lsp_ghost"]
TEXT = "one two three\nfour"


class Ghost:
    def complete(
        self,
        request: CompletionRequest,
        ended: EndCheck,
        on_text: Callable[[str], None],
    ) -> Completion:
        with (directory / "requests").open("a") as log:
            files = [(file.path, file.text) for file in request.files]
            log.write(json.dumps([files, request.recent]) + "\n")
        if not request.max_tokens:
            return Completion("", "length", Stats())
        if request.edits is not None:
            return Completion("", "stop", Stats(), change=next_edit(request))
        if "die" in request.prefix:
            os.kill(os.getpid(), signal.SIGKILL)
        if not request.prefix.split("\n")[-1].strip():
            return Completion("uno" if request.temperature else TEXT, "stop", Stats())
        if request.prefix.endswith("slow"):
            return self.slow(ended, on_text)
        if request.prefix.endswith("teh"):
            return Completion(" two four", "stop", Stats())
        while not ended():
            time.sleep(0.01)
        return Completion("", ended() or "stop", Stats())

    def slow(self, ended: EndCheck, on_text: Callable[[str], None]) -> Completion:
        for number, word in enumerate(re.findall(r"\s*\S+", TEXT), start=1):
            while not (directory / f"word{number}").exists():
                if reason := ended():
                    return Completion("", reason, Stats())
                time.sleep(0.01)
            on_text(word)
        return Completion(TEXT, "stop", Stats())


def next_edit(request: CompletionRequest) -> Change | None:
    if not request.edits or "new" not in request.edits[-1].after:
        return None
    lines = (request.prefix + request.suffix).split("\n")
    row = next((row for row, line in enumerate(lines) if "old" in line), None)
    return None if row is None else Change(row, row + 1, (lines[row].replace("old", "new"),))


def load(directory: Path) -> ScriptedLoop:
    while not (directory / "model").exists():
        if (directory / "missing").exists():
            raise UsageError((directory / "missing").read_text() or "no such model")
        time.sleep(0.01)
    return ScriptedLoop("ghost", Ghost().complete)


if __name__ == "__main__":
    CompletionCache.find = lambda self, request: None  # type: ignore[method-assign]
    directory = Path(sys.argv[1])
    kept = Acceptance(directory / "counts")
    serve = serve_jsonl if "--jsonl" in sys.argv else serve_lsp
    serve(lambda: load(directory), CompletionRequest("", seconds=200), kept)
