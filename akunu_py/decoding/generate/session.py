"""Session: a model with its token histories. Generation: one answer in progress.

Both belong to one thread, because MLX's streams are thread-local; only `Generation.cancel` may be
called from others.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from akunu_py.decoding.constraint.matcher import ConstraintMatcher
from akunu_py.decoding.drafting.drafter import Drafting, check_mode
from akunu_py.decoding.events import PrefillProgress
from akunu_py.decoding.generate import memory_guard
from akunu_py.decoding.generate.decode import decode, ended, plain_step
from akunu_py.decoding.generate.prefill import ChunkSizes, prefill
from akunu_py.decoding.learned_state import LearnedState
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.prompt_cache import disk
from akunu_py.decoding.prompt_cache.cache_file import Stopped
from akunu_py.decoding.prompt_cache.history import TokenHistory
from akunu_py.decoding.prompt_cache.memory import PromptCaches
from akunu_py.decoding.prompt_cache.prompt_cache_store import LEAST, PromptCacheStore, is_forgotten
from akunu_py.decoding.sampling import LogprobSampler, Sampler
from akunu_py.decoding.target import Target
from akunu_py.decoding.text.stream_decoder import StreamDecoder
from akunu_py.decoding.token_ids import common_prefix, first_invalid
from akunu_py.errors import DamagedModel, DoesNotFit, EmptyPrompt, PromptTooLong, UsageError
from akunu_py.ngram.cost import CostCurve
from akunu_py.types import (
    Answer,
    Drafter,
    FinishReason,
    GenerateOptions,
    Message,
    NotCached,
    Piece,
    Stats,
    TextPiece,
    TokenLogprobs,
)

_LEG = 1024  # answer tokens for which memory is reserved at once


@dataclass(slots=True)
class Turn:
    """Per-request state shared by the scheduler and the session."""

    # Set by the scheduler:
    cancelled: bool = False  # the client cancelled or disconnected
    alone: bool = True  # no other session runs before this one's next step
    chunk_seconds: float | None = None  # time limit of a prefill chunk; None: no other session
    crowded: bool = False  # an earlier request waits for memory
    # Set by the session:
    blocked: Callable[[], bool] | None = None  # returns whether it still waits for another session
    left: int = 0  # prompt tokens not prefilled yet
    steps: Generator[object] | None = None  # of the current generation

    def begin(self, steps: Generator[object] | None) -> None:
        """Close the previous generation and register the steps of the next one."""
        if self.steps is not None:
            self.steps.close()
        self.steps, self.blocked, self.left = steps, None, 0


class Session:
    """Token histories with their KV caches, and the drafter that learns from them."""

    def __init__(
        self, engine: Engine, learned: LearnedState | None = None, sibling: Session | None = None
    ) -> None:
        """learned: what to learn into (None: nothing). sibling: a session to share caches with."""
        self.engine = engine
        self.learned = learned
        caches = sibling.target.caches if sibling else PromptCaches(engine.plan.prompt_cache_memory)
        self.target: Target = Target(engine.model, engine.plan.kv_bits, caches)
        drafting = sibling.drafting if sibling else None
        self.drafting: Drafting = Drafting(engine, self.target, learned, drafting)
        self.turn = Turn()
        self.recall: DiskPromptCaches | None = None  # from disk
        if learned is not None and learned.caches is not None:
            self.recall = DiskPromptCaches(engine, learned.caches, self.drafting.curve)

    def release(self) -> None:
        """Close an unfinished generation and return the history to the shared caches."""
        self.turn.begin(None)
        self.drafting.release()
        self.target.release()

    def save_idle(
        self, stopped: Callable[[], bool] = lambda: False, seconds: float | None = None
    ) -> bool:
        """Save one prompt cache to disk and release memory under pressure. Call only when idle.

        stopped: polled during the save; returning True aborts it. seconds: time limit. Returns True
        if a cache was saved (there may be more to save).
        """
        caches = self.target.caches  # which other sessions may share
        memory_guard.release_under_pressure(caches)
        histories = [*caches.in_use, *caches.histories()]
        return self.recall is not None and self.recall.write(histories, stopped, seconds)

    def sharing(self, engine: Engine) -> Session:
        """Return this session for `engine`, the same model with other options."""
        other = copy.copy(self)
        other.engine = engine
        return other

    def save_prompt_cache(self, path: Path) -> None:
        """Write the KV cache and its tokens to a file in mlx-lm's prompt cache format.

        Raises UsageError if nothing can be saved, StoreError on disk errors; an older file stays
        intact.
        """
        disk.save(self.target.history, self.engine, path)

    def load_prompt_cache(self, path: Path) -> None:
        """Continue from the session that `save_prompt_cache` wrote to `path`.

        Raises StoreError, DamagedCache, or UsageError for another model's file; the session is
        unchanged then.
        """
        self.target.adopt(disk.load(self.engine, path))

    def chat(self, messages: Sequence[Message], options: GenerateOptions) -> Generation:
        """Return the answer to a conversation as a stream; see `generate`."""
        prompt = self.engine.tokens.encode_chat(messages)
        stable = None
        if self.target.history.needs_checkpoints:
            stable = self.engine.tokens.stable_prefix(messages, prompt)
        return self.generate(prompt, options, stable=stable)

    def generate(
        self,
        prompt: Sequence[int],
        options: GenerateOptions,
        draft_context: Sequence[Sequence[int]] = (),
        stable: int | None = None,
    ) -> Generation:
        """Return the answer to `prompt` (token ids) as a stream.

        draft_context: token sequences to draft from, without prefill. stable: length of the prefix
        that the next prompt will share, if known. Raises EmptyPrompt, PromptTooLong, or UsageError
        at once.
        """
        return Generation(self, prompt, options, draft_context, stable)


class Generation:
    """One answer in progress: iterate for its pieces; `stats` and `text` grow meanwhile."""

    def __init__(
        self,
        session: Session,
        prompt: Sequence[int],
        options: GenerateOptions,
        draft_context: Sequence[Sequence[int]] = (),
        stable: int | None = None,
    ) -> None:
        engine = session.engine
        if options.stop_tokens:
            stop_tokens = engine.tokens.stop_tokens.union(options.stop_tokens)
            engine = replace(engine, tokens=replace(engine.tokens, stop_tokens=stop_tokens))
        _check(engine, prompt, options)
        check_mode(engine, options.draft)
        self._session = session
        self._engine = engine
        self._target = session.target
        self._prompt = list(prompt)
        self._options = options
        self._draft_context = draft_context
        self._stable = stable
        self._logprobs: LogprobSampler | None = None
        if options.sampling.logprobs is not None:
            self._logprobs = LogprobSampler(options.sampling, engine.tokens.tokenizer)
        self._sampler = self._logprobs or Sampler(options.sampling)
        constraint = options.sampling.constraint
        self._constraint = (
            ConstraintMatcher(engine.tokens, constraint, self._prompt) if constraint else None
        )
        self._room = engine.plan.context_length - len(self._prompt)
        self._cancelled = threading.Event()
        self._decoder = StreamDecoder(
            engine.tokens.tokenizer,
            engine.tokens.stop_tokens,
            self._prompt,
            options.stop,
            options.markers,
        )
        self.stats = Stats(prompt_tokens=len(self._prompt))
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.text = ""
        self.thinking = ""  # a reasoning model's text before the answer, without markers
        self.finish_reason: FinishReason | None = None  # set at the end

    @property
    def stop_sequence(self) -> str:
        """The stop sequence that ended the answer, or ""."""
        return self._decoder.stop_sequence

    def cancel(self) -> None:
        """End the answer after the current pass. Callable from any thread."""
        self._cancelled.set()

    def answer(self) -> Answer:
        """Run to the end and return the whole answer."""
        for _ in self:
            pass
        reason = self.finish_reason or "cancelled"
        return Answer(self.text, tuple(self.tokens), reason, replace(self.stats), self.thinking)

    def __iter__(self) -> Iterator[TextPiece]:
        return (step for step in self.steps() if not isinstance(step, PrefillProgress))

    def steps(self) -> Generator[PrefillProgress | TextPiece]:
        """Yield prefill progress, then pieces (some empty), one per chunk or pass.

        Closing the generator between two steps ends the answer and keeps the prefilled tokens.
        """
        steps = self._all_steps()
        self._session.turn.begin(steps)
        return steps

    def _all_steps(self) -> Generator[PrefillProgress | TextPiece]:
        try:
            with contextlib.closing(self._steps()) as steps:
                while not self._decoder.stopped:
                    self._follow_turn()
                    step = self._next(steps)
                    if step is None:
                        break
                    yield self._decoded(step) if isinstance(step, Piece) else step
        finally:
            self._target.rest()
        rest = self._decoder.finish()
        self.finish_reason = self._finish_reason()
        if self._session.learned is not None and self._options.remember:
            self._session.learned.add_answer(self.tokens)
            self._session.learned.save_costs()
        if rest.text or rest.thinking:
            yield self._counted(rest)

    def _steps(self) -> Generator[PrefillProgress | Piece | TextPiece]:
        """Yield prefill progress, the first token, then a piece per decode pass."""
        started = time.perf_counter()
        target, stop = self._target, self._engine.tokens.stop_tokens
        target.sampler, target.constraint = self._sampler, self._constraint
        self._session.drafting.prepare(self._options)
        yield from self._prefill()
        if self._ends():
            return
        first = plain_step(target)
        prefilled = time.perf_counter()
        self.stats.prefill_s = prefilled - started
        yield Piece(tuple(first), seconds=self.stats.prefill_s)
        if ended(target, first[0], stop) or self._ends():
            return
        drafting = self._session.drafting
        history = [*self._prompt, *first]
        drafter = drafting.drafter(self._options, history, draft_context=self._draft_context)
        drafting.set_guide(self._constraint)
        with contextlib.closing(self._decode(drafter)) as pieces:
            for piece in pieces:
                yield piece
                # Includes the consumer's time: this is the speed that the user sees.
                self.stats.decode_s = time.perf_counter() - prefilled
                if self._ends():
                    return

    def _decode(self, drafter: Drafter) -> Generator[Piece | TextPiece]:
        """Yield a piece per pass, in legs; each leg reserves memory for its own tokens only."""
        target, stop = self._target, self._engine.tokens.stop_tokens
        left = min(self._options.max_tokens, self._room) - 1
        while left > 0:
            piece = Piece(())
            passes = decode(target, drafter, min(left, _LEG), stop)
            with contextlib.closing(passes):
                for piece in passes:
                    left -= len(piece.tokens)
                    yield piece
            if not piece.tokens or ended(target, piece.tokens[-1], stop):
                return
            if left > 0:
                yield from self._take_room(left)

    def _take_room(self, left: int) -> Generator[TextPiece]:
        """Reserve memory for the next leg, releasing the history and waiting if needed."""
        target, turn, nothing = self._target, self._session.turn, TextPiece("", Piece(()))
        memory_guard.release_under_pressure(target.caches)
        known = [*target.tokens, *target.pending]
        needed = self._needed(len(known) + min(left, _LEG))
        if not turn.crowded and target.caches.has_room(needed, target.history):
            target.caches.reserve(needed, target.history)
            return
        target.release()
        for _ in self._blocked(lambda: not target.caches.has_room(needed, target.history)):
            yield nothing
        target.reuse_prefix(known, needed)
        whole = len(target.pending) - target.prompt_tail
        for read in self._read():
            turn.left = max(0, whole - read)
            yield nothing

    def _blocked(self, blocked: Callable[[], bool]) -> Generator[None]:
        """Yield while `blocked()` is true and the answer is not cancelled."""
        turn = self._session.turn
        turn.blocked = blocked
        while blocked() and not self._ends():
            yield
        turn.blocked = None

    def _needed(self, tokens: int) -> int:
        """Return the bytes of a KV cache of `tokens` tokens."""
        most = min(tokens, self._engine.plan.context_length)
        return self._engine.plan.fit.needs.cache.at(most)

    def _follow_turn(self) -> None:
        """Pass on whether the session runs alone."""
        alone = self._session.turn.alone
        self._target.alone = alone
        self._session.drafting.set_alone(alone)

    def _ends(self) -> bool:
        return self._cancelled.is_set() or self._session.turn.cancelled

    def _next(
        self, steps: Iterator[PrefillProgress | Piece | TextPiece]
    ) -> PrefillProgress | Piece | TextPiece | None:
        """Return the next step, None at the end. After a failed pass the cache is reset."""
        try:
            return next(steps, None)
        except DoesNotFit:  # nothing ran
            raise
        except RuntimeError as error:
            lost = self._engine.ring.explain(error) if self._engine.ring else None
            self._target.reset()
            raise lost or error from error
        except BaseException:
            self._target.reset()
            raise

    def _prefill(self) -> Generator[PrefillProgress]:
        """Prefill the prompt except its tail, once there is memory for it."""
        target, prompt, turn = self._target, self._prompt, self._session.turn
        needed = self._needed(len(prompt) + min(self._options.max_tokens, _LEG))
        elsewhere = target.is_read_elsewhere(prompt)
        if elsewhere is not None:
            for _ in self._blocked(elsewhere):
                yield PrefillProgress(0, len(prompt))
        for _ in self._blocked(lambda: not target.caches.has_room(needed, target.history)):
            yield PrefillProgress(0, len(prompt))
        if self._ends():
            return
        leg = min(self._options.max_tokens, _LEG)
        memory_guard.make_room(self._engine, target, prompt, leg)
        remember, recall = self._options.remember, self._session.recall
        on_disk: tuple[int, NotCached] = (0, "")
        if remember and recall is not None:
            on_disk = recall.read(target, prompt)
        reuse = target.reuse_prefix(prompt, needed, self._stable)
        target.history.remember = remember
        target.history.conversation = self._options.conversation
        target.history.requested_at = time.time()
        cached = self.stats.cached_tokens = reuse.cached
        memory: tuple[int, NotCached] = (reuse.known, reuse.missing)
        known = max(memory, on_disk, key=lambda each: each[0])
        self.stats.known_tokens, self.stats.not_cached = known
        total = max(cached, len(prompt) - target.prompt_tail)

        def learn(launched: int) -> None:
            self._session.drafting.drafter(
                self._options, prompt, cached + launched, draft_context=self._draft_context
            )

        for read in self._read(learn):
            turn.left = total - cached - read
            yield PrefillProgress(cached + read, total)
            if self._ends():
                return

    def _read(self, meanwhile: Callable[[int], None] = lambda launched: None) -> Generator[int]:
        """Prefill the pending tokens except the tail, in chunks sized by the scheduler."""
        turn, curve = self._session.turn, self._session.drafting.curve
        sizes = ChunkSizes(curve, self._engine.plan.fit.prefill_rows, turn.chunk_seconds)
        for read in prefill(self._target, sizes, meanwhile):
            yield read
            sizes.seconds = turn.chunk_seconds

    def _decoded(self, piece: Piece) -> TextPiece:
        """Decode a piece and count the part that belongs to the answer."""
        decoded, used = self._decoder.add(piece)
        self.stats.add(decoded.piece, from_prefill=not self.tokens)
        if self._logprobs is not None:
            self._add_logprobs(self._logprobs, piece.tokens[:used])
        self.tokens += piece.tokens[:used]
        return self._counted(decoded)

    def _add_logprobs(self, sampler: LogprobSampler, tokens: Sequence[int]) -> None:
        """Collect logprobs for all tokens but a stop token."""
        shown = [token for token in tokens if token not in self._engine.tokens.stop_tokens]
        last = [*self._prompt[-1:], *self.tokens][-1]
        position = len(self._prompt) + len(self.tokens)
        self.logprobs += sampler.pop_logprobs(position, shown, last)

    def _counted(self, decoded: TextPiece) -> TextPiece:
        self.text += decoded.text
        self.thinking += decoded.thinking
        return decoded

    def _finish_reason(self) -> FinishReason:
        last = self.tokens[-1] if self.tokens else -1
        complete = self._constraint is not None and self._constraint.complete
        if self._decoder.stopped or complete or last in self._engine.tokens.stop_tokens:
            return "stop"
        if len(self.tokens) == self._options.max_tokens:
            return "length"
        return "context" if len(self.tokens) == self._room else "cancelled"


def _check(engine: Engine, prompt: Sequence[int], options: GenerateOptions) -> None:
    if options.max_tokens < 1:
        raise UsageError(f"max_tokens must be at least 1, got {options.max_tokens}")
    if options.draft_tokens < 1:
        raise UsageError(
            f"draft_tokens must be at least 1, got {options.draft_tokens}; for none use --draft off"
        )
    if not prompt:
        raise EmptyPrompt("the prompt is empty; give a text to answer")
    if (at := first_invalid(prompt, engine.tokens.vocabulary)) is not None:
        raise DamagedModel(
            f"the tokenizer of {engine.name} knows token {prompt[at]}, but its weights only "
            f"{engine.tokens.vocabulary} tokens; fetch the model again"
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
            f"logit_bias: {engine.name} has {engine.tokens.vocabulary} tokens, none is {biased[at]}"
        )


_WORTH = 1.0  # minimum prefill seconds that a file saves
_SHARE = 8  # a history is saved again after growing by 1/8
_PREFILL_RATE, _LOAD_RATE = 500.0, 400e6  # tokens and bytes per second, before any measurement
_TRUST = 1.1  # growth of a slow disk's assumed rate per prompt


class DiskPromptCaches:
    """The prompt caches on disk of an engine's model."""

    def __init__(self, engine: Engine, store: PromptCacheStore, costs: CostCurve) -> None:
        self._engine = engine
        self._store = store
        self._costs = costs

    def read(self, target: Target, prompt: Sequence[int]) -> tuple[int, NotCached]:
        """Load the best prompt cache for `prompt` into `target` if that saves time.

        Returns the prompt tokens on disk, and why they were not used: "slow disk", "no checkpoint",
        "damaged file", or saved for "other KV width", "other weights" or "other context".
        """
        if len(prompt) < LEAST:
            return 0, ""
        self._forget_slowness()
        unusable = self._store.find_unusable(prompt, self._engine)
        reached = target.reach(prompt)
        return max(self._read_best(target, prompt, reached), unusable, key=lambda each: each[0])

    def _read_best(
        self, target: Target, prompt: Sequence[int], reached: int
    ) -> tuple[int, NotCached]:
        found = self._store.find(prompt, self._engine)
        if found is None:
            return 0, ""
        reach, saved = found
        shared = saved.metadata.shared(prompt)
        if reach - reached < LEAST:
            return shared, "slow disk" if reach > reached else "no checkpoint"
        if self._load_s(saved.size) >= self._prefill_s(reach - reached):
            return shared, "slow disk"
        target.caches.make_room(saved.size)
        started = time.perf_counter()
        history = self._store.load(saved, self._engine)
        if isinstance(history, str):
            return shared, history
        self._costs.load_rate = saved.size / (time.perf_counter() - started)
        target.adopt(history)
        return shared, ""

    def write(
        self, histories: Sequence[TokenHistory], stopped: Stopped, seconds: float | None
    ) -> bool:
        """Save the history with the most unsaved tokens, if worthwhile. seconds: time limit.

        Returns True if one was saved (there may be more to save).
        """
        worth = [each for each in histories if self._is_worth_writing(each, seconds)]
        new = [(self._new_tokens(each), each) for each in worth]
        tokens, history = max(new, key=lambda each: each[0], default=(0, None))
        if history is None or not tokens:
            return False
        end = None if seconds is None else time.monotonic() + seconds

        def late() -> bool:
            return stopped() or (end is not None and time.monotonic() > end)

        return not late() and self._store.save(history, self._engine, late)

    def _is_worth_writing(self, history: TokenHistory, seconds: float | None) -> bool:
        load_s = self._load_s(history.nbytes)
        quick = seconds is None or load_s <= seconds  # saving takes about as long as loading
        worth = load_s < self._prefill_s(len(history.tokens))
        wanted = history.remember and not is_forgotten(history.conversation, history.requested_at)
        return wanted and quick and worth and self._store.may_write(history.nbytes)

    def _new_tokens(self, history: TokenHistory) -> int:
        """Return the number of unsaved tokens, 0 if too few to save."""
        length = len(history.tokens)
        saved = self._store.saved(self._engine)
        files = (each.metadata.tokens for each in saved)
        kept = max((common_prefix(tokens, history.tokens) for tokens in files), default=0)
        new = length - kept
        few = new < max(LEAST, kept // _SHARE) or self._prefill_s(new) < _WORTH
        return 0 if few else new

    def _forget_slowness(self) -> None:
        """Raise the load rate a little, so that a disk that was slow once is tried again."""
        rate = self._costs.load_rate
        if rate and rate < _LOAD_RATE:
            self._costs.load_rate = min(_LOAD_RATE, rate * _TRUST)

    def _prefill_s(self, tokens: int) -> float:
        return tokens / (self._costs.prefill_rate or _PREFILL_RATE)

    def _load_s(self, nbytes: int) -> float:
        return nbytes / (self._costs.load_rate or _LOAD_RATE)
