"""What a hub may offer and under which name it comes: code, odd names, revisions, places."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from akunu_py import paths
from akunu_py.errors import (
    DamagedModel,
    FetchError,
    StoreError,
    UnknownModel,
    UnsupportedModel,
    UsageError,
)
from akunu_py.models import cleanup, store
from akunu_py.models.hub import api, cache, download
from akunu_py.models.pull import find_installed, pull
from tests.support.hub_home import NAME, WEIGHTS, everything
from tests.support.hub_home import files as files  # fixtures
from tests.support.hub_home import home as home
from tests.support.hub_home import server as server
from tests.support.hub_server import REPOSITORY, Hub


def test_no_pickle_no_code_no_names_that_leave(server: Hub, home: Path) -> None:
    original = dict(server.files)
    del server.files[WEIGHTS]
    server.files["pytorch_model.bin"] = b"pickle"
    with pytest.raises(UnsupportedModel, match="pickle only"):
        pull(REPOSITORY)
    server.files = dict(original)
    for name in ("../../evil.json", "/etc/x.json", "a/../../b", "..\\x"):
        server.listed = [name]
        with pytest.raises(FetchError, match="outside its directory"):
            pull(REPOSITORY)
    server.listed = []
    config = json.loads(original["config.json"]) | {"model_file": "evil.py"}
    server.files["config.json"] = json.dumps(config).encode()
    with pytest.raises(UnsupportedModel, match="code of its own"):
        pull(REPOSITORY)
    assert server.asked(WEIGHTS) == []  # it was refused before the weights were fetched
    config = json.loads(original["config.json"]) | {"model_type": "no_such"}
    server.files["config.json"] = json.dumps(config).encode()
    server.commit = "1" * 40
    with pytest.raises(UnsupportedModel, match="no_such"):
        pull(REPOSITORY)
    assert server.asked(WEIGHTS) == []


def test_pointers_to_code_are_left_out_of_our_copy(server: Hub) -> None:
    config = json.loads(server.files["config.json"]) | {"auto_map": {"AutoModel": "x.Evil"}}
    server.files["config.json"] = json.dumps(config).encode()
    model = pull(REPOSITORY)
    assert "auto_map" not in json.loads((model.path / "config.json").read_text())
    assert not (model.path / "modeling_tiny.py").exists()
    store.verify(model)


@pytest.mark.parametrize("harm", ["sha", "digest", "size"])
def test_a_listing_that_is_malformed_is_refused(server: Hub, harm: str) -> None:
    listing = server.listing()
    if harm == "sha":
        server.changes = {"sha": "../../x"}
    else:
        weights = next(s for s in listing["siblings"] if s["rfilename"] == WEIGHTS)
        weights["lfs"] |= {"sha256": "../../../x"} if harm == "digest" else {"size": -5}
        server.changes = {"siblings": listing["siblings"]}
    with pytest.raises(FetchError, match="HF_ENDPOINT"):
        pull(REPOSITORY)


def test_names_of_repositories() -> None:
    assert api.parse_reference("a/b") == ("a/b", None)
    assert api.parse_reference("a-b.c/d_e@refs/pr/1") == ("a-b.c/d_e", "refs/pr/1")
    for bad in ("a", "/a/b", "a/b/c", "../b", "a/..", "a/b@../x", "a/b@", "a//b", "a/b\n", "a/--"):
        assert api.parse_reference(bad) is None, bad


def test_revisions(server: Hub) -> None:
    with pytest.raises(UnknownModel, match="no revision 'v9'"):
        pull(f"{REPOSITORY}@v9")
    first = pull(f"{REPOSITORY}@{server.commit}")
    server.requests.clear()
    assert pull(REPOSITORY) == first
    assert pull(f"{REPOSITORY}@{server.commit}") == first
    assert server.requests == []
    server.commit = "2" * 40
    assert pull(f"{REPOSITORY}@main").commit == "2" * 40
    assert find_installed(REPOSITORY)
    assert not find_installed(f"{REPOSITORY}@{first.commit}")


def test_a_name_of_ones_own_and_one_that_is_taken(server: Hub, home: Path) -> None:
    model = pull(REPOSITORY, name="mine")
    assert store.resolve("mine") == store.resolve(REPOSITORY) == model
    with pytest.raises(UnknownModel, match="akunu models pull some/other"):
        store.resolve("some/other")
    other = json.loads((model.path / "akunu.json").read_text()) | {"repository": "x/y"}
    (model.path / "akunu.json").write_text(json.dumps(other))
    with pytest.raises(UsageError, match="another model called 'mine'"):
        pull(REPOSITORY, name="mine")


def test_offline_uses_the_cache_alone(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    pull(REPOSITORY)
    store.remove(NAME)
    server.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    store.verify(pull(REPOSITORY))
    with pytest.raises(FetchError, match="HF_HUB_OFFLINE forbids"):
        pull("someone/else")
    assert server.requests == []


def test_nobody_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(FetchError, match=r"127\.0\.0\.1:9 does not answer.*network") as caught:
        pull(REPOSITORY)
    assert "\n" not in str(caught.value)


def test_too_little_space(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=70_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(download, "_RESERVE", 70_000_000)
    with pytest.raises(StoreError, match="HF_HOME"):
        pull(REPOSITORY)


def test_files_that_vanish_from_the_cache(server: Hub, home: Path) -> None:
    model = pull(REPOSITORY)
    shutil.rmtree(home / "hub")
    with pytest.raises(DamagedModel, match=f"missing.*akunu models pull {REPOSITORY}"):
        store.check(store.get(NAME))
    assert [leftover.name for leftover in cleanup.find_leftovers()] == [NAME]
    store.verify(pull(REPOSITORY))
    assert store.get(NAME).path == model.path


def test_rm_leaves_the_hubs_files_unless_told(server: Hub, home: Path) -> None:
    model = pull(REPOSITORY)
    size = cache.linked_bytes(model.path)
    assert size > len(server.files[WEIGHTS])
    store.remove(NAME)
    assert WEIGHTS in everything(home / "hub")
    pull(REPOSITORY)
    assert cache.delete(REPOSITORY, model.commit) >= size
    assert WEIGHTS not in everything(home / "hub")
    assert paths.models_dir().exists()
