"""`akunu launch`: each client gets address, model and key, on a running or a new server."""

import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp

from akunu_py import paths
from akunu_py.commands.launch import CLIENTS, ModelEndpoint
from akunu_py.serve.http.guard import AccessRules
from tests.support.command import assert_one_line_error, run_here
from tests.support.serving import at_a_socket, served, write_served_model

OURS = (
    *("AKUNU_", "OPENAI_", "AIDER_", "OPENCODE_", "ANTHROPIC_", "CLAUDE_"),
    *("PI_", "QWEN_", "GPTME_", "CONTINUE_"),
)
CLIENT = f"""#!{sys.executable}
import json, os, sys
call = {{"arguments": sys.argv[1:], "environment": dict(os.environ)}}
if os.environ.get("MODELS_OF"):
    import urllib.request
    call["models"] = json.load(urllib.request.urlopen(os.environ["MODELS_OF"] + "/v1/models"))
json.dump(call, open(os.environ["CALL"], "w"))
sys.exit(7)
"""


@pytest.fixture
def client_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install stand-ins of all clients; each writes its arguments and environment to this file."""
    for client in CLIENTS.values():
        program = tmp_path / "bin" / client(ModelEndpoint("", "")).command[0]
        program.parent.mkdir(exist_ok=True)
        program.write_text(CLIENT)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALL", str(tmp_path / "call.json"))
    monkeypatch.delenv("AKUNU_API_KEY", raising=False)
    return tmp_path / "call.json"


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Serve a model with a context of 4,096 tokens, for requests with a key."""
    directory = write_served_model(tmp_path_factory.mktemp("served") / "model")
    with (
        served(directory, "served") as model,
        at_a_socket(model.application(AccessRules(key="secret"))) as url,
    ):
        model.model.service()  # loads it, so that clients learn its context
        yield int(url.rpartition(":")[2])


@pytest.mark.usefixtures("own_directories")
@pytest.mark.parametrize("client", [*CLIENTS])
def test_the_printed_command_is_the_one_that_runs(
    client: str, client_call: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AKUNU_API_KEY", "secret")
    options = [client, "--port", str(port)]
    assert run_here("launch", *options, "--", "it's", "--model").returncode == 7
    run = json.loads(client_call.read_text())
    shown = run_here("launch", *options, "--print", "--", "it's", "--model")
    assert subprocess.run(shown.stdout, shell=True).returncode == 7
    typed = json.loads(client_call.read_text())
    for call in (run, typed):  # the rest is a shell's, or Python's
        names = [name for name in call["environment"] if name.startswith(OURS)]
        call["environment"] = {name: call["environment"][name] for name in names}
    assert typed == run
    assert run["arguments"][-2:] == ["it's", "--model"]
    files = list((paths.cache_dir() / "launch").glob("*"))
    assert {file.stat().st_mode & 0o777 for file in files} <= {0o600}
    assert all(str(file) in json.dumps(run) for file in files)
    everything = json.dumps([run, *(file.read_text() for file in files)])
    for needed in (f"http://127.0.0.1:{port}", "served", "secret"):
        assert needed in everything


@pytest.mark.usefixtures("own_directories")
def test_a_missing_key_or_program_is_an_error(
    client_call: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("launch", "codex", "--port", str(port))
    no_key = run_here(*options)
    assert (no_key.returncode, "AKUNU_API_KEY" in no_key.stderr) == (2, True)
    monkeypatch.setenv("AKUNU_API_KEY", "secret")
    monkeypatch.setenv("PATH", str(client_call.parent))
    for client in CLIENTS:
        no_program = run_here("launch", client, *options[2:])
        assert_one_line_error(no_program, 2, "is not installed; to install it, run: ")
    assert "npm install -g @continuedev/cli" in no_program.stderr
    assert not client_call.exists()


def test_another_program_at_the_port_is_an_error() -> None:
    programs: list[ASGIApp] = [JSONResponse({"data": []}), PlainTextResponse("no such page", 404)]
    for each in programs:
        with at_a_socket(each) as url:
            done = run_here("launch", "aider", "--port", url.rpartition(":")[2])
        words = f"the program at {url} is not an akunu server; use another port: --port N"
        assert_one_line_error(done, 2, words)


def _free() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


@pytest.mark.e2e
def test_a_new_server_ends_with_the_client(
    client_call: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, port = write_served_model(tmp_path / "tiny-model"), _free()
    monkeypatch.setenv("MODELS_OF", f"http://127.0.0.1:{port}")
    done = run_here("launch", "aider", "--model", str(model), "--port", str(port))
    assert done.returncode == 7, done.stderr
    call = json.loads(client_call.read_text())
    (served,) = call["models"]["data"]
    assert call["arguments"][:2] == ["--model", f"openai/{served['id']}"]
    with socket.socket() as gone:
        assert gone.connect_ex(("127.0.0.1", port))


@pytest.mark.parametrize(
    ("context", "answer", "window"), [(65_536, 8192, None), (262_144, 32_000, "262144")]
)
def test_claude_requests_no_other_model_and_changes_no_prompt(
    context: int, answer: int, window: str | None
) -> None:
    """It compacts before the context is full; it needs three variables for that.

    It warns at each start about a window below 100,000 tokens.
    """
    defaults = CLIENTS["claude"](ModelEndpoint("http://h", "m", context)).defaults
    names = [name for name, value in defaults.items() if value == "m"]
    sizes = [f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("FABLE", "OPUS", "SONNET", "HAIKU")]
    assert names == [*sizes, "CLAUDE_CODE_SUBAGENT_MODEL"]
    assert defaults["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert defaults["CLAUDE_CODE_TOTAL_TOKENS_REMINDER"] == "off"
    assert defaults.get("CLAUDE_CODE_AUTO_COMPACT_WINDOW") == window
    assert defaults["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == str(context)
    assert defaults["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == str(answer)


def test_codex_gets_metadata_of_the_model() -> None:
    """All fields that Codex 0.171 requires; it warns at each start about a model without them."""
    launch = CLIENTS["codex"](ModelEndpoint("http://h", "m", 65_536))
    [(file, text)] = launch.files.items()
    assert f"model_catalog_json={json.dumps(str(file))}" in launch.command
    [model] = json.loads(text)["models"]
    needed = ("slug", "display_name", "description", "supported_reasoning_levels", "shell_type",
              "visibility", "supported_in_api", "priority", "base_instructions",
              "truncation_policy", "experimental_supported_tools")  # fmt: skip
    assert set(needed) <= set(model)
    assert (model["slug"], model["context_window"]) == ("m", 65_536)


@pytest.mark.usefixtures("own_directories")
@pytest.mark.parametrize(("given", "modes"), [
    ([], ["--permission-mode", "default"]),
    (["--permission-mode=plan"], ["--permission-mode=plan"]),
    (["--dangerously-skip-permissions"], ["--dangerously-skip-permissions"]),
])  # fmt: skip
def test_what_the_user_sets_for_claude_wins(
    given: list[str], modes: list[str], client_call: Path, port: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Its mode and variables, except the address and the key of the server."""
    monkeypatch.setenv("AKUNU_API_KEY", "secret")
    monkeypatch.setenv("CLAUDE_CODE_MAX_OUTPUT_TOKENS", "5")
    monkeypatch.setenv("ANTHROPIC_BASE_URL", "http://elsewhere")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "of another server")
    launched = run_here("launch", "claude", "--port", str(port), "--", *given)
    assert launched.returncode == 7
    call = json.loads(client_call.read_text())
    assert call["arguments"] == ["--model", "served", *modes]
    # In 4,096 tokens. Again at the end, because the client may have covered the first warning.
    assert launched.stderr.count("its first prompt will not fit") == 2
    assert call["environment"]["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "5"
    assert call["environment"]["ANTHROPIC_BASE_URL"] == f"http://127.0.0.1:{port}"
    assert call["environment"]["ANTHROPIC_API_KEY"] == ""


@pytest.mark.usefixtures("own_directories")
def test_serve_and_launch_use_the_environment(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AKUNU_MODEL", "nothing-here")
    missing = run_here("serve")
    assert missing.returncode == 1
    assert "AKUNU_MODEL: no model called 'nothing-here'" in missing.stderr
    monkeypatch.setenv("AKUNU_PORT", "x")
    wrong = run_here("serve")
    assert (wrong.returncode, "AKUNU_PORT" in wrong.stderr) == (2, True)
    monkeypatch.setenv("AKUNU_PORT", str(port))
    monkeypatch.setenv("AKUNU_API_KEY", "secret")
    shown = run_here("launch", "codex", "--print")
    assert f"http://127.0.0.1:{port}" in shown.stdout
    assert "served" in shown.stdout
