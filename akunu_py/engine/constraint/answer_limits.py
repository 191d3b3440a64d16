"""Limits on an answer by counting its tokens: a budget for thinking, and a minimum length.

At the budget, the tokens that end thinking are the only ones that can be sampled, so drafting,
batching and seeds do not change where thinking ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from akunu_py.engine.constraint.masks import TokenMasks
from akunu_py.engine.constraint.matcher import ConstraintMatcher, compile_ahead
from akunu_py.engine.model.tokens import TokenCodec
from akunu_py.engine.text.thinking import MarkerTokens, marker_tokens, unfinished_thinking
from akunu_py.types import DraftGuide, GenerateOptions

_FAR = 512  # tokens; more than a pass and the pass launched behind it can yield


def can_limit_thinking(tokenizer: Any) -> bool:
    """Return whether the model thinks, between markers that a budget can force."""
    return marker_tokens(tokenizer) is not None


def forced_end(tokenizer: Any, known: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens that end thinking if the tokens `known` end within it, else ()."""
    markers = marker_tokens(tokenizer)
    thinks = markers and unfinished_thinking(tokenizer, known) is not None
    return markers.forced_end if markers and thinks else ()


@dataclass(frozen=True, slots=True)
class _Place:
    """The position of an answer in its thinking."""

    thinking: bool
    tail: tuple[int, ...] = ()  # the last tokens, up to the length of a marker
    used: int = 0  # thinking tokens
    forced: int = 0  # tokens of the forced end so far
    answered: bool = False  # the answer has begun, so no thinking follows


class ThinkingBudget:
    """At most `limit` tokens of thinking, in all blocks together."""

    def __init__(self, codec: TokenCodec, limit: int | None, prompt: Sequence[int]) -> None:
        """limit: None for any number, as for a model that does not think."""
        markers = marker_tokens(codec.tokenizer) or MarkerTokens((), (), (), False)
        self._tokenizer, self._markers, self._limit = codec.tokenizer, markers, limit or 0
        thought = unfinished_thinking(codec.tokenizer, prompt)
        self.place = _Place(thought is not None, used=thought or 0, answered=limit is None)

    @property
    def free(self) -> bool:
        """Whether the next passes cannot reach the limit."""
        return self.place.answered or self._limit - self.place.used > _FAR

    def forced(self) -> tuple[int, ...]:
        """Return the tokens that must follow, () for any."""
        place = self.place
        if place.answered or not place.thinking or place.used < self._limit:
            return ()
        return self._markers.forced_end[place.forced :]

    def step(self, token: int) -> None:
        """Count a token."""
        place, markers = self.place, self._markers
        if place.answered:
            return
        if self.forced():
            done = place.forced + 1 == len(markers.forced_end)
            after = _Place(False, used=place.used, answered=done and markers.in_channels)
            self.place = after if done else replace(place, forced=place.forced + 1)
            return
        tail = (*place.tail, token)[-max(len(markers.start), len(markers.end)) :]
        if place.thinking:
            used = place.used + 1
            ended = tail[-len(markers.end) :] == markers.end
            begun = _overlap(tail, markers.end) if used == self._limit else 0
            self.place = _Place(not ended, () if ended else tail, used, begun)
        elif tail[-len(markers.start) :] == markers.start:
            self.place = _Place(True, used=place.used)
        else:
            self.place = _Place(False, tail, place.used, answered=self._begins_answer(tail))

    def _begins_answer(self, tail: tuple[int, ...]) -> bool:
        """Return whether thinking can no longer begin; between channels, it always can."""
        if self._markers.in_channels or tail == self._markers.start[: len(tail)]:
            return False
        return bool(self._tokenizer.decode(list(tail)).strip())


def _overlap(tail: tuple[int, ...], marker: tuple[int, ...]) -> int:
    """Return how many tokens of `marker` are at the end of `tail`."""
    sizes = range(min(len(marker) - 1, len(tail)), 0, -1)
    return next((size for size in sizes if tail[-size:] == marker[:size]), 0)


class AnswerLimits(TokenMasks):
    """The limits of an answer, and its grammar if it has one."""

    def __init__(
        self,
        codec: TokenCodec,
        matcher: ConstraintMatcher | None,
        budget: ThinkingBudget,
        min_tokens: int,
    ) -> None:
        super().__init__(codec.vocabulary, codec.stop_tokens)
        self._grammar = matcher or TokenMasks(codec.vocabulary, codec.stop_tokens)
        self._budget = budget
        self._missing = min_tokens  # tokens before the answer may end
        self._saved = min_tokens, budget.place

    @property
    def complete(self) -> bool:
        return self._grammar.complete

    @property
    def free(self) -> bool:
        return self._grammar.free and self._budget.free and self._missing <= 0

    def begin_draft(self) -> None:
        self._saved = self._missing, self._budget.place
        self._grammar.begin_draft()

    def end_draft(self) -> None:
        self._missing, self._budget.place = self._saved
        self._grammar.end_draft()

    def forced(self) -> tuple[list[int], bool]:
        if tokens := self._budget.forced():
            return list(tokens), True
        return self._grammar.forced()

    def ending(self) -> tuple[list[int], int]:
        return self._grammar.ending()

    def choices(self) -> list[int]:
        return [] if self._budget.forced() else self._grammar.choices()

    def mask(self) -> bytes:
        if tokens := self._budget.forced():
            return self._with(bytes(len(self._every_token)), tokens[:1])
        mask = self._grammar.mask()
        if not self._missing:
            return mask
        longer = self._without(mask, self._stop_tokens)
        return longer if any(longer) else mask  # a grammar may end the answer early

    def step(self, token: int) -> bool:
        forced = self._budget.forced()
        if (forced and token != forced[0]) or not self._grammar.step(token):
            return False
        self._budget.step(token)
        self._missing = max(0, self._missing - 1)
        return True

    def failure(self) -> str:
        return self._grammar.failure() or "thinking did not end"


def compile_rules(codec: TokenCodec, options: GenerateOptions) -> None:
    """Compile grammars, in any thread, so that `answer_rules` is quick. Raises UsageError."""
    if (constraint := options.sampling.constraint) is not None:
        ends = codec.stop_tokens.union(options.stop_tokens)
        compile_ahead(replace(codec, stop_tokens=ends), constraint)


def answer_rules(
    codec: TokenCodec, options: GenerateOptions, prompt: Sequence[int]
) -> tuple[TokenMasks | None, DraftGuide | None]:
    """Return the token rules of an answer, and the guide of its drafts. Raises UsageError."""
    constraint, limit = options.sampling.constraint, options.thinking_budget
    matcher = ConstraintMatcher(codec, constraint, prompt) if constraint else None
    markers = marker_tokens(codec.tokenizer)
    # A grammar for channels decides itself whether there is thinking.
    if markers is None or (matcher is not None and markers.in_channels):
        limit = None
    if limit is None and not options.min_tokens:
        return matcher, matcher
    limits = AnswerLimits(codec, matcher, ThinkingBudget(codec, limit, prompt), options.min_tokens)
    return limits, limits if matcher is not None else None
