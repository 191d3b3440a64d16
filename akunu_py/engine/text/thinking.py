"""Separate thinking from the answer by a model's markers or channels.

Most models put thinking between two markers. A block opens only before the answer, so an answer
that explains a marker stays an answer.

Some models write in channels: messages, each with a header. gpt-oss (the harmony format) writes
`<|channel|>analysis<|message|>` before thinking, `<|channel|>final<|message|>` before the answer,
and the function of a call in its header. Muse Spark names the recipient of each message. Sources:
OpenAI, "OpenAI Harmony Response Format" (2025); mlx-lm, chat_templates/muse_spark.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from akunu_py.engine.template.chat_template import cached_per_tokenizer
from akunu_py.engine.text.stop_sequences import Finder, Kind, TextRun, merge_runs

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
    start, close = marker_tokens(tokenizer)
    if not start:
        return None
    boundaries = _added_tokens(tokenizer)
    for place in range(len(prompt), 0, -1):
        if tuple(prompt[max(0, place - len(start)) : place]) == start:
            first = tokenizer.decode(list(prompt[place : place + 1]))
            return len(prompt) - place - (bool(first) and not first.strip(_NEWLINES))
        closed = tuple(prompt[max(0, place - len(close)) : place]) == close
        if closed or prompt[place - 1] in boundaries:
            return None
    return None


@cached_per_tokenizer
def marker_tokens(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens that open and close thinking; () for both if they are unknown."""
    texts = thinking_markers(tokenizer)
    if texts is None and channels_of(tokenizer) is HARMONY:
        texts = HARMONY_THINKING, HARMONY.ends[0]
    if texts is None:
        return (), ()
    found = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
    start, end = (tuple(map(int, tokens)) for tokens in found)
    return start, end


@cached_per_tokenizer
def _added_tokens(tokenizer: Any) -> frozenset[int]:
    return frozenset(tokenizer.backend_tokenizer.get_added_tokens_decoder())


class ThinkingSplitter:
    """Separates thinking between markers from the answer, as early as is certain.

    Leaves out markers, the newlines directly after them, and whitespace before an opening one. A
    closing marker without an open block, and an opening one inside a block or the answer, are text.
    """

    def __init__(
        self, start: str | None, end: str | None, *, inside: bool, trim: bool = True
    ) -> None:
        """inside: whether the prompt opened a block. Without markers, all text is the answer.

        trim: drop newlines at the start of that block; False if the prompt has a part of it.
        """
        self._start, self._end = start or "", end or ""
        self._thinking = inside
        self._trim = inside and trim  # whether to drop newlines at the current position
        self._whitespace: list[TextRun] = []  # whitespace before the answer or an opening marker
        # None: only answer from here on.
        self._finder = Finder([end if inside else start]) if start and end else None

    def add(self, text: str, drafted: bool = False) -> list[TextRun]:
        """Return the text that became certain, in order, each run with its kind."""
        runs: list[TextRun] = []
        position = 0
        while self._finder and position < len(text):
            if self._trim and text[position] in _NEWLINES:
                position += 1
                continue
            self._trim = False
            found, position = self._finder.search(text, drafted, position)
            if self._thinking:
                runs += _as_thinking(found)
                if self._finder.found is not None:
                    self._switch(thinking=False)
            else:
                runs += self._before_answer(found)
        runs.append(TextRun(text[position:], drafted))
        return merge_runs(runs)

    def finish(self) -> list[TextRun]:
        """Return the text held back at the end."""
        if self._finder is None:
            return []
        rest = self._finder.flush()
        self._finder = None
        return _as_thinking(rest) if self._thinking else merge_runs([*self._whitespace, *rest])

    def _before_answer(self, found: list[TextRun]) -> list[TextRun]:
        """Hold whitespace back until the answer begins or a block opens."""
        assert self._finder is not None
        self._whitespace += found
        if any(not run.text.isspace() for run in found):
            return self.finish()
        if self._finder.found is not None:
            self._whitespace = []
            self._switch(thinking=True)
        return []

    def _switch(self, *, thinking: bool) -> None:
        self._thinking = thinking
        self._trim = True
        self._finder = Finder([self._end if thinking else self._start])


def _as_thinking(runs: Iterable[TextRun]) -> list[TextRun]:
    return [replace(run, kind="thinking") for run in runs]


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


class ChannelSplitter:
    """Separates thinking in channels from the answer.

    Calls stay unchanged from `<|start|>` on, for the parser of tool calls.
    """

    def __init__(self, channels: Channels, *, thinking: bool = False) -> None:
        """thinking: whether the prompt ends inside a message of thinking."""
        self._channels = channels
        self._header: str | None = None if thinking else ""  # None: in a message
        # Held back until the first header is certain.
        self._start_buffer: list[TextRun] | None = None if thinking else []
        self._kind: Kind = "thinking" if thinking else "answer"
        self._finder = Finder(channels.ends if thinking else [_MESSAGE])

    def add(self, text: str, drafted: bool = False) -> list[TextRun]:
        """Return the text that became certain, in order, each run with its kind."""
        if self._start_buffer is not None:
            self._start_buffer.append(TextRun(text, drafted))
            return self._check_start()
        runs: list[TextRun] = []
        position = 0
        while position < len(text):
            found, position = self._finder.search(text, drafted, position)
            runs += self._route(found)
            if self._finder.found is not None:
                runs += self._switch()
        return merge_runs(runs)

    def finish(self) -> list[TextRun]:
        """Return the text held back at the end."""
        runs = self._check_start(certain=True)
        runs += self._route(self._finder.flush())
        begins = self._channels.headers
        if header := self._header:
            self._header = ""
            if not any(each.startswith(header[: len(each)]) for each in begins):
                runs.append(TextRun(header))
        return merge_runs(runs)

    def _check_start(self, *, certain: bool = False) -> list[TextRun]:
        """Release the start, once a header is certain or excluded, as by some grammars."""
        if self._start_buffer is None:
            return []
        text = "".join(run.text for run in self._start_buffer)
        if not certain and any(each.startswith(text) for each in self._channels.headers):
            return []
        if not text.startswith(self._channels.headers):
            self._header, self._finder = None, Finder(self._channels.ends)
        buffered, self._start_buffer = self._start_buffer, None
        return [made for run in buffered for made in self.add(run.text, run.drafted)]

    def _route(self, found: list[TextRun]) -> list[TextRun]:
        """Add text to the open header, or return it with the kind of its message."""
        if self._header is None:
            return [TextRun(run.text, run.drafted, self._kind) for run in found]
        self._header += "".join(run.text for run in found)
        return []

    def _switch(self) -> list[TextRun]:
        """Switch from a header to its message, or from a message to the next header."""
        if self._header is None:
            self._header, self._finder = "", Finder([_MESSAGE])
            return []
        header, self._header = self._header, None
        self._kind, self._finder = "answer", Finder(self._channels.ends)
        if self._channels.call and self._channels.call in header:
            header = header.removeprefix(_START).removeprefix("assistant")
            return [TextRun(f"{_START}assistant{header}{_MESSAGE}")]
        if self._channels.thinking in header:
            self._kind = "thinking"
        return []
