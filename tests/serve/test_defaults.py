"""Default sampling of requests."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from akunu_py.decoding.sampling import Sampler
from akunu_py.serve.http.server import model_defaults
from akunu_py.types import SamplingOptions
from tests.reliability.fuzz import SCALARS

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "do_sample")


def test_generation_config_sets_defaults(tmp_path: Path) -> None:
    assert model_defaults(tmp_path, SamplingOptions()).temperature == 1.0
    given = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "x": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    asked = SamplingOptions(seed=3)
    expected = SamplingOptions(0.7, 0.8, top_k=20, repetition_penalty=1.05, seed=3)
    assert model_defaults(tmp_path, asked) == expected


@given(st.dictionaries(st.sampled_from(NAMES), SCALARS) | SCALARS)
def test_any_generation_config_gives_valid_defaults(content: object) -> None:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "generation_config.json"
        file.write_text(json.dumps(content))
        Sampler(model_defaults(file.parent, SamplingOptions()))
