"""Drafters with a directory of their own: small networks trained to draft for one target.

`read_config` recognizes them, `load_drafter` loads one, and `state_drafter.py` describes what each
kind offers to the engine.
"""

from typing import Any

from akunu_py.errors import UnsupportedModel
from akunu_py.models.drafters.drafter_config import BLOCK_KINDS, DrafterConfig

_KINDS = (*BLOCK_KINDS, "eagle3", "gemma4-assistant")


def load_drafter(config: DrafterConfig | None, target: dict[str, Any]) -> Any:
    """Load a drafter. target: the config.json of the model to draft for.

    Raises UnsupportedModel if the drafter is for another model or of an unknown kind, DamagedModel.
    """
    # Imported here: they load MLX, and the store only reads configurations.
    from akunu_py.models.drafters import block, eagle3, gemma4_assistant

    if config is None or config.kind not in _KINDS:
        found = "none" if config is None else f"{config.kind} in {config.path}"
        raise UnsupportedModel(
            f"expected a drafter of kind {', '.join(_KINDS)}, found {found}; use another drafter"
        )
    if config.kind == "eagle3":  # these two check it themselves, with corrected taps
        return eagle3.load_eagle3(config, target)
    if config.kind == "gemma4-assistant":
        return gemma4_assistant.load_assistant(config, target)
    config.check(target)
    return block.load(config, target)
