"""How byte-level BPE tokenizers split a text into words before they merge, by the name in GGUF.

Owns the names (`tokenizer.ggml.pre`) and their regular expressions, which are those of the models'
own tokenizer.json. llama.cpp, which gives the names, is what tests compare them with. A name that
is not here is refused by `gguf_tokenizer`: a tokenizer that splits a little differently gives worse
answers without any error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """splits: expressions whose matches become words of their own, one after the other.

    gpt2: whether GPT-2's own expression comes last. whole_words: whether a word that is in the
    vocabulary is taken without merging. add_bos: whether texts begin with the beginning-of-text
    token where the file does not say.
    """

    splits: tuple[str, ...]
    gpt2: bool = False
    whole_words: bool = False
    add_bos: bool = False

    def build(self) -> Any:
        """The pre-tokenizer as an object of the `tokenizers` library."""
        from tokenizers import Regex, pre_tokenizers

        steps: list[Any] = [
            pre_tokenizers.Split(Regex(split), behavior="isolated") for split in self.splits
        ]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2))
        return pre_tokenizers.Sequence(steps)


_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_SEED = (
    _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Words that begin with capitals and go on in small letters; letters without case count as both.
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

_BY_KIND = {
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
PRE_TOKENIZERS = {name: kind for kind, names in _BY_KIND.items() for name in names.split()}
