"""`python -m tests.reliability.serve`: hostile requests, and clients that hang up, on real sockets.

Starts `akunu serve` on a tiny model, sends it requests that are wrong in every way and hangs up on
it at random moments, many at a time. Then the same answers must come as before, and the process
must hold about the memory that it held after the first tenth. Ends with a line of counts, and with
code 1 where a promise was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.reliability.fuzz import changed, damaged
from tests.reliability.test_fuzz_serve import ASKED, SAID
from tests.support.command import AKUNU
from tests.support.serving import write_served_model

_TOGETHER = 8  # requests at a time
_GROWTH = 16 << 20  # bytes that memory may grow by in the second half


class Process:
    """`akunu serve` on a model."""

    def __init__(self, model: Path, errors: Path) -> None:
        self._errors = errors
        words = ("--model", str(model), "--port", "0", "--no-answer-cache", "--quiet")
        with errors.open("wb") as file:
            self._process = subprocess.Popen(
                [*AKUNU, "serve", *words, "--max-tokens", "64", "--prompt-cache-memory", "8MB"],
                stderr=file,
                env=os.environ,
            )
        while "akunu serves" not in self.printed():
            assert self._process.poll() is None, self.printed()
            time.sleep(0.05)
        self.port = int(self.printed().rpartition(":")[2].partition("/")[0])

    def printed(self) -> str:
        return self._errors.read_text("utf-8")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def memory(self) -> int:
        """Bytes that it holds."""
        asked = ["ps", "-o", "rss=", "-p", str(self._process.pid)]
        return int(subprocess.run(asked, capture_output=True, check=True).stdout) << 10

    def end(self) -> int:
        self._process.terminate()
        return self._process.wait(60)

    async def send(
        self, path: str, body: bytes, *, leave_after_s: float | None = None, head: bytes = b""
    ) -> bytes:
        """The whole reply; nothing of it where the client leaves before it is there."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close"]
            lines += [f"Content-Length: {len(body)}", ""]
            writer.write(b"\r\n".join([*[line.encode() for line in lines[:-1]], head, b""]) + body)
            if leave_after_s is None:
                return await asyncio.wait_for(reader.read(), 120)
            await asyncio.wait_for(reader.read(), leave_after_s)
        except (TimeoutError, ConnectionError):
            pass
        finally:
            writer.transport.abort() if leave_after_s is not None else writer.close()
        return b""


def hostile(count: int) -> list[tuple[str, bytes]]:
    """So many requests, from a fixed seed."""
    found: list[tuple[str, bytes]] = []
    paths = st.sampled_from(sorted(ASKED))
    nearly = paths.flatmap(lambda path: st.tuples(st.just(path), changed(ASKED[path])))
    whole = paths.flatmap(
        lambda path: st.tuples(st.just(path), damaged(json.dumps(ASKED[path]).encode()))
    )

    @settings(
        max_examples=count, derandomize=True, database=None, suppress_health_check=[*HealthCheck]
    )
    @given(nearly | whole)
    def collect(asked: tuple[str, Any]) -> None:
        path, body = asked
        found.append((path, body if isinstance(body, bytes) else json.dumps(body).encode()))

    collect()
    while len(found) < count:
        found += found[: count - len(found)]
    return found[:count]


async def together(work: list[Callable[[], Awaitable[None]]]) -> None:
    places = asyncio.Semaphore(_TOGETHER)

    async def one(each: Callable[[], Awaitable[None]]) -> None:
        async with places:
            await each()

    await asyncio.gather(*map(one, work))


async def attack(process: Process, requests: int, hang_ups: int, seed: int) -> list[str]:
    """What was broken."""
    dice, statuses = random.Random(seed), Counter[str]()
    before = await right(process)

    async def one(path: str, body: bytes) -> None:
        reply = await process.send(path, body)
        statuses[reply[9:12].decode(errors="replace")] += 1

    def leaver() -> Callable[[], Awaitable[None]]:
        path = dice.choice(["/v1/chat/completions", "/v1/messages", "/v1/responses"])
        said = [{"role": "user", "content": "a long story " * dice.randrange(1, 250)}]
        limit = {"max_tokens": 900} if path != "/v1/responses" else {"max_output_tokens": 900}
        asked = {"input" if path == "/v1/responses" else "messages": said, **limit}
        body = json.dumps(asked | {"stream": dice.random() < 0.5}).encode()
        seconds = dice.uniform(0, 0.5)

        async def leave() -> None:
            await process.send(path, body, leave_after_s=seconds)

        return leave

    bodies = hostile(requests)
    work: list[Callable[[], Awaitable[None]]] = [
        lambda path=path, body=body: one(path, body)  # type: ignore[misc]
        for path, body in bodies
    ]
    work += [leaver() for _ in range(hang_ups)]
    dice.shuffle(work)
    half = len(work) // 2
    await together(work[:half])
    settled = process.memory
    await together(work[half:])
    grown = process.memory - settled
    broken = [] if await right(process) == before else ["the same request has another answer"]
    if grown > _GROWTH:
        broken.append(f"memory grew by {grown >> 20} MB")
    wrong = {status: number for status, number in statuses.items() if status not in _EXPECTED}
    if wrong:
        broken.append(f"unexpected statuses: {wrong}")
    if not process.alive or "this is a bug" in process.printed():
        broken.append(f"it failed: {process.printed()[-2000:]}")
    print(
        f"{requests} requests ({dict(sorted(statuses.items()))}), {hang_ups} hang-ups, memory "
        f"{settled >> 20} MB {grown / (1 << 20):+.1f}"
    )
    return broken


_EXPECTED = ("200", "400", "404", "413")


async def right(process: Process) -> Any:
    body = {"messages": SAID, "seed": 1, "temperature": 1.0, "max_tokens": 30}
    reply = await process.send("/v1/chat/completions", json.dumps(body).encode())
    return json.loads(reply.partition(b"\r\n\r\n")[2])["choices"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability.serve", description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--hang-ups", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = write_served_model(Path(directory) / "model")
        process = Process(model, Path(directory) / "errors")
        try:
            broken = asyncio.run(attack(process, args.requests, args.hang_ups, args.seed))
        finally:
            code = process.end()
        if code:
            broken.append(f"it ended with code {code}")
    print(*(f"BROKEN: {line}" for line in broken), sep="\n", end="")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
