"""Drafters with a directory of their own: small networks trained to draft for one target.

`read_config` recognizes them, `load_drafter` loads one, and `interface.py` describes what each
kind offers to the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from akunu_py.errors import UnsupportedModel
from akunu_py.models.drafters import block, eagle3
from akunu_py.models.drafters.config import BLOCK_KINDS, read_config

_LOADERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(BLOCK_KINDS, block.load),
    "eagle3": eagle3.load_eagle3,
}


def load_drafter(directory: Path, target: dict[str, Any]) -> Any:
    """Load the drafter in `directory`. target: the config.json of the model to draft for.

    Raises UnsupportedModel if the drafter is for another model or of an unknown kind, DamagedModel.
    """
    config = read_config(directory)
    if config is None or config.kind not in _LOADERS:
        raise UnsupportedModel(
            f"expected a drafter of kind {', '.join(_LOADERS)} in {directory}, found "
            f"{'none' if config is None else config.kind}; use another drafter"
        )
    config.check(target)
    return _LOADERS[config.kind](config, target)
