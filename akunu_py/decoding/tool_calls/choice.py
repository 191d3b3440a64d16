"""Calls that the model must make, or may only make as a schema wants: as a grammar."""

from __future__ import annotations

from collections.abc import Sequence

from akunu_py.decoding.engine import Engine
from akunu_py.errors import UsageError
from akunu_py.types import SamplingOptions, Tool, ToolChoice


def constrained(
    engine: Engine,
    sampling: SamplingOptions,
    tools: Sequence[Tool],
    choice: ToolChoice,
    *,
    parallel: bool,
) -> SamplingOptions:
    """`sampling` with what the choice asks for. Raises UsageError where it cannot be honoured."""
    if choice.mode in ("auto", "none"):
        return sampling
    raise UsageError("tool_choice required or named is not supported yet")
