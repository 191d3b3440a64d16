"""Session: a model with a token history. Request: one answer in a session, and its state.

Both belong to one thread, because MLX's streams are thread-local; only `Request.cancel` may be
called from others.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from akunu_py.decoding import blas_threads, wired
from akunu_py.decoding.constraint.answer_limits import answer_rules
from akunu_py.decoding.drafting.drafter import Drafting, check_mode
from akunu_py.decoding.events import PrefillProgress
from akunu_py.decoding.generate.decode import Decoding, ended
from akunu_py.decoding.generate.prefill import (
    ChunkSizes,
    history_bytes,
    make_room,
    prefill,
    release_under_pressure,
)
from akunu_py.decoding.learned_state import UnsavedState
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.prompt_cache import disk
from akunu_py.decoding.prompt_cache.history import Owner
from akunu_py.decoding.prompt_cache.memory import PromptCaches
from akunu_py.decoding.prompt_cache.prompt_cache_store import DiskPromptCaches
from akunu_py.decoding.sampling import LogprobSampler, Sampler
from akunu_py.decoding.target import Target
from akunu_py.decoding.text.stream_decoder import StreamDecoder
from akunu_py.decoding.token_ids import first_invalid
from akunu_py.errors import DamagedModel, DoesNotFit, EmptyPrompt, PromptTooLong, UsageError
from akunu_py.types import (
    Answer,
    Drafter,
    FinishReason,
    GenerateOptions,
    NotCached,
    Piece,
    Stats,
    TextPiece,
    TokenLogprobs,
)


class Session:
    """Token histories with their KV caches, and the drafter that learns from them."""

    def __init__(
        self,
        engine: Engine,
        learned: UnsavedState | None = None,
        sibling: Session | None = None,
        reserved_tokens: int | None = None,
    ) -> None:
        """learned: what to learn into. sibling: a session to share it and prompt caches with.

        reserved_tokens: answer tokens for which memory is reserved at once; None: the sibling's.
        """
        self.engine = engine
        inherited: int = sibling.reserved_tokens if sibling else _RESERVED_TOKENS
        self.reserved_tokens: int = reserved_tokens or inherited
        self.learned: UnsavedState = learned or (sibling.learned if sibling else UnsavedState())
        caches = sibling.target.caches if sibling else PromptCaches(engine.plan.prompt_cache_memory)
        self.target: Target = Target(engine.model, engine.plan.kv_bits, caches)
        self.drafting: Drafting = Drafting(engine, self.target, self.learned)
        self.request: Request | None = None  # the last one that ran
        self.chunk_seconds: float | None = None  # time limit of prefill chunks; None: the fastest
        self.disk_caches: DiskPromptCaches | None = None  # from disk
        if (store := self.learned.caches) is not None:
            self.disk_caches = DiskPromptCaches(engine, store, self.drafting.curve)

    def release(self) -> None:
        """Close an unfinished request and return the history to the shared caches."""
        self.begin(None)
        self.drafting.release()
        self.target.release()

    def save_idle(
        self, stopped: Callable[[], bool] = lambda: False, seconds: float | None = None
    ) -> bool:
        """Save one prompt cache to disk and release memory under pressure. Call only when idle.

        stopped: polled during the save; returning True aborts it. seconds: time limit. Returns True
        if a cache was saved (there may be more to save).
        """
        self.learned.flush()
        caches = self.target.caches  # which other sessions may share
        release_under_pressure(caches)
        mx.clear_cache()  # MLX keeps the buffers of every prompt length
        histories = [*caches.in_use, *caches.histories()]
        wired.adjust(self.engine.model, sum(each.nbytes for each in histories))
        return self.disk_caches is not None and self.disk_caches.write(histories, stopped, seconds)

    def begin(self, request: Request | None) -> None:
        """Close the previous request if it is another one."""
        if self.request is not None and self.request is not request:
            self.request.close()
        self.request = request

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

    def generate(
        self,
        prompt: Sequence[int],
        options: GenerateOptions,
        draft_context: Sequence[Sequence[int]] = (),
        stable: int | None = None,
    ) -> Request:
        """Return the request to answer `prompt` (token ids).

        draft_context: token sequences to draft from, without prefill. stable: length of the prefix
        that the next prompt will share, if known. Raises EmptyPrompt, PromptTooLong, or UsageError
        at once.
        """
        return Request(self, prompt, options, draft_context, stable)


_RESERVED_TOKENS = 1024  # see `Session`
_FEW = 64  # pending prompt tokens that join the first decode pass instead of a prefill pass

Step = PrefillProgress | TextPiece


class Status(enum.Enum):
    """The phase of a request."""

    WAITING = "waiting"  # for memory, or for a prefix that another request prefills
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"


class Request:
    """A request and its answer so far: call `step` until `status` is FINISHED."""

    def __init__(
        self,
        session: Session,
        prompt: Sequence[int],
        options: GenerateOptions,
        draft_context: Sequence[Sequence[int]] = (),
        stable: int | None = None,
    ) -> None:
        """See `Session.generate`."""
        engine = session.engine
        if options.stop_tokens:
            stop_tokens = engine.tokens.stop_tokens.union(options.stop_tokens)
            engine = replace(engine, tokens=replace(engine.tokens, stop_tokens=stop_tokens))
        _check(engine, prompt, options)
        check_mode(engine, options.draft)
        self.status = Status.WAITING
        # Set before each step by the step loop:
        self.crowded = False  # an earlier request waits for memory
        self.chunk_seconds = session.chunk_seconds  # time limit of a prefill chunk
        self.prompt_tokens_left = 0  # prompt tokens not prefilled yet, once the prefill began
        self._session = session
        self._engine = engine
        self.target = session.target
        self._prompt = list(prompt)
        self._options = options
        self._draft_context = draft_context
        self._stable = stable
        self._logprobs: LogprobSampler | None = None
        if options.sampling.logprobs is not None:
            self._logprobs = LogprobSampler(options.sampling, engine.tokens.tokenizer)
        self._sampler = self._logprobs or Sampler(options.sampling)
        self._constraint, self._guide = answer_rules(engine.tokens, options, self._prompt)
        self._room = engine.plan.context_length - len(self._prompt)
        self._cancelled = threading.Event()
        self._decoder = StreamDecoder(
            engine.tokens.tokenizer,
            engine.tokens.stop_tokens,
            self._prompt,
            options.stop,
            options.markers,
        )
        self._conditions: list[Callable[[], bool]] | None = None  # to wait for, None before
        self._started = 0.0
        self._prefilled: float | None = None  # time of the first token
        self._chunks: Iterator[int] = iter(())  # prefill passes
        self._cached = self._prefill_end = 0  # prompt tokens where the prefill begins and ends
        self._drafter: Drafter | None = None
        self._decoding: Decoding | None = None
        self._tokens_left = min(options.max_tokens, self._room)
        self._complete = False  # a stop token, or no tokens left
        self._generated: list[int] = []  # in the evicted history
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

    def steps(self) -> Generator[Step]:
        """Run this request alone: yield prefill progress, then pieces, some of them empty.

        Closing the generator between two steps ends the answer and keeps the prefilled tokens.
        """
        try:
            while self.status is not Status.FINISHED:
                yield from self.step()
        finally:
            self.close()

    def step(self) -> list[Step]:
        """Run a prefill chunk or a decode pass of this request alone; return its results."""
        blas_threads.adapt()
        self._session.begin(self)
        return self._guarded(self._advance)

    @property
    def blocked(self) -> Callable[[], bool] | None:
        """Returns whether it still has to wait; None if it waits for nothing."""
        return self._conditions[0] if self._conditions else None

    @property
    def can_share(self) -> bool:
        """Whether its next decode pass may be shared with other requests."""
        target = self.target
        one_row = len(target.pending) == 1 and bool(target.tokens)
        return (
            self.status is Status.DECODING
            and self._decoding is not None
            and target.run == target.run_model
            and (one_row or not self._engine.recurrent)
        )

    @property
    def joining_tokens(self) -> int:
        """Prompt tokens that run in the first decode pass, 0 after it."""
        first = self._decoding is not None and not self._decoding.answering
        return len(self.target.pending) if first else 0

    @property
    def is_running(self) -> bool:
        """Whether it has launched a pass."""
        return self._decoding is not None and self._decoding.is_running

    @property
    def decoding(self) -> Decoding:
        """The decode passes, while `can_share`."""
        assert self._decoding is not None
        return self._decoding

    def collect(self, seconds: float) -> list[Step] | Exception:
        """Return the results of a shared pass, or the error that ends this request."""
        try:
            collect = self.decoding.collect
            return self._guarded(lambda: self._deliver(collect(seconds)), shared=True)
        except Exception as error:  # noqa: BLE001 - it must not end the other requests
            return error

    def fail(self, error: Exception) -> Exception:
        """End the request because a shared pass failed; return what to report."""
        self.status = Status.FINISHED
        self.target.reset()
        return error

    def close(self) -> None:
        """End the answer between two steps and keep the prefilled tokens."""
        if self.status is Status.FINISHED:
            return
        status, self.status = self.status, Status.FINISHED
        self._conditions = []
        if isinstance(self._chunks, Generator):
            self._chunks.close()
        if self._decoding is not None:
            self._decoding.close()
        if self._options.side_request and status is not Status.WAITING:
            self.target.keep(self._stable or 0)
        self.target.pause_workers()

    def _guarded(self, advance: Callable[[], list[Step]], *, shared: bool = False) -> list[Step]:
        """Return the results, and those of the end. After a failed pass the cache is reset."""
        if self.status is Status.FINISHED:
            return []
        try:
            steps = advance() if shared or not self._ends() else []
            if not self._ends():
                return steps
            return [*steps, *self._finish()]
        except DoesNotFit:  # nothing ran
            self.close()
            raise
        except BaseException as error:
            self.status = Status.FINISHED
            group, lost = self._engine.host_group, None
            if isinstance(error, RuntimeError) and group is not None:
                lost = group.explain(error)
            self.target.reset()
            if lost is not None:
                raise lost from error
            raise

    def _ends(self) -> bool:
        return self._cancelled.is_set() or self._complete or self._decoder.stopped

    def _finish(self) -> list[Step]:
        self._measure()
        self.close()
        rest = self._decoder.finish()
        self.finish_reason = self._reason()
        if self._options.may_store and not self._options.side_request:
            self._learn()
        return [self._counted(rest)] if rest.text or rest.thinking else []

    def _learn(self) -> None:
        """Learn from the answer for later requests."""
        self._session.drafting.learn_answer()
        self._session.learned.add_answer(self.tokens)
        self._session.learned.save_costs()

    def _measure(self) -> None:
        """Update the decode time. It includes the consumer's time, as users see it."""
        if self._prefilled is not None and self.tokens:
            self.stats.decode_s = time.perf_counter() - self._prefilled

    def _advance(self) -> list[Step]:
        if self.status is Status.WAITING:
            return self._wait()
        if self.status is Status.PREFILLING:
            return self._prefill()
        return self._deliver(self.decoding.step())

    def _wait(self) -> list[Step]:
        """Begin the prefill once there is memory for it, and nothing better to wait for."""
        if self._conditions is None:
            self._started = time.perf_counter()
            self.target.sampler, self.target.constraint = self._sampler, self._constraint
            options = self._options
            self.target.owner = Owner(options.conversation, time.time(), options.may_store)
            self._session.drafting.prepare(self._options)
            elsewhere = self.target.find_concurrent_prefill(self._prompt)
            self._conditions = [] if elsewhere is None else [elsewhere]
            self._conditions.append(lambda: not self._has_room(len(self._prompt)))
        while self._conditions:
            if self._conditions[0]():
                return [self._progress(0)]
            del self._conditions[0]
        if self._drafter is None:
            self._begin_prefill()
        else:
            self._resume_prefill()
        self.status = Status.PREFILLING
        return self._prefill()

    def _progress(self, done: int) -> Step:
        if self._drafter is not None:  # the client knows that the prompt is processed
            return TextPiece("", Piece(()))
        return PrefillProgress(done, self._prefill_end or len(self._prompt))

    def _begin_prefill(self) -> None:
        """Reuse the longest cached prefix, in memory or on disk; plan the prefill of the rest."""
        target, prompt = self.target, self._prompt
        make_room(self._engine, target, prompt, self._reserved_tokens)
        may_store, disk_caches = self._options.may_store, self._session.disk_caches
        on_disk: tuple[int, NotCached] = (0, "")
        if may_store and disk_caches is not None:
            reached = target.reach(prompt)
            history, tokens, missing = disk_caches.read(prompt, reached, target.caches)
            on_disk = tokens, missing
            if history is not None:
                target.adopt(history)
        reuse = target.reuse_prefix(prompt, self._needed(len(prompt)), self._stable)
        self._cached = self.stats.cached_tokens = reuse.cached
        memory: tuple[int, NotCached] = (reuse.known, reuse.missing)
        known = max(memory, on_disk, key=lambda each: each[0])
        self.stats.known_tokens, self.stats.not_cached = known
        if len(target.pending) <= _FEW and not target.history.needs_checkpoints:
            self._cached = self._prefill_end = len(prompt)
            return
        self._prefill_end = max(self._cached, len(prompt) - target.prompt_tail)

        def learn(launched: int) -> None:
            self._session.drafting.drafter(
                self._options, prompt, self._cached + launched, draft_context=self._draft_context
            )

        self._chunks = self._new_chunks(learn)

    def _resume_prefill(self) -> None:
        """Prefill the tokens again that were evicted while the request waited for memory."""
        target, known = self.target, [*self._prompt, *self._generated]
        target.reuse_prefix(known, self._needed(len(known)))
        self._cached = len(known) - len(target.pending)
        self._prefill_end = len(known) - target.prompt_tail
        self._chunks = self._new_chunks(lambda launched: None)

    def _new_chunks(self, meanwhile: Callable[[int], None]) -> Generator[int]:
        curve = self._session.drafting.curve
        sizes = ChunkSizes(curve, self._engine.plan.fit.prefill_rows, self.chunk_seconds)
        for read in prefill(self.target, sizes, meanwhile):
            yield read
            sizes.seconds = self.chunk_seconds

    def _prefill(self) -> list[Step]:
        """Run a chunk; after the last one, begin to decode."""
        read = next(self._chunks, 0)
        self.prompt_tokens_left = max(0, self._prefill_end - self._cached - read)
        progress = self._progress(self._cached + read)
        if not self.prompt_tokens_left:
            next(self._chunks, None)  # takes the last checkpoint
            self.status = Status.DECODING
            self._begin_decoding()
        return [progress]

    def _begin_decoding(self) -> None:
        """Begin the next decode passes; memory is reserved for these tokens only."""
        answering = self._drafter is not None
        if self._drafter is None:
            drafting, context = self._session.drafting, self._draft_context
            self._drafter = drafting.drafter(self._options, self._prompt, draft_context=context)
            drafting.set_guide(self._guide)
        limit, stop = self._reserved_tokens, self._engine.tokens.stop_tokens
        self._decoding = Decoding(self.target, self._drafter, limit, stop, answering=answering)

    def _deliver(self, piece: Piece) -> list[Step]:
        """Decode a piece to text; end the answer, or reserve more memory, if it is the last one."""
        if self._prefilled is None:
            self._prefilled = time.perf_counter()
            self.stats.prefill_s = self._prefilled - self._started
            piece = replace(piece, seconds=self.stats.prefill_s)
        self._tokens_left -= len(piece.tokens)
        stop = self._engine.tokens.stop_tokens
        if not piece.tokens or ended(self.target, piece.tokens[-1], stop) or not self._tokens_left:
            self._complete = True
        elif self.decoding.limit <= 0:
            self._reserve_more()
        text = self._decoded(piece)
        self._measure()
        return [text]

    def _reserve_more(self) -> None:
        """Reserve memory for more tokens; release the history and wait if there is none."""
        release_under_pressure(self.target.caches)
        held = len(self.target.tokens) + len(self.target.pending)
        if not self.crowded and self._has_room(held):
            self.target.caches.reserve(self._needed(held), self.target.history)
            self._begin_decoding()
            return
        self._generated = [*self.target.tokens, *self.target.pending][len(self._prompt) :]
        self._session.drafting.release()
        self.target.release()
        self._decoding = None
        self._conditions = [lambda: not self._has_room(held)]
        self.status = Status.WAITING

    def _has_room(self, held: int) -> bool:
        """Return whether memory is left for more tokens after `held` tokens."""
        return self.target.caches.has_room(self._needed(held), self.target.history)

    def _needed(self, held: int) -> int:
        """Return the bytes of a history of `held` tokens and those to reserve."""
        return history_bytes(self._engine, held + self._reserved_tokens)

    @property
    def _reserved_tokens(self) -> int:
        """Answer tokens to reserve memory for, at first or next."""
        return min(self._tokens_left, self._session.reserved_tokens)

    def _decoded(self, piece: Piece) -> TextPiece:
        """Decode a piece and count the part that belongs to the answer."""
        decoded, used = self._decoder.add(piece)
        self.stats.add(decoded.piece, from_prefill=not self.tokens)
        if self._logprobs is not None:  # of all tokens but a stop token
            stop = self._engine.tokens.stop_tokens
            shown = [token for token in piece.tokens[:used] if token not in stop]
            last = [*self._prompt[-1:], *self.tokens][-1]
            position = len(self._prompt) + len(self.tokens)
            self.logprobs += self._logprobs.pop_logprobs(position, shown, last)
        self.tokens += piece.tokens[:used]
        return self._counted(decoded)

    def _counted(self, decoded: TextPiece) -> TextPiece:
        self.text += decoded.text
        self.thinking += decoded.thinking
        return decoded

    def _reason(self) -> FinishReason:
        last = self.tokens[-1] if self.tokens else -1
        complete = self._constraint is not None and self._constraint.complete
        if self._decoder.stopped or complete or last in self._engine.tokens.stop_tokens:
            return "stop"
        if len(self.tokens) == self._options.max_tokens:
            return "length"
        return "context" if len(self.tokens) == self._room else "cancelled"


def _check(engine: Engine, prompt: Sequence[int], options: GenerateOptions) -> None:
    """Raise an error if the model cannot answer the prompt with these options."""
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
