"""Advances requests: prefill chunks, and decode passes of one or several requests.

A decode pass drafts, verifies, accepts and rolls back: speculative decoding after Leviathan et al.
(2023), section 2. The output is exactly that of plain decoding (see `sampling` for temperatures).
"""

import math
import time
from collections.abc import Callable, Collection, Generator, Sequence
from functools import partial

import mlx.core as mx

from akunu_py.engine import batched_pass, kv_cache
from akunu_py.engine.drafters.drafter import DrafterPool
from akunu_py.engine.drafters.learned_state import UnsavedState
from akunu_py.engine.engine import Engine
from akunu_py.engine.events import PrefillProgress, SharedPasses
from akunu_py.engine.histories.history import Owner
from akunu_py.engine.histories.memory import PromptCaches
from akunu_py.engine.histories.prompt_cache_store import PromptCacheStore
from akunu_py.engine.model import blas_threads
from akunu_py.engine.prefill import (
    ChunkSizes,
    history_bytes,
    make_room,
    prefill,
    release_under_pressure,
)
from akunu_py.engine.request import DecodePass, Request, Status, Step
from akunu_py.engine.sampling import sample_together
from akunu_py.engine.scheduler import StepPlan
from akunu_py.errors import DoesNotFit
from akunu_py.ngram.cost import MAX_ROWS, CostCurve
from akunu_py.ngram.planner import JointPlanner, SharedPass, best_draft
from akunu_py.types import NotCached, PassCosts, Piece, TextPiece

_FEW = 64  # pending prompt tokens that join the first decode pass instead of a prefill pass
_MAX_PENDING = 8  # with more pending tokens a pass has no draft
_CLEAR_EVERY = 256  # passes between clearing MLX's buffer cache, as in mlx-lm

Results = list[Step] | Exception


class ModelRunner:
    """Advances the requests to one model, with its drafters and prompt caches."""

    reserved_tokens = 1024  # answer tokens that memory is reserved for at once
    wants_trial = False  # an answer could have used token trees
    _is_tried = False  # the trial of `try_batching` was run
    _planner: JointPlanner  # of shared passes, after that trial

    def __init__(
        self,
        engine: Engine,
        learned: UnsavedState,
        chunk_seconds: float | None = None,  # time limit of prefill chunks; None: the fastest size
    ) -> None:
        self._engine = engine
        self._learned = learned
        self._chunk_seconds = chunk_seconds
        self.curve = learned.curve
        self.caches = PromptCaches(engine.plan.prompt_cache_memory)
        self.drafters = DrafterPool(engine, learned)
        self.disk_caches: PromptCacheStore | None = None
        if learned.disk_limits is not None:
            self.disk_caches = PromptCacheStore(engine, learned.disk_limits, self.curve)
        self.not_batched: str | None = None  # why requests take turns, once that is tried
        self._timed_from = 0.0  # end of the previous pass, or start of this one
        self._joint: batched_pass.Joint = {}  # recurrent states of the last shared pass
        self._drafts_pay = False  # read the launched pass first, so that the next one has drafts
        self._passes = 0
        self.shared = SharedPasses()

    def try_batching(self) -> bool:
        """Return whether requests or branches can share a pass, after a trial of about 8 passes."""
        if not self._is_tried:
            model, kv_bits = self._engine.model, self._engine.plan.kv_bits
            exact = "--exact keeps passes small" if self._engine.exact else None
            self.not_batched = exact or batched_pass.why_not_batched(model, kv_bits)
            known = self.curve.table(0)
            costs = CostCurve({rows: known[rows - 1] for rows in range(1, MAX_ROWS + 1)})
            costs.preset = False
            self._planner = JointPlanner(costs)
            self._is_tried = True
        return self.not_batched is None

    def sharing(self, requests: Sequence[Request]) -> list[Request]:
        """Return the requests whose next decode pass is shared, none if that is impossible."""
        if len(requests) < 2 or not self.try_batching():
            return []
        sharing = [each for each in requests if each.can_share]
        count = len(sharing)
        return [each for each in sharing if each.is_running or not self._prefers_alone(each, count)]

    def _prefers_alone(self, request: Request, sharing: int) -> bool:
        """Return whether a separate pass with a draft is faster than a shared pass without drafts.

        Recurrent layers accept one row per request, so shared passes of recurrent models cannot
        verify drafts. sharing: number of requests that share the pass.
        """
        if not self._engine.recurrent:
            return False
        context = len(request.target.tokens)
        shared, own = self._planner.curve.table(context), self.curve.table(context)
        rate = sharing * shared[0] / shared[sharing - 1] / own[0]  # tokens per unit of cost
        offer = _offer(request)
        length, values = best_draft(offer, own, rate, len(offer), rerun_on_reject=True)
        if length > 0 and values[0] > 0:
            return True
        plan = request.drafter.plan_neural(_room(request), PassCosts(own, rate))
        return plan is not None and plan.value > 0

    def run(self, plan: StepPlan, crowded: Collection[Request]) -> list[Results]:
        """Run the next step of `plan`. crowded: requests behind a blocked one."""
        blas_threads.adapt()
        first = plan.requests[0]
        if len(plan.requests) == 1 and first.ends:
            return [self._advance(first, lambda: [])]
        if first.status is Status.DECODING:
            return self._decode(plan.requests, crowded, alone=plan.alone)
        first.chunk_seconds = plan.chunk_seconds or self._chunk_seconds
        step = self._wait if first.status is Status.WAITING else self._prefill
        return [self._advance(first, partial(step, first))]

    def close(self, request: Request) -> None:
        """End an answer between two steps and keep the prefilled tokens."""
        if request.status is not Status.FINISHED:
            begun, request.status = request.status is not Status.WAITING, Status.FINISHED
            request.waits_for = []
            if isinstance(request.chunks, Generator):
                request.chunks.close()
            request.drop_launched()
            if request.options.side_request and begun:
                request.target.keep(request.stable or 0)
            request.target.pause_workers()
        self._release(request)

    def _release(self, request: Request) -> None:
        self._joint.clear()
        try:
            if request.has_drafter:
                self.drafters.give_back(request.drafter)
                request.has_drafter = False
            request.target.release()
        except Exception:  # noqa: BLE001 - a failing device
            request.target.reset()

    def fail(self, request: Request, error: BaseException) -> Exception:
        """End a request whose pass failed and drop its history; return what to report."""
        request.status = Status.FINISHED
        request.launched = []
        request.target.reset()
        self._release(request)
        group = self._engine.host_group
        lost = group.explain(error) if group and isinstance(error, RuntimeError) else None
        if lost is not None:
            lost.__cause__ = error
            return lost
        if not isinstance(error, Exception):
            raise error
        return error

    def _advance(self, request: Request, step: Callable[[], list[Step]]) -> Results:
        """Return the results of a step of one request, and those of the end."""
        if request.status is Status.FINISHED:
            return []
        try:
            steps = step()
            return [*steps, *self._finish(request)] if request.ends else steps
        except DoesNotFit as error:  # nothing ran
            self.close(request)
            return error
        except BaseException as error:  # noqa: BLE001 - one bad request must not end the others
            return self.fail(request, error)

    def _finish(self, request: Request) -> list[Step]:
        request.measure(time.perf_counter())
        rest = request.finish()
        if request.options.may_store and not request.options.side_request:
            request.drafter.share_weights()
            self._learned.add_answer(request.tokens)
            self._learned.save_costs()
        self.close(request)
        return rest

    # The prefill

    def _wait(self, request: Request) -> list[Step]:
        """Begin the prefill once there is memory for it, and nothing better to wait for."""
        target, options = request.target, request.options
        if request.waits_for is None:
            request.started = time.perf_counter()
            target.owner = Owner(options.conversation, time.time(), options.may_store)
            context = request.draft_context
            request.drafter = self.drafters.take(target, options, request.prompt, context)
            request.has_drafter = True
            elsewhere = target.find_concurrent_prefill(request.prompt)
            request.waits_for = [] if elsewhere is None else [elsewhere]
            request.waits_for.append(lambda: not self._has_room(request))
        while request.waits_for:
            if request.waits_for[0]():
                return [self._progress(request, 0)]
            del request.waits_for[0]
        if not request.answering:  # else it waited for memory, and prefills evicted tokens again
            make_room(self._engine, self.caches, request.prompt, self._to_reserve(request))
        request.cached, request.prefill_end = 0, len(request.prompt) + len(request.tokens)
        request.chunks = self._chunks(request)
        request.status = Status.PREFILLING
        return self._prefill(request)

    def _progress(self, request: Request, done: int) -> Step:
        if request.answering:  # the client knows that the prompt is processed
            return TextPiece("", Piece(()))
        return PrefillProgress(done, request.prefill_end or len(request.prompt))

    def _chunks(self, request: Request) -> Generator[int | None]:
        """Reuse the longest cached prefix (None while it loads), then yield as `prefill`."""
        target, known = request.target, [*request.prompt, *request.tokens]
        if not request.answering:
            on_disk = yield from self._load_from_disk(request)
        reuse = target.reuse_prefix(known, self._needed(request), request.stable)
        request.cached = reuse.cached
        if not request.answering:
            stats, memory = request.stats, (reuse.known, reuse.missing)
            stats.cached_tokens = reuse.cached
            stats.known_tokens, stats.not_cached = max(memory, on_disk, key=lambda each: each[0])
            if len(target.pending) <= _FEW and not target.history.needs_checkpoints:
                request.cached = request.prefill_end = len(known)
                return
        request.prefill_end = max(request.cached, len(known) - target.prompt_tail)

        def learn(launched: int) -> None:
            if not request.answering:
                request.drafter.follow(request.options, request.prompt, request.cached + launched)

        rows = self._engine.plan.fit.prefill_rows
        sizes = ChunkSizes(self.curve, rows, request.chunk_seconds)
        for done in prefill(target, sizes, learn):
            yield done
            sizes.seconds = request.chunk_seconds

    def _load_from_disk(self, request: Request) -> Generator[None, None, tuple[int, NotCached]]:
        """Load a longer prefix in steps; return the tokens on disk, and why not all are cached."""
        target, prompt = request.target, request.prompt
        if not request.options.may_store or self.disk_caches is None:
            return 0, ""
        reached, _ = self.caches.best(prompt, in_use=True)
        target.history.pending = list(prompt)  # requests with the same prefix wait for it
        read = self.disk_caches.read(prompt, reached, self.caches, target.history)
        history, tokens, missing = yield from read
        if history is not None:
            self.caches.add(target.history)
            target.history = history
        return tokens, missing

    def _prefill(self, request: Request) -> list[Step]:
        """Reuse the cached prefix in the first step, then run chunks; decode after the last."""
        done = next(request.chunks, 0) or 0
        request.prompt_tokens_left = max(0, request.prefill_end - request.cached - done)
        progress = self._progress(request, request.cached + done)
        if not request.prompt_tokens_left:
            next(request.chunks, None)  # takes the last checkpoint
            request.status = Status.DECODING
            request.limit = self._to_reserve(request)
            if not request.answering:
                request.drafter.follow(request.options, request.prompt, len(request.prompt))
                # The trial costs more time than a few trees save: no trees until it has run.
                allowed = request.can_branch and request.drafter.auto is not None
                self.wants_trial |= allowed and bool(request.guide or request.drafter.neural)
                branches = allowed and self._is_tried and self.try_batching()
                request.drafter.begin_answer(request.guide, branches=branches)
        return [progress]

    def _prefill_again(self, request: Request) -> None:
        """Give the history to the prompt caches, and wait; what they evict is prefilled again."""
        self._joint.clear()
        request.drafter.release()
        request.target.release()
        request.waits_for = [lambda: not self._has_room(request)]
        request.status = Status.WAITING

    def _has_room(self, request: Request) -> bool:
        """Return whether memory is left for the known tokens and more."""
        return self.caches.has_room(self._needed(request), request.target.history)

    def _needed(self, request: Request) -> int:
        """Return the bytes of a history of the known tokens and those to reserve."""
        known = len(request.prompt) + len(request.tokens)
        return history_bytes(self._engine, known + self._to_reserve(request))

    def _to_reserve(self, request: Request) -> int:
        """Return the answer tokens to reserve memory for, at first or next."""
        return min(request.tokens_left, self.reserved_tokens)

    # Decode passes

    def _decode(
        self, requests: Sequence[Request], crowded: Collection[Request], *, alone: bool
    ) -> list[Results]:
        """Run one pass over all requests.

        If a pass was already launched, collect only the results of its requests. alone: no other
        request is ready, so that the next pass can be launched before this one is delivered.
        """
        running = [each for each in requests if each.is_running]
        try:
            if not running:
                self._timed_from = requests[0].target.clock()
                drafts = self._drafts(requests, alone=alone)
                if len(requests) > 1:  # the time of neural drafters is not that of the pass
                    self._timed_from = requests[0].target.clock()
                self._launch(requests, drafts)
                running = list(requests)
            self._launch_ahead(requests, running, alone=alone)
            mx.eval([each.launched[0].sampled for each in running])
            started, self._timed_from = self._timed_from, requests[0].target.clock()
            pieces = self._accept(running, self._timed_from - started)
            self._prepare_next(requests, alone=alone)
        except BaseException as error:  # noqa: BLE001 - every request reports it
            return [self.fail(each, error) for each in requests]
        results: list[Results] = []
        for each in requests:
            deliver = partial(self._deliver, each, pieces.get(each), crowded=each in crowded)
            results.append(self._advance(each, deliver))
        return results

    def _drafts(self, requests: Sequence[Request], *, alone: bool) -> list[list[int]]:
        if len(requests) == 1:
            return [self._propose(requests[0], alone=alone)]
        lengths = self._joint_lengths(requests, alone=alone)
        return [
            each.in_vocabulary(each.drafter.take(length)) if each.answering else []
            for each, length in zip(requests, lengths, strict=True)
        ]

    def _propose(self, request: Request, *, alone: bool, ahead: bool = False) -> list[int]:
        if not request.answering:
            return []
        room = max(0, _room(request) - ahead)
        if (exact := self._engine.exact) is not None:
            context, pending = len(request.target.tokens), len(request.target.pending)
            rows = min(exact.at(context + more) for more in (0, 2 * ahead))
            room = max(0, min(room, rows - max(1, pending)))
        if request.drafter.auto is not None:
            request.drafter.auto.can_pipeline = alone
        return request.in_vocabulary(request.drafter.propose(room, ahead=ahead))

    def _joint_lengths(self, requests: Sequence[Request], *, alone: bool) -> list[int]:
        """Return the number of draft tokens for each request of a shared pass."""
        planner, context = self._planner, _context(requests)
        if self._engine.recurrent:
            return [0] * len(requests)
        rows = sum(len(each.target.pending) for each in requests)
        pipelined = alone and all(each.target.constraint is None for each in requests)
        known = None
        if any(each.drafter.neural or each.guide is not None for each in requests):
            known = planner.pass_costs(len(requests), rows, context, pipelined=pipelined)
        offers = [_offer(each, known) for each in requests]
        return planner.lengths(offers, rows, context, pipelined=pipelined)

    def _waiting_pays(self, requests: Sequence[Request]) -> bool:
        """Return whether the next pass should wait for the tokens of this one, to have drafts."""
        if self._engine.recurrent:
            return any(self._prefers_alone(each, len(requests)) for each in requests)
        planner, context = self._planner, _context(requests)
        offers = [_offer(each) for each in requests]
        if any(planner.lengths(offers, len(requests), context, pipelined=True)):
            return True
        neural = [each for each in requests if each.drafter.neural]
        if not neural:
            return False
        known = planner.pass_costs(len(requests), len(requests), context, pipelined=True)
        return any(each.drafter.plan_neural(_room(each), known) for each in neural)

    def _launch_ahead(
        self, requests: Sequence[Request], running: Sequence[Request], *, alone: bool
    ) -> None:
        """Launch the pass after the launched one, before that one is read, if it pays."""
        more = [each for each in requests if each.limit > len(each.launched)]
        if not (alone and more and all(each.can_continue for each in running)):
            return
        first, drafts = requests[0], [list[int]() for _ in more]
        if len(requests) > 1:
            pays = not self._drafts_pay
        else:
            # A pass launched ahead has no draft, because its history was not known. So the drafter
            # may predict its token and the ones after it now.
            if first.launched[0].follows:
                drafts = [self._propose(first, alone=True, ahead=True)]
            pays = any(drafts) or first.drafter.pipelines
        if pays:
            self._launch(more, drafts, ahead=True)

    def _prepare_next(self, requests: Sequence[Request], *, alone: bool) -> None:
        """Prepare the next pass before this one is delivered.

        Launch that of a single request; of several, plan whether to wait for drafts.
        """
        first = requests[0]
        if len(requests) > 1:
            left = [each for each in requests if each.is_running]
            self._drafts_pay = bool(left) and self._waiting_pays(left)
        elif alone and first.limit > 0 and not first.is_running and first.tokens:
            rules = first.target.constraint
            if rules is None or rules.free:  # sampling does not depend on the piece
                self._launch([first], self._drafts([first], alone=True))

    def _launch(
        self, requests: Sequence[Request], drafts: Sequence[list[int]], *, ahead: bool = False
    ) -> None:
        """Launch a pass over pending tokens and drafts. ahead: behind a pass not collected yet."""
        passes, parts = [], []
        for each, drafted in zip(requests, drafts, strict=True):
            follows = ahead and each.is_running
            known = drafted if follows else [*each.target.pending, *drafted]
            rows = mx.array(known, mx.int32)
            if follows:
                sampled = each.launched[0].sampled
                rows = mx.concatenate([sampled, rows]) if drafted else sampled
            # Holding the state would prevent in-place writes of plain steps.
            before = kv_cache.pass_state(each.target.cache) if drafted else None
            passes.append(DecodePass(drafted, before, follows, rows, rows))
            parts.append(each.target.part(rows, drafted))
        logits = batched_pass.run(self._engine.model, parts, self._joint)
        to_sample = [
            each.target.to_sample(rows_logits, made.rows, made.drafted, ahead=made.follows)
            for each, made, rows_logits in zip(requests, passes, logits, strict=True)
        ]
        for made, sampled in zip(passes, sample_together(to_sample), strict=True):
            made.sampled = sampled
        mx.async_eval([each.sampled for each in passes])
        shared = None
        if len(requests) > 1:
            shared = SharedPass(
                len(requests),
                sum(each.rows.size for each in passes),
                sum(len(each.drafted) for each in passes),
                _context(requests),
                pipelined=ahead,
                joined=any(each.joining_tokens for each in requests),
                drafting=0.0 if ahead else sum(each.drafter.drafting_cost for each in requests),
            )
        for each, made in zip(requests, passes, strict=True):
            made.shared = shared
            each.launched.append(made)

    def _accept(self, running: Sequence[Request], seconds: float) -> dict[Request, Piece]:
        """Accept the tokens of the launched pass, and learn its cost."""
        passes = [each.launched[0] for each in running]
        # Launching a pass may wait for most of it: on a CPU, or with many commands. So the first of
        # several pipelined passes seems slow, and the second one quick. A time counts if this pass
        # and the one launched after it are both ahead, or neither is.
        is_ahead = any(each.follows for each in passes)
        is_steady = is_ahead == any(len(each.launched) > 1 for each in running)
        timed = seconds if is_steady else math.nan
        pieces = dict[Request, Piece]()
        for each, done in zip(running, passes, strict=True):
            answering, rows = each.answering, len(each.target.pending) + len(done.drafted)
            piece = pieces[each] = each.accept(seconds)
            if len(running) == 1 and done.shared is None and answering:
                drafted, pipelined = len(done.drafted), done.follows
                each.drafter.observe(drafted, piece.accepted, rows, timed, pipelined=pipelined)
            each.drafter.extend(piece.tokens)
        shared = passes[0].shared
        same = all(each.shared is shared for each in passes)
        if shared is not None and same and shared.requests == len(running):
            self.shared += SharedPasses(1, len(running))
            self._planner.observe(shared, sum(len(p.tokens) for p in pieces.values()), timed)
        self._passes += 1
        if self._passes % _CLEAR_EVERY == 0:
            mx.clear_cache()
        return pieces

    def _deliver(self, request: Request, piece: Piece | None, *, crowded: bool) -> list[Step]:
        """Decode a piece to text; reserve more memory if it is the last one."""
        if piece is None:
            return []
        text = request.add(piece, time.perf_counter())
        if request.stale and not request.ends:
            request.drop_launched()
            self._prefill_again(request)
        elif not request.ends and request.limit <= 0:
            release_under_pressure(self.caches)
            if crowded or not self._has_room(request):
                self._prefill_again(request)
            else:
                self.caches.reserve(self._needed(request), request.target.history)
                request.limit = self._to_reserve(request)
        return [text]


def _offer(request: Request, known: PassCosts | None = None) -> list[float]:
    """Return the chances of draft tokens for the next pass; see `Drafter.offer`."""
    room = _room(request)
    return request.drafter.offer(room, known) if room else []


def _room(request: Request) -> int:
    """Return the maximum number of draft tokens in the next pass."""
    may_draft = request.answering and len(request.target.pending) <= _MAX_PENDING
    return request.limit - 1 if may_draft else 0


def _context(requests: Sequence[Request]) -> int:
    """Return the mean number of cached tokens."""
    return sum(len(each.target.tokens) for each in requests) // len(requests)
