"""Tiny models with random weights whose tokenizers have the markers of a family."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from akunu_py.engine.engine import Engine
from tests.support.tiny import write_tiny_llama

_PRINTABLE = [chr(code) for code in range(32, 127)]


def byte_level(
    markers: Sequence[str], bos: str | None = None, letters: int | None = None
) -> Tokenizer:
    """Every byte, or some, is a token; so are the markers, of which not all are special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:letters]
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_markers(tokenizer, markers, bos)


def sentence_piece(markers: Sequence[str], bos: str | None = None) -> Tokenizer:
    """Every printable character is a token, the smiley that encoding bare needs too."""
    pieces = ["<unk>", "▁", "\n", "☺", *(letter for letter in _PRINTABLE if letter != " ")]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return _with_markers(tokenizer, markers, bos)


def _with_markers(tokenizer: Tokenizer, markers: Sequence[str], bos: str | None) -> Tokenizer:
    added = [*([bos] if bos else []), *markers]
    tokenizer.add_tokens([AddedToken(text, special=i % 2 == 0) for i, text in enumerate(added)])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer


HARMONY_MARKERS = (
    "<|return|>", "<|channel|>", "<|start|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>"
)  # fmt: skip


def write_model(
    directory: Path, tokenizer: Tokenizer, *, end: str, seed: int = 0, template: str = "",
    context: int = 4096,
) -> Path:  # fmt: skip
    """A model directory. end: the token that ends texts."""
    directory.mkdir(parents=True, exist_ok=True)
    size, stop = tokenizer.get_vocab_size(), tokenizer.token_to_id(end)
    write_tiny_llama(
        directory, seed, vocab_size=size, eos_token_id=stop, max_position_embeddings=context
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end).save_pretrained(directory)
    if template:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def write_chat_model(directory: Path) -> Path:
    """A tiny model that can be talked to, and at length: a letter is a token of it."""
    end = "<|endoftext|>"
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    tokenizer = sentence_piece([end])
    return write_model(directory, tokenizer, end=end, template=template, context=16_384)


def load_tiny(
    directory: Path, markers: Sequence[str], name: str = "tiny", template: str = "", **options: Any
) -> Engine:
    """An engine on a byte-level tiny model with `markers`, the first of which ends texts."""
    write_model(directory, byte_level(markers, **options), end=markers[0], template=template)
    return Engine.load(directory, name=name)
