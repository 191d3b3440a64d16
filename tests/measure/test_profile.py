"""`python -m tests.measure.profile`: where the time of a pass goes. No timings."""

from __future__ import annotations

import json

import pytest

from akunu_py.models.store.model_store import StoredModel
from tests.measure.profile import main
from tests.support.bench_fakes import write_quick_model

pytestmark = pytest.mark.rotating


@pytest.fixture(scope="module")
def quick(starter: StoredModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_quick_model(tmp_path_factory.mktemp("model") / "quick", starter.path)


def test_profile_measures_every_stage(quick: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--workload", "summary", "--max-tokens", "12", "--repeats", "1", "--model", quick]
    assert main([*words, "--format", "json"]) == 0
    result = json.loads(capsys.readouterr().out)
    (one,) = result["profiles"]
    assert one["tokens"] == 11
    stages = one["stages_s"]
    assert list(stages) == [
        "drafting", "building the graph", "device", "sampling", "detokenising", "the rest",
    ]  # fmt: skip
    assert sum(stages.values()) == pytest.approx(one["staged_s"])
    assert stages["device"] > stages["drafting"] > 0
    assert one["drawing_s"] > 0
