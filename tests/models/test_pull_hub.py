"""Pulls from the hub: accepted files, names, and failures."""

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import close_session, constants

from akunu_py import paths
from akunu_py.cli import main
from akunu_py.errors import (
    AkunuError,
    DamagedModel,
    FetchError,
    UnknownModel,
    UnsupportedModel,
    UsageError,
)
from akunu_py.models import catalog
from akunu_py.models.pull import pull as pull_module
from akunu_py.models.pull.pull import find_installed, pull
from akunu_py.models.store import cleanup, hub_cache, model_store
from akunu_py.models.store.names import set_drafter
from akunu_py.models.store.progress import Progress
from tests.support.hub_home import NAME, WEIGHTS, everything, partials, stop_in_the_weights
from tests.support.hub_home import files as files  # fixtures
from tests.support.hub_home import home as home
from tests.support.hub_home import in_process as in_process
from tests.support.hub_home import server as server
from tests.support.hub_server import REPOSITORY, Fault, Hub
from tests.support.published_drafters import write_drafter

pytestmark = pytest.mark.usefixtures("in_process")  # test_worker has the process


def test_a_pull_makes_a_model_that_runs(server: Hub, home: Path) -> None:
    from akunu_py.engine.engine import Engine
    from akunu_py.engine.loop import StepLoop
    from akunu_py.types import GenerateOptions

    seen: list[Progress] = []
    empty = (2).to_bytes(8, "little") + b"{}"
    server.files |= {"mtp.safetensors": empty, "mtp.bin": b"pickle"}
    model = pull(REPOSITORY, seen.append)
    assert (model.name, model.repository, model.commit) == (NAME, REPOSITORY, server.commit)
    assert model.license == "mit"
    model_store.verify(model)
    engine = Engine.load(model.path)
    answer = StepLoop(engine).answer([1, 2, 3], GenerateOptions(max_tokens=4))
    assert len(answer.tokens) == 4
    fetched = {name for name, _, _ in server.requests if name in server.files}
    settings = {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert fetched == settings | {WEIGHTS, "mtp.safetensors"}
    last = [progress for progress in seen if progress.phase == "download"][-1]
    assert last.done == last.total == sum(len(server.files[name]) for name in fetched)
    assert {key for name, _, key in server.requests if name in server.files} == {"Bearer hf_secret"}
    assert cleanup.unfinished_pulls() == []


def test_a_drafter_needs_no_tokenizer_and_is_no_model(
    server: Hub, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = write_drafter(home / "made", 32, 96)
    server.files = {path.name: path.read_bytes() for path in made.iterdir()}
    drafter = pull(REPOSITORY)
    assert (drafter.kind, drafter.quantization[:3]) == ("dflash", "F32")
    model_store.check(drafter)
    assert main(["models", "list"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if NAME in line]
    assert "drafter" in line
    assert main(["run", "--model", NAME, "hello"]) == 2
    assert "which cannot answer" in capsys.readouterr().err


def test_a_catalog_drafter_is_used_from_then_on(
    server: Hub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull(REPOSITORY)
    made = write_drafter(home / "made", 32, 96)
    server.files = {path.name: path.read_bytes() for path in made.iterdir()}
    server.commit, server.repository = "1" * 40, "someone/drafter"
    entry = replace(catalog.find("qwen3-8b"), repository=REPOSITORY, drafter="someone/drafter")
    monkeypatch.setattr(
        catalog, "find_repository", lambda repository: entry if repository == REPOSITORY else None
    )
    command = ["models", "pull", REPOSITORY, "--name", NAME]
    assert main([*command, "--with-drafter"]) == 0
    assert model_store.get(NAME).drafter == "drafter"
    assert model_store.get("drafter").kind == "dflash"
    model_store.remove("drafter")
    assert model_store.get(NAME).drafter == ""


def test_files_that_the_library_fetched_are_used(server: Hub, home: Path) -> None:
    from huggingface_hub import snapshot_download

    del server.files["a/b"]
    snapshot_download(REPOSITORY, cache_dir=home / "hub")
    server.requests.clear()
    blobs = everything(home / "hub")
    model = pull(REPOSITORY)
    assert {name for name, _, _ in server.requests if name in server.files} == set()
    assert everything(home / "hub") == blobs
    assert (model.path / WEIGHTS).resolve().is_relative_to(home / "hub")
    model_store.verify(model)
    model_store.remove(NAME)
    data = (model.path / WEIGHTS).read_bytes()
    (model.path / WEIGHTS).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(FetchError, match=r"model\.safetensors was altered: .* delete .*blobs"):
        pull(REPOSITORY)


@pytest.mark.parametrize("faults", [
    [Fault(cut=1000), Fault(cut=50_000)], [Fault(status=status) for status in (408, 502, 504)],
    [Fault(status=429, headers={"Retry-After": "0"})],
    [Fault(cut=20_000), Fault(no_range=True)], [Fault(cut=20_000), Fault(status=416)],
    [Fault(short=10)],
], ids=["cut", "5xx", "429", "no range", "no part", "short"])  # fmt: skip
def test_transient_faults_are_retried(server: Hub, faults: list[Fault]) -> None:
    server.faults[WEIGHTS].extend(faults)
    model_store.verify(pull(REPOSITORY))
    assert not server.faults[WEIGHTS]


@pytest.mark.parametrize(("where", "fault", "kind", "words"), [
    (WEIGHTS, Fault(cut=0), FetchError, "does not answer"),
    (WEIGHTS, Fault(short=10), FetchError, "expected 64,752 bytes, found 64,742"),
    (WEIGHTS, Fault(longer=10), FetchError, "expected 64,752 bytes, found more"),
    (WEIGHTS, Fault(flip=True), FetchError, "was altered: expected hash"),
    ("tokenizer.json", Fault(flip=True), FetchError, "was altered: expected hash"),
    (WEIGHTS, Fault(status=401), FetchError, "refuses .*HF_TOKEN"),
    (WEIGHTS, Fault(status=404), FetchError, "no longer has a file"),
    (WEIGHTS, Fault(status=429), FetchError, "too many requests .*429"),
    (WEIGHTS, Fault(status=500), FetchError, "fails .*500"),
    (WEIGHTS, Fault(status=403, headers={"X-Error-Code": "GatedRepo"}), FetchError, "accept"),
    ("api", Fault(status=401), FetchError, "refuses"),
    ("api", Fault(status=500), FetchError, "fails"),
    ("api", Fault(status=404, headers={"X-Error-Code": "RepoNotFound"}), UnknownModel, "spell"),
])  # fmt: skip
def test_lasting_faults_are_one_line_errors_and_resumable(
    server: Hub, home: Path, monkeypatch: pytest.MonkeyPatch, where: str, fault: Fault,
    kind: type[AkunuError], words: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(pull_module, "_ATTEMPTS", 2)  # each is six of the library
    cut = where == WEIGHTS and fault.status != 429  # which the library waits out for 20 s
    server.faults[where].extend([Fault(cut=30_000)] * cut + [fault] * 60)
    with pytest.raises(kind, match=words) as caught:
        pull(REPOSITORY)
    assert "\n" not in str(caught.value)
    assert "hf_secret" not in str(caught.value)
    assert model_store.list_models() == []
    server.faults.clear()
    model_store.verify(pull(REPOSITORY))
    assert partials(home) == []


def test_unreadable_certificates_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere.pem")
    close_session()
    with pytest.raises(FetchError, match=r"No such file.*SSL_CERT_FILE"):
        pull(REPOSITORY)


def test_an_interrupted_pull_resumes_where_it_ended(server: Hub, home: Path) -> None:
    stop_in_the_weights(server, home)
    (unfinished,) = cleanup.unfinished_pulls()
    assert (unfinished.name, unfinished.size) == (NAME, 30_000)
    assert "an unfinished pull of someone/tiny-model, 3" in unfinished.what
    assert pull(REPOSITORY)
    assert server.requested(WEIGHTS) == ["bytes=30000-"]
    assert server.requested("config.json") == []


def test_a_damaged_partial_file_is_discarded(server: Hub, home: Path) -> None:
    stop_in_the_weights(server, home).write_bytes(b"y" * 30_000)
    model_store.verify(pull(REPOSITORY))
    assert server.requested(WEIGHTS) == ["bytes=30000-", ""]


def test_the_token_is_not_sent_to_redirects(server: Hub) -> None:
    server.elsewhere = server.url.replace("127.0.0.1", "localhost")
    server.faults[WEIGHTS].extend([Fault(), Fault(cut=30_000)])
    model_store.verify(pull(REPOSITORY))
    requested = [(wanted, key) for name, wanted, key in server.requests if name == WEIGHTS]
    assert requested == [
        ("", "Bearer hf_secret"), ("", ""), ("bytes=30000-", "Bearer hf_secret"),
        ("bytes=30000-", ""),
    ]  # fmt: skip


def test_pickle_and_code_are_refused_and_escaping_names_are_ignored(
    server: Hub, home: Path
) -> None:
    original = dict(server.files)
    del server.files[WEIGHTS]
    server.files["pytorch_model.bin"] = b"pickle"
    with pytest.raises(UnsupportedModel, match="the repository has its weights as pickle"):
        pull(REPOSITORY)
    server.files = dict(original)
    server.listed = ["../../config.json", "/etc/tokenizer.json", "a/../../vocab.json", "..\\x.json"]
    config = json.loads(original["config.json"]) | {"model_file": "evil.py"}
    server.files["config.json"] = json.dumps(config).encode()
    with pytest.raises(UnsupportedModel, match="its own code"):
        pull(REPOSITORY)
    assert server.requested(WEIGHTS) == []  # rejected before the download of the weights
    assert not {name for name, *_ in server.requests} & {*server.listed}
    config = json.loads(original["config.json"]) | {"model_type": "no_such"}
    server.files["config.json"] = json.dumps(config).encode()
    server.commit = "1" * 40
    with pytest.raises(UnsupportedModel, match="no_such"):
        pull(REPOSITORY)
    assert server.requested(WEIGHTS) == []
    assert cleanup.unfinished_pulls() == []


def test_pointers_to_code_are_ignored(server: Hub) -> None:
    """The library would refuse them: the code is not there."""
    from akunu_py.engine.engine import Engine

    for name, key in (("config.json", "AutoConfig"), ("tokenizer_config.json", "AutoTokenizer")):
        settings = json.loads(server.files[name]) | {"auto_map": {key: ["x.Evil", None]}}
        settings |= {"tokenizer_class": "EvilTokenizer"} if "tokenizer" in name else {}
        server.files[name] = json.dumps(settings).encode()
    model = pull(REPOSITORY)
    assert Engine.load(model.path).tokens.encode("a b")
    model_store.verify(model)


def test_repository_names() -> None:
    assert hub_cache.parse_reference("a/b") == ("a/b", None)
    assert hub_cache.parse_reference("a-b.c/d_e@refs/pr/1") == ("a-b.c/d_e", "refs/pr/1")
    for bad in ("a", "/a/b", "a/b/c", "../b", "a/..", "a/b@../x", "a/b@", "a//b", "a/b\n", "a/--"):
        assert hub_cache.parse_reference(bad) is None, bad


def test_revisions(server: Hub) -> None:
    with pytest.raises(UnknownModel, match="no revision 'v9'"):
        pull(f"{REPOSITORY}@v9")
    pinned = f"{REPOSITORY}@{server.commit}"
    server.faults[WEIGHTS].append(Fault(status=403))
    with pytest.raises(FetchError):
        pull(pinned)
    (unfinished,) = cleanup.unfinished_pulls()
    assert unfinished.pull_command == f"akunu models pull {pinned}"
    first = pull(pinned)
    (first.path / "config.json").unlink()
    with pytest.raises(DamagedModel, match=f"run `akunu models pull {pinned}`"):
        model_store.get(NAME)
    assert pull(pinned) == first
    server.requests.clear()
    assert pull(REPOSITORY) == first
    assert pull(f"{REPOSITORY}@{server.commit}") == first
    assert server.requests == []
    server.commit = "2" * 40
    learned = paths.cache_dir() / "learned"
    (learned / paths.model_directory_name(first.path)).mkdir(parents=True)
    set_drafter(NAME, "small")
    second = pull(f"{REPOSITORY}@main")
    assert (second.commit, second.drafter) == ("2" * 40, "small")
    assert os.listdir(learned) == [paths.model_directory_name(second.path)]
    assert find_installed(REPOSITORY)
    assert not find_installed(f"{REPOSITORY}@{first.commit}")


def test_the_name_option_and_a_name_that_is_taken(server: Hub, home: Path) -> None:
    model = pull(REPOSITORY, name="mine")
    assert model_store.resolve("mine") == model_store.resolve(REPOSITORY) == model
    with pytest.raises(UnknownModel, match="akunu models pull some/other"):
        model_store.resolve("some/other")
    assert find_installed(REPOSITORY, "mine") == model
    assert find_installed("qwen3-0.6b", "mine") is None
    with pytest.raises(UsageError, match="fixed name"):
        find_installed("starter", "mine")
    pull(REPOSITORY, name="starter")
    with pytest.raises(UsageError, match="another model is installed as 'starter'"):
        pull("starter")
    taken = paths.models_dir() / "taken"
    shutil.copytree(model.path, taken)
    with pytest.raises(UsageError, match="another model is installed as 'taken'"):
        pull(REPOSITORY, name="taken")
    (taken / "tokenizer.json").unlink()
    assert pull(REPOSITORY, name="taken").repository == REPOSITORY
    assert not taken.exists()


def test_files_with_two_names_are_removed_with_the_second(server: Hub, home: Path) -> None:
    for name in ("one", "two"):
        pull(REPOSITORY, name=name)
    assert main(["models", "rm", REPOSITORY, "--yes"]) == 2, "which of them?"
    assert main(["models", "rm", "one", "--yes", "--hub-files"]) == 0
    model_store.verify(model_store.get("two"))
    (model_store.get("two").path / "tokenizer.json").resolve().unlink()
    assert main(["models", "rm", REPOSITORY, "--yes", "--hub-files"]) == 0
    assert model_store.list_models() == []
    assert not list((home / "hub").rglob(WEIGHTS))


def test_offline_uses_the_cache_alone(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    pull(REPOSITORY)
    model_store.remove(NAME)
    server.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model_store.verify(pull(REPOSITORY))
    with pytest.raises(FetchError, match="HF_HUB_OFFLINE forbids"):
        pull("someone/else")
    assert server.requests == []


def test_file_systems_without_links(
    server: Hub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    symlink = os.symlink

    def refuse(source: str, link: str, *options: bool) -> None:
        if str(link).startswith(str(home)):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        symlink(source, link, *options)

    monkeypatch.setattr(os, "symlink", refuse)
    model = pull(REPOSITORY)
    assert not (model.path / WEIGHTS).is_symlink()
    assert model_store.known_hashes(model) == {}
    model_store.remove(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model_store.check(pull(REPOSITORY))


def test_files_that_vanish_from_the_cache(server: Hub, home: Path) -> None:
    model = pull(REPOSITORY)
    shutil.rmtree(home / "hub")
    with pytest.raises(DamagedModel, match=f"missing.*akunu models pull {REPOSITORY}"):
        model_store.check(model_store.get(NAME))
    assert [leftover.name for leftover in cleanup.find_leftovers()] == [NAME]
    model_store.verify(pull(REPOSITORY))
    assert model_store.get(NAME).path == model.path


def test_what_other_commits_need_stays_in_the_hubs_cache(server: Hub, home: Path) -> None:
    first = pull(REPOSITORY)
    server.commit = "2" * 40
    server.files["tokenizer_config.json"] += b" "
    second = pull(f"{REPOSITORY}@main")
    blobs = len(list((home / "hub").rglob("blobs/*")))
    (home / "hub").joinpath("models--x").mkdir()
    os.mkfifo(home / "hub" / "models--x" / "refs")  # an unexpected file of another program
    old = len(server.files["tokenizer_config.json"]) - 1
    assert hub_cache.delete(first.path) == old
    assert len(list((home / "hub").rglob("blobs/*"))) == blobs - 1
    model_store.verify(second)
    assert hub_cache.delete(first.path) == 0
    assert hub_cache.cached_model(REPOSITORY, "main")
    assert hub_cache.delete(second.path) > old
    assert list((home / "hub").rglob("blobs/*")) == []
