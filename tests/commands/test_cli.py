"""The command line: imports, mistakes, `run`, interrupts, pipes, and structured output."""

import argparse
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from akunu_py import paths
from akunu_py.commands.chat import check_draft_model
from akunu_py.commands.run import read_prompt
from akunu_py.engine.engine import Engine
from akunu_py.engine.load import with_settings
from akunu_py.models.store.model_store import StoredModel
from akunu_py.paths import shell_command
from akunu_py.settings import Settings
from akunu_py.types import LoadOptions
from akunu_py.version import __version__
from tests.support.command import AKUNU, assert_one_line_error, printed, run_here


@pytest.mark.parametrize(("commands", "slow"), [
    (["--help"], {"ctypes", "dataclasses", "inspect", "platformdirs", "subprocess"}),
    (["models list"], {"ctypes", "email", "huggingface_hub.utils", "tqdm"}),
    (
        [
            "run hi --model nope", "models show nope", "bench --help", "bench --max-tokens 0",
            "bench report nofile", "bench curve --repeats 0", "bench replay nofile",
            "completions bash",
        ],
        {"transformers", "huggingface_hub", "llguidance"},
    ),
])  # fmt: skip
def test_commands_import_no_more_than_they_need(commands: list[str], slow: set[str]) -> None:
    """Imports take most of the time of a command."""
    script = (
        "loaded = set(sys.modules)  # by the installation\n"
        "from akunu_py.cli import main\n"
        f"for words in {commands}:\n"
        "    try: main(words.split())\n"
        "    except SystemExit: pass\n"
        "print('loaded:', *set(sys.modules) - loaded, file=sys.stderr)"
    )
    command = [sys.executable, "-S", "-c", f"import sys; sys.path[:] = {sys.path}; {script}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    loaded = set(done.stderr.rpartition("loaded:")[2].split())
    assert "akunu_py.parser" in loaded
    assert not loaded & (slow | {"asyncio", "httpx2", "mlx", "mlx_lm", "numpy", "textual"})


def test_version_names_the_libraries() -> None:
    libraries = f"mlx {version('mlx')}, mlx-lm {version('mlx-lm')}"
    assert run_here("--version").stdout == f"akunu {__version__} ({libraries})\n"


MISTAKES = {
    "serve --nope": ["akunu serve: unrecognized arguments: --nope; see: akunu serve --help"],
    "run --max-token 5 hi": [": --max-token (did you mean '--max-tokens'?)"],
    "--modle=x": ["akunu chat: unrecognized arguments: --modle=x (did you mean 'MODEL'?)"],
    "run hi there": ["unrecognized arguments: there; put the prompt in quotes"],
    "models": ["akunu models: expected COMMAND: list, pull"],
    "launch": ["akunu launch: expected AGENT: codex, "],
    "bench fast": ["akunu bench: unknown action 'fast'; known: speed, replay"],
    "bench replay --nope": ["; see: akunu bench replay --help"],
    "launch codex fix it": ["akunu launch: unrecognized arguments: fix it"],
    "models pull": ["; see: akunu models pull --help"],
    "run hi --temperature 9": ["a number from 0 to 5, got '9'; see: akunu run --help"],
    "chat --temperature hot": ["expected a number from 0 to 5, got 'hot'"],
    "serve --temperature nan": ["expected 0 to 1,000,000, got 'nan'"],
    "serve --grace inf": ["expected 0 to 1,000,000, got 'inf'"],
    "run hi --max-tokens 0": ["1 or more"],
    "run hi --max-tokens many": ["1 or more"],
    "wibble": ["akunu: unknown command 'wibble'; known: chat", "complete"],
    "runn hi": ["'runn' (did you mean 'run'?)"],
    "models recomend": ["(did you mean 'recommend'?)"],
    "completions klingon": ["klingon", "bash", "fish", "zsh"],
    "run hi --draft wild": ["wild"],
    "run": ["empty"],
    "bench --workload wibble": ["wibble", "multi-turn"],
    "chat": ["terminal", "akunu run"],
    "models rm starter": ["--yes"],
    "run hi --model /no --prompt-cache c.bin": [".safetensors"],
    "run hi --model /no --json --open-objects": ["--open-objects requires --json-schema"],
    "run hi --model /no --regex a --compact": ["--compact requires --json-schema or --json"],
    "run hi --model /no --json --choice a": ["not allowed with argument --json"],
    "run hi --model /no --json-schema /nowhere.json": ["-schema: cannot read /nowhere.json: No"],
    "run hi --model /no --grammar /dev/zero": ["cannot read /dev/zero: not a regular file"],
    "run hi --model /no --grammar=": ["--grammar: expected the path of a file, found an empty"],
}


@pytest.mark.parametrize("words", MISTAKES)
def test_wrong_usage_is_one_line_with_exit_code_2(words: str, starter: StoredModel) -> None:
    assert_one_line_error(run_here(*words.split()), 2, *MISTAKES[words])
    assert starter.path.exists()


def test_help_is_a_command() -> None:
    assert printed("help") == printed("--help")
    assert "akunu bench [OPTIONS] [ACTION] ..." in printed("help", "bench")


def test_a_prompt_without_text_is_refused() -> None:
    assert_one_line_error(run_here("run", "   "), 2, "empty")
    assert_one_line_error(run_here("run", "-", stdin=b"\xff\xfe\x00"), 2, "UTF-8")


@pytest.mark.parametrize("piped", [True, False])
def test_piped_text_goes_before_the_prompt(piped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text on a socket does not: a program may never close it."""
    ends = os.pipe() if piped else [each.detach() for each in socket.socketpair()]
    with os.fdopen(ends[0]) as stdin:
        os.write(ends[1], b"some text\n")
        os.close(ends[1])
        monkeypatch.setattr(sys, "stdin", stdin)
        assert read_prompt("sum up") == ("some text\n\n\nsum up" if piped else "sum up")


@pytest.mark.usefixtures("loaded_shallow_starter")
def test_run_prints_the_answer_and_statistics_apart() -> None:
    done = run_here("run", "Say hello.", "--max-tokens", "12")
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
        options = ("--format", "json", "--draft", mode, "--max-tokens", "8")
        answers[mode] = json.loads(printed("run", "-", *options, stdin="Count to ten."))
    answer, stats = answers["fixed"], answers["fixed"]["stats"]
    assert answer["tokens"] == answers["off"]["tokens"]
    assert set(answer) == {"text", "tokens", "finish_reason", "stats"}
    assert answer["finish_reason"] == "length"
    assert answer["text"] == loaded_shallow_starter.tokens.tokenizer.decode(answer["tokens"])
    assert stats["generated_tokens"] == len(answer["tokens"]) == 8
    assert answers["off"]["stats"]["target_passes"] == 7
    assert stats["target_passes"] + stats["accepted"] == 7
    names = {"prompt_tokens", "cached_tokens", "drafted", "prefill_s", "decode_s", "tokens_per_s"}
    assert names <= set(stats)


def test_raw_continues_the_text(loaded_starter: Engine) -> None:
    done = run_here("run", "--raw", "--quiet", "--max-tokens", "4", "The capital of France is")
    assert done.stdout.startswith(" Paris")
    assert done.stderr == ""


@pytest.mark.e2e
@pytest.mark.usefixtures("tiny_store")
@pytest.mark.parametrize(("arguments", "code", "word"), [
    ("run $(printf 'caf\\351')", 2, "UTF-8"),
    ("run <&-", 2, "empty"),
    ("run hi --quiet --max-tokens 3 >/dev/full", 1, "space"),
    ("models list >&-", 0, ""),
])  # fmt: skip
def test_broken_streams_and_arguments_are_at_most_one_line(
    arguments: str, code: int, word: str
) -> None:
    if "/dev/full" in arguments and not Path("/dev/full").exists():
        pytest.skip("a Mac has no /dev/full")
    script = f"{' '.join(AKUNU)} {arguments}"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, len(done.stderr.splitlines())) == (code, bool(word)), done.stderr
    assert word in done.stderr


@pytest.mark.usefixtures("loaded_shallow_starter")
@pytest.mark.parametrize(("option", "value", "word"), [
    ("--logit-bias", "999999=5", "49152"),
    ("--kv-bits", "5", "4 or 8"),
])  # fmt: skip
def test_values_that_the_model_does_not_have_are_one_line(
    option: str, value: str, word: str
) -> None:
    assert_one_line_error(run_here("run", "hi", option, value), 2, word)


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
    # The same without a name.
    directory = shutil.move(store / "starter", tmp_path / "loose")
    assert_one_line_error(run_here("run", "hi", "--model", str(directory)), 1, "damaged")


def test_an_empty_store_says_what_to_run(tmp_path: Path) -> None:
    home = {"XDG_DATA_HOME": str(tmp_path)}
    assert_one_line_error(run_here("run", "hi", env=home), 1, "akunu models pull starter")
    listing = run_here("models", "list", env=home)
    assert listing.returncode == 0
    assert "starter" in listing.stdout


def start_run(*arguments: str) -> subprocess.Popen[bytes]:
    command = [*AKUNU, "run", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.e2e
@pytest.mark.usefixtures("tiny_store")
def test_an_interrupt_ends_with_the_text_so_far() -> None:
    process = start_run("Tell me a very long story.", "--max-tokens", "9000", "--draft", "off")
    assert process.stdout is not None
    text = b""
    while not text.strip():  # an answer may begin with a space, which ends no word
        piece = process.stdout.read(1)
        assert piece, process.stderr.read() if process.stderr else b""
        text += piece
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out.endswith(b"\n")
    assert b"first after" in err
    assert b"interrupted" in err
    assert b"Traceback" not in err


@pytest.mark.e2e
@pytest.mark.usefixtures("tiny_store")
def test_a_closed_pipe_is_quiet() -> None:
    process = start_run("--quiet", "Tell me a story.", "--max-tokens", "200")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 0


def test_models_list_show_and_info(starter: StoredModel) -> None:
    shown = printed("models", "list") + printed("models", "show", starter.name) + printed("info")
    words = ("8,192", "Apache-2.0", "device", "memory", "blas", "mlx-lm", "store", "python")
    assert [word for word in words if word not in shown] == []


@pytest.mark.usefixtures("own_directories")
def test_info_describes_an_unreadable_store() -> None:
    paths.models_dir().mkdir(parents=True)
    (paths.models_dir() / "models.toml").write_text("[")
    done = run_here("info")
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert (done.returncode, done.stderr, lines["akunu"]) == (1, "", __version__)
    assert "models.toml is damaged" in lines["store"]


# Structured output


@pytest.fixture
def model(own_directories: None, starter_engine: Engine, loaded_shallow_starter: Engine) -> str:
    return str(loaded_shallow_starter.path)


ARRAY = {"type": "array", "items": {"enum": [7, True]}, "minItems": 2, "maxItems": 2}
ARRAYS = {"[7,7]", "[7,true]", "[true,7]", "[true,true]"}


@pytest.mark.parametrize(
    ("options", "content", "texts"),
    [
        (["--choice", "a b", "--choice", "cd", "--temperature", "1"], "", {"a b", "cd"}),
        (["--grammar", "FILE"], 'start: "x" y\ny: "y" | "z"\n', {"xy", "xz"}),
        (["--compact", "--json-schema", "FILE"], "\ufeff" + json.dumps(ARRAY), ARRAYS),
        (["--compact", "--json-schema", json.dumps({"$ref": "#/x", "x": ARRAY})], "", ARRAYS),
    ],
    ids=["choices", "grammar", "schema in a file", "schema"],
)
def test_answers_follow_their_constraint(
    model: str, tmp_path: Path, options: list[str], content: str, texts: set[str]
) -> None:
    file = tmp_path / "constraint"
    file.write_text(content)
    words = [word.replace("FILE", str(file)) for word in options]
    answer = json.loads(printed("run", "Which?", "--model", model, *words, "--format", "json"))
    assert (answer["finish_reason"], answer["text"] in texts) == ("stop", True), answer


def test_one_token_has_no_rates(model: str) -> None:
    done = run_here("run", "Which?", "--model", model, "--choice", "yes")
    assert done.stderr.startswith("[1 token · first after ")


def test_an_incomplete_answer_is_printed_with_a_warning(model: str) -> None:
    words = ("--quiet", "--regex", "a{99}", "--max-tokens", "2")
    done = run_here("run", "Which?", "--model", model, *words)
    assert done.returncode == 0
    assert set(done.stdout) == {"a", "\n"}
    assert "the answer is incomplete: cut off at --max-tokens" in done.stderr


def test_a_schema_that_cannot_be_used_is_refused_with_its_place(model: str) -> None:
    schema = '{"properties": {"a": {"$dynamicRef": "#b"}}}'
    done = run_here("run", "Which?", "--model", model, "--json-schema", schema)
    assert done.returncode == 2
    assert "at #/properties/a: $dynamicRef is not supported" in done.stderr
    assert done.stdout == ""


# Before and after a chat


def test_a_missing_draft_model_is_a_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    args = argparse.Namespace(draft_model="no-such-model")
    (notice,) = check_draft_model(args)
    assert notice.startswith("--draft-model is not used: ")
    assert "no-such-model" in notice
    assert args.draft_model == ""
    assert check_draft_model(argparse.Namespace(draft_model=None)) == []


def test_the_memory_limit_of_the_settings_is_a_default() -> None:
    settings = Settings(memory_limit="2GB")
    assert with_settings(LoadOptions(), settings).memory_limit == 2_000_000_000
    assert with_settings(LoadOptions(memory_limit=5), settings).memory_limit == 5
    assert with_settings(LoadOptions(), Settings()).memory_limit is None


def test_the_command_that_reopens_a_chat_works_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after `make chat`, which runs a script that is not on the path."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    command = shlex.split(shell_command())
    done = subprocess.run([*command, "--version"], check=True, capture_output=True, text=True)
    assert done.stdout.startswith("akunu ")
    (tmp_path / "akunu").symlink_to(command[0])
    if command[0].endswith("/akunu"):
        monkeypatch.setenv("PATH", str(tmp_path))
        assert shell_command() == "akunu"
