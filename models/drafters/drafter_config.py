"""The configuration of a drafter in its own directory, in one form for all packagings.

The packagings and where they are defined:

- DFlash and DFlash2: z-lab's `dflash` 0.1.0, `model_mlx.py`.
- DSpark: deepseek-ai/DeepSpec (flat), SpecForge and LFM2 (fields in `dflash_config`), Nemotron
  (causal, sliding window, attention sinks). `config.py` of mlx-dspark 0.20.3 compares them.
- The "speculators" container of vLLM: `config.py` and `models/*/config.py` of speculators 0.9.0.
- EAGLE-3: SafeAILab, and the `eagle_config` of NVIDIA and SGLang.
- Gemma 4 assistants and MTP heads: `speculative/drafters/` of mlx-vlm 0.7.10.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from akunu_py.errors import DamagedModel, UnsupportedModel
from akunu_py.models.load.model_files import ADVICE, read_settings

BLOCK_KINDS = ("dspark", "dflash2", "dflash")
Settings = dict[str, Any]
_ALGORITHMS = {kind: kind for kind in (*BLOCK_KINDS, "eagle3", "mtp")} | {"peagle": "eagle3"}
_ARCHITECTURES = {kind: kind for kind in (*BLOCK_KINDS, "eagle3")} | {
    "gemma4assistant": "gemma4-assistant",  # part of a class name in lower case, and its kind
    "gemma4unifiedassistant": "gemma4-assistant",
}
DIGEST_KEY = "akunu_target_digest"  # of the weights that a drafter was trained on
TRAINING_KEY = "akunu_training"  # facts of a drafter that akunu trained
_MOST = 1000  # layers, and rows of a block


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """The facts about a drafter that all kinds have."""

    path: Path  # the drafter's directory
    kind: str  # "dflash", "dflash2", "dspark", "eagle3", "gemma4-assistant" or "mtp"
    settings: Settings  # all settings in one flat object; `dflash_config` wins
    speculators: bool  # packaged by vLLM's speculators
    width: int  # of the drafter's hidden states
    target_width: int  # of the target's hidden states
    layers: int  # of the drafter
    vocabulary: int  # tokens of the target, as its configuration counts them
    draft_vocabulary: int  # tokens of the drafter's own head
    target_layers: int | None  # None: unknown
    taps: tuple[int, ...]  # output layers of the target, -1: its embedding; (): see `tap_layers`
    block: int  # rows of a draft's pass; 0 if not given
    suggested_tokens: int | None  # draft tokens of one draft, if the publisher states them
    mask_token: int | None
    anchor_predicts: bool  # the row of the last known token predicts the next one

    def tap_layers(self, layers: int) -> tuple[int, ...]:
        """Return the target's layers whose outputs the drafter takes; -1 is the embedding.

        layers: of the target. Publishers of EAGLE-3 number inputs or outputs. In `eagle_config`,
        ids from 2 on and ids that reach the number of layers name inputs (sgl-project/sglang
        #25454, #32334). Containers converted from SpecForge have its default, which names outputs.
        """
        taps = self.taps
        if self.kind in BLOCK_KINDS and not taps:
            if self.layers == 1:
                return (layers // 2,)
            step = (layers - 4) / (self.layers - 1)
            return tuple(round(1 + index * step) for index in range(self.layers))
        if self.kind != "eagle3":
            return taps
        if not taps:  # the inputs of layers 2, n // 2 and n - 3
            return 1, layers // 2 - 1, layers - 4
        named = "eagle_aux_hidden_state_layer_ids" in nested(self.settings, "eagle_config")
        if named and not self.speculators and (taps[0] == 2 or max(taps) >= layers):
            return tuple(tap - 1 for tap in taps)
        default = taps == (0, layers // 2 - 2, layers - 5)
        return tuple(tap + 1 for tap in taps) if default else taps

    def check(self, target: Settings) -> None:
        """Raise UnsupportedModel with the first difference to the target's text configuration."""
        layers, needed = target.get("num_hidden_layers"), max(self.taps, default=-1) + 1
        for what, own, found in (
            ("hidden states of width", self.target_width, target.get("hidden_size")),
            ("layers:", max(needed, self.target_layers or layers or 0), layers),
            ("tokens:", self.vocabulary, target.get("vocab_size")),
        ):
            if found is not None and own != found:
                raise UnsupportedModel(
                    f"the drafter in {self.path} is for another model: it expects {what} {own}, "
                    f"the model has {found}; use a drafter that was trained for this model"
                )


def read_config(directory: Path) -> DrafterConfig | None:
    """Return the configuration of the drafter in `directory`, None if it has an ordinary model.

    Raises UnsupportedModel for a drafter of an unknown kind, DamagedModel for a bad config.json.
    """
    path = directory / "config.json"
    return parse_config(path, read_settings(path)) if path.is_file() else None


def parse_config(path: Path, raw: dict[str, Any]) -> DrafterConfig | None:
    """Return the configuration in `raw`, the content of the file `path`; see `read_config`."""
    container = nested(raw, "speculators_config")
    kind = _kind(path, raw, container)
    if kind is None:
        return None
    inner = nested(raw, "transformer_layer_config") or nested(raw, "text_config")
    settings = raw | inner | nested(raw, "dflash_config")
    speculators = "speculators_model_type" in raw or bool(container)
    methods = container.get("proposal_methods")
    method = methods[0] if isinstance(methods, list) and methods else {}
    suggested = method.get("speculative_tokens") if isinstance(method, dict) else None
    suggested = suggested if type(suggested) is int and suggested > 0 else None
    width = count(path, settings, "hidden_size")
    mask = count(path, settings, "mask_token_id", -1, least=-1)
    # An MTP head has the configuration of its target.
    target_layers = "num_hidden_layers" if kind == "mtp" else "num_target_layers"
    vocabulary = count(path, settings, "vocab_size")
    target_width = count(path, settings, "target_hidden_size", width)
    return DrafterConfig(
        path=path.parent,
        kind=kind,
        settings=settings,
        speculators=speculators,
        width=width,
        target_width=count(path, settings, "backbone_hidden_size", target_width),
        layers=count(path, settings, "num_hidden_layers", 1, most=_MOST),
        vocabulary=vocabulary,
        draft_vocabulary=count(path, settings, "draft_vocab_size", vocabulary),
        target_layers=count(path, settings, target_layers, 0, least=0) or None,
        taps=_taps(path, settings, speculators=speculators),
        block=_block(path, kind, settings, speculators=speculators),
        suggested_tokens=suggested,
        mask_token=None if mask < 0 else mask,
        anchor_predicts=_anchor_predicts(kind, settings, suggested, speculators=speculators),
    )


def _kind(path: Path, raw: Settings, container: Settings) -> str | None:
    algorithm = raw.get("speculators_model_type") or container.get("algorithm")
    if algorithm is not None:
        if str(algorithm) not in _ALGORITHMS:
            raise UnsupportedModel(
                f"{path}: the drafter is of kind {algorithm!r:.40}; akunu supports "
                f"{', '.join(_ALGORITHMS)}: use a drafter of such a kind"
            )
        return _ALGORITHMS[str(algorithm)]
    model_type = str(raw.get("model_type"))
    if "dspark_block_size" in raw:  # a target that contains its drafter
        return None
    dflash = nested(raw, "dflash_config")
    if dflash.get("projector_type") == "dspark":
        return "dspark"
    described = f"{raw.get('architectures')} {model_type}".lower().replace("_", "")
    for part, kind in _ARCHITECTURES.items():
        if part in described:
            return kind
    if dflash:
        return "dflash"
    if "draft_vocab_size" in raw:  # SafeAILab names the architecture of the layer
        return "eagle3"
    return "mtp" if model_type.endswith("_mtp") else None


def _anchor_predicts(
    kind: str, settings: Settings, suggested: int | None, *, speculators: bool
) -> bool:
    """Return True if row k of a block predicts position k + 1 after its first row, else k.

    The wrong answer halves the acceptance without an error. The number of draft tokens decides
    where the container states it: containers without `sample_from_anchor` are older than it.
    """
    block = settings.get("block_size")
    if suggested is not None and block in (suggested, suggested + 1):
        return suggested == block
    if isinstance(stated := settings.get("sample_from_anchor"), bool):
        return stated
    if isinstance(start := settings.get("logits_start"), int):
        return start == 0
    return kind == "dspark" and not speculators


def _taps(path: Path, settings: Settings, *, speculators: bool) -> tuple[int, ...]:
    """Return the numbers of output layers. The container counts the embedding as 0."""
    eagle = nested(settings, "eagle_config").get("eagle_aux_hidden_state_layer_ids")
    plain = settings.get("target_layer_ids") or eagle
    shifted = settings.get("aux_hidden_state_layer_ids") or settings.get(
        "eagle_aux_hidden_state_layer_ids"
    )
    found = shifted or plain if speculators else plain or shifted
    if not found:
        return ()
    if not isinstance(found, list) or not all(type(tap) is int and tap >= -1 for tap in found):
        raise DamagedModel(f"{path}: expected a list of layers, found {found!r:.60}; {ADVICE}")
    return tuple(tap - 1 if found is shifted else tap for tap in found)


def _block(path: Path, kind: str, settings: Settings, *, speculators: bool) -> int:
    if kind not in BLOCK_KINDS:
        return count(path, settings, "block_size", 0, least=0, most=_MOST)
    default = None if kind == "dspark" or speculators else 16
    block = count(path, settings, "block_size", default, most=_MOST)
    return block - 1 if settings.get("dspark_bonus_anchor") else block  # counts the bonus token


def count(
    path: Path, settings: Settings, key: str, default: int | None = None,
    *, least: int = 1, most: int = 10_000_000,
) -> int:  # fmt: skip
    """Return an integer of `settings`, `default` if it is missing or null. Raises DamagedModel."""
    value = default if settings.get(key) is None else settings[key]
    if type(value) is not int or not least <= value <= most:
        raise DamagedModel(
            f"{path}: expected {key} as an integer from {least} to {most}, found {value!r:.40}; "
            f"{ADVICE}"
        )
    return value


def nested(settings: Settings, key: str) -> Settings:
    """Return the object at `key`, an empty one if there is none."""
    found = settings.get(key)
    return found if isinstance(found, dict) else {}
