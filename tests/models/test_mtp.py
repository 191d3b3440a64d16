"""MTP heads: loading from the published names of every family, and their results."""

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model, save_model

from akunu_py.engine import kv_cache
from akunu_py.engine.model import output_rows
from akunu_py.errors import DamagedModel, UnsupportedModel
from akunu_py.models.load.mlx_loader import open_directory
from akunu_py.models.mtp import FAMILIES, HEAD_FILE, Head, HeadChain, Trunk, load_heads, write_heads
from akunu_py.models.store.local_import import import_model
from tests.support.published_drafters import Target, cut, draft_rounds, is_divisible, save_drafter
from tests.support.tiny_drafters import mtp_checkpoint, mtp_config
from tests.support.tiny_mtp import (
    CONFIGS,
    VOCABULARY,
    reference,
    write_chain,
    write_checkpoint,
    write_tokenizer,
)

DRAFT = 4
ACCEPTED = (2, 0, 4, 1, 3)  # draft tokens of each pass
ROWS = sum(ACCEPTED) + len(ACCEPTED)
LONG = ("deepseek_v3", "qwen3_5", "qwen3_5_moe", "mimo", "nemotron_h")


def loaded(directory: Path) -> tuple[Any, Head]:
    opened = open_directory(directory)
    return opened.model, chain_in(directory, opened.model, opened.config).heads[0]


def chain_in(directory: Path, model: Any, config: dict[str, Any]) -> HeadChain:
    chain = load_heads(directory, model, config)
    assert chain is not None
    return chain


def inputs(model: Any, head: Head) -> tuple[mx.array, mx.array]:
    """Embeddings and hidden states [1, ROWS, width]."""
    mx.random.seed(1)
    embeddings = Trunk(model).embed(mx.random.randint(0, VOCABULARY, (1, ROWS)))
    return embeddings, mx.random.normal((1, ROWS, head.hidden_norm.weight.size))


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in CONFIGS],
)
def test_head_computes_the_published_formula(family: str, tmp_path: Path) -> None:
    """Compare all rows at once with drafts that are partly rolled back."""
    published = write_checkpoint(tmp_path, family)
    model, head = loaded(tmp_path)
    embeddings, hidden = inputs(model, head)
    wanted = reference(family, published, np.array(embeddings[0]), np.array(hidden[0]))
    whole = head(embeddings, hidden, head.make_cache())
    np.testing.assert_allclose(np.array(whole[0]), wanted, atol=2e-3)

    cache, at, got = kv_cache.new_cache(head), 0, []
    for accepted in ACCEPTED:
        end = at + 1 + accepted
        got.append(head(embeddings[:, at:end], hidden[:, at:end], cache))
        state = got[-1][:, -1:]
        for _ in range(DRAFT):  # each from the previous state
            state = head(embeddings[:, :1], state, cache)
        kv_cache.trim(cache, DRAFT)
        assert kv_cache.has_length(cache, end)
        at = end
    np.testing.assert_allclose(np.array(mx.concatenate(got, 1)[0]), wanted, atol=2e-3)


@pytest.mark.parametrize("family", [name for name in CONFIGS if name != "deepseek_v3"])
def test_hidden_states_come_with_the_logits(family: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family)
    model, head = loaded(tmp_path)
    assert head.family.normed != (family in ("mimo", "step3p5"))
    trunk, tokens = Trunk(model), mx.arange(9)[None]
    last = len(model.layers) - 1

    def states() -> tuple[mx.array, mx.array]:
        cache = kv_cache.new_cache(model)
        kept = output_rows.run(model, tokens, cache, lambda rows: rows, [last, last + 1])[1]
        return kept[last + 1], kept[last + head.family.normed]

    normed, hidden = states()
    assert mx.array_equal(trunk.logits(normed), model(tokens, kv_cache.new_cache(model)))
    assert mx.array_equal(normed, hidden if head.family.normed else model.model.norm(hidden))
    assert mx.array_equal(states()[1], hidden)


def test_exaone_head_with_full_attention_has_no_rope() -> None:
    """As in the target, whose other layers have sliding windows."""
    settings = CONFIGS["exaone_moe"] | {"model_type": "exaone_moe"}
    for kind, has_rope in (("full_attention", False), ("sliding_attention", True)):
        head = Head(FAMILIES["exaone_moe"], settings | {"mtp_layer_types": [kind]}, 2)
        attention = head.body.layers[0].self_attn
        assert (attention.use_rope, attention.is_sliding_window) == (has_rope, has_rope)


def quantized(source: Path, target: Path) -> Any:
    """Convert the model in `source` with mlx-lm, which drops the head."""
    opened = open_directory(source)
    model, config = quantize_model(opened.model, opened.config, 32, 8)
    target.mkdir()
    save_model(target, model)
    (target / "config.json").write_text(json.dumps(config))
    opened = open_directory(target)
    assert load_heads(target, opened.model, opened.config) is None
    return opened.model


def parameters(head: Head) -> dict[str, mx.array]:
    return dict(tree_flatten(head.parameters()))


def published_names(family: str, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Rename the parameters of a head as its publisher names them."""
    modules, renamed = {own: name for name, own in FAMILIES[family].modules.items()}, {}
    for name, value in weights.items():
        module, _, part = name.rpartition(".")
        layer = name.replace("body.model.layers.", "layers.")
        renamed[f"{modules[module]}.{part}" if module in modules else layer] = value
    return renamed


@pytest.mark.parametrize(
    "family", ["qwen3_next", "qwen3_5_moe", "glm4_moe", "mimo", "ernie4_5_moe", "nemotron_h"]
)
def test_separate_head_file_of_a_converted_model(family: str, tmp_path: Path) -> None:
    """Load a published head and a written one, quantized like the model."""
    published = write_checkpoint(tmp_path / "published", family)
    made = tmp_path / "made"
    model = quantized(tmp_path / "published", made)
    mx.save_safetensors(str(made / HEAD_FILE), published)
    _, head = loaded(made)
    kept = parameters(head)
    assert head.project.bits == 8
    assert any(name.endswith(".o_proj.scales") for name in kept)
    embeddings, hidden = inputs(model, head)
    wanted = reference(family, published, np.array(embeddings[0]), np.array(hidden[0]))
    got = head(embeddings, hidden, head.make_cache())
    assert np.abs(np.array(got[0]) - wanted).mean() < 0.02

    write_heads(HeadChain([head], 2), made / HEAD_FILE)
    again = parameters(loaded(made)[1])
    assert again.keys() == kept.keys()
    assert all(mx.array_equal(again[name], kept[name]) for name in kept)

    if family == "qwen3_5_moe":  # as mlx-vlm and MTPLX write it, and as conversions keep it
        bare = published_names(family, kept)
        for file, home in ((HEAD_FILE, ""), ("model-2.safetensors", "language_model.mtp.")):
            (made / HEAD_FILE).unlink()
            weights = {home + name: value for name, value in bare.items()}
            mx.save_safetensors(str(made / file), weights)
            again = parameters(loaded(made)[1])
            assert all(mx.array_equal(again[name], kept[name]) for name in kept)


@pytest.mark.parametrize("bits", [None, 4])
def test_an_import_keeps_the_head(
    bits: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    source = tmp_path / "model"
    published = write_checkpoint(source, "qwen3_5")
    write_tokenizer(source)
    if bits is None:  # a separate head file takes precedence
        better = {name: value * 2 for name, value in published.items()}
        mx.save_safetensors(str(source / HEAD_FILE), better)
    _, before = loaded(source)
    _, head = loaded(import_model(source, bits=bits).path)
    assert hasattr(head.project, "bits") == bool(bits)
    assert mx.array_equal(head.embedding_norm.weight, before.embedding_norm.weight)


def test_head_that_does_not_fit_is_rejected(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", "qwen3_5", head=False)
    opened = open_directory(tmp_path / "a")
    model, config, file = opened.model, opened.config, tmp_path / "a" / HEAD_FILE
    assert load_heads(tmp_path / "a", model, config) is None
    published = write_checkpoint(tmp_path / "b", "qwen3_5")
    name = "mtp.layers.0.self_attn.o_proj.weight"
    narrow = published | {name: published[name][:, :-1]}
    missing = {key: value for key, value in published.items() if key != name}
    for weights in (narrow, missing):
        mx.save_safetensors(str(file), weights)
        with pytest.raises(UnsupportedModel, match="does not fit the model"):
            load_heads(tmp_path / "a", model, config)
    file.write_bytes(b"\0" * 100)
    with pytest.raises(DamagedModel):
        load_heads(tmp_path / "a", model, config)


@pytest.mark.parametrize("family", ["step3p5", "mimo_v2_flash"])
def test_chain_drafts_as_its_heads_compute_whole_texts(family: str, tmp_path: Path) -> None:
    """Each head computes all rows of a text at once, and drafts behind every prefix of it."""
    write_chain(tmp_path / "model", family)
    opened = open_directory(tmp_path / "model")
    model, place = opened.model, (tmp_path / "model", opened.model, opened.config)
    write_heads(chain_in(*place), tmp_path / "model" / HEAD_FILE)
    chain = chain_in(*place)
    heads = chain.heads
    assert len(heads) == 3
    assert [each.family.chained for each in heads] == [family == "step3p5"] * 3

    trunk = Trunk(model)
    mx.random.seed(2)
    tokens = mx.random.randint(0, VOCABULARY, (1, ROWS + 3))
    hidden = mx.random.normal((1, ROWS, heads[0].hidden_norm.weight.size))
    embeddings, wanted, state = trunk.embed(tokens), [], hidden
    for number, each in enumerate(heads):
        shifted = embeddings[:, number + 1 : number + 1 + ROWS]
        state = each(shifted, state if family == "step3p5" else hidden, each.make_cache())
        wanted.append(each.logits(state, trunk)[0])

    assert chain.longest == 3
    cache, at = chain.make_cache(), 0
    for end in (1, 2, 3, 7, 8, ROWS):
        cut(cache, max(0, at - chain.overlap))
        begin, at = max(0, at - chain.overlap), end
        rows = chain.extend(hidden[:, begin:end], embeddings[:, begin + 1 : end + 1], cache)
        for _ in range(2):  # the first draft leaves no trace
            draft = chain.start(trunk, rows, cache)
            for depth in range(3):
                logits = draft.logits(depth, int(tokens[0, end + depth].item()))
                np.testing.assert_allclose(logits[0], wanted[depth][end - 1], atol=2e-3)
            for number, entry in enumerate(cache):
                cut([entry], max(0, end - number))


CASES = json.loads((Path(__file__).parents[1] / "golden" / "drafters" / "mtp.json").read_text())


def target_of(config: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the model that the head of `config` belongs to, without weights, and its config."""
    text = config["text_config"]
    name = "qwen3_5_moe" if "num_experts" in text else "qwen3_5"
    module: Any = importlib.import_module(f"mlx_lm.models.{name}")
    settings = {"model_type": name, "text_config": text}
    return module.Model(module.ModelArgs.from_dict(settings)), settings


def speculators(
    config: dict[str, Any], weights: dict[str, mx.array]
) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """Return a head in the "speculators" container, whose norms are stored minus one."""
    names = {
        "fc": "input_proj", "norm": "final_layernorm", "pre_fc_norm_hidden": "hidden_layernorm",
        "pre_fc_norm_embedding": "token_layernorm",
    }  # fmt: skip
    renamed = {}
    for name, value in weights.items():
        module, _, part = name.rpartition(".")
        home = names.get(module, module.removeprefix("layers.0."))
        value = value - 1 if value.ndim == 1 else value
        renamed[f"mtp_layers.0.{home}.{part}"] = value
    settings = {"speculators_model_type": "mtp", "transformer_layer_config": config["text_config"]}
    return settings, renamed


@pytest.mark.parametrize("case", CASES["cases"], ids=lambda case: f"seed{case['seed']}")
def test_drafts_of_a_head_in_its_own_repository_equal_mlx_vlm(
    case: dict[str, Any], tmp_path: Path
) -> None:
    config, seed = case["config"], case["seed"]
    drawn = mtp_checkpoint(config, seed)
    weights = {name: mx.array(value) for name, value in drawn.items()}
    embedding, lm_head = (weights.pop(f"{name}.weight") for name in ("embed_tokens", "lm_head"))
    model, settings = target_of(config)
    text = config["text_config"]
    target = Target(
        lambda tokens: embedding[tokens], lambda hidden: hidden @ lm_head.T,
        text["hidden_size"], text["vocab_size"],
    )  # fmt: skip
    packagings = {"mlx-vlm": (config, weights), "speculators": speculators(config, weights)}
    for name, (own, tensors) in packagings.items():
        chain = chain_in(save_drafter(tmp_path / name, own, tensors), model, settings)
        assert draft_rounds(chain, target, seed) == case["drafts"], name
    assert len({token for draft in case["drafts"] for token in draft}) > 5

    packed = chain_in(tmp_path / "mlx-vlm", model, settings).heads[0]
    nn.quantize(packed, 32, 8, class_predicate=lambda _, part: is_divisible(part))
    renamed = published_names("qwen3_5", parameters(packed))
    own = config | {"quantization": {"bits": 8, "group_size": 32}}
    again = chain_in(save_drafter(tmp_path / "packed", own, renamed), model, settings).heads[0]
    assert again.project.bits == 8
    kept = parameters(packed)
    assert all(mx.array_equal(value, kept[name]) for name, value in parameters(again).items())


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_head_of_another_model_is_rejected(key: str, tmp_path: Path) -> None:
    config = mtp_config(0)
    weights = {name: mx.array(value) for name, value in mtp_checkpoint(config, 0).items()}
    directory = save_drafter(tmp_path / "head", config, weights)
    model, settings = target_of(config)
    other = settings | {"text_config": config["text_config"] | {key: 7}}
    with pytest.raises(UnsupportedModel, match=r"expects .*, the model has 7; use a drafter"):
        load_heads(directory, model, other)
    module: Any = importlib.import_module("mlx_lm.models.llama")
    with pytest.raises(UnsupportedModel, match="no MTP heads for the architecture 'llama'; use"):
        load_heads(directory, module.Model.__new__(module.Model), {"model_type": "llama"})
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match=r"pytorch_model\.bin"):
        load_heads(directory, model, settings)
