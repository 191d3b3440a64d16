"""Every tool runs with quick arguments; prompt caches are evicted better than by age alone."""

import json
import random
import re
from collections import Counter
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from akunu_py.bench.replay import TraceItem
from akunu_py.bench.result import load_results
from akunu_py.models.store.model_store import StoredModel
from tests.measure import check
from tests.measure.caches import replay_caches, schedule
from tests.support.bench_fakes import TRACE, write_quick_model
from tests.support.paths import ROOT, golden_sources
from tests.support.tiny_fim import write_chat_model

CASES = [
    ("caches", "TRACE --budget 3000 --repeats 1", "again aside budget prompts"),
    ("oracle", "SOURCES --places 9 --faults", "all languages reached"),
    ("fidelity", "--model MODEL --answers 1 --max-tokens 4 --weights float32",
     "command date fidelity machine"),
    pytest.param(
        "serve", "--model MODEL --layers 1 --words 300 --turns 1 --max-tokens 8 --repeats 1",
        "akunu mlx-lm", marks=pytest.mark.slow),
    pytest.param(
        "chat", "--model MODEL --repeats 1 --max-tokens 16 --keys 2 --force",
        "alone chat command date draft identical keys machine model ratio ratio_spread "
        "tokens_per_s", marks=pytest.mark.slow),
]  # fmt: skip


@pytest.fixture(scope="module")
def places(starter: StoredModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the files and models of the command lines."""
    directory = tmp_path_factory.mktemp("measure")
    sources, trace = directory / "sources", directory / "trace.json"
    sources.mkdir()
    (sources / "tree.py").write_text(golden_sources()["tree.py"])
    trace.write_text(json.dumps(TRACE))
    model = write_quick_model(directory / "quick", starter.path)
    return {"MODEL": model, "TRACE": str(trace), "SOURCES": str(sources)}


def run_tool(name: str, line: str, places: dict[str, str]) -> int:
    words = [places.get(word, word) for word in line.split()]
    return int(import_module(f"tests.measure.{name}").main(words))


@pytest.mark.parametrize(("name", "line", "keys"), CASES)
def test_tool_prints_a_table_and_json(
    name: str, line: str, keys: str, places: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_tool(name, f"{line} --format json", places) == 0
    found: Any = json.loads(capsys.readouterr().out)
    assert sorted(found[0] if isinstance(found, list) else found) == keys.split()
    if name not in ("chat", "serve"):
        assert run_tool(name, line, places) == 0
        assert len(capsys.readouterr().out.splitlines()) > 2


@pytest.mark.slow
def test_check_judges_every_promise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_chat_model(tmp_path / "tiny")
    line = f"--quick --model {model} --soak 0.001 -o {tmp_path}/there/mac.json --format json"
    code = run_tool("check", line, {})
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert json.loads((tmp_path / "there" / "mac.json").read_text()) == found
    assert found["complete"], captured.err
    lines = found["lines"]
    assert code == any(line["verdict"] == "FAIL" for line in lines)
    about = Counter(line["about"] for line in lines)
    assert about == {"device": 1, "tiny": 18 + 1}  # the last one is of --soak
    assert "checked completely" not in {line["name"] for line in lines}
    assert lines[-1]["verdict"] == "pass"
    (result,) = load_results(tmp_path / "there" / "mac.json")  # as `akunu bench report` does
    assert {run.runner for run in result.runs} == {"mlx-lm", "off", "auto"}


def test_no_check_begins_when_the_time_is_over() -> None:
    found = check.Check(replace(check.ESSENTIAL, seconds=0.0))
    model = StoredModel("tiny", Path("missing"))
    check.run_parts([model], found)
    assert [line.about for line in found.lines] == ["device", "tiny"]
    assert {line.verdict for line in found.lines} == {"not measured"}
    assert not found.failed


@pytest.mark.long
def test_tables_of_pages_agree_with_the_results(tmp_path: Path) -> None:
    (tmp_path / "bench").symlink_to(ROOT / "bench")
    (tmp_path / "docs").mkdir()
    pages = ["README.md", "docs/bench-reference.md"]
    texts = [(ROOT / page).read_text() for page in pages]
    for page, text in zip(pages, texts, strict=True):
        (tmp_path / page).write_text(re.sub(r"\*\*\d[\d.]+\*\*", "**9.99**", text))
    assert run_tool("readme", " ".join(str(tmp_path / page) for page in pages), {}) == 0
    assert [(tmp_path / page).read_text() for page in pages] == texts


def session(seed: int) -> list[TraceItem]:
    """Return a growing conversation."""
    draw = random.Random(seed)
    tokens, items = [draw.randrange(1000) for _ in range(300)], []
    for _ in range(8):
        tokens += [draw.randrange(1000) for _ in range(draw.randrange(50, 250))]
        output = [draw.randrange(1000) for _ in range(20)]
        items.append(TraceItem(tuple(tokens), tuple(output)))
        tokens += output
    return items


@pytest.mark.long
def test_own_policy_prefills_less_again_than_lru() -> None:
    totals = dict.fromkeys(("akunu", "lru"), 0)
    sessions = [session(seed) for seed in range(4)]
    for aside in (False, True):
        orders = [schedule(sessions, 3, seed, aside=aside) for seed in range(3)]
        for budget in (2_000, 3_000, 5_000):
            again = {
                policy: sum(replay_caches(each, budget, policy) for each in orders)
                for policy in totals
            }
            assert again["akunu"] <= again["lru"]
            totals = {policy: totals[policy] + again[policy] for policy in totals}
    assert totals["akunu"] < 0.9 * totals["lru"]
