"""Policies for prompt caches, replayed: sessions told apart, tokens counted by hand, and whose
policy reads least again."""

from __future__ import annotations

import json
import random
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from akunu_py.bench.caches import POLICIES, replay_caches, schedule, sessions_of
from akunu_py.bench.switches import Server, Talk, print_servers
from akunu_py.bench.trace import Trace, TraceItem
from akunu_py.errors import AkunuError
from tests.support.command import run_here


def session(seed: int, turns: int = 8) -> list[TraceItem]:
    """A conversation that grows."""
    draw = random.Random(seed)
    known = [draw.randrange(1000) for _ in range(600)]
    items = []
    for _ in range(turns):
        known += [draw.randrange(1000) for _ in range(draw.randrange(50, 500))]
        output = [draw.randrange(1000) for _ in range(20)]
        items.append(TraceItem(tuple(known), tuple(output)))
        known += output
    return items


SESSIONS = [session(seed) for seed in range(6)]


def test_sessions_are_told_apart() -> None:
    trace = Trace("t", {"agent": tuple(item for each in SESSIONS for item in each)})
    assert sessions_of(trace) == SESSIONS


@pytest.mark.parametrize("policy", POLICIES)
def test_with_room_for_all_nothing_is_read_again(policy: str) -> None:
    requests = schedule(SESSIONS, 3, 1, aside=True)
    counts = replay_caches(requests, 1 << 40, policy)
    assert counts.again <= 0.01 * counts.prompts  # ends of texts; 16 of them are kept at most
    assert counts.prompts == sum(len(item.prompt) for item in requests)
    alone = replay_caches(SESSIONS[0], 1 << 40, policy)
    last = SESSIONS[0][-1].prompt
    outputs = sum(len(item.output) - 1 for item in SESSIONS[0][:-1])
    assert (alone.read, alone.again) == (len(last) - outputs, 0)


def test_ours_reads_less_again_than_where_the_oldest_goes_first() -> None:
    ours = oldest = 0
    for seed in range(3):
        requests = schedule(SESSIONS, 3, seed, aside=bool(seed))
        for budget in (4_000, 6_000, 8_000):
            ours += replay_caches(requests, budget, "akunu").again
            oldest += replay_caches(requests, budget, "lru").again
    assert ours < 0.9 * oldest


def test_the_command_compares_them(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    items = [{"prompt": item.prompt, "output": item.output} for item in SESSIONS[0]]
    path.write_text(json.dumps({"tokenizer": "t", "workloads": {"agent": items}}))
    words = ("bench", "caches", str(path), "--budget", "3000", "--repeats", "1")
    text = run_here(*words)
    assert text.returncode == 0, text.stderr
    assert "lru" in text.stdout
    rows = json.loads(run_here(*words, "--format", "json").stdout)
    assert [row["aside"] for row in rows] == [False, True]


class Answering(BaseHTTPRequestHandler):
    """A server that streams an answer of two words."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 7}}
        deltas = [{"role": "assistant"}, {"content": "two"}, {"content": " words"}]
        chunks = [{"choices": [{"delta": delta}]} for delta in deltas]
        lines = [json.dumps(each) for each in [*chunks, {"choices": [], "usage": usage}]]
        self.send_response(200 if asked["messages"] else 400)
        self.end_headers()
        self.wfile.write("".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]).encode())

    def log_message(self, *_: object) -> None:
        pass


def test_what_a_server_streams_is_timed_and_joins_the_conversation(tmp_path: Path) -> None:
    server = Server("mlx-lm", tmp_path)
    with HTTPServer(("127.0.0.1", server._port), Answering) as fake:
        thread = threading.Thread(target=fake.serve_forever)
        thread.start()
        talk = Talk(1)
        with pytest.raises(AkunuError, match="mlx-lm"):
            server.ask(talk)
        talk.say(3)
        found = server.ask(talk)
        fake.shutdown()
        thread.join()
    assert (found.prompt, found.cached) == (9, 7)
    assert found.seconds > 0
    assert talk.messages[-1] == {"role": "assistant", "content": "two words"}
    print_servers({"akunu": {"a": found}, "mlx-lm": {"a": found}})
