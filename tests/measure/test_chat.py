"""`python -m tests.measure.chat`: the chat on a pseudo-terminal. No timings."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from akunu_py.errors import INTERRUPTED, AkunuError
from akunu_py.types import Stats
from tests.measure.chat import LETTERS, ChatBench, ChatResult, KeyTimes, chat_terminal, main
from tests.support.tiny_fim import write_chat_model

pytestmark = pytest.mark.rotating


def test_percentiles_are_measured_values() -> None:
    keys = KeyTimes([number / 100 for number in range(100, 0, -1)])
    assert keys.median == pytest.approx(0.505)
    assert keys.p95 == 0.95
    assert KeyTimes([0.2]).p95 == 0.2
    assert keys.worst == 1.0
    assert KeyTimes().worst == KeyTimes().median == KeyTimes().p95 == 0.0


def test_ratio_divides_the_medians() -> None:
    result = ChatResult()
    assert result.ratio == result.spread == 0.0
    for alone, chat in ((100, 90), (50, 60), (101, 95)):
        result.alone.append(("a", Stats(generated_tokens=alone + 1, decode_s=1.0)))
        result.chat.append(("a", Stats(generated_tokens=chat + 1, decode_s=1.0)))
    assert result.ratio == pytest.approx(0.9)
    assert result.spread == pytest.approx((1.2 - 0.9) / 2)
    assert result.identical
    result.chat.append(("b", Stats()))
    assert not result.identical


def test_letters_are_distinct_and_fit_into_the_box() -> None:
    assert len(set(LETTERS)) == len(LETTERS) <= 70
    assert all(letter.isprintable() for letter in LETTERS)


def test_a_program_that_ends_is_an_error_with_its_last_output() -> None:
    command = [sys.executable, "-c", "print('\\x1b[1mno model here')"]
    with pytest.raises(AkunuError, match="no model here"), chat_terminal(command, {}):
        pass


@pytest.mark.e2e
@pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_command(
    long: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run on a tiny model, with all files in a temporary directory."""
    user = tmp_path / "user"
    for name in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(user))
    # A letter is a token of the tiny model.
    monkeypatch.setattr("tests.measure.chat._LONG_LENGTH", 1500)
    directory = write_chat_model(tmp_path / "model")
    options = ["--model", str(directory), "--repeats", "1", "--max-tokens", "24", "--keys", "2"]
    options += ["--force", "--format", "json", *(["--long"] if long else [])]
    assert main(options) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert "in the chat, 1/1" in captured.err
    assert not user.exists()
    keys = result["keys"]
    assert keys["idle"]["count"] + keys["idle"]["lost"] == 8
    names = {"idle", "decoding", *(("decoding, long chat", "decoding, heavy chat") if long else ())}
    assert set(keys) == names
    for name in names:
        assert len(keys[name]["ms"]) == keys[name]["count"]
    assert 0 <= keys["decoding"]["count"] <= 2
    assert len(result["alone"]) == len(result["chat"]) == 1
    assert result["identical"]
    assert {each["prompt_tokens"] for each in (*result["alone"], *result["chat"])} == {
        result["alone"][0]["prompt_tokens"]
    }
    assert (result["long_chat_tokens"] > 1000) == long
    assert result["ratio"] > 0


def test_an_interrupt_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(bench: object, result: ChatResult) -> None:
        result.alone.append(("a", Stats(generated_tokens=11, decode_s=1.0)))
        raise KeyboardInterrupt

    monkeypatch.setattr(ChatBench, "measure", interrupted)
    directory = write_chat_model(tmp_path)
    assert main(["--model", str(directory)]) == INTERRUPTED
    captured = capsys.readouterr()
    (row,) = [line for line in captured.out.splitlines() if line.startswith("without the chat")]
    assert row.split()[3:] == ["1", "11", "10.0", "0.0", "0.00"]
    assert "interrupted" in captured.err
