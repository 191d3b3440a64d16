"""Result files: all repetitions of a run of the speed bench, with model, machine, and versions."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from akunu_py.bench.curve import Curve
from akunu_py.errors import UsageError
from akunu_py.files import disk_errors
from akunu_py.text import first_problem
from akunu_py.version import __version__

if TYPE_CHECKING:
    from akunu_py.engine.engine import Engine


FORMAT, CHECK_FORMAT = "akunu bench 1", "akunu bench check 1"
_MAX_PERIOD, _MIN_REPEATS = 64, 3  # a loop: maximum tokens of the passage, minimum repetitions
_VERSIONS = ("mlx", "mlx-lm", "numpy")


def median(values: Sequence[float]) -> float:
    """Return the median, 0 for no values. Times have a long tail, so means mislead."""
    return statistics.median(values) if values else 0.0


def half_range(values: Sequence[float]) -> float:
    """Return half the range, which tables print after a ±."""
    return (max(values) - min(values)) / 2 if values else 0.0


def loop_start(tokens: Sequence[int]) -> int | None:
    """Return where `tokens` start to repeat one passage up to their end, None for no loop."""
    for period in range(1, min(_MAX_PERIOD, len(tokens) // _MIN_REPEATS) + 1):
        start = len(tokens) - period
        while start > 0 and tokens[start - 1] == tokens[start - 1 + period]:
            start -= 1
        if len(tokens) - start >= _MIN_REPEATS * period:
            return start
    return None


@dataclass(frozen=True, slots=True)
class Repeat:
    """One repetition, summed over the turns of a conversation."""

    tokens: int  # decoded tokens, without the first one
    decode_s: float
    ttft_s: float  # time to first token, the mean of the turns
    peak_bytes: int = 0  # of MLX's memory, 0 if not measured

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.decode_s if self.decode_s > 0 else 0.0


@dataclass(slots=True)
class Series:
    """All repetitions of one runner on one workload."""

    workload: str
    temperature: float
    runner: str
    baseline: str  # the runner whose speed is 1.00
    reference: str | None = None  # the runner whose output must be identical
    prompt_tokens: int = 0
    repeats: list[Repeat] = field(default_factory=list)
    identical: bool | None = None  # in every repetition; None without a reference
    difference: dict[str, Any] | None = None  # the first `Divergence`
    drafted: list[int] = field(default_factory=list)  # this and below: of the last repetition
    accepted: list[int] = field(default_factory=list)
    loop: int | None = None  # see `loop_start`
    answer: str = ""
    failed: str | None = None  # the reason of a failure

    @property
    def rates(self) -> list[float]:
        """Tokens per second, by repetition."""
        return [repeat.tokens_per_s for repeat in self.repeats]

    @property
    def tokens_per_s(self) -> float:
        return median(self.rates)

    @property
    def spread(self) -> float:
        return half_range(self.rates)

    @property
    def tokens_per_pass(self) -> float:
        """1 for a plain loop, which records no passes."""
        passes = len(self.drafted)
        return (passes + sum(self.accepted)) / passes if passes else 1.0

    @property
    def acceptance_rate(self) -> float:
        drafted = sum(self.drafted)
        return sum(self.accepted) / drafted if drafted else 0.0

    def score(self, curve_s: dict[int, float]) -> float | None:
        """Return tokens per cost by the measured curve, without noise and drafting time."""
        if not self.drafted or 1 not in curve_s:
            return None
        curve = Curve(curve_s)
        cost = sum(curve(1 + drafted) for drafted in self.drafted) / curve(1)
        return (len(self.drafted) + sum(self.accepted)) / cost


@dataclass(slots=True)
class Throughput:
    """One test of given lengths, named as in llama-bench: `pp512`, `tg128`, `pp512 @ d1024`."""

    test: str
    runner: str
    rates: list[float] = field(default_factory=list)  # tokens per second, by repetition


@dataclass(slots=True)
class Result:
    command: str = ""
    date: str = ""
    model: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    complete: bool = False  # False if it was interrupted
    lost: str = ""  # the lost host that ended the run
    load_s: float = 0.0
    curve_context: int = 0  # cached tokens during the measurement of the curve
    curve_s: dict[int, float] = field(default_factory=dict)  # duration of a pass by rows
    throughput: list[Throughput] = field(default_factory=list)
    runs: list[Series] = field(default_factory=list)

    def baseline(self, series: Series) -> Series | None:
        """Return the baseline of `series`, None if it has no repetition."""
        for other in self.runs:
            same = (other.workload, other.temperature) == (series.workload, series.temperature)
            if same and other.runner == series.baseline and other.repeats:
                return other
        return None

    def speedup(self, series: Series) -> float | None:
        baseline = self.baseline(series)
        if baseline is None or not series.repeats or not baseline.tokens_per_s:
            return None
        return series.tokens_per_s / baseline.tokens_per_s

    def as_dict(self) -> dict[str, Any]:
        """Return all fields and derived figures, ready for JSON."""
        content = {"format": FORMAT} | asdict(self)
        if not self.lost:
            del content["lost"]
        content["curve_s"] = {str(rows): seconds for rows, seconds in self.curve_s.items()}
        for entry, test in zip(content["throughput"], self.throughput, strict=True):
            entry |= {"tokens_per_s": median(test.rates), "spread": half_range(test.rates)}
        for entry, series in zip(content["runs"], self.runs, strict=True):
            figures = {
                "tokens_per_s": series.tokens_per_s,
                "spread": series.spread,
                "speedup": self.speedup(series),
                "tokens_per_pass": series.tokens_per_pass,
                "acceptance_rate": series.acceptance_rate,
                "score": series.score(self.curve_s),
            }
            entry |= {name: v if v is None else round(v, 4) for name, v in figures.items()}
        return content

    def to_json(self) -> str:
        return json_text(self.as_dict())

    def save(self, path: Path) -> None:
        """Write the result file. Raises StoreError."""
        write_text(path, self.to_json())


def json_text(content: dict[str, Any]) -> str:
    """Return JSON with each list of plain values on one line."""
    text = json.dumps(content, indent=1, ensure_ascii=False)
    lists = re.compile(r"\[\n([^][{}\"]*)\]")
    return lists.sub(lambda match: "[" + re.sub(r",\s+", ", ", match[1].strip()) + "]", text) + "\n"


def write_text(path: Path, text: str) -> None:
    """Write a file and create its directory. Raises StoreError."""
    with disk_errors(f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def load_result(path: Path) -> Result:
    """Load a result file. Raises UsageError."""
    return _result(path, _read(path))


def load_results(path: Path) -> list[Result]:
    """Load a result file, or all results of a file of `make check-mac`. Raises UsageError."""
    content = _read(path)
    is_check = isinstance(content, dict) and content.get("format") == CHECK_FORMAT
    parts = content.get("results") if is_check else [content]
    return [_result(path, part) for part in (parts if isinstance(parts, list) else [parts])]


def _read(path: Path) -> Any:
    try:
        with disk_errors(f"cannot read {path}", UsageError):
            return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"expected a result of akunu bench, found {path}: {error}") from error


def _result(path: Path, content: Any) -> Result:
    from pydantic import TypeAdapter, ValidationError

    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UsageError(
            f'expected a result file with "format": "{FORMAT}", found {path}; '
            f"make one with: akunu bench -o {path.name}"
        )
    try:
        return TypeAdapter(Result).validate_python(content)
    except ValidationError as error:
        raise UsageError(f"{path} is damaged: {first_problem(error)}") from error


def load_merged(files: Sequence[Path]) -> list[Result]:
    """Load result files and merge those of one model and machine. Raises UsageError."""
    found: dict[str, Result] = {}
    for result in chain.from_iterable(map(load_results, files)):
        key = json.dumps([result.model, result.machine], sort_keys=True)
        if (other := found.get(key)) is not None:
            result = replace(
                other,
                command=f"{other.command}; {result.command}",
                complete=other.complete and result.complete,
                throughput=[*other.throughput, *result.throughput],
                runs=[*other.runs, *result.runs],
            )
        found[key] = result
    return list(found.values())


def describe_model(engine: Engine) -> dict[str, Any]:
    """Return name, format and size of a model, and its parts if it is split over hosts."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import get_total_parameters

    from akunu_py.engine.model import device
    from akunu_py.models.load.mlx_loader import open_directory

    model, host_group = engine.model, engine.host_group
    if host_group is not None:  # opens the whole model without reading its weights
        model = open_directory(engine.path).model
        device.convert_weights(model, host_group.weights)
    arrays = [value for _, value in tree_flatten(model.parameters())]
    described = {
        "name": engine.name,
        "weights": engine.plan.weights,
        "params": int(get_total_parameters(model)),
        "size_bytes": sum(value.nbytes for value in arrays if isinstance(value, mx.array)),
        "kv_bits": engine.plan.kv_bits,
    }
    if host_group is not None:
        parts = enumerate(host_group.partitions)
        described["hosts"] = [f"{host_group.hosts.label(rank)}: {part}" for rank, part in parts]
    return described


def describe_machine() -> dict[str, Any]:
    from akunu_py.engine.model import device
    from akunu_py.workarounds.openblas import load_openblas

    return {
        "device": device.device_name(),
        "backend": "Metal" if device.on_metal() else f"CPU, {load_openblas()}",
        "cores": os.cpu_count(),
        "memory_bytes": device.total_memory(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {"akunu": __version__} | {name: version(name) for name in _VERSIONS},
    }


def today() -> str:
    """Return the date in UTC, in ISO 8601."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()
