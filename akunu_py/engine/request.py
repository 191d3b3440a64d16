"""One request: its options and its progress.

The scheduler decides on its plain fields, `ModelRunner` advances it. It belongs to one thread,
because MLX's streams are thread-local; only `cancel` may be called from others.
"""

import enum
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from akunu_py.engine import kv_cache
from akunu_py.engine.constraint.answer_limits import answer_rules, forced_end
from akunu_py.engine.drafters.drafter import TrackedDrafter, check_mode
from akunu_py.engine.engine import Engine
from akunu_py.engine.events import PrefillProgress
from akunu_py.engine.model.token_ids import first_invalid
from akunu_py.engine.sampling import LogprobSampler, Sampler
from akunu_py.engine.target import Target
from akunu_py.engine.text.stream_decoder import StreamDecoder
from akunu_py.errors import DamagedModel, PromptTooLong, UsageError
from akunu_py.ngram.planner import SharedPass
from akunu_py.ngram.token_tree import TokenTree
from akunu_py.types import (
    Answer,
    FinishReason,
    GenerateOptions,
    Piece,
    Stats,
    TextPiece,
    TokenLogprobs,
)

# A loop: as long as this, and as many blocks. Texts that a user wants repeated are shorter.
_LOOP_TOKENS, _LOOP_BLOCKS, _LONGEST_BLOCK = 768, 6, 256
_GUARD_EVERY = 32  # tokens between two checks for a loop

Step = PrefillProgress | TextPiece  # a result of one step


class Status(enum.Enum):
    """The phase of a request."""

    WAITING = "waiting"  # for memory, or for a prefix that another request prefills
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"


@dataclass(slots=True)
class DecodePass:
    """The part of one request in a launched pass."""

    drafted: list[int]  # a `TokenTree` if it has branches
    before: Any  # see `kv_cache.pass_state`
    follows: bool  # its first row is the token of the request's previous pass, not read yet
    rows: mx.array  # tokens [rows]
    sampled: mx.array  # tokens [drafted + 1] after the last rows
    shared: SharedPass | None = None  # None: the request has it alone


class Request:
    """One answer. `ModelRunner` changes its state until `status` is FINISHED."""

    def __init__(
        self,
        engine: Engine,
        target: Target,
        prompt: Sequence[int],
        options: GenerateOptions,
        draft_context: Sequence[Sequence[int]] = (),
        stable: int | None = None,
    ) -> None:
        """prompt: token ids. draft_context: token sequences to draft from, without prefill.

        target: an empty one. stable: length of the prefix that the next prompt will share, if
        known. Raises PromptTooLong, DamagedModel or UsageError.
        """
        if options.stop_tokens:
            stop_tokens = engine.tokens.stop_tokens.union(options.stop_tokens)
            engine = replace(engine, tokens=replace(engine.tokens, stop_tokens=stop_tokens))
        _check(engine, prompt, options)
        check_mode(engine, options.draft)
        self.engine = engine
        self.prompt = list(prompt)
        self.options = options
        self.draft_context = draft_context
        self.stable = stable
        # For the scheduler:
        self.short = False  # small prompt and few tokens
        self.begun = False  # the scheduler chose it
        self.since = 0.0  # when it was added
        self.spent = 0.0  # weighted decode time, starting at the others' minimum
        self.stepped_s = 0.0  # all time given since `since`
        self.pass_s = 0.0  # time of its last pass
        self.prompt_tokens_left = 0  # prompt tokens not prefilled yet, once the prefill began
        # For the runner:
        self.status = Status.WAITING
        # The first returns True while the request must wait; None before its first step.
        self.waits_for: list[Callable[[], bool]] | None = None
        self.target = target
        self.drafter = TrackedDrafter()
        self.has_drafter = False  # `drafter` is from the pool
        self.chunks: Iterator[int | None] = iter(())  # steps of the prefill
        self.chunk_seconds: float | None = None  # time limit of a prefill chunk
        self.cached = self.prefill_end = 0  # prompt tokens where the prefill begins and ends
        self.launched: list[DecodePass] = []  # at most two, in order
        self.limit = 0  # tokens that memory is reserved for; 0 after the last token
        self.answering = False  # its first token was sampled; no drafts before that
        self.started = 0.0
        self.prefilled: float | None = None  # time of the first token
        target.sampler = Sampler(options.sampling)
        if options.sampling.logprobs is not None:
            target.sampler = LogprobSampler(options.sampling, engine.tokens.tokenizer)
        target.constraint, self.guide = answer_rules(engine.tokens, options, self.prompt)
        self.answer_room = engine.plan.context_length - len(self.prompt)
        self.tokens_left = min(options.max_tokens, self.answer_room)
        self.cancelled = False
        self._forced = 0  # tokens at the end of the last pass that were not sampled
        self.stale = False  # the launched passes follow a token that is not part of the answer
        self._complete = False  # a stop token, or no tokens left
        self._loops = False  # see `repeats`
        self._decoder = StreamDecoder(
            engine.tokens.tokenizer,
            engine.tokens.stop_tokens,
            self.prompt,
            options.stop,
            options.markers,
        )
        # The answer so far:
        self.stats = Stats(prompt_tokens=len(self.prompt))
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.text = ""
        self.thinking = ""  # a reasoning model's text before the answer, without markers
        self.finish_reason: FinishReason | None = None  # set at the end

    @property
    def stop_sequence(self) -> str:
        """The stop sequence that ended the answer, or ""."""
        return "" if self.finish_reason == "cancelled" else self._decoder.stop.found

    def cancel(self) -> None:
        """End the answer after the current pass. Callable from any thread."""
        self.cancelled = True

    @property
    def is_running(self) -> bool:
        """Whether a pass is launched."""
        return bool(self.launched)

    @property
    def decodes(self) -> bool:
        """Whether its prompt is prefilled."""
        return self.status is Status.DECODING

    @property
    def joining_tokens(self) -> int:
        """Prompt tokens that run in the first decode pass, at least one; 0 after it."""
        first = self.status is Status.DECODING and not self.answering
        return len(self.target.pending) if first else 0

    @property
    def can_share(self) -> bool:
        """Whether its next decode pass may be shared with other requests."""
        if self.status is not Status.DECODING or self.cancelled:
            return False
        one_row = len(self.target.pending) == 1 and bool(self.target.tokens)
        return one_row or not self.engine.recurrent

    @property
    def can_branch(self) -> bool:
        """Whether its drafts may be token trees: each row is sampled without the tokens before."""
        sampler, tree = self.target.sampler, self.options.draft_tree
        return tree != "off" and sampler.group is not None and not self.engine.recurrent

    @property
    def can_continue(self) -> bool:
        """Whether a plain step can be launched before the launched pass is read.

        An answer's first token is read at once: MLX's CPU backend launches at most 10 tasks ahead.
        """
        return self.answering and not self.launched[0].drafted and self.target.constraint is None

    @property
    def ends(self) -> bool:
        """Whether no pass follows."""
        return bool(self.cancelled or self._complete or self._loops or self._decoder.stop.found)

    @property
    def answer(self) -> Answer:
        """The answer so far."""
        reason = self.finish_reason or "cancelled"
        return Answer(self.text, tuple(self.tokens), reason, replace(self.stats), self.thinking)

    def in_vocabulary(self, drafted: list[int]) -> list[int]:
        """Return the tokens before the first invalid one, which an answer cache may hold."""
        vocabulary = self.target.vocabulary
        end = None if vocabulary is None else first_invalid(drafted, vocabulary)
        return drafted if end is None else TokenTree.of(drafted).first(end)

    def accept(self, seconds: float) -> Piece:
        """Accept the draft tokens that the pass confirms, and the next. seconds: of the pass."""
        target, done = self.target, self.launched.pop(0)
        sampled: list[int] = done.sampled.tolist()
        path = TokenTree.of(done.drafted).accepted(sampled)
        found = [sampled[row] for row in (0, *[node + 1 for node in path])]
        tokens = found = cut(found, self.engine.tokens.stop_tokens)
        if end := self._end_of_thinking(found):  # instead of a stop token
            tokens = [*found[:-1], *end]
        if target.constraint is not None:
            tokens = target.constraint.consume(tokens)  # may be fewer
        self._forced, self.stale = len(end), bool(end and self.launched)
        sampled_count = len(tokens) - len(end)
        kept = sampled_count if end else sampled_count - 1  # the last token has no row yet
        accepted = min(len(path), sampled_count)
        self._commit(done, found[: kept + 1] if self.stale else tokens, path[:kept])
        self.answering = True
        self.limit = 0 if self._is_last(tokens[-1]) else self.limit - len(tokens)
        branches = [done.drafted[accepted:]]
        if isinstance(done.drafted, TokenTree):
            branches = done.drafted.continuations(path[accepted - 1] if accepted else -1) or [[]]
        rejected, *others = map(tuple, branches)
        return Piece(
            tuple(tokens), accepted, rejected, seconds, tuple(others), drafted=len(done.drafted)
        )

    def add(self, piece: Piece, now: float) -> TextPiece:
        """Add a piece to the answer and return its text. now: the time."""
        if self.prefilled is None:
            self.prefilled = now
            self.stats.prefill_s = now - self.started
            piece = replace(piece, seconds=self.stats.prefill_s)
        self.tokens_left -= len(piece.tokens)
        if not piece.tokens or self._is_last(piece.tokens[-1]) or not self.tokens_left:
            self._complete = True
        decoded, used = self._decoder.add(piece)
        self.stats.add(decoded.piece, from_prefill=not self.tokens)
        if isinstance(self.target.sampler, LogprobSampler):  # of all tokens but a stop token
            stop = self.engine.tokens.stop_tokens
            chosen = piece.tokens[: min(used, len(piece.tokens) - self._forced)]
            shown = [token for token in chosen if token not in stop]
            last = (self.tokens or self.prompt)[-1]
            position = len(self.prompt) + len(self.tokens)
            self.logprobs += self.target.sampler.pop_logprobs(position, shown, last)
        before = len(self.tokens)
        self.tokens += piece.tokens[:used]
        # Every few tokens, because it takes 0.2 ms.
        if self.options.loop_guard and before // _GUARD_EVERY < len(self.tokens) // _GUARD_EVERY:
            self._loops = self.target.constraint is None and repeats(self.tokens)
        self.measure(now)
        return self._append(decoded)

    def drop(self, piece: Piece, used: int) -> None:
        """Drop the tokens after the first `used` from the last piece and the counts."""
        dropped, stop = piece.tokens[used:], self.engine.tokens.stop_tokens
        shown = sum(token not in stop for token in dropped)
        self.tokens = self.tokens[: len(self.tokens) - len(dropped)]
        self.logprobs = self.logprobs[: max(0, len(self.logprobs) - shown)]
        accepted = min(piece.accepted, used)
        self.stats.generated_tokens -= len(dropped)
        self.stats.accepted -= piece.accepted - accepted
        self.stats.drafted -= piece.drafted - accepted

    def drop_launched(self) -> None:
        """Keep the pending tokens of the launched passes and drop their drafts."""
        launched, self.launched = self.launched, []
        for each in launched:
            self._commit(each, (), ())

    def finish(self) -> list[Step]:
        """Set the reason and return the text held back at the end."""
        reason = self._reason()
        rest = self._decoder.finish()
        # The replacement of half a character may be a stop sequence, but ends no answer.
        self.finish_reason = reason if reason == "cancelled" else self._reason()
        return [self._append(rest)] if rest.text or rest.thinking else []

    def measure(self, now: float) -> None:
        """Update the decode time. It includes the consumer's time, as users see it."""
        if self.prefilled is not None and self.tokens:
            self.stats.decode_s = now - self.prefilled

    def _end_of_thinking(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens that replace a stop token at the end of `tokens`, () for none.

        Within thinking it ends the thinking, unless a tool call in it may be the answer.
        """
        codec, options = self.engine.tokens, self.options
        last = tokens[-1]
        if last not in codec.stop_tokens or last in options.stop_tokens:
            return ()
        if self.text or self.guide is not None:
            return ()
        answer = [*self.tokens, *tokens[:-1]]
        end = forced_end(codec.tokenizer, [*self.prompt, *answer])
        if not end or self.tokens_left <= len(tokens) + len(end) - 1:
            return ()
        called = options.markers and codec.decode(answer)
        return () if called and any(each in called for each in options.markers) else end

    def _is_last(self, token: int) -> bool:
        rules = self.target.constraint
        return token in self.engine.tokens.stop_tokens or (rules is not None and rules.complete)

    def _commit(self, done: DecodePass, tokens: Sequence[int], path: Sequence[int]) -> None:
        """Record the new tokens of a pass, and keep its rows of the draft tokens in `path`."""
        target = self.target
        pending = len(target.pending)
        written, kept = pending + len(done.drafted), pending + len(path)
        if path and path[-1] >= len(path):  # from a branch
            rows = [*range(pending), *[pending + node for node in path]]
            target.move_rows(written, rows)
        if kept < written:
            # Recurrent states keep none: the accepted tokens are pending and run again.
            kept = kv_cache.roll_back(target.cache, done.before, written, kept)
        target.commit(tokens, kept)

    def _append(self, decoded: TextPiece) -> TextPiece:
        self.text += decoded.text
        self.thinking += decoded.thinking
        return decoded

    def _reason(self) -> FinishReason:
        last = self.tokens[-1] if self.tokens else -1
        if self._decoder.stop.found or self._is_last(last):
            return "stop"
        if len(self.tokens) == self.options.max_tokens:
            return "length"
        if len(self.tokens) == self.answer_room:
            return "context"
        return "repetition" if self._loops else "cancelled"


def repeats(tokens: Sequence[int]) -> bool:
    """Return whether the last tokens repeat a block: _LOOP_BLOCKS times, _LOOP_TOKENS in all."""
    last = array("q", tokens[-_LOOP_BLOCKS * _LONGEST_BLOCK :])  # compares faster than a list
    for block in range(1, _LONGEST_BLOCK + 1):
        span = max(_LOOP_TOKENS, _LOOP_BLOCKS * block)
        if span <= len(last) and last[-span:-block] == last[block - span :]:
            return True
    return False


def cut(tokens: list[int], stop: frozenset[int]) -> list[int]:
    """Return `tokens` up to and including the first stop token."""
    end = next((count for count, token in enumerate(tokens, 1) if token in stop), None)
    return tokens[:end]


def _check(engine: Engine, prompt: Sequence[int], options: GenerateOptions) -> None:
    if options.max_tokens < 1:
        raise UsageError(f"max_tokens must be at least 1, got {options.max_tokens}")
    if options.draft_tokens < 1:
        raise UsageError(
            f"draft_tokens must be at least 1, got {options.draft_tokens}; for none use --draft off"
        )
    if not prompt:
        raise UsageError("the prompt is empty; give a text to answer")
    if (at := first_invalid(prompt, engine.tokens.vocabulary)) is not None:
        raise DamagedModel(
            f"the tokenizer of {engine.name} has token id {prompt[at]}, but its weights have only "
            f"{engine.tokens.vocabulary} tokens; download the model again"
        )
    if len(prompt) >= engine.plan.context_length:
        raise PromptTooLong(
            f"the prompt has {len(prompt)} tokens, but the context of {engine.name} holds "
            f"{engine.plan.context_length} with the answer; shorten the prompt",
            len(prompt),
            engine.plan.context_length - 1,
        )
    biased = [token for token, _ in options.sampling.logit_bias]
    if (at := first_invalid(biased, engine.tokens.vocabulary)) is not None:
        raise UsageError(
            f"logit_bias: {engine.name} has {engine.tokens.vocabulary} tokens, no id {biased[at]}"
        )
