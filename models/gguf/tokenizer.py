"""Build a tokenizer from GGUF metadata: byte-level BPE ("gpt2") or SentencePiece ("llama").

The pre-tokenizers' expressions are those of the models' own tokenizer.json; tests compare them with
llama.cpp, which defines the names. An unknown kind or name raises UnsupportedModel, because a
slightly different split gives worse answers without any error.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from akunu_py.errors import UnsupportedModel
from akunu_py.models.gguf.file import GgufFile, damaged
from akunu_py.models.load.model_files import as_error, write_settings

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_TOKEN_KEYS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
_SENTENCEPIECE_ROLES = {"bos": 1, "eos": 2, "unk": 0}  # defaults
# Tokens that end a chat turn, for files that do not name theirs.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
# Phi 3's tokenizer drops whitespace after all special tokens except these.
_PHI3_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")
_SPACE = "▁"
# Pieces are split at every character to find their merges. Known models have 2 MB in total.
_LONGEST_PIECE, _MOST_CHARACTERS = 512, 8_000_000


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How byte-level BPE splits a text into words before it merges."""

    splits: tuple[str, ...]  # expressions whose matches become words, applied in order
    gpt2: bool = False  # apply GPT-2's own expression last
    whole_words: bool = False  # do not merge inside a word of the vocabulary
    add_bos: bool = False  # default for files that do not say


_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_SEED = (
    _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Words of capitals, then small letters; letters without case count as both.
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_SMALL}+%s|[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_SMALL}*%s"
)
_CASED_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _CASED % ("", "") + r"|\p{N}" + _CASED_TAIL
_GPT4O = _CASED % (f"{_ENDINGS}?", f"{_ENDINGS}?") + r"|\p{N}{1,3}" + _CASED_TAIL
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")

_NAMES_BY_KIND = {
    PreTokenizer((), gpt2=True): "gpt-2 phi-2 olmo mpt jais mellum a.x-4.0 gigachat exaone4",
    PreTokenizer((r"\p{N}",), gpt2=True): "smollm starcoder refact command-r",
    PreTokenizer((_LLAMA3,), whole_words=True, add_bos=True): (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2"
    ),
    PreTokenizer((_LLAMA3,)): "dbrx smaug-bpe glm4 chatglm-bpe",
    PreTokenizer((_QWEN2,)): "qwen2 deepseek-r1-qwen stablelm2 megrez hunyuan",
    PreTokenizer((_SEED,)): "seed-coder",
    PreTokenizer((_TEKKEN,), whole_words=True, add_bos=True): "tekken",
    PreTokenizer((_GPT4O,)): "gpt-4o llama4",
    PreTokenizer(_DEEPSEEK3): "deepseek-v3 hunyuan-dense",
    PreTokenizer(_DEEPSEEK_CODER): "deepseek-coder",
}
PRE_TOKENIZERS = {name: kind for kind, names in _NAMES_BY_KIND.items() for name in names.split()}


@dataclass(frozen=True, slots=True)
class TokenizerPlan:
    """A checked tokenizer, ready to be written."""

    tokenizer: Tokenizer
    roles: dict[str, int]  # special ids
    settings: dict[str, Any]  # tokenizer_config.json

    def config_ids(self) -> dict[str, Any]:
        """Return the special ids for config.json, with all end tokens under eos."""
        roles = self.roles
        ids: dict[str, Any] = {
            f"{role}_token_id": roles[role] for role in ("bos", "eos", "pad") if role in roles
        }
        ends = {roles[role] for role in ("eos", "eot", "eom") if role in roles}
        return ids | ({"eos_token_id": sorted(ends)} if len(ends) > 1 else {})

    def write(self, directory: Path) -> None:
        (directory / "tokenizer.json").write_text(self.tokenizer.to_str(), "utf-8")
        write_settings(directory, {"tokenizer_config.json": self.settings})


def plan_tokenizer(file: GgufFile) -> TokenizerPlan:
    """Build the tokenizer in `file`'s metadata. Raises UnsupportedModel, DamagedModel."""
    name, metadata = file.path.name, file.metadata
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model not in ("gpt2", "llama"):
        raise UnsupportedModel(
            f"{name} has a tokenizer of kind {model!r:.40}; akunu imports byte-level BPE ('gpt2') "
            "and SentencePiece ('llama')"
        )
    pre_tokenizer = PRE_TOKENIZERS.get(pre) if model == "gpt2" and isinstance(pre, str) else None
    if model == "gpt2" and pre_tokenizer is None:
        known = ", ".join(PRE_TOKENIZERS)
        raise UnsupportedModel(f"{name} has the pre-tokenizer {pre!r:.40}; akunu imports {known}")
    if metadata.get("tokenizer.ggml.add_eos_token", False) is not False:
        raise UnsupportedModel(f"{name} adds an end token to every text (add_eos_token)")
    tokens = _read_strings(file, "tokenizer.ggml.tokens")
    if not tokens or len(set(tokens)) != len(tokens):
        raise damaged(file.path, "its vocabulary is empty or has a duplicate token")
    kinds = metadata.get("tokenizer.ggml.token_type", np.ones(len(tokens), np.int32))
    if not isinstance(kinds, np.ndarray) or kinds.shape != (len(tokens),):
        raise damaged(file.path, f"expected token_type for {len(tokens)} tokens")
    control = np.flatnonzero((kinds == _CONTROL) | (kinds == _UNKNOWN)).tolist()
    roles = _read_roles(file, tokens, control, _SENTENCEPIECE_ROLES if model == "llama" else {})
    default = pre_tokenizer.add_bos if pre_tokenizer else True
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", default)
    template = metadata.get("tokenizer.chat_template")
    if not isinstance(add_bos, bool) or not isinstance(template, str | None):
        raise damaged(file.path, "add_bos_token or chat_template is of the wrong type")
    if add_bos and "bos" not in roles:
        raise damaged(file.path, "it has no beginning-of-text token")
    with as_error(f"{name} is damaged: its tokenizer cannot be built"):
        if pre_tokenizer:
            merges = _read_merges(file, set(tokens))
            tokenizer = build_byte_pairs(tokens, merges, pre_tokenizer)
        else:
            tokenizer = _build_sentence_pieces(file, tokens, kinds, tokens[roles["unk"]])
        user_defined = np.flatnonzero(kinds == _USER_DEFINED).tolist()
        _add_special_tokens(tokenizer, file, tokens, control, user_defined)
        if add_bos:
            bos = tokens[roles["bos"]]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[bos, "$A"], special_tokens=[(bos, roles["bos"])]
            )
    context = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context if isinstance(context, int) else 0,
    }
    settings |= {f"{role}_token": tokens[roles[role]] for role in _TOKEN_KEYS if role in roles}
    settings |= {"chat_template": template} if template is not None else {}
    return TokenizerPlan(tokenizer, roles, settings)


def build_byte_pairs(
    tokens: list[str], merges: list[tuple[str, str]], pre_tokenizer: PreTokenizer
) -> Tokenizer:
    """Build byte-level BPE. tokens: texts by id. merges: in order of rank."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre_tokenizer.whole_words)
    )
    steps: list[Any] = [
        pre_tokenizers.Split(Regex(split), behavior="isolated") for split in pre_tokenizer.splits
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre_tokenizer.gpt2))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _read_merges(file: GgufFile, tokens: set[str]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for text in _read_strings(file, "tokenizer.ggml.merges"):
        left, _, right = text.partition(" ")
        if left not in tokens or right not in tokens or left + right not in tokens:
            raise damaged(file.path, f"the merge {text[:60]!r} is not in its vocabulary")
        merges.append((left, right))
    return merges


def _build_sentence_pieces(
    file: GgufFile, tokens: list[str], kinds: Any, unknown: str
) -> Tokenizer:
    """Build SentencePiece's BPE with byte fallback. Raises DamagedModel or UnsupportedModel."""
    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or scores.shape != (len(tokens),):
        raise damaged(file.path, f"expected scores for {len(tokens)} tokens")
    scores = scores.astype(np.float64)
    if not np.isfinite(scores).all():
        raise damaged(file.path, "a token has an infinite score, or none")
    byte_tokens = {tokens[i] for i in np.flatnonzero(kinds == _BYTE)}
    if not {f"<0x{byte:02X}>" for byte in range(256)} <= byte_tokens:
        raise UnsupportedModel(
            f"{file.path.name} has a SentencePiece tokenizer without a token for every byte; "
            "akunu needs one for each"
        )
    has_prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    if not isinstance(has_prefix, bool):
        raise damaged(file.path, "add_space_prefix is of the wrong type")
    if max(map(len, tokens)) > _LONGEST_PIECE or sum(map(len, tokens)) > _MOST_CHARACTERS:
        raise damaged(
            file.path, f"its vocabulary has pieces of more than {_LONGEST_PIECE} characters"
        )
    mergeable = np.flatnonzero((kinds == _NORMAL) | (kinds == _USER_DEFINED))
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=sentence_piece_merges({tokens[i]: float(scores[i]) for i in mergeable}),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def sentence_piece_merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Return every pair of pieces that joins into a piece, best score first.

    SentencePiece merges the best score first and, among equals, the leftmost. Ranking the longer
    left part first gives the same result for runs of one character, where scores are equal.
    """
    found = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                found.append((-score, -len(left), -len(right), left, right))
    found.sort(key=lambda merge: merge[:3])
    return [merge[3:] for merge in found]


def _add_special_tokens(
    tokenizer: Tokenizer,
    file: GgufFile,
    tokens: list[str],
    control: list[int],
    user_defined: list[int],
) -> None:
    """Add tokens that are not text, and tokens whose text is never split.

    Like llama.cpp, decides by the model's name which tokens drop the whitespace after them.
    """
    name = str(file.metadata.get("general.name")).lower()
    is_phi3 = "phi-3" in name or "phi3" in name
    for is_special, ids in ((True, control), (False, user_defined)):
        add = tokenizer.add_special_tokens if is_special else tokenizer.add_tokens
        texts = [tokens[i] for i in ids]
        add([
            AddedToken(
                text,
                rstrip=is_phi3 and text not in _PHI3_KEEPS_SPACE,
                special=is_special,
                normalized=False,
            )
            for text in texts
        ])  # fmt: skip


def _read_roles(
    file: GgufFile, tokens: list[str], control: list[int], defaults: dict[str, int]
) -> dict[str, int]:
    roles: dict[str, int] = {}
    for role, key in (_TOKEN_KEYS | {"eot": "eot", "eom": "eom"}).items():
        value = file.metadata.get(f"tokenizer.ggml.{key}_token_id", defaults.get(role))
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(tokens):
            raise damaged(
                file.path, f"its {key} token {value!r:.40} is not one of its {len(tokens)} tokens"
            )
        roles[role] = value
    if "eos" not in roles:
        raise damaged(file.path, "it has no end-of-text token")
    by_text = {tokens[i]: i for i in control}
    found = [by_text[text] for text in _TURN_ENDS if text in by_text]
    if found and "eot" not in roles:
        roles["eot"] = found[0]
    return roles


def _read_strings(file: GgufFile, key: str) -> list[str]:
    value = file.metadata.get(key)
    if not isinstance(value, list):
        raise damaged(file.path, f"{key} is missing")
    return value
