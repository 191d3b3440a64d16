"""Tools all the way: a tiny model that must call one, a real server, and keys in between."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from akunu_py.decoding.generate import answer_jobs
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.generate.step_loop import StepLoop
from akunu_py.mcp.config import ServerConfig
from akunu_py.mcp.connection import Connection  # noqa: F401 - imported before the clock runs
from akunu_py.tui.app import ChatApp, ChatConfig
from akunu_py.tui.workers.chat_client import ChatClient
from akunu_py.tui.workers.tool_servers import ToolServers
from akunu_py.types import Message, ToolChoice
from tests.support.paths import ROOT
from tests.support.tool_models import load_family, options
from tests.support.tui_chat import Chat, until


async def test_a_real_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("akunu_py.tui.screens.consent._READING_S", 0.0)
    engine = load_family(tmp_path / "model", "hermes")
    job, prompts = answer_jobs.chat_job, list[list[Message]]()

    def forced(
        engine: Any, messages: Any, asked: Any, tools: Any, choice: Any = None, **more: Any
    ) -> Any:
        """The first answer must call `picture`, the next ones must not call."""
        if choice is None:  # not the title
            prompts.append(messages)
            choice = ToolChoice("none") if prompts[1:] else ToolChoice("named", "picture")
        return job(engine, messages, asked, tools, choice, **more)

    monkeypatch.setattr(answer_jobs, "chat_job", forced)
    command = [sys.executable, "-m", "tests.support.mcp_server"]
    servers = ToolServers(
        [ServerConfig("tests", command[0], tuple(command[1:]), cwd=str(ROOT), timeout=60)]
    )
    client = ChatClient("hermes", lambda name: StepLoop(Session(engine), 1))
    asked = options(engine)
    brace = engine.tokens.tokenizer.backend_tokenizer.token_to_id("}")  # ends the arguments
    bias = (*asked.sampling.logit_bias, (brace, 30.0))
    asked = replace(asked, sampling=replace(asked.sampling, logit_bias=bias))
    config = ChatConfig("hermes", asked, session=client, tools=servers)
    async with ChatApp(config).run_test(size=(100, 40)) as pilot:
        it = Chat(pilot)
        await until(pilot, lambda: it.app.tools.offered.listed)
        await it.send("go")
        await until(pilot, lambda: it.phase() == "asking")
        assert "Run this tool? tests · picture" in it.screen_text()
        await it.press("enter")
        await until(pilot, lambda: prompts[1:])
        assert [message.role for message in prompts[1]] == ["user", "assistant", "tool"]
        assert prompts[1][2].content == "before\n[image not shown: image/png, 3.0 kB]"
        await until(pilot, lambda: it.phase() == "answering")
        await it.press("escape")
        assert "tests · picture" in it.screen_text()
    assert client.close(60)
    assert servers.close(60)
