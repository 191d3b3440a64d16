"""Kernels are used only where a probe found them equal and faster."""

import json
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import mlx.nn as nn
import pytest

from akunu_py import paths
from akunu_py.kernels import probe, row_kernels
from akunu_py.kernels.probe import Probe
from akunu_py.kernels.row_kernels import QUANTIZED_ORDERS as ORDERS
from akunu_py.kernels.row_kernels import ROWS, MatrixShape, Order

FASTER = dict.fromkeys((2, 4, 5, 6, 8, 12, 16), (2.0, 1.0))


def layer_of(outputs: int = 24, inputs: int = 512, *, bits: int = 4, **more: Any) -> Any:
    linear = nn.Linear(inputs, outputs)
    linear.set_dtype(mx.bfloat16)
    if bits == 16:
        return linear
    return nn.QuantizedLinear.from_linear(linear, more.pop("group_size", 64), bits, **more)


def row_by_row(layer: nn.Module, x: mx.array, order: Order) -> mx.array:
    """Multiply as on a GPU where the kernel is right. MLX's CPU backend treats each row alone."""
    assert order in row_kernels.orders_of(shape(layer))
    return row_kernels.mlx_product(layer, x)


def shape(layer: nn.Module) -> MatrixShape:
    found = row_kernels.shape_of(layer)
    assert found is not None
    return found


refusing = Mock(side_effect=RuntimeError("Unable to build metal library\nfrom source"))


def off_by_a_bit(rows: int, right: Order) -> Callable[[nn.Module, mx.array, Order], mx.array]:
    """Return a kernel that is wrong from `rows` rows on, and in all other orders than `right`."""

    def multiply(layer: nn.Module, x: mx.array, order: Order) -> mx.array:
        product = row_kernels.mlx_product(layer, x)
        if len(x) < rows and order == right:
            return product
        bits = product.view(mx.uint16)
        bits[-1, -1] = bits[-1, -1] ^ 1
        return bits.view(mx.bfloat16)

    return multiply


@pytest.mark.parametrize(("bits", "multiply", "order", "most", "error"), [
    (4, row_by_row, ORDERS[0], 16, ""),
    (4, off_by_a_bit(9, ORDERS[1]), ORDERS[1], 8, ""),
    (8, off_by_a_bit(5, ORDERS[2]), ORDERS[2], 4, ""),
    (4, off_by_a_bit(2, ORDERS[0]), None, 1, "its bits differ from those of one row"),
    (4, refusing, None, 1, "Unable to build metal library"),
    (16, row_by_row, Order(split=8), 16, ""),
    (16, off_by_a_bit(7, Order(split=8)), Order(split=8), 6, ""),
    (16, off_by_a_bit(2, Order()), None, 1, "its bits differ from those of one row"),
])  # fmt: skip
def test_only_equal_numbers_of_rows_pass(
    bits: int, multiply: Callable[[nn.Module, mx.array, Order], mx.array], order: Order | None,
    most: int, error: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    layer = layer_of(bits=bits)
    monkeypatch.setattr(row_kernels, "multiply", multiply)
    found = probe.probe([layer], shape(layer))
    assert (found.order, found.equal) == (order, tuple(range(2, most + 1)))
    assert found.error.startswith(error)
    assert bool(found.error) == bool(error)
    assert not found.again
    assert all(ours > 0 for _, ours in found.times.values())


@pytest.mark.parametrize(("times", "rows"), [
    (FASTER, list(ROWS)),
    (FASTER | {5: (1.0, 0.99)}, [2, 3, 4, *range(6, 17)]),
    (FASTER | {6: (1.0, 2.0)}, [2, 3, 4, 5, *range(8, 17)]),
    (FASTER | {16: (1.0, 2.0)}, list(range(2, 13))),
    ({}, []),
])  # fmt: skip
def test_only_faster_numbers_of_rows_are_used(
    times: dict[int, tuple[float, float]], rows: list[int]
) -> None:
    found = Probe(ORDERS[0], tuple(ROWS), times)
    assert found.rows(exact=False) == rows
    assert found.rows(exact=True) == list(ROWS)
    assert Probe(ORDERS[0], (2, 3), times).rows(exact=True) == [2, 3]


def test_unsupported_matrices_stay_with_mlx() -> None:
    supported = [
        layer_of(bits=8), layer_of(group_size=128), layer_of(inputs=192, outputs=9),
        layer_of(bits=16, outputs=2),
    ]  # fmt: skip
    others = [
        layer_of(bits=3), layer_of(inputs=128), layer_of(outputs=4),
        layer_of(mode="mxfp4", group_size=32), nn.QuantizedLinear(512, 24), nn.Linear(512, 24),
        layer_of(bits=16, outputs=1), layer_of(bits=16, inputs=510),
    ]  # fmt: skip
    assert all(row_kernels.shape_of(each) for each in supported)
    assert not any(row_kernels.shape_of(each) for each in others)


class Model(nn.Module):  # type: ignore[misc]
    """A layer with a bias, and an embedding that is the output head, too."""

    def __init__(self, bits: int = 4) -> None:
        super().__init__()
        self.linear = layer_of(192, 512, bits=bits)
        self.embedding = nn.Embedding(24, 192)
        self.embedding.set_dtype(mx.bfloat16)
        if bits < 16:
            self.embedding = nn.QuantizedEmbedding.from_embedding(self.embedding, 32, 8)

    def __call__(self, x: mx.array) -> mx.array:
        return self.embedding.as_linear(self.linear(x))


@pytest.fixture
def gpu(own_directories: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A GPU on which the kernel is right and fast; returns the rows of its calls."""
    calls: list[int] = []

    def kernel(inputs: list[mx.array], template: list[Any], **grid: Any) -> list[mx.array]:
        x, weight, *quantized = inputs
        values = dict(template)
        calls.append(values["ROWS"])
        assert values["ROWS"] * x.shape[-1] == x.size
        rows = [
            mx.quantized_matmul(row[None], weight, *quantized, transpose=True,
                                group_size=values["GROUP"], bits=values["BITS"])
            if quantized else row[None] @ weight.T
            for row in x.reshape(-1, x.shape[-1])
        ]  # fmt: skip
        (threads, simdgroups, _), (shape,) = grid["grid"], grid["output_shapes"]
        of_simdgroup = 4 * (32 // values.get("LANES", 32))
        covered = simdgroups // values.get("SPLIT", 1) * of_simdgroup
        assert (threads, simdgroups % grid["threadgroup"][1]) == (32, 0)
        assert shape[-1] <= covered < shape[-1] + of_simdgroup * grid["threadgroup"][1]
        return [mx.concatenate(rows).reshape(shape)]

    monkeypatch.setattr(mx, "addmm", lambda bias, x, weight: x @ weight + bias)  # as Metal rounds
    monkeypatch.setattr(probe, "why_off", lambda: "")
    monkeypatch.setattr(probe, "_MAX_SECONDS", 1e9)
    monkeypatch.setattr(row_kernels, "_kernel", lambda quantized: kernel)
    monkeypatch.setattr(
        probe, "_seconds", lambda compute, *_: 2.0 if compute is row_kernels.mlx_product else 1.0
    )
    return calls


@pytest.mark.parametrize("bits", [4, 16])
def test_layers_use_the_kernel_after_one_probe(bits: int, gpu: list[int]) -> None:
    model = Model(bits)
    x = mx.random.normal((1, 20, 512)).astype(mx.bfloat16)
    before = [model(x[:, :rows]) for rows in range(1, 21)]
    assert probe.use_kernels(model)
    probed, parameters = len(gpu), len(model.parameters())
    assert probed > 0
    for rows, expected in enumerate(before, 1):
        gpu.clear()
        assert probe.same_bits(model(x[:, :rows]), expected)
        together = [rows] * 2 if rows <= 8 else [rows // 2, rows - rows // 2] * 2
        assert gpu == (together if rows in ROWS else [])
    assert mx.array_equal(model.linear(x[0, :4, None]), model.linear(x[:, :4])[0][:, None])
    assert model.linear(x[:, :4].astype(mx.float32)).dtype == mx.float32  # by MLX
    other = Model(bits)
    gpu.clear()
    assert probe.use_kernels(other)
    assert not gpu  # the results of the first probe are saved
    assert len(other.parameters()) == parameters
    assert probe.describe() == ("used for 2 of 2 matrix shapes, 2.0 to 2.0 times as fast as MLX's")


@pytest.mark.long
def test_saved_results_are_checked(gpu: list[int]) -> None:
    file = paths.kernels_file()
    assert probe.use_kernels(Model())
    ((machine, found),) = json.loads(file.read_text()).items()
    for changed in ({"another machine": found}, {machine: 5}, {machine: {"shape": 5}}, 5):
        file.write_text(json.dumps(changed))
        gpu.clear()
        assert probe.use_kernels(Model())
        assert gpu  # probed again
    file.unlink()
    file.mkdir()  # nothing can be saved
    assert probe.use_kernels(Model())


def test_slow_and_failing_kernels_are_named(
    gpu: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert probe.describe() == "off (no supported model was loaded yet)"
    monkeypatch.setattr(probe, "_seconds", lambda *_: 1.0)
    model = Model()
    assert not probe.use_kernels(model)
    assert type(model.linear) is nn.QuantizedLinear
    assert probe.describe() == "off (it is slower than MLX's)"
    assert probe.use_kernels(model, exact=True)
    paths.kernels_file().unlink()
    with monkeypatch.context() as changed:
        changed.setattr(row_kernels, "multiply", refusing)
        assert not probe.use_kernels(Model(), exact=True)
    assert not probe.use_kernels(Model(), exact=True)  # not tried again, though it would compile


@pytest.mark.parametrize("error", [
    "[malloc] Unable to allocate 8 bytes.",
    "[METAL] Command buffer execution failed: Interrupted",
])  # fmt: skip
def test_passing_errors_are_probed_again(
    error: str, gpu: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as changed:
        changed.setattr(row_kernels, "multiply", Mock(side_effect=RuntimeError(error)))
        assert not probe.use_kernels(Model())
    assert probe.describe() == f"off ({error})"
    assert probe.use_kernels(Model())
    assert gpu
    assert probe.describe().startswith("used for 2 of 2 matrix shapes")


@pytest.mark.parametrize(("architecture", "name", "reason"), [
    ("applegpu_g13s", "Apple M1 Max", ""),
    ("applegpu_g16s", "Apple M4 Pro", ""),
    ("applegpu_g17s", "Apple M5 Max", "such kernels have stalled on Apple M5 Max"),
    ("", "AMD", "not tested on AMD"),
])  # fmt: skip
def test_kernels_are_off_on_an_m5_and_elsewhere(
    architecture: str, name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not mx.metal.is_available():
        assert probe.why_off() == "no Apple GPU"
        assert not probe.use_kernels(Model())
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    info = {"architecture": architecture, "device_name": name}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    assert probe.why_off() == reason
