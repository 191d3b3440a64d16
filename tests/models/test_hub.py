"""Pulling from a hub that cuts, lies, refuses and trickles: whole, or clear and resumable."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from akunu_py.errors import (
    AkunuError,
    Cancelled,
    FetchError,
    UnknownModel,
)
from akunu_py.models import cleanup, store
from akunu_py.models.progress import Progress
from akunu_py.models.pull import pull
from tests.support.hub_home import NAME, WEIGHTS, everything, partials
from tests.support.hub_home import files as files  # fixtures
from tests.support.hub_home import home as home
from tests.support.hub_home import server as server
from tests.support.hub_server import REPOSITORY, Fault, Hub


def test_a_pull_makes_a_model_that_runs(server: Hub, home: Path) -> None:
    from akunu_py.decoding.engine import Engine
    from akunu_py.decoding.session import Session
    from akunu_py.types import GenerateOptions

    seen: list[Progress] = []
    model = pull(REPOSITORY, seen.append)
    assert (model.name, model.repository, model.commit) == (NAME, REPOSITORY, server.commit)
    assert model.licence == "mit"
    store.verify(model)
    engine = Engine.load(model.path)
    answer = Session(engine).generate([1, 2, 3], GenerateOptions(max_tokens=4)).answer()
    assert len(answer.tokens) == 4
    fetched = {name for name, _, _ in server.requests if name in server.files}
    assert fetched == {"config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json"}
    last = [progress for progress in seen if progress.phase == "download"][-1]
    assert last.done == last.total == sum(len(server.files[name]) for name in fetched)
    assert {key for name, _, key in server.requests if name in server.files} == {"Bearer hf_secret"}
    assert cleanup.unfinished_pulls() == []


def test_it_lies_in_the_hubs_cache_as_the_library_has_it(server: Hub, home: Path) -> None:
    from huggingface_hub import scan_cache_dir, snapshot_download, try_to_load_from_cache

    model = pull(REPOSITORY)
    assert (model.path / WEIGHTS).is_symlink()
    info = scan_cache_dir(home / "hub")
    assert not info.warnings
    assert [repository.repo_id for repository in info.repos] == [REPOSITORY]
    found = try_to_load_from_cache(REPOSITORY, WEIGHTS, cache_dir=home / "hub")
    assert Path(str(found)).read_bytes() == server.files[WEIGHTS]
    directory = snapshot_download(REPOSITORY, cache_dir=home / "hub", local_files_only=True)
    assert Path(directory).name == server.commit


def test_what_the_library_fetched_is_used_as_it_is(server: Hub, home: Path) -> None:
    from huggingface_hub import snapshot_download

    del server.files["a/b"]
    snapshot_download(REPOSITORY, cache_dir=home / "hub")
    server.requests.clear()
    blobs = everything(home / "hub")
    model = pull(REPOSITORY)
    assert {name for name, _, _ in server.requests if name in server.files} == set()
    assert everything(home / "hub") == blobs
    assert (model.path / WEIGHTS).resolve().is_relative_to(home / "hub")
    store.verify(model)


@pytest.mark.parametrize(
    "faults",
    [
        [Fault(cut=1000), Fault(cut=50_000)],
        [Fault(status=500), Fault(status=503)],
        [Fault(status=429, headers={"Retry-After": "0"})],
        [Fault(cut=20_000), Fault(no_range=True)],
        [Fault(pause=0.001)],
        [Fault(short=10)],
    ],
    ids=["cut", "500", "429", "no range", "trickle", "short"],
)
def test_what_passes_is_survived(server: Hub, faults: list[Fault]) -> None:
    server.faults[WEIGHTS].extend(faults)
    store.verify(pull(REPOSITORY))
    assert not server.faults[WEIGHTS]


def test_a_busy_listing_is_asked_again(server: Hub) -> None:
    server.faults["api"].extend([Fault(status=500), Fault(status=429)])
    assert pull(REPOSITORY)
    assert len(server.asked("api")) == 3


@pytest.mark.parametrize(
    ("where", "fault", "kind", "words"),
    [
        (WEIGHTS, Fault(cut=0), FetchError, "does not answer"),
        (WEIGHTS, Fault(short=10), FetchError, "ended after"),
        (WEIGHTS, Fault(longer=10), FetchError, "longer than the .* bytes that the hub lists"),
        (WEIGHTS, Fault(flip=True), FetchError, "arrived altered: expected hash"),
        ("tokenizer.json", Fault(flip=True), FetchError, "arrived altered: expected hash"),
        (WEIGHTS, Fault(status=401), FetchError, "refuses .*HF_TOKEN"),
        (WEIGHTS, Fault(status=404), FetchError, "no longer what it listed"),
        (WEIGHTS, Fault(status=429), FetchError, "too many requests .*429"),
        (WEIGHTS, Fault(status=500), FetchError, "fails .*500"),
        (WEIGHTS, Fault(status=403, headers={"X-Error-Code": "GatedRepo"}), FetchError, "accept"),
        ("api", Fault(status=401), FetchError, "refuses"),
        ("api", Fault(status=500), FetchError, "fails"),
        ("api", Fault(status=404, headers={"X-Error-Code": "RepoNotFound"}), UnknownModel, "spell"),
    ],
)
def test_what_stays_is_said_and_can_be_resumed(
    server: Hub, home: Path, where: str, fault: Fault, kind: type[AkunuError], words: str
) -> None:
    server.faults[where].extend([Fault(cut=30_000)] * (where == WEIGHTS) + [fault] * 6)
    with pytest.raises(kind, match=words) as caught:
        pull(REPOSITORY)
    assert "\n" not in str(caught.value)
    assert "hf_secret" not in str(caught.value)
    assert store.list_models() == []
    server.faults.clear()
    store.verify(pull(REPOSITORY))
    assert partials(home) == []


def test_a_cut_pull_goes_on_where_it_ended(server: Hub, home: Path) -> None:
    server.faults[WEIGHTS].extend([Fault(cut=30_000), *[Fault(status=500)] * 5])
    with pytest.raises(FetchError):
        pull(REPOSITORY)
    (partial,) = partials(home)
    assert partial.stat().st_size == 30_000
    (unfinished,) = cleanup.unfinished_pulls()
    assert unfinished.name == NAME
    assert 30_000 < unfinished.done < unfinished.total
    server.requests.clear()
    server.faults.clear()
    assert pull(REPOSITORY)
    assert server.asked(WEIGHTS) == ["bytes=30000-"]
    assert server.asked("config.json") == []


def test_large_files_may_lie_elsewhere_and_the_token_stays_here(server: Hub) -> None:
    server.elsewhere = server.url.replace("127.0.0.1", "localhost")
    server.faults[WEIGHTS].extend([Fault(), Fault(cut=30_000)])
    store.verify(pull(REPOSITORY))
    asked = [(wanted, key) for name, wanted, key in server.requests if name == WEIGHTS]
    assert asked == [
        ("", "Bearer hf_secret"),
        ("", ""),
        ("bytes=30000-", "Bearer hf_secret"),
        ("bytes=30000-", ""),
    ]


def test_a_damaged_rest_is_found_and_thrown_away(server: Hub, home: Path) -> None:
    server.faults[WEIGHTS].extend([Fault(cut=30_000), *[Fault(status=500)] * 5])
    with pytest.raises(FetchError):
        pull(REPOSITORY)
    (partial,) = partials(home)
    partial.write_bytes(b"y" * 30_000)
    server.faults.clear()
    with pytest.raises(FetchError, match="altered"):
        pull(REPOSITORY)
    store.verify(pull(REPOSITORY))


def test_cancelling_keeps_what_came(server: Hub, home: Path) -> None:
    server.faults[WEIGHTS].append(Fault(pause=0.002))
    seen: list[Progress] = []

    def cancelled() -> bool:
        return any(p.phase == "download" and p.share > 0.5 for p in seen)

    thread_error: list[BaseException] = []

    def work() -> None:
        try:
            pull(REPOSITORY, seen.append, cancelled)
        except Cancelled as error:
            thread_error.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert [error.exit_code for error in thread_error if isinstance(error, Cancelled)] == [130]
    assert len(partials(home)) == 1
    assert store.list_models() == []
    assert pull(REPOSITORY)
