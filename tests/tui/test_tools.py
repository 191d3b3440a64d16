"""Tools in the chat: no call runs without a key, and its result reaches the model."""

import contextlib
import math
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from textual.message import Message as TextualMessage
from textual.widgets import Input, OptionList

from akunu_py.mcp.config import ServerConfig
from akunu_py.mcp.connection import Connection  # noqa: F401 - imported before the clock runs
from akunu_py.mcp.output import ListedTool, ToolOutput
from akunu_py.tui.controllers.tool_consent import ToolServersOverdue
from akunu_py.tui.workers.chat_client import AnswerFinished, ModelLoaded
from akunu_py.tui.workers.tool_servers import ToolCalled, ToolServerFailed, ToolServers, ToolsListed
from akunu_py.types import Message, ToolCall
from tests.support.paths import ROOT
from tests.support.tui_chat import STATS, Chat, chat

READ = ListedTool("read", "Read a file.", {"type": "object", "properties": {"path": {}}})
LIST = ListedTool("list", "List files.", {"type": "object"})
CALL = ToolCall("read", '{"path": "notes.txt"}', "c1")


class Recorded(ToolServers):
    """Servers that are never started; a test posts what they would."""

    def __init__(self, *names: str) -> None:
        super().__init__([ServerConfig(name, "x") for name in names])
        self.called: list[tuple[str, str, str, str]] = []
        self.cancelled: list[str] = []

    def start(self, post: Callable[[TextualMessage], object]) -> None:
        pass

    def call(self, call: str, server: str, tool: str, arguments: str) -> None:
        self.called.append((call, server, tool, arguments))

    def cancel(self, call: str) -> None:
        self.cancelled.append(call)


@pytest.fixture(autouse=True)
def _no_reading_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("akunu_py.tui.screens.consent._QUIET_S", 0.0)


async def started(it: Chat, *tools: ListedTool) -> None:
    await it.post(ToolsListed("files", tools or (READ, LIST)))


async def call_tools(it: Chat, *calls: ToolCall, text: str = "Let me look.") -> None:
    """The model answers with calls."""
    await it.piece(text)
    await it.post(AnswerFinished(it.request(), "stop", STATS, calls=calls or (CALL,)))
    panel = it.app.view.consent
    await it.until(lambda: not panel.is_asking or panel._quiet_since < math.inf)


@contextlib.asynccontextmanager
async def requesting(
    *calls: ToolCall, text: str = "Let me look.", **config: Any
) -> AsyncIterator[tuple[Chat, Recorded]]:
    """Start a chat in which the model has called tools."""
    servers = Recorded("files")
    async with chat(tools=servers, **config) as it:
        await started(it)
        await it.send("go")
        await call_tools(it, *calls, text=text)
        yield it, servers


async def result(it: Chat, text: str = "buy milk", call: str = "c1") -> None:
    await it.post(ToolCalled(call, ToolOutput(text)))


@pytest.mark.long
async def test_a_call_runs_after_enter_and_its_result_is_answered() -> None:
    async with requesting() as (it, servers):
        assert (servers.called, it.phase()) == ([], "asking")
        shown = it.screen
        assert "Run this tool?" in shown
        assert "files · read  21 characters" in shown
        assert '"path": "notes.txt"' in shown
        assert "Let me look." in it.markdown
        await it.press("enter")
        assert servers.called == [("c1", "files", "read", '{"path": "notes.txt"}')]
        assert it.phase() == "calling"
        assert "running read" in it.status_line
        await result(it, "buy\x1b[2J\nmilk")
        assert it.phase() == "prefill"
        answer = Message("assistant", "Let me look.", tool_calls=(CALL,))
        found = Message("tool", "buy\x1b[2J\nmilk", tool_call_id="c1", name="read")
        assert it.history == [Message("user", "go"), answer, found]
        await it.answer("You need milk.")
        assert it.phase() == "ready"
        assert "✓  12 characters" in it.screen
        assert "buy␛" not in it.screen, "results are folded"
        await it.press("tab", "enter")
        assert "buy␛[2J" in it.screen
        await it.click_on("files · read")
        assert "buy␛" not in it.screen
        it.box.focus()
        await it.send("thanks")
        assert it.history[-2:] == [
            Message("assistant", "You need milk."),
            Message("user", "thanks"),
        ]
        assert it.history[1:3] == [answer, found]


@pytest.mark.long
async def test_typing_never_runs_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Letters and the Enter behind them are a prompt, whenever the question appears."""
    servers = Recorded("files")
    async with chat(tools=servers) as it:
        await started(it)
        await it.send("go")
        await it.press(*"ye")
        await call_tools(it)
        await it.press("s", "enter")
        assert (servers.called, it.text()) == ([], "")
        assert it.prompts == ["go", "yes"]
        await it.press("tab", *"y", "space", "a")
        assert it.text() == "y a", "the focus was on the question"
        await it.press("ctrl+c", "tab", "enter")
        assert len(servers.called) == 1
        await result(it)
        monkeypatch.setattr("akunu_py.tui.screens.consent._QUIET_S", 60.0)
        await call_tools(it, ToolCall("list", "{}", "c2"))
        await it.press("tab", *15 * ["enter"])
        await it.click_on("Allow once")
        assert len(servers.called) == 1, "the question has just appeared"
        monkeypatch.setattr("akunu_py.tui.screens.consent._QUIET_S", 0.0)
        await it.press("enter")
        assert len(servers.called) == 2


@pytest.mark.long
async def test_deny_is_for_one_call_and_always_for_this_tool_in_this_chat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with requesting(ToolCall("read", "{}", "c0")) as (it, servers):
        panel = it.app.view.consent
        with monkeypatch.context() as patch:
            patch.setattr("akunu_py.tui.screens.consent._QUIET_S", 0.7)
            first = panel._quiet_since
            quiet = [panel._is_quiet(first + seconds) for seconds in (0.6, 1.2, 1.8, 2.6, 2.7)]
            assert quiet == [False, False, False, True, True], "each early key postpones Enter"
        await it.press("down", "down", "enter")
        assert servers.called == []
        assert it.phase() == "prefill"
        assert it.history[-1].content == "The user did not allow this call."
        assert "– denied" in it.screen
        await call_tools(it)
        await it.press("down", "enter")
        await result(it)
        await call_tools(it, ToolCall("read", "{}", "c2"), ToolCall("list", "{}", "c3"))
        assert [call[0] for call in servers.called] == ["c1", "c2"]
        await result(it, call="c2")
        assert it.phase() == "asking", "another tool calls"
        assert "files · list (2 of 2)" in it.screen
        await it.press("enter")
        await result(it, call="c3")
        await it.answer("Done.")
        await it.act("new_chat")
        await it.send("again")
        await call_tools(it, ToolCall("read", "{}", "c4"))
        assert (it.phase(), len(servers.called)) == ("asking", 3)


@pytest.mark.long
async def test_escape_stops_a_call() -> None:
    async with requesting(text="") as (it, servers):
        await it.press("enter", "escape")
        assert servers.cancelled == ["c1"]
        assert (it.phase(), it.feet, it.text()) == ("stopped", ["■ stopped; F9 continues"], "")
        await result(it, "too late")
        await it.act("continue")
        assert "stopped before it had a result" in it.history[-1].content
        await it.answer("Well.")
        await it.send("more")
        await call_tools(it)
        await it.press("escape")
        assert len(servers.called) == 1
        assert "Run this tool" not in it.screen
        await it.send("else")
        roles = [message.role for message in it.history]
        assert roles == [
            "user", "assistant", "tool", "assistant", "user", "assistant", "tool", "assistant",
            "user",
        ]  # fmt: skip


@pytest.mark.long
async def test_tools_may_get_other_names_while_a_call_waits() -> None:
    """Two servers with the same tool: the second one starts after the question."""
    servers, search = Recorded("a", "b"), ListedTool("search it", "Search.", {"type": "object"})
    async with chat(tools=servers) as it:
        await it.post(ToolsListed("a", [search]), ToolServersOverdue())
        await it.send("go")
        await call_tools(it, ToolCall("search_it", "{}", "c1"))
        await it.post(ToolsListed("b", [search]))
        names = [tool.name for tool in it.app.tools.offered.for_model()]
        assert names == ["a_search_it", "b_search_it"]
        await it.press("enter")
        assert servers.called == [("c1", "a", "search it", "{}")]
        await result(it)
        await call_tools(it, ToolCall("b_search_it", "{}", "c2"))
        await it.post(ToolsListed("b", [READ]))
        await it.press("enter")
        assert len(servers.called) == 1, "the tool is gone"
        assert it.history[-1].content.startswith("There is no tool 'b_search_it'.")


@pytest.mark.long
async def test_other_prompts_wait_and_other_chats_do_not(tmp_path: Path) -> None:
    async with requesting(store=tmp_path / "c.db") as (it, _):
        await it.press(*"behind", "enter")
        assert it.app.answering.active is None
        first = it.conversation
        await it.act("new_chat")
        assert "Run this tool" not in it.screen
        await it.send("elsewhere")
        assert it.phase() == "prefill", "the model is free"
        await it.answer("Here.")
        assert it.app.answering.progress() == {first: "? waits for you"}
        await it.open(first)
        assert "Run this tool" in it.screen
        await it.press("tab", "enter")
        await result(it)
        assert it.history[-1].content == "buy milk"
        await it.answer("Milk.")
        assert it.history[-1].content == "behind"


@pytest.mark.long
async def test_a_queued_answer_is_never_taken_back(tmp_path: Path) -> None:
    """While another chat is answered, results wait in the queue, and so does a resumed answer."""
    async with requesting(store=tmp_path / "c.db") as (it, _):
        first = it.conversation
        await it.act("new_chat")
        await it.send("elsewhere")
        await it.open(first)
        await it.press("tab", "enter")
        await result(it)
        (turn,) = it.app.conversation.turns
        for stop in ("unqueue_last", "interrupt", "interrupt"):
            assert turn.state == "queued"
            await getattr(it.app.answering, stop)()
            await it.pilot.pause()
            assert (it.prompts, it.text(), it.feet) == (["go"], "", ["■ stopped; F9 continues"])
            assert turn.rounds[0].uses[0].result == "buy milk"
            assert it.app.conversation.turns == [turn]
            await it.act("continue")


@pytest.mark.long
async def test_saved_chats_have_their_calls_and_branches(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    async with requesting(store=path) as (it, servers):
        await it.press("enter")
        await result(it)
        await it.answer("Milk.")
        await it.act("regenerate")
        await it.answer("No idea.")
        await it.send("again")
        await call_tools(it, ToolCall("list", "{}", "c9"))
        conversation = it.conversation
    async with chat(tools=servers, store=path) as it:
        await started(it)
        await it.open(conversation)
        assert it.feet[-1] == "… interrupted; F9 continues"
        await it.act("continue")
        assert it.history[-1].role == "tool"
        await it.press("escape", "tab", "up", "up", "left")
        assert "files · read" in it.screen


async def test_prompts_wait_for_servers_that_start() -> None:
    async with chat(loaded=False, tools=Recorded("files", "slow", "broken")) as it:
        await it.post(ModelLoaded("plain", 8192, shows_tools=False))
        assert "template of plain does not support tools" in it.notices[0]
        await it.app.view.show_conversation()  # without notices
        await started(it)
        await it.send("go")
        assert it.app.answering.active is None
        assert "starting the tools" in it.status_line
        await it.post(ToolServerFailed("broken", "the server ended while it started: no node"))
        assert it.notices == [
            "The tools of broken are not available: the server ended while it started: no node"
        ]
        assert it.app.answering.active is None
        await it.post(ToolServersOverdue())
        assert it.phase() == "prefill"
        await it.post(ToolsListed("slow", [LIST]))
        names = [tool.name for tool in it.app.tools.offered.for_model()]
        assert names == ["read", "files_list", "slow_list"]


async def test_a_failed_server_is_noted_once_a_change_and_the_list_follows() -> None:
    noted = {"failed": {"files": "no node"}}
    async with chat(tools=Recorded("files", "slow"), state=noted) as it:
        await it.act("tools")
        await it.post(ToolServerFailed("files", "no node"))
        assert "failed: no node" in it.screen
        assert it.notices == []
        await it.post(ToolsListed("slow", [LIST]))
        assert "1 of 1 tools on" in it.screen
        await it.post(ToolServerFailed("files", "no uvx"))
        assert it.notices == ["The tools of files are not available: no uvx"]
        assert it.app.state["failed"] == {"files": "no uvx"}


async def test_tools_are_listed_searched_and_turned_off() -> None:
    many = [ListedTool(f"tool {n}", f"Do the thing {n}.", {"type": "object"}) for n in range(300)]
    async with chat(tools=Recorded("files", "many")) as it:
        await started(it)
        await it.post(ToolsListed("many", many))
        assert "descriptions of 302 tools take about" in it.notices[-1]
        await it.send("/tools")
        assert "2 of 2 tools on" in it.screen
        assert "[x] read  Read a file." in it.screen
        await it.press("down", "enter")
        assert "[ ] read" in it.screen
        it.app.screen.query_one(Input).value = "thing 299"
        await it.pilot.pause()
        assert it.app.screen.query_one(OptionList).option_count == 2
        await it.press("enter")
        assert "0 of 300 tools on" in it.screen
        await it.press("escape")
        assert [tool.name for tool in it.app.tools.offered.for_model()] == ["list"]


@pytest.mark.parametrize("size", [(24, 8), (80, 24)])
async def test_the_question_shows_name_and_all_arguments(size: tuple[int, int]) -> None:
    text = "".join(f"row {number}\\n" for number in range(20))
    async with requesting(ToolCall("read", f'{{"text": "{text}"}}', "c1"), size=size) as (it, _):
        await it.rest()
        panel, box = it.app.view.consent, it.box.region
        assert all(words in it.screen for words in ("files · read", "Allow once", "Deny"))
        assert panel.region.bottom == box.y
        assert box.bottom == it.status.region.y == size[1] - 1
        assert not it.app.screen.show_vertical_scrollbar
        shown = it.screen
        for key in ("enter", *20 * ["pagedown"], "pageup"):  # Enter reads on.
            await it.press(key)
            shown += it.screen
        assert all(f"│ row {number} " in shown for number in range(1, 20))
        assert it.phase() == "asking"
        assert panel.query_one(OptionList).highlighted == 0


@pytest.mark.long
def test_mcp_is_imported_for_servers_only() -> None:
    check = "import sys, akunu_py.tui.app, akunu_py.commands.chat; sys.exit('mcp' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


@pytest.mark.long
async def test_a_real_server_is_called(tmp_path: Path) -> None:
    command = ("-m", "tests.support.mcp_server")
    servers = ToolServers([ServerConfig("tests", sys.executable, command, cwd=str(ROOT))])
    async with chat(tools=servers, size=(100, 40)) as it:
        await it.until(lambda: it.app.tools.offered.listed)
        await it.send("go")
        await call_tools(it, ToolCall("wait", f'{{"file": "{tmp_path / "x"}"}}', "c0"))
        await it.press("enter")
        await it.until((tmp_path / "x").exists)
        await it.press("escape")
        await it.until((tmp_path / "x.cancelled").exists)
        await it.send("again")
        await call_tools(it, ToolCall("picture", "{}", "c1"))
        assert "tests · picture" in it.screen
        await it.press("enter")
        await it.until(lambda: it.phase() == "prefill")
        assert it.history[-1].content == "before\n[image not shown: image/png, 3.0 kB]"
    assert servers.close(60)


@pytest.mark.long
async def test_the_model_sees_unknown_tools_errors_and_the_start_of_long_results() -> None:
    async with requesting(ToolCall("rm", "{}", "c0"), CALL) as (it, _):
        assert it.phase() == "asking"
        await it.press("enter")
        await it.post(ToolCalled("c1", ToolOutput("no such file", is_error=True)))
        results = [message.content for message in it.history if message.role == "tool"]
        assert results == ["There is no tool 'rm'. Tools: read, list", "no such file"]
        assert it.screen.count("× failed") == 2
        await call_tools(it, ToolCall("rm", "{}", "c2"))
        assert (it.phase(), it.history[-1].role) == ("prefill", "tool"), "nothing to allow"
        await call_tools(it, ToolCall("read", "{}", "c3"))
        await it.press("enter")
        await result(it, "x" * 100_000, call="c3")
        assert len(it.history[-1].content) < 8192 + 100
        assert "characters left out" in it.history[-1].content
