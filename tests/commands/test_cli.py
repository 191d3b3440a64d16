"""The commands as a user runs them: real model, and real pipes where those matter."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from akunu_py.decoding.model.engine import Engine
from akunu_py.models.store.model_store import StoredModel
from akunu_py.version import __version__
from tests.support.command import AKUNU, akunu, assert_one_line_error, run_here


def test_help_names_every_command() -> None:
    done = run_here("--help")
    assert done.returncode == 0
    for command in ("chat", "run", "models", "info", "bench"):
        assert command in done.stdout


def test_help_and_mistakes_load_nothing_heavy() -> None:
    commands = [
        "--help",
        "run hi --model nope",
        "models show nope",
        "bench --help",
        "bench --max-tokens 0",
        "bench report nofile",
        "bench curve --repeats 0",
        "bench replay nofile",
    ]
    script = f"""
import sys
from akunu_py.cli import main
for words in {commands}:
    try:
        main(words.split())
    except SystemExit:
        pass
    heavy = {{"mlx", "mlx_lm", "transformers", "textual", "numpy", "huggingface_hub", "llguidance"}}
    if heavy & set(sys.modules):
        sys.exit(f"{{words}} loads {{heavy & set(sys.modules)}}")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "slow"),
    [
        ("--help", {"ctypes", "dataclasses", "inspect", "platformdirs", "subprocess", "traceback"}),
        ("models list", {"ctypes", "email", "huggingface_hub.utils", "importlib.metadata", "tqdm"}),
    ],
)
def test_commands_that_users_wait_for_import_little(words: str, slow: set[str]) -> None:
    """Imports take most of their time; seconds of a shared machine would say nothing."""
    script = (
        "loaded = set(sys.modules)  # by the installation\n"
        "from akunu_py.cli import main\n"
        f"try: main({words.split()})\n"
        "except SystemExit: pass\n"
        "print(*set(sys.modules) - loaded, file=sys.stderr)"
    )
    command = [sys.executable, "-S", "-c", f"import sys; sys.path[:] = {sys.path}; {script}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    loaded = set(done.stderr.split())
    assert "akunu_py.parser" in loaded
    assert not loaded & (slow | {"asyncio", "httpx2", "mlx", "mlx_lm", "numpy", "textual"})


def test_version_names_the_libraries() -> None:
    libraries = f"mlx {version('mlx')}, mlx-lm {version('mlx-lm')}"
    assert akunu("--version").stdout == f"akunu {__version__} ({libraries})\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "chats export --nope",
            "akunu chats export: unrecognized arguments: --nope; see: akunu chats export --help",
        ),
        ("serve --nope", "akunu serve: unrecognized arguments: --nope; see: akunu serve --help"),
        ("bench replay --nope", "; see: akunu bench replay --help"),
        ("models pull", "; see: akunu models pull --help"),
        ("run hi --temperature 9", "expected a number from 0 to 5, got '9'; see: akunu run --help"),
        ("chat --temperature hot", "expected a number from 0 to 5, got 'hot'"),
        ("--debug bench replay", "expected a trace file"),
    ],
)
def test_wrong_usage_names_the_help_of_the_command(words: str, says: str) -> None:
    done = run_here(*words.split())
    assert done.returncode == 2
    assert says in done.stderr


@pytest.mark.e2e
@pytest.mark.usefixtures("shallow_store")
def test_run_prints_the_answer_and_statistics_apart() -> None:
    done = akunu("run", "Say hello.", "--max-tokens", "12")
    assert done.returncode == 0
    assert done.stdout.endswith("\n")
    assert done.stdout.strip()
    assert "12 tokens" in done.stderr
    assert "tokens/pass" in done.stderr
    assert "cut off at --max-tokens" in done.stderr


@pytest.mark.long
def test_run_json_from_stdin_in_both_modes(loaded_shallow_starter: Engine) -> None:
    answers = {}
    for mode in ("fixed", "off"):
        options = ("--format", "json", "--draft", mode, "--max-tokens", "16")
        done = run_here("run", "-", *options, stdin="Count to ten.")
        assert done.returncode == 0, done.stderr
        answers[mode] = json.loads(done.stdout)
    assert answers["fixed"]["tokens"] == answers["off"]["tokens"]
    answer = answers["fixed"]
    assert set(answer) == {"text", "tokens", "finish_reason", "stats"}
    assert answer["finish_reason"] == "length"
    assert answer["text"] == loaded_shallow_starter.tokens.tokenizer.decode(answer["tokens"])
    stats = answer["stats"]
    assert stats["generated_tokens"] == len(answer["tokens"]) == 16
    assert answers["off"]["stats"]["target_passes"] == 15
    assert stats["target_passes"] + stats["accepted"] == 15
    for name in (
        "prompt_tokens",
        "cached_tokens",
        "drafted",
        "prefill_s",
        "decode_s",
        "tokens_per_s",
    ):
        assert name in stats


def test_raw_continues_the_text(loaded_starter: Engine) -> None:
    done = run_here("run", "--raw", "--quiet", "--max-tokens", "4", "The capital of France is")
    assert done.stdout.startswith(" Paris")
    assert done.stderr == ""


def test_wrong_usage_is_one_line_with_exit_code_2(starter: StoredModel) -> None:
    assert_one_line_error(run_here("run", "hi", "--max-tokens", "0"), 2, "1 or more")
    assert_one_line_error(run_here("run", "hi", "--max-tokens", "many"), 2, "1 or more")
    assert_one_line_error(run_here("run", "hi", "--wibble"), 2, "--wibble", "--help")
    assert_one_line_error(run_here("wibble"), 2, "wibble")
    assert_one_line_error(run_here("run", "hi", "--draft", "wild"), 2, "wild")
    assert_one_line_error(run_here("run", stdin=""), 2, "empty")
    assert_one_line_error(run_here("run", "   "), 2, "empty")
    assert_one_line_error(run_here("run", "-", stdin=b"\xff\xfe\x00"), 2, "UTF-8")
    assert_one_line_error(run_here("bench", "--workload", "wibble"), 2, "wibble", "multi-turn")


@pytest.mark.e2e
@pytest.mark.usefixtures("shallow_store")
def test_plausible_accidents_are_one_line() -> None:
    shell = " ".join(AKUNU)
    for script, code, word in (
        (f"{shell} run $(printf 'caf\\351')", 2, "UTF-8"),
        (f"{shell} run <&-", 2, "empty"),
        (f"{shell} run hi --quiet --max-tokens 3 >/dev/full", 1, "space"),
    ):
        if "/dev/full" in script and not Path("/dev/full").exists():  # a Mac
            continue
        done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=120)
        assert done.returncode == code, (script, done.stderr)
        assert len(done.stderr.strip().splitlines()) == 1, (script, done.stderr)
        assert word in done.stderr, (script, done.stderr)
    closed = subprocess.run(
        ["sh", "-c", f"{shell} run hi --quiet --max-tokens 3 >&-"], capture_output=True, timeout=120
    )
    assert (closed.returncode, closed.stderr) == (0, b"")


@pytest.mark.usefixtures("loaded_shallow_starter")
def test_values_that_the_model_does_not_have_are_one_line() -> None:
    for option, value, word in (
        ("--logit-bias", "999999=5", "49152"),
        ("--kv-bits", "5", "4 or 8"),
        ("--temperature", "-1", "temperature"),
    ):
        assert_one_line_error(run_here("run", "hi", option, value), 2, word)


@pytest.mark.long
def test_a_quantised_cache_drafts_what_plain_decoding_says(loaded_shallow_starter: Engine) -> None:
    outputs = {
        json.loads(
            run_here("run", "Count to ten.", "--kv-bits", "8", "--draft", mode, "--format", "json",
                  "--no-answer-cache", "--max-tokens", "40").stdout
        )["text"]
        for mode in ("off", "fixed")
    }  # fmt: skip
    assert len(outputs) == 1


def test_chat_needs_a_terminal(starter: StoredModel) -> None:
    assert_one_line_error(run_here("chat"), 2, "terminal", "akunu run")


def test_unknown_and_damaged_models(starter: StoredModel, tmp_path: Path) -> None:
    assert_one_line_error(run_here("run", "hi", "--model", "startr"), 1, "starter")
    assert_one_line_error(run_here("run", "hi", "--model", str(tmp_path)), 1, "config.json")
    assert_one_line_error(run_here("models", "show", "wibble"), 1, "wibble")
    store = tmp_path / "akunu" / "models"
    shutil.copytree(starter.path, store / "starter")
    weights = store / "starter" / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    home = {"XDG_DATA_HOME": str(tmp_path)}
    assert_one_line_error(
        run_here("run", "hi", env=home), 1, "model.safetensors", "akunu models pull starter"
    )
    # The same without a manifest to compare with.
    (store / "starter" / "akunu.json").unlink()
    directory = shutil.move(store / "starter", tmp_path / "loose")
    assert_one_line_error(run_here("run", "hi", "--model", str(directory)), 1, "damaged")


def test_an_empty_store_says_what_to_run(tmp_path: Path) -> None:
    home = {"XDG_DATA_HOME": str(tmp_path)}
    assert_one_line_error(run_here("run", "hi", env=home), 1, "akunu models pull starter")
    listing = run_here("models", "list", env=home)
    assert listing.returncode == 0
    assert "starter" in listing.stdout


@pytest.mark.long
def test_no_network_is_one_line(tmp_path: Path) -> None:
    home = {
        "XDG_DATA_HOME": str(tmp_path),
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_RETRIES": "1",
    }
    done = run_here("models", "pull", "starter", env=home)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("akunu: ")
    assert "network" in last
    assert "Traceback" not in done.stderr
    assert [entry.name for entry in (tmp_path / "akunu" / "models").glob("starter*")] == []


def test_a_prompt_longer_than_the_context(loaded_shallow_starter: Engine) -> None:
    done = run_here("run", "-", stdin="word " * 9000)
    assert_one_line_error(done, 1, "8192", "shorten")


@pytest.mark.e2e
@pytest.mark.usefixtures("shallow_store")
def test_interrupt_ends_cleanly_with_what_was_said() -> None:
    command = [*AKUNU, "run", "Tell me a very long story.", "--max-tokens", "2000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    said = b""
    while not said.strip():  # an answer may begin with a space, which is no word yet
        piece = process.stdout.read(1)
        assert piece, process.stderr.read() if process.stderr else b""
        said += piece
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out.endswith(b"\n")
    assert b"tokens/s" in err
    assert b"interrupted" in err
    assert b"Traceback" not in err


@pytest.mark.e2e
@pytest.mark.usefixtures("shallow_store")
def test_interrupt_while_loading_is_quiet() -> None:
    process = subprocess.Popen(
        [*AKUNU, "run", "hi"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    time.sleep(0.3)
    # Without Metal, MLX looks for a compiler with system(), and C ignores interrupts until that
    # returns: for these milliseconds a person has to press again.
    presses = 0
    while process.poll() is None:
        presses += 1
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT)
    assert presses <= 2
    assert b"Traceback" not in err


@pytest.mark.e2e
@pytest.mark.usefixtures("shallow_store")
def test_a_closed_pipe_is_quiet() -> None:
    process = subprocess.Popen(
        [*AKUNU, "run", "--quiet", "Tell me a story.", "--max-tokens", "200"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    assert process.wait(timeout=60) == 0
    assert err == b""


def test_models_list_and_show(starter: StoredModel) -> None:
    listing = run_here("models", "list").stdout
    assert "starter" in listing
    assert "8,192" in listing
    shown = run_here("models", "show", "starter")
    assert "Apache-2.0" in shown.stdout
    assert shown.returncode == 0


def test_rm_asks_and_keeps_without_a_yes(starter: StoredModel) -> None:
    assert_one_line_error(run_here("models", "rm", "starter"), 2, "--yes")
    assert starter.path.exists()


def test_info_has_what_a_bug_report_needs(starter: StoredModel) -> None:
    done = run_here("info")
    assert done.returncode == 0
    for word in ("akunu", "device", "memory", "blas", "mlx-lm", "store", "python"):
        assert word in done.stdout
