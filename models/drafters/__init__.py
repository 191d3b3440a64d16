"""Drafters with a directory of their own: small networks trained to draft for one target."""

from dataclasses import replace
from typing import Any

from akunu_py.errors import UnsupportedModel
from akunu_py.models.drafters.drafter_config import DrafterConfig
from akunu_py.models.load.model_files import as_error, text_config


def load_drafter(config: DrafterConfig, target: dict[str, Any]) -> Any:
    """Load a drafter of any kind but "mtp". Its weights are read on first use.

    target: the config.json of the model to draft for. Raises UnsupportedModel if the drafter is for
    another model, or of a variant that would draft wrongly, and DamagedModel.
    """
    # Imported here: they load MLX, and the store only reads configurations.
    from akunu_py.models.drafters.block import BlockDrafter
    from akunu_py.models.drafters.eagle3 import Eagle3
    from akunu_py.models.drafters.gemma4_assistant import Gemma4Assistant
    from akunu_py.models.drafters.state_drafter import fill, read_weights

    with as_error(f"the drafter in {config.path} cannot be loaded", UnsupportedModel):
        text = text_config(target)
        config = replace(config, taps=config.tap_layers(text["num_hidden_layers"]))
        config.check(text)
        weights = read_weights(config)
        drafter: Any
        if config.kind == "gemma4-assistant":
            drafter = Gemma4Assistant(config, weights, text)
        else:
            drafter = (Eagle3 if config.kind == "eagle3" else BlockDrafter)(config, weights)
        fill(drafter, weights, config)
    return drafter
