"""A drafter trained on a model's own answers is right, and no interrupt breaks its training."""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from akunu_py import paths
from akunu_py.chats.conversation_store import ConversationStore
from akunu_py.commands.drafter_actions import saved_prompts
from akunu_py.engine.engine import Engine
from akunu_py.engine.model.drafters import PublishedDrafter
from akunu_py.errors import DamagedModel, DoesNotFit, StoreError
from akunu_py.models.load.model_files import read_settings
from akunu_py.models.mtp import Trunk
from akunu_py.models.store import model_store
from akunu_py.models.store.directories import lock_model
from akunu_py.training import design
from akunu_py.training.session import Training, home_of
from akunu_py.training.trainer import Batch, UnrolledCache, unroll
from akunu_py.types import Message
from tests.support.chats import branched
from tests.support.command import assert_one_line_error, run_here
from tests.support.full_disk import full_disk
from tests.support.learned import tokens_per_pass, write_chat_model
from tests.support.published_drafters import NEEDS, load

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("own_directories")]
STEPS, ROOM = 80, 10**9


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def engine(directory: Path) -> Engine:
    return Engine.load(directory, name="tiny")


class Crash(BaseException):
    """The process ends here."""


def training(
    engine: Engine, steps: int = STEPS, at: int = 0, act: Callable[[], None] = lambda: None,
    cost: int = 3,
) -> Training:  # fmt: skip
    """Return a training of so many passes and training steps. at, act: acts at this one.

    cost: of a training step, in passes.
    """
    done = 0

    def report(line: str, left: float | None) -> None:
        nonlocal done
        writes = line.startswith("answer tokens")
        before, step = done, 1 if writes else cost
        done += step * (left is not None)
        assert left is None or left <= (0.4 if writes else 1) * steps
        if before < at <= done:
            act()

    return Training(engine, steps, report, clock=lambda: float(done))


def test_a_trained_drafter_lowers_the_number_of_passes(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a part of the model's vocabulary."""
    monkeypatch.setattr(design, "_LARGE", 100)
    monkeypatch.setattr(design, "_SHARE", 4)
    mx.random.seed(0)
    trainer = training(engine, 130, cost=1).run(1500, ROOM, 0.7)
    trainer.write_drafter(tmp_path)
    drafter = load(tmp_path, read_settings(engine.path / "config.json"))
    assert drafter.target_ids.size < engine.tokens.vocabulary
    published = PublishedDrafter("x", tmp_path, drafter, NEEDS, 1e-6)
    begun = [engine.tokens.encode_text(f"<|im_start|>{words}<|im_end|>") for words in ("Aa", "Cd")]
    assert tokens_per_pass(engine.model, published, begun, 20) > 1.8
    assert min(trainer.curve[-1][-1][:2]) > 0.4


def test_the_loss_is_that_of_all_rows(engine: Engine) -> None:
    """Rows that draft no learned token get no logits, which changes no gradient."""
    config, size = design.make_config(engine), engine.tokens.vocabulary
    drafter = design.make_drafter(
        config, design.first_weights(engine, config, list(range(size))), engine
    )
    embed, width = Trunk(engine.model).embed, config["target_hidden_size"]
    mx.random.seed(0)
    tokens = np.arange(24).reshape(2, 12) % size
    learned = (np.arange(12) >= [[3], [7]]) & (tokens != 11)
    hidden = mx.random.normal((2, 11, width * len(drafter.taps)))
    batch = Batch(hidden, mx.random.normal((2, 11, width)), tokens, learned, learned)

    def plain() -> mx.array:
        cache: list[Any] = [UnrolledCache()]
        state, loss = drafter.states(hidden), mx.array(0.0)
        chances = mx.softmax(drafter.lm_head(batch.final), axis=-1)
        following = mx.pad(mx.array(tokens)[:, 1:], [(0, 0), (0, 3)])
        for step in range(3):
            state = drafter.extend(state, embed(following[:, step : step + 11]), cache)
            logits = drafter.lm_head(drafter.norm(state[:, : 10 - step]))
            lost = mx.logsumexp(logits, axis=-1) - (chances[:, step + 1 :] * logits).sum(axis=-1)
            counted = mx.array(learned[:, step + 2 :])
            loss = loss + 0.8**step * (lost * counted).sum() / counted.sum()
        return loss

    expected = nn.value_and_grad(drafter, plain)()
    found = nn.value_and_grad(drafter, lambda: unroll(drafter, embed, batch, 3))()
    assert mx.allclose(found[0][0], expected[0], rtol=1e-5)
    for (_, one), (_, other) in zip(*map(tree_flatten, (found[1], expected[1])), strict=True):
        assert mx.allclose(one, other, rtol=1e-4, atol=1e-6)


def test_a_drafter_that_does_not_fit_is_refused_first(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("akunu_py.engine.model.device.memory_left", lambda limit: 1000)
    with pytest.raises(DoesNotFit, match="are left"):
        training(engine)
    assert not home_of("tiny").exists()


def crash() -> None:
    raise Crash


@pytest.mark.parametrize("at", [1, 33])
def test_training_continues_after_a_crash(at: int, engine: Engine) -> None:
    """In the first pass, and in a training step."""
    with pytest.raises(Crash):
        training(engine, at=at, act=crash).run(10**6, ROOM, 0.7)
    files = sorted((home_of("tiny")).glob("*/conversations/*"))
    if files:  # as a crash during a write leaves them
        files[-1].write_bytes(files[-1].read_bytes()[:-100])
        shutil.copy(files[0], files[0].with_name(".00000009.safetensors-x.safetensors"))
    made = training(engine, 30 if files else STEPS)
    assert len(made.dataset.conversations) == max(0, len(files) - 1)
    assert made.run(10**6, ROOM, 0.7).steps >= 6


def interrupt() -> None:
    raise KeyboardInterrupt


def test_an_interrupt_saves_the_training(engine: Engine) -> None:
    with pytest.raises(KeyboardInterrupt):
        training(engine, at=50, act=interrupt).run(10**6, ROOM, 0.7)
    later = training(engine, 2).run(1, ROOM, 0.7)
    (stopped, *_), *_ = later.curve
    assert later.steps > stopped > 0


@pytest.mark.parametrize("room", [1000, 100_000])
def test_a_full_disk_is_one_line_and_breaks_nothing(room: int, engine: Engine) -> None:
    """There is no room for a conversation, or for the checkpoint."""
    with full_disk(room), pytest.raises(StoreError, match="cannot write"):
        training(engine).run(10**6, ROOM, 0.7)
    made = training(engine, 40)
    assert bool(made.dataset.conversations) is (room == 100_000)
    if made.dataset.conversations:
        assert made.run(10**6, ROOM, 0.7).steps


def test_training_waits_for_others(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons, lines = ["battery", "battery", ""], list[str]()
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    waiting = Training(
        engine, 1.0, lambda line, *_: lines.append(line), lambda: reasons.pop(0), lambda: 0.0
    )
    assert waiting._left() == 1.0
    assert lines == ["waiting: battery"]


def test_the_command_installs_a_drafter(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model uses it, another model refuses it, and `rm` leaves nothing behind."""
    monkeypatch.setattr("os.nice", lambda steps: steps)
    assert run_here("models", "import", str(directory), "--name", "tiny").returncode == 0
    assert run_here("models", "import", str(directory), "--name", "tiny-drafter").returncode == 0
    taken = run_here("drafter", "train", "tiny", "--time", "1s", "--tokens", "1")
    assert_one_line_error(taken, 2, "another model is installed as 'tiny-drafter'")
    long = "t" * 96
    assert run_here("models", "import", str(directory), "--name", long).returncode == 0
    refused = run_here("drafter", "train", long, "--time", "1s", "--tokens", "1")
    assert_one_line_error(refused, 2, "is too long")
    assert model_store.remove(long) > 0
    home_of("tiny").mkdir(parents=True)
    assert run_here("drafter", "rm", "tiny", "--yes").returncode == 0
    assert model_store.remove("tiny-drafter") > 0
    training(Engine.load(directory, name="tiny")).run(10**6, ROOM, 0.7)
    trained = run_here("drafter", "train", "tiny", "--time", "1s", "--tokens", "1")
    assert trained.returncode == 0, trained.stderr
    assert "tiny-drafter is ready" in trained.stderr
    assert model_store.get("tiny").drafter == "tiny-drafter"
    assert "tiny-drafter" in run_here("drafter", "list").stdout
    assert "trained tokens" in run_here("drafter", "show", "tiny").stdout
    answered = run_here("run", "Ab", "--model", "tiny", "--draft", "model", "--max-tokens", "5")
    assert answered.returncode == 0, answered.stderr
    other = tmp_path / "other"
    shutil.copytree(directory, other)
    weights = mx.load(str(other / "model.safetensors"))
    weights["model.norm.weight"] = weights["model.norm.weight"] * 2
    mx.save_safetensors(str(other / "model.safetensors"), weights, {"format": "mlx"})
    refused = run_here("run", "Ab", "--model", str(other), "--draft-model", "tiny-drafter")
    assert refused.returncode == 2
    assert "was trained for other weights" in refused.stderr
    (model_store.get("tiny-drafter").path / "model.safetensors").unlink()
    with pytest.raises(DamagedModel, match="run `akunu drafter train tiny`"):
        model_store.check(model_store.get("tiny-drafter"))
    with lock_model("tiny", training=True):
        busy = run_here("drafter", "rm", "tiny", "--yes").stderr
    assert "another akunu process is training a drafter of model 'tiny'" in busy
    assert run_here("models", "rm", "tiny", "--yes").returncode == 0
    assert "none yet" in run_here("drafter", "list").stdout
    assert run_here("drafter", "rm", "tiny", "--yes").returncode == 0
    assert [each.name for each in model_store.list_models()] == []
    assert not home_of("tiny").exists()
    assert run_here("drafter", "show", "tiny").returncode == 1
    assert run_here("drafter", "rm", "tiny").returncode == 1


def test_saved_chats_are_answered_after_a_confirmation(engine: Engine) -> None:
    with contextlib.closing(ConversationStore.open(paths.conversations_file())) as store:
        store.save_tree(branched())
    unconfirmed = run_here("drafter", "train", str(engine.path), "--conversations")
    assert (unconfirmed.returncode, "cannot ask" in unconfirmed.stderr) == (2, True)
    refused = [Message("user", "\ud800")]
    for _ in range(2):  # the second run answers none again
        made = training(engine, cost=1000)
        made.run(10**6, ROOM, 0.7, [refused, *saved_prompts(confirmed=True)])
    chats = made.dataset.conversations
    prompts = [engine.tokens.decode(each.tokens[: each.answer]) for each in chats]
    assert prompts.count("<|im_start|>What is a queue?\nShow me Python.<|im_end|>") == 1
