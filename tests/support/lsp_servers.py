"""Language servers like the real one, with scripted models.

`python -m tests.support.lsp_servers echo` completes with the request as JSON. A prefix that ends
with "wait" is completed only when that is cancelled; at one with "print", the model prints to
stdout first, as a careless library might.

`python -m tests.support.lsp_servers ghost DIRECTORY` is controlled by files in DIRECTORY. Loading
waits for the file `model`, and fails if there is a file `missing`; requests are logged in
`requests`. It completes empty lines, with "uno" as an alternative; on other lines it writes the
file `endless` and runs until cancelled, and after "die" it is killed. After "slow" it generates
TEXT word by word, each when a file `word1`, `word2`... exists, and after "teh" two words.
"""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from akunu_py.completion.completion_cache import CompletionCache
from akunu_py.completion.completion_queue import QueueOptions
from akunu_py.completion.completion_request import Completion, CompletionRequest, EndCheck
from akunu_py.completion.protocols.lsp import read_frames, serve_lsp
from akunu_py.errors import UsageError
from akunu_py.types import Stats
from tests.support.command import AKUNU
from tests.support.scripted_loop import ScriptedLoop

ECHO = [sys.executable, "-m", "tests.support.lsp_servers", "echo"]
GHOST = [*ECHO[:-1], "ghost"]
# The time limit is long because the machine may be busy.
STARTER = [*AKUNU, "complete", "--lsp", "--time-ms", "200000", "--model", "starter"]
TEXT = "one two three\nfour"


def frame(message: object) -> bytes:
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    return b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


def talk(data: bytes, *command: str) -> tuple[list[tuple[int | str | None, int | None]], int, str]:
    """Return the id and error code of each reply to `data`, the exit code and stderr."""
    done = subprocess.run(command, input=data, capture_output=True, timeout=120)
    replies = [json.loads(body) for body in read_frames(io.BytesIO(done.stdout))]
    codes = [(each["id"], each.get("error", {}).get("code")) for each in replies if "id" in each]
    return codes, done.returncode, done.stderr.decode()


class Echo:
    def __init__(self) -> None:
        self.samples = 0  # two of which are the same
        self.prefilled: list[str] = []  # prefixes

    def load(self) -> ScriptedLoop:
        return ScriptedLoop("echo", self.complete)

    def complete(
        self, request: CompletionRequest, ended: EndCheck, on_text: Callable[[str], None]
    ) -> Completion:
        if not request.max_tokens:
            self.prefilled.append(request.prefix)
            return Completion("", "length", Stats())
        while request.prefix.endswith("wait") and not ended():
            time.sleep(0.01)
        if request.prefix.endswith("print"):
            print("Content-Length: 1000000", flush=True)
        self.samples += request.temperature > 0
        text = json.dumps(asdict(request) | {"sample": (self.samples + 1) // 2}, ensure_ascii=False)
        return Completion(text, ended() or "stop", Stats())


class Ghost:
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def load(self) -> ScriptedLoop:
        while not (self.directory / "model").exists():
            if (self.directory / "missing").exists():
                raise UsageError((self.directory / "missing").read_text() or "no such model")
            time.sleep(0.01)
        return ScriptedLoop("ghost", self.complete)

    def complete(
        self, request: CompletionRequest, ended: EndCheck, on_text: Callable[[str], None]
    ) -> Completion:
        with (self.directory / "requests").open("a") as log:
            files = [(file.path, file.text) for file in request.files]
            log.write(json.dumps([files, request.recent]) + "\n")
        if not request.max_tokens:
            return Completion("", "length", Stats())
        if "die" in request.prefix:
            os.kill(os.getpid(), signal.SIGKILL)
        if not request.prefix.split("\n")[-1].strip():
            return Completion("uno" if request.temperature else TEXT, "stop", Stats())
        if request.prefix.endswith("slow"):
            for number, word in enumerate(re.findall(r"\s*\S+", TEXT), start=1):
                while not (self.directory / f"word{number}").exists():
                    if reason := ended():
                        return Completion("", reason, Stats())
                    time.sleep(0.01)
                on_text(word)
            return Completion(TEXT, "stop", Stats())
        if request.prefix.endswith("teh"):
            return Completion(" two four", "stop", Stats())
        (self.directory / "endless").touch()
        while not ended():
            time.sleep(0.01)
        return Completion("", ended() or "stop", Stats())


if __name__ == "__main__":
    CompletionCache.find = lambda self, request: None  # type: ignore[method-assign]
    if sys.argv[1] == "ghost":
        serve_lsp(Ghost(Path(sys.argv[2])).load, CompletionRequest("", seconds=200), QueueOptions())
    else:
        serve_lsp(Echo().load, CompletionRequest("", max_lines=7), QueueOptions())
