"""The client that times servers, on a fake server; the slow test runs the whole comparison."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from akunu_py.bench.serving import HttpConversation, Server, ServerTimes, print_servers
from akunu_py.errors import AkunuError
from tests.support.command import run_here


class Answering(BaseHTTPRequestHandler):
    """A server that streams an answer of two words."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 7}}
        usage |= {"completion_tokens": 2}
        deltas = [{"role": "assistant"}, {"content": "two"}, {"content": " words"}]
        chunks = [{"choices": [{"delta": delta}]} for delta in deltas]
        lines = [json.dumps(each) for each in [*chunks, {"choices": [], "usage": usage}]]
        self.send_response(200 if asked["messages"] else 400)
        self.end_headers()
        self.wfile.write("".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]).encode())

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_streamed_answer_is_timed_and_appended_to_the_conversation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server("mlx-lm", tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", server._port), Answering) as fake:
        thread = threading.Thread(target=fake.serve_forever)
        thread.start()
        chat = HttpConversation(1)
        with pytest.raises(AkunuError, match="mlx-lm"):
            server.ask(chat)
        chat.add_message(3)
        found = server.ask(chat)
        assert not server.ask(HttpConversation(2), abort_s=0.0).times
        assert server.time_health(3) > 0
        fake.shutdown()
        thread.join()
    assert (found.prompt, found.cached, found.tokens) == (9, 7, 2)
    assert len(found.times) == 2
    assert 0 < found.ttft <= found.times[1]
    assert found.token_s == found.worst_gap == found.times[1] - found.times[0]
    assert chat.messages[-1] == {"role": "assistant", "content": "two words"}
    times = ServerTimes({"a": found}, found, found, {2: 5.0}, 100.0)
    print_servers({"akunu": times, "mlx-lm": times})
    assert "tokens/s of 2" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("starter")
def test_the_command_measures_both_servers() -> None:
    words = ("--layers", "1", "--words", "300", "--max-tokens", "8", "--clients", "1,2")
    done = run_here("bench", "serve", *words, "--format", "json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {"akunu", "mlx-lm"}
    ours = found["akunu"]["requests"]
    again = ours["back to the first"]
    # One layer answers with newlines, which merge with the last token of the prompt, a newline.
    assert again["cached"] >= ours["a long prompt"]["prompt"] - 1
    assert ours["agent after a restart"]["prompt"] > 10_000
