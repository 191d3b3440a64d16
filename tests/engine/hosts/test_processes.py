"""A model in several processes over loopback: equal answers, and a common end."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import IO, Any

import pytest

from akunu_py.engine.engine import Engine
from akunu_py.engine.hosts.hostfile import _free_ports
from akunu_py.engine.loop import StepLoop
from akunu_py.types import GenerateOptions
from tests.support.command import AKUNU, until
from tests.support.hosts import (
    PROMPT,
    SPLIT_FAMILIES,
    all_gone,
    answer,
    running,
    workers,
    write_named,
    write_talking,
)
from tests.support.terminal import Terminal, needs_tmux
from tests.support.terminal import terminal as terminal  # a fixture

pytestmark = pytest.mark.e2e

NOT_PIPELINED = {"llama", "gpt_oss", "iquestloopcoder", "longcat_flash_ngram"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    write_named(directory, "llama")
    return directory


@pytest.fixture(scope="module")
def whole(model: Path) -> str:
    """A long answer of this process, without drafts."""
    engine = Engine.load(model)
    prompt = engine.tokens.encode(PROMPT)
    return StepLoop(engine).answer(prompt, GenerateOptions(120, "off")).text.rstrip()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("hosts", ["2", "3"])
@pytest.mark.parametrize("name", SPLIT_FAMILIES)
def test_every_family_answers_on_several_hosts_as_on_one(
    name: str, hosts: str, tmp_path: Path
) -> None:
    """Two hosts share each layer, or the layers if mlx-lm shards no heads; three the layers."""
    write_named(tmp_path, name)
    if hosts == "3" and name in NOT_PIPELINED:
        pytest.skip("mlx-lm does not pipeline it")
    expected = answer(tmp_path, "", "--draft", "off", tokens=40)
    assert answer(tmp_path, hosts, "--draft", "fixed", tokens=40) == expected


def test_a_hung_rank_ends_the_answer(model: Path, whole: str) -> None:
    with running(model, "2") as process:
        assert process.stdout is not None
        begun = process.stdout.read(20)
        others = workers(process.pid)
        assert len(others) == 1
        os.kill(others[0], signal.SIGSTOP)
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    (error,) = [line for line in errors.decode().splitlines() if "holds" not in line]
    assert error.startswith("akunu: rank 1 on 127.0.0.1 sent nothing for 7 seconds")
    text = (begun + out).decode().rstrip()
    assert whole.startswith(text) or text.startswith(whole)
    assert all_gone([process.pid, *others])


def test_interrupts_and_kills_leave_no_processes(model: Path, whole: str) -> None:
    for number, code in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
        with running(model, "2") as process:
            assert process.stdout is not None
            process.stdout.read(20)
            others = workers(process.pid)
            process.send_signal(number)
            process.communicate(timeout=60)
        assert process.returncode == code
        assert all_gone(others)


@pytest.mark.slow
def test_a_server_restarts_after_losing_a_host(model: Path, whole: str) -> None:
    (port,) = _free_ports(1)
    address = f"http://127.0.0.1:{port}/v1/completions"
    options = ["--hosts", "2", "--no-answer-cache", "--model", str(model), "--port", str(port)]
    with subprocess.Popen(
        [*AKUNU, "serve", *options], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            _wait_for(process.stderr, "akunu serves")
            others = workers(process.pid)
            with _submit(address, model.name, 3000, stream=True) as stream:
                for _ in range(9):
                    stream.readline()
                os.kill(others[0], signal.SIGKILL)
                assert b"was killed by SIGKILL" in stream.read()
            _wait_for(process.stderr, "restarting")
            _wait_for(process.stderr, "akunu serves")
            with _submit(address, model.name, 20, stream=False) as reply:
                text = json.load(reply)["choices"][0]["text"]
            assert whole.startswith(text)
            others += workers(process.pid)
            process.terminate()
            process.communicate(timeout=60)
        finally:
            process.kill()
    assert len(others) == 2
    assert all_gone(others)


@pytest.mark.slow
def test_the_benchmark_runs_on_two_hosts(tmp_path: Path) -> None:
    write_talking(tmp_path)
    options = ["--hosts", "2", "--model", str(tmp_path), "--workload", "chat", "--max-tokens", "8"]
    options += ["--draft", "auto", "--repeats", "1", "-p", "8", "--format", "json"]
    words = [*AKUNU, "bench", "speed", *options]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [run["runner"] for run in found["runs"]] == ["off", "auto"]
    assert [run["identical"] for run in found["runs"]] == [None, True]
    assert found["runs"][0]["speedup"] == 1
    assert [test["runner"] for test in found["throughput"]] == ["akunu"]
    assert ["1/2 of each layer" in each for each in found["model"]["hosts"]] == [True, True]


@needs_tmux
def test_a_chat_continues_after_losing_a_host(terminal: Terminal, tmp_path: Path) -> None:
    model = tmp_path / "llama"
    model.mkdir()
    write_talking(model)
    keep = f"XDG_DATA_HOME={tmp_path}/home XDG_CONFIG_HOME={tmp_path}/home"
    chat = f"{sys.executable} -m akunu_py chat --temperature 0 --no-answer-cache"
    options = f"--max-tokens 4000 --hosts 2 {model}"
    terminal.type(f'clear; {keep} {chat} {options}; echo "code=$?"', "Enter")
    terminal.wait_for("rank 1 on 127.0.0.1 holds 1/2 of each layer")
    terminal.type("1 2 3", "Enter")
    terminal.wait_for("answering")
    before = workers(int(terminal.shell()))
    assert len(before) == 1
    os.kill(before[0], signal.SIGKILL)
    screen = terminal.wait_for("was killed by SIGKILL")
    assert re.search(r"[0-9]+[^╭]*interrupted", screen)  # the answer so far stays
    terminal.type("4 5", "Enter")
    until(lambda: {*workers(int(terminal.shell()))} - {*before})  # of the restarted server
    terminal.wait_for("answering")
    after = workers(int(terminal.shell()))
    assert len(after) == 1
    assert after != before
    terminal.type("Escape")
    terminal.wait_for("■ stopped")
    assert "[ring]" not in terminal.screen()
    terminal.type("C-q")
    assert "code=0\n" in terminal.wait_for("code=[0-9]+\n")
    assert all_gone(after)


def _wait_for(stream: IO[str], words: str) -> None:
    assert any(words in line for line in iter(stream.readline, ""))


def _submit(address: str, name: str, tokens: int, *, stream: bool) -> Any:
    body = {"model": name, "prompt": PROMPT, "max_tokens": tokens, "stream": stream}
    data = json.dumps(body | {"temperature": 0}).encode()
    headers = {"Content-Type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(address, data, headers), timeout=120)
