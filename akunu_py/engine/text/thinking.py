"""Separate thinking from the answer by a model's markers or channels.

Most models put thinking between two markers. A block opens only before the answer, so an answer
that explains a marker stays an answer.

Some models write in channels: messages, each with a header. gpt-oss (the harmony format) writes
`<|channel|>analysis<|message|>` before thinking, `<|channel|>final<|message|>` before the answer,
and the function of a call in its header. Muse Spark names the recipient of each message. Sources:
OpenAI, "OpenAI Harmony Response Format" (2025); mlx-lm, chat_templates/muse_spark.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from akunu_py.engine.text.reader import CutOff, Kind, ParserSteps, TextRun, TextSplitter
from akunu_py.weak_cache import cached_weakly

_NEWLINES = "\r\n"
_PROMPT_END = 16  # tokens; enough for a marker and the newlines behind it
_START, _MESSAGE = "<|start|>", "<|message|>"

Markers = tuple[str, str]
MINIMAX_M3: Markers = ("<mm:think>", "</mm:think>")  # mlx-lm takes the unused <think> of this model


def splitter_for(
    tokenizer: Any, prompt: Sequence[int]
) -> tuple[ChannelSplitter | ThinkingSplitter, tuple[str, ...]]:
    """Return a splitter for the answer to a prompt, and the markers that it needs."""
    thought = unfinished_thinking(tokenizer, prompt)
    inside = thought is not None
    if (channels := channels_of(tokenizer)) is not None:
        return ChannelSplitter(channels, thinking=inside), channel_markers(channels)
    markers = thinking_markers(tokenizer)
    start, end = markers or (None, None)
    return ThinkingSplitter(start, end, inside=inside, trim=not thought), markers or ()


def thinking_markers(tokenizer: Any) -> Markers | None:
    """Return the opening and closing marker of mlx-lm's TokenizerWrapper, None if it has none."""
    if not getattr(tokenizer, "has_thinking", False):
        return None
    if tokenizer.backend_tokenizer.token_to_id(MINIMAX_M3[1]) is not None:
        return MINIMAX_M3
    return str(tokenizer.think_start), str(tokenizer.think_end)


def special_tokens_in(tokenizer: Any, texts: Sequence[str]) -> dict[int, str]:
    """Return the tokens of `texts` that decoding drops by default, with their texts."""
    encoded = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
    return {
        token: str(tokenizer.decode([token], skip_special_tokens=False))
        for token in sorted({int(token) for tokens in encoded for token in tokens})
        if not tokenizer.decode([token], skip_special_tokens=True)
    }


def opens_thinking(prompt_text: str, markers: Markers | None) -> bool:
    """Return whether a prompt, with its special tokens, ends with the opening marker."""
    return markers is not None and prompt_text.rstrip().endswith(markers[0])


def unfinished_thinking(tokenizer: Any, prompt: Sequence[int]) -> int | None:
    """Return how many tokens of unfinished thinking a prompt ends with; None: no open block.

    An opening marker in an earlier message does not count: an added token of the template follows.
    """
    end = tokenizer.decode(list(prompt[-_PROMPT_END:]), skip_special_tokens=False)
    if opens_thinking(end, thinking_markers(tokenizer)):
        return 0
    if (markers := marker_tokens(tokenizer)) is None:
        return None
    start, close = markers.start, markers.end
    boundaries = _added_tokens(tokenizer)
    for place in range(len(prompt), 0, -1):
        if tuple(prompt[max(0, place - len(start)) : place]) == start:
            first = tokenizer.decode(list(prompt[place : place + 1]))
            return len(prompt) - place - (bool(first) and not first.strip(_NEWLINES))
        closed = tuple(prompt[max(0, place - len(close)) : place]) == close
        if closed or prompt[place - 1] in boundaries:
            return None
    return None


@dataclass(frozen=True, slots=True)
class MarkerTokens:
    """The tokens around thinking."""

    start: tuple[int, ...]
    end: tuple[int, ...]
    forced_end: tuple[int, ...]  # begins with `end`; the answer follows
    in_channels: bool


@cached_weakly
def marker_tokens(tokenizer: Any) -> MarkerTokens | None:
    """Return the tokens around thinking, None if they are unknown."""

    def encode(text: str) -> tuple[int, ...]:
        return tuple(map(int, tokenizer.encode(text, add_special_tokens=False)))

    texts = thinking_markers(tokenizer)
    in_channels = channels_of(tokenizer) is HARMONY
    if texts is None and in_channels:
        texts = HARMONY_THINKING, HARMONY.ends[0]
    if texts is None:
        return None
    start, end = map(encode, texts)
    answer = encode(HARMONY_NEXT + HARMONY_ANSWER) if in_channels else ()
    return MarkerTokens(start, end, end + answer, in_channels) if start else None


@cached_weakly
def _added_tokens(tokenizer: Any) -> frozenset[int]:
    return frozenset(tokenizer.backend_tokenizer.get_added_tokens_decoder())


class ThinkingSplitter(TextSplitter):
    """Separates thinking between markers from the answer, as early as is certain.

    Leaves out markers, the newlines directly after them, and whitespace before an opening one. A
    closing marker without an open block, and an opening one inside a block or the answer, are text.
    """

    def __init__(
        self, start: str | None, end: str | None, *, inside: bool, trim: bool = True
    ) -> None:
        """inside: whether the prompt opened a block. trim: drop newlines at that block's start."""
        self._start, self._end = start or "", end or ""
        self._inside, self._trim = inside, inside and trim
        super().__init__()

    def _parse(self) -> ParserSteps[None]:
        inside, trim = self._inside, self._trim
        while self._start and self._end:
            if trim:
                yield from self._reader.skip(_NEWLINES)
            if inside:
                emit = partial(self._emit, kind="thinking")
                yield from self._reader.emit_until((self._end,), emit)
            elif not (yield from self._accept_start()):
                break
            inside, trim = not inside, True
        yield from self._reader.emit_until((), self._emit)

    def _accept_start(self) -> ParserSteps[bool]:
        """Read the opening marker with the whitespace before it; False if there is none."""
        while True:
            unread = self._reader.unread
            text = unread.lstrip()
            if text.startswith(self._start):
                self._reader.consume(len(unread) - len(text) + len(self._start))
                return True
            if self._reader.closed or not self._start.startswith(text):
                return False
            yield


@dataclass(frozen=True, slots=True)
class Channels:
    """How a model writes its messages."""

    headers: tuple[str, ...]  # beginnings of a header
    ends: tuple[str, ...]  # ends of a message
    thinking: str  # part of the header of thinking
    call: str | None = None  # part of the header of a call, None if calls are markup
    markers: tuple[str, ...] = ()  # further special tokens


HARMONY = Channels(
    headers=("<|channel|>", " to=", _START),
    ends=("<|end|>", "<|call|>", "<|return|>"),
    thinking="<|channel|>analysis",
    call="to=functions.",
    markers=("<|channel|>", "<|constrain|>"),
)
HARMONY_NEXT = f"{_START}assistant"  # begins a message
HARMONY_THINKING = "<|channel|>analysis<|message|>"
HARMONY_ANSWER = "<|channel|>final<|message|>"
MUSE = Channels(headers=("to=", " to=", _START), ends=("<|eom|>", "<|eot|>"), thinking="to=self")


def channels_of(tokenizer: Any) -> Channels | None:
    """Return the channels of a model, None if it has none."""
    find = tokenizer.backend_tokenizer.token_to_id
    if find(_MESSAGE) is None or find(_START) is None:
        return None
    if find("<|channel|>") is not None:
        return HARMONY
    return MUSE if getattr(tokenizer, "response_transitions", None) else None


def channel_markers(channels: Channels) -> tuple[str, ...]:
    """Return the texts that the splitter needs, although they may be special tokens."""
    return (_START, _MESSAGE, *channels.ends, *channels.markers)


class ChannelSplitter(TextSplitter):
    """Separates thinking in channels from the answer; calls stay unchanged, for their parser."""

    def __init__(self, channels: Channels, *, thinking: bool = False) -> None:
        """thinking: whether the prompt ends inside a message of thinking."""
        self._channels, self._inside = channels, thinking
        super().__init__()

    def _parse(self) -> ParserSteps[None]:
        channels, header = self._channels, ""
        if self._inside:
            yield from self._read_message("thinking")
        elif not (header := (yield from self._reader.accept(*channels.headers))):
            yield from self._read_message("answer")  # a grammar may exclude headers
        while True:
            header = yield from self._read_header(header)
            calls = channels.call is not None and channels.call in header
            if calls:
                header = header.removeprefix(_START).removeprefix("assistant")
                self._output.append(TextRun(f"{_START}assistant{header}{_MESSAGE}"))
            thinks = channels.thinking in header and not calls
            yield from self._read_message("thinking" if thinks else "answer")
            header = ""

    def _read_message(self, kind: Kind) -> ParserSteps[str]:
        return self._reader.emit_until(self._channels.ends, partial(self._emit, kind=kind))

    def _read_header(self, begin: str) -> ParserSteps[str]:
        """Return a header. Raises CutOff, and emits what cannot be a header. begin: known part."""
        parts = [begin]
        try:
            yield from self._reader.emit_until((_MESSAGE,), parts.append)
        except CutOff:
            text, begins = "".join(parts), self._channels.headers
            if text and not any(each.startswith(text[: len(each)]) for each in begins):
                self._emit(text)
            raise
        return "".join(parts)
