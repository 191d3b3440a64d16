"""akunu's own clients on a server return the same results as with a local model."""

import json
import queue
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from akunu_py import paths
from akunu_py.commands.drafter_actions import why_wait
from akunu_py.completion.completer import Completer
from akunu_py.completion.completion_queue import CompletionJob
from akunu_py.completion.completion_request import (
    CompleteOptions,
    Completion,
    CompletionReason,
    CompletionRequest,
    SourceFile,
)
from akunu_py.engine.answer import ChatJob
from akunu_py.engine.engine import Engine
from akunu_py.engine.events import Event, Failed, Finished, TextDelta
from akunu_py.engine.host import ModelHost
from akunu_py.engine.job import ModelLoop
from akunu_py.engine.loop import StepLoop
from akunu_py.errors import AkunuError, ServerGone, UsageError
from akunu_py.ngram.cost import CostCurve
from akunu_py.serve.http.guard import AccessRules
from akunu_py.serve.own.client import (
    RunningServer,
    ServerClient,
    announce,
    matching_server,
    running_servers,
    server_at,
)
from akunu_py.serve.own.remote_loop import RemoteLoop
from akunu_py.tui.workers.chat_client import PieceArrived
from akunu_py.types import GenerateOptions, LoadOptions, Message, SamplingOptions, Tool, ToolChoice
from tests.support.chat_client import RecordedClient
from tests.support.command import until
from tests.support.complete import complete as complete_locally
from tests.support.jobs import end_of, open_jobs, submit
from tests.support.serving import Served, at_a_socket
from tests.support.tool_models import force_calls

NAME, TOKEN = "tiny-qwen2.5-coder", "a token of this test"
OPTIONS = CompleteOptions(prefix_tokens=64)


@pytest.fixture(scope="module")
def client(tiny: Served) -> Iterator[ServerClient]:
    """A client of a server with an unknown API key."""
    access = AccessRules(key="another key", token=TOKEN)
    with at_a_socket(tiny.application(access)) as url:
        yield ServerClient(url, TOKEN)


def remote(client: ServerClient, **options: Any) -> RemoteLoop:
    return RemoteLoop(client, client.facts().model, **options)


def complete(
    client: ServerClient,
    options: CompleteOptions,
    request: CompletionRequest,
    ended: Callable[[], CompletionReason | None] = lambda: None,
    on_text: Callable[[str], None] = lambda text: None,
) -> Completion:
    """Complete on the server. Raises the error of a failed request."""
    host = ModelHost(lambda: remote(client, options=options))
    host.start()
    event = end_of(submit(host, CompletionJob(request, no_model, ended, on_text)))
    assert host.close()
    if isinstance(event, Failed):
        raise event.error
    assert isinstance(event, Finished)
    assert isinstance(event.details, Completion)
    return event.details


def no_model(loop: StepLoop) -> Completer:
    raise AssertionError("the model is on the server")


FILES = tuple(SourceFile(f"{name}.py", f"def total_{name}(b):\n    c\n" * 9) for name in "xyz")


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "more"),
    [
        (OPTIONS, {"max_lines": 1}),
        (CompleteOptions(file_tokens=1000, fim="qwen2.5-coder"),
         {"files": FILES, "root": "/a", "recent": ("total_z",)}),
    ],
)  # fmt: skip
def test_completions_equal_local_completions(
    tiny: Served, client: ServerClient, options: CompleteOptions, more: dict[str, Any]
) -> None:
    """Other files cross the connection."""
    request = CompletionRequest("total_x(\r\n", ")\n", "a.py", max_tokens=12, **more)
    expected = tiny.in_thread(lambda engine: complete_locally(Completer(engine, options), request))
    parts: list[str] = []
    found = complete(client, options, request, on_text=parts.append)
    assert "".join(parts) == found.text
    for name in ("text", "finish_reason", "draft_context_tokens"):
        assert getattr(found, name) == getattr(expected, name)
    assert found.stats.prompt_tokens == expected.stats.prompt_tokens
    assert found.stats.generated_tokens == expected.stats.generated_tokens
    assert (found.draft_context_tokens > 0) == (options is not OPTIONS)


@pytest.mark.long
def test_completion_ends_on_cancel_and_on_time_limit(tiny: Served, client: ServerClient) -> None:
    options = CompleteOptions(fim="none", draft="off")
    long = CompletionRequest("ab", path="a.py", max_tokens=1024)
    whole = tiny.in_thread(lambda engine: complete_locally(Completer(engine, options), long))
    reasons: list[CompletionReason] = ["time", "cancelled"]
    for reason in reasons:
        looks = iter([None])
        done = complete(client, options, long, lambda: next(looks, reason))  # noqa: B023
        until(lambda: not any(open_jobs(tiny.scheduler)))
        assert done.finish_reason == reason
        assert whole.text.startswith(done.text)
        assert done.stats.generated_tokens < whole.stats.generated_tokens


@pytest.mark.usefixtures("own_directories")
def test_training_waits_while_a_server_answers(client: ServerClient) -> None:
    request = CompletionRequest("ab", path="a.py", max_tokens=1000)
    reasons = list[str]()

    def ended() -> CompletionReason | None:
        reasons.append(why_wait(False))
        return "cancelled" if reasons[-1] else None

    with announce(RunningServer(client.url, TOKEN, {})):
        until(lambda: why_wait(False) == "")  # the requests of earlier tests have ended
        complete(client, OPTIONS, request, ended)
        until(lambda: why_wait(False) == "")
    assert "akunu serve is answering requests" in reasons


@pytest.mark.long
def test_invalid_options_are_usage_errors(client: ServerClient) -> None:
    request = CompletionRequest("a")
    for options, wrong in (
        (OPTIONS, replace(request, temperature=-1.0)),
        (CompleteOptions(fim="no such"), request),
    ):
        with pytest.raises(UsageError):
            complete(client, options, wrong)


def test_client_without_token_is_refused(client: ServerClient) -> None:
    with pytest.raises(AkunuError, match="AKUNU_API_KEY"):
        ServerClient(client.url, "no such").facts()
    assert client.has_token(TOKEN)
    assert not client.has_token("no such")


@pytest.mark.usefixtures("own_directories")
def test_matching_server_compares_model_and_options(
    tiny: Served, client: ServerClient, tmp_path: Path
) -> None:
    model, plain, servers = tmp_path / "model", LoadOptions(), paths.servers_dir()
    running = RunningServer(client.url, TOKEN, {NAME: str(model)}, kv_bits=None)
    servers.mkdir(parents=True)
    (servers / "1.json").write_text('{"url": 1')  # cut off
    with announce(running):
        (found,) = running_servers()
        assert found == running
        file = next(servers.glob("[2-9]*.json"))
        assert file.stat().st_mode & 0o777 == 0o600
        shared = matching_server(model, plain)
        assert shared is not None
        assert shared[1].name == NAME
        assert shared[1].model.context_length == tiny.in_thread(
            lambda engine: engine.plan.context_length
        )
        assert matching_server(model, LoadOptions(context=64)) is not None
        for other in (
            LoadOptions(context=10**6), LoadOptions(kv_bits=8), LoadOptions(weights="float32"),
            LoadOptions(force=True), LoadOptions(memory_limit=10**9),
        ):  # fmt: skip
            assert matching_server(model, other) is None
        assert matching_server(tmp_path / "other", plain) is None
        assert server_at(client.url, NAME)[1].name == NAME  # by the token in the file
        with pytest.raises(UsageError, match=f"serves {NAME}, not other"):
            server_at(client.url, "other")
    assert running_servers() == []
    with announce(RunningServer(client.url, "of another", {NAME: str(model)})):
        assert matching_server(model, plain) is None  # another server has its port now
    with announce(RunningServer("http://127.0.0.1:9", TOKEN, {NAME: str(model)})):
        assert matching_server(model, plain) is None  # it was killed
    killed = subprocess.Popen(["true"])
    killed.wait()
    with announce(RunningServer(client.url, TOKEN, {NAME: str(model)}, process=killed.pid)):
        assert running_servers() == []
        assert list(servers.iterdir()) == []
    unfinished = servers / ".9.json-x.json"  # of a server that is starting
    unfinished.touch()
    assert (running_servers(), unfinished.exists()) == ([], True)
    with pytest.raises(ServerGone):
        server_at("http://127.0.0.1:9", None)
    for wrong in ("https://127.0.0.1:1", "http://", "http://a:b", "8012", "http://a/b"):
        with pytest.raises(UsageError):
            ServerClient(wrong)


QUESTION = [Message("user", "aab ba(aab ba(\naab ba(")]
CHAT = GenerateOptions(max_tokens=40, draft="fixed")


class Chat(RecordedClient):
    """A chat client that has loaded its model."""

    def __init__(self, load: Callable[[], ModelLoop]) -> None:
        super().__init__(NAME, lambda name: load())
        self.thread.start(self.messages.put)
        self.loaded = self.next()

    def send(self, options: GenerateOptions) -> list[Any]:
        self.thread.request(1, ChatJob(QUESTION, options))
        return self.until_end()


def merged(messages: list[Any]) -> tuple[Any, ...]:
    """Merge messages, so that their boundaries do not matter."""
    pieces = [each for each in messages if isinstance(each, PieceArrived)]
    whole = sum((each.delta for each in pieces), TextDelta(""))
    thinking = "".join(each.thinking for each in pieces)
    stats = messages[-1].stats
    counts = stats.generated_tokens, stats.target_passes, stats.drafted, stats.accepted
    drafts = whole.drafted, whole.rejected, whole.passes + whole.branches
    return whole.text, thinking, *drafts, messages[-1].reason, counts


@pytest.mark.parametrize("seed", [None, 3])
def test_served_chat_equals_local_chat(
    tiny: Served, client: ServerClient, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CostCurve, "measured", lambda self, rows: True)  # after many steps
    sampling = SamplingOptions(temperature=0.0 if seed is None else 0.9, seed=seed)
    options = replace(CHAT, sampling=sampling)
    path = tiny.model.service().engine.path
    own = Chat(lambda: StepLoop(Engine.load(path, name=NAME), slots=1))
    served = Chat(lambda: remote(client))
    try:
        expected, found = own.send(options), served.send(options)
        assert merged(found) == merged(expected)
        *_, rejected, passes, _, counts = merged(found)
        assert rejected
        assert len(passes) == counts[1]
        assert found[-2].delta.speedup
        for name in ("model", "context_length", "no_draft", "note", "shows_tools"):
            assert getattr(served.loaded, name) == getattr(own.loaded, name)
        assert (own.loaded.server, served.loaded.server) == ("", client.url)
        wrong = served.send(replace(CHAT, sampling=SamplingOptions(temperature=-1.0)))
        assert "temperature" in wrong[-1].error
    finally:
        assert own.thread.close(60)
        assert served.thread.close(60)


def test_tool_calls_cross_the_connection(
    client: ServerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_calls(monkeypatch, ToolChoice("required"), parallel=False)
    switch = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    tools = [Tool("switch", "Switch a lamp.", switch | {"additionalProperties": False})]
    sampling = SamplingOptions(temperature=1.0, seed=3)
    options = replace(CHAT, max_tokens=1000, sampling=sampling)
    chat = Chat(lambda: remote(client))
    chat.thread.request(1, ChatJob(QUESTION, options, tools))
    (call,) = chat.until_end()[-1].calls
    assert chat.thread.close(60)
    assert (call.name, set(json.loads(call.arguments))) == ("switch", {"on"})


@pytest.mark.long
def test_chat_survives_server_stop(tiny: Served) -> None:
    """A running answer breaks off; the next answer comes from a local model."""
    path, loads = tiny.model.service().engine.path, list[str]()

    def load() -> ModelLoop:
        loads.append(url)
        if len(loads) > 1:
            return StepLoop(Engine.load(path, name=NAME), slots=1)
        return remote(ServerClient(url, TOKEN))

    with at_a_socket(tiny.application(AccessRules(token=TOKEN))) as url:
        chat = Chat(load)
        chat.thread.request(1, ChatJob(QUESTION, replace(CHAT, max_tokens=3000)))
        while not isinstance(chat.next(), PieceArrived):
            pass
    assert "does not answer" in chat.until_end()[-1].error
    until(lambda: not any(open_jobs(tiny.scheduler)))
    loaded, *answer = chat.send(CHAT)
    assert loaded.server == ""
    assert answer[-1].reason in ("length", "stop")
    assert chat.thread.close(60)


def test_a_side_request_ends_when_another_client_needs_the_model(
    tiny: Served, client: ServerClient
) -> None:
    """It waits for running requests, and neither ends nor unloads the chat's connection."""
    chat = Chat(lambda: remote(client))
    other = Chat(lambda: remote(client))

    def begin_side_request() -> queue.SimpleQueue[Event]:
        job = ChatJob(QUESTION, replace(CHAT, max_tokens=3000, side_request=True))
        events = submit(chat.thread._host, job, idle=True)
        while not isinstance(events.get(timeout=60), TextDelta):
            pass
        return events

    events = begin_side_request()
    assert other.send(CHAT)[-1].reason in ("length", "stop")
    last = end_of(events)
    assert isinstance(last, Failed)
    assert "another request needs the model" in str(last.error)
    begin_side_request()
    assert chat.send(CHAT)[-1].reason in ("length", "stop")
    assert chat.thread._host.state == "ready"
    for each in (chat, other):
        assert each.thread.close(60)


@pytest.mark.long
def test_no_answer_cache_is_honored(client: ServerClient) -> None:
    """Even if the server has an answer cache."""
    sent: list[Any] = []

    class Recording(ServerClient):
        def frames(self, path: str, body: Any, end_reason: Any) -> Any:
            sent.append(body["options"]["may_store"])
            return super().frames(path, body, end_reason)

    for may_store in (True, False):
        recording = Recording(client.url, TOKEN)
        chat = Chat(lambda: remote(recording, may_store=may_store))  # noqa: B023
        for requested in (True, False):
            chat.send(replace(CHAT, may_store=requested))
        assert chat.thread.close(60)
    assert sent == [True, False, False, False]
