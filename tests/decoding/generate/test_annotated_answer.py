"""What the chat shows of an answer's drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel

from akunu_py.decoding.generate.annotated_answer import AnnotatedAnswer
from akunu_py.types import Piece, TextPiece


def test_no_special_token_of_a_rejected_draft_is_shown() -> None:
    tokenizer = Tokenizer(WordLevel({"one": 0, "two": 1, "three": 2}, unk_token="one"))
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens(["<|im_end|>", "<|im_start|>"])
    session = SimpleNamespace(engine=SimpleNamespace(tokens=SimpleNamespace(tokenizer=tokenizer)))
    shown = AnnotatedAnswer.__new__(AnnotatedAnswer)
    shown._session = cast(Any, session)
    shown.request = cast(Any, SimpleNamespace(tokens=[0, 1]))
    for rejected, text in (([2, 3, 4], "three"), ([3, 4], ""), ([1, 2], "twothree")):
        piece = TextPiece("one", Piece((0, 1), accepted=1, rejected=tuple(rejected)))
        assert shown._rejected_text(piece) == text
