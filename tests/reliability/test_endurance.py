"""Long runs leak no memory, open files or threads; the slow form has hundreds of turns."""

from pathlib import Path

import pytest

from tests.reliability.endurance import CACHE_MEMORY, RUNS, tiny_model

MEGABYTE = 1_000_000
LONG = [pytest.mark.slow, pytest.mark.timeout(1800)]
CACHE = 256  # bytes of a token in the tiny model's KV cache, which grows in steps of 256 tokens
A_TURN = 64  # tokens at most, of a prompt and its answer
# MB that a run may allocate after the warm-up, and for each turn of a conversation: a kilobyte a
# token, in the app 0.6 MB.
GROWTH = {"chat": (6, 0.06), "chats": (4, 0), "app": (10, 0.6)}


@pytest.mark.usefixtures("own_directories")
@pytest.mark.parametrize(
    ("name", "part"),
    [
        *((name, 0.01) for name in ("app", "completions", "serving", "reloads")),
        *(pytest.param(name, 1, marks=LONG) for name in RUNS),
    ],
)
def test_long_runs_leave_nothing(name: str, part: float, tmp_path: Path) -> None:
    run, count = RUNS[name]
    count = max(6, int(count * part))
    allowed, a_turn = GROWTH.get(name, (4, 0))
    samples = run(tiny_model(tmp_path / "tiny"), count, 12)
    first, last = samples[1], samples[-1]
    assert last.files <= first.files
    assert last.threads <= first.threads + (name == "serving")  # one may still end
    arrays = 10_000 if name == "reloads" else CACHE_MEMORY
    caches = CACHE * (512 + (A_TURN * count if a_turn else 0)) + arrays
    assert last.active - first.active <= caches
    assert last.used - first.used < MEGABYTE * (allowed + a_turn * count)
    assert sum(sample.passes for sample in samples) > 0
