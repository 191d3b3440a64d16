"""Decode a stream of tokens to text: thinking, and the answer up to a stop sequence."""

from collections.abc import Collection, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from akunu_py.engine.events import Span
from akunu_py.engine.text.reader import StopText, TextRun
from akunu_py.engine.text.thinking import special_tokens_in, splitter_for
from akunu_py.errors import DamagedModel
from akunu_py.models.load.model_files import as_error
from akunu_py.types import Piece, TextPiece

_MAX_PENDING = 32  # tokens of invalid UTF-8 that are held back


class StreamDecoder:
    """Text of one answer, from its tokens. Raises UsageError for an empty stop."""

    def __init__(
        self,
        tokenizer: Any,
        stop_tokens: Collection[int],
        prompt: Sequence[int],
        stops: Sequence[str],
        markers: Sequence[str] = (),
    ) -> None:
        """markers: texts to keep although they may be special tokens."""
        self._detokenizer = Detokenizer(tokenizer, prompt[-1])
        self._splitter, needed = splitter_for(tokenizer, prompt)
        self._markers = special_tokens_in(tokenizer, (*needed, *markers))
        self.stop = StopText(stops)
        self._stop_tokens = stop_tokens

    def add(self, piece: Piece) -> tuple[TextPiece, int]:
        """Return the text of a piece, and the number of its tokens that belong to the answer."""
        runs: list[TextRun] = []
        ends: list[int] = []
        for index, token in enumerate(piece.tokens):
            ends.append(ends[-1] if ends else 0)
            if token in self._stop_tokens:
                continue
            if token in self._markers:  # decoding drops it
                text = self._detokenizer.finish() + self._markers[token]
            else:
                text = self._detokenizer.add(token)
            drafted = [(0, len(text))] if index < piece.accepted else ()
            added = self._split(self._splitter.add(text, drafted))
            runs += added
            ends[-1] += sum(len(run.text) for run in added if run.kind == "answer")
            if self.stop.found:
                used = index + 1
                taken = min(piece.accepted, used)
                cut = Piece(piece.tokens[:used], taken, seconds=piece.seconds, drafted=taken)
                return _text_piece(runs, cut, ends), used
        return _text_piece(runs, piece, ends), len(piece.tokens)

    def finish(self) -> TextPiece:
        """Return the text held back at the end of the answer."""
        if self.stop.found:
            return TextPiece("", Piece(()))
        rest = self._splitter.add(self._detokenizer.finish()) + self._splitter.finish()
        return _text_piece([*self._split(rest), *self.stop.finish()], Piece(()))

    def _split(self, runs: Sequence[TextRun]) -> list[TextRun]:
        """Pass thinking unchanged, and the answer up to a stop sequence."""
        return [
            part
            for run in runs
            for part in ([run] if run.kind == "thinking" else self.stop.add(run.text, run.drafted))
        ]


def _text_piece(runs: Sequence[TextRun], piece: Piece, ends: Sequence[int] = ()) -> TextPiece:
    text = thinking = ""
    drafted = list[Span]()
    for run in runs:
        if run.kind == "thinking":
            thinking += run.text
        else:
            drafted += [(len(text) + start, len(text) + end) for start, end in run.drafted]
            text += run.text
    return TextPiece(text, piece, tuple(drafted), thinking, tuple(ends))


class Detokenizer:
    """Decodes a stream of tokens to a stream of text, and holds back incomplete characters."""

    def __init__(self, tokenizer: Any, last_prompt_token: int | None = None) -> None:
        """last_prompt_token: context for the first token, as for SentencePiece's leading space."""
        self._tokenizer = tokenizer
        self._context: list[int] = [] if last_prompt_token is None else [last_prompt_token]
        self._pending: list[int] = []  # tokens whose text was not returned
        self._restart()

    def _restart(self) -> None:
        self._stream = DecodeStream(self._context, skip_special_tokens=True)
        text = self._tokenizer.backend_tokenizer.decode(self._context)
        # The stream returns the text of a context that ends within a character.
        self._repeated = text if text.endswith("\ufffd") else ""

    def add(self, token: int) -> str:
        """Return the text that became complete with `token`."""
        self._pending.append(token)
        try:
            with as_error("the stream cannot be decoded"):
                text = self._stream.step(self._tokenizer.backend_tokenizer, token)
        except DamagedModel:  # some decoders change the text of earlier tokens
            return self.finish()
        if text is not None:
            self._context, self._pending = self._pending, []
            text, self._repeated = text.removeprefix(self._repeated), ""
            return text
        return "" if len(self._pending) < _MAX_PENDING else self.finish()

    def finish(self) -> str:
        """Return the text held back; U+FFFD for an incomplete character."""
        if not self._pending:
            return ""
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        text = str(self._tokenizer.decode(self._pending, **options))
        self._pending = []
        self._restart()
        return text
