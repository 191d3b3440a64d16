"""`python -m tests.measure.early_exit`: agreement of the first layers. No timings."""

from __future__ import annotations

import json

import pytest

from akunu_py.models.store.model_store import StoredModel
from tests.measure.early_exit import main
from tests.support.bench_fakes import write_quick_model

pytestmark = pytest.mark.rotating


@pytest.fixture(scope="module")
def quick(starter: StoredModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_quick_model(tmp_path_factory.mktemp("model") / "quick", starter.path)


def test_exits_are_measured_after_every_layer(
    quick: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", quick, "--format", "json"]) == 0
    result = json.loads(capsys.readouterr().out)
    exits = result["exits"]
    assert [row["layers"] for row in exits] == list(range(1, len(exits) + 1))
    assert result["chosen"] in range(1, len(exits) + 1)
    assert all(0.0 <= row["agreement"] <= 1.0 and row["reused"] < row["share"] for row in exits)
