"""`python -m tests.measure.completion`: the kept workload, and what it must show on the starter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from akunu_py.bench.curve import CURVES, parse_curve
from akunu_py.completion.completer import Completer
from akunu_py.completion.request import CompleteOptions
from akunu_py.decoding.model.engine import Engine
from tests.measure import completion
from tests.measure.completion import BUFFER, FILES, PREFIX, TOGETHER
from tests.support.tiny_fim import sentence_piece, write_model

END = "<|endoftext|>"


def test_places_hold_out_whole_bodies() -> None:
    places = completion.load_places()
    assert len(places) > 60
    for place in places:
        request = place.request
        assert place.body[:40] not in request.prefix[-200:]
        assert request.prefix.rstrip().endswith(":")
        assert all(file.path != request.path for file in request.files)
        compile(request.prefix + place.body + request.suffix, request.path, "exec")


def test_buffer_and_files_raise_tokens_per_pass_by_a_fifth(starter_engine: Engine) -> None:
    """At least 1.2 times the tokens per pass of the prompt alone, for any cost curve."""
    completer = Completer(starter_engine)
    places = completion.load_places()[::4]
    for name in ("m5max", "cpu"):
        counts = completion.replay_places(completer, places, parse_curve(CURVES[name]))[TOGETHER]
        rate = {kind: total.tokens / total.passes for kind, total in counts.items()}
        assert rate[FILES] >= 1.2 * rate[PREFIX]
        assert rate[BUFFER] > 1.1 * rate[PREFIX]
        assert counts[FILES].cost < counts[BUFFER].cost < counts[PREFIX].cost


@pytest.mark.long
def test_keystrokes(shallow_starter: Engine) -> None:
    place = completion.load_places()[8]  # a small one
    counted = completion.count_keystrokes(shallow_starter, CompleteOptions(), place)
    assert counted.first > 100
    assert 1 <= counted.typed <= 4
    assert counted.predicted == 0
    assert counted.superseded <= 1


@pytest.mark.long
def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    places = completion.load_places()[:40:6]
    monkeypatch.setattr(completion, "load_places", lambda: places)
    directory = write_model(tmp_path, sentence_piece([END]), end=END)
    options = ["--model", str(directory), "--live", "1"]
    assert completion.main([*options, "--format", "json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["replay"]["places"] == len(completion.load_places())
    assert set(result["replay"]["projects"]) == {"all", "shop", "tests"}
    assert result["live"]["identical"]
    assert result["live"]["places"] == 1
    assert set(result["keystrokes"]) == {"first", "typed", "predicted", "superseded"}
