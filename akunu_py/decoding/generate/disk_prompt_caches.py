"""When a prompt cache on disk is worth loading or saving."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future

from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.prompt_cache.cache_file import Stopped
from akunu_py.decoding.prompt_cache.history import TokenHistory
from akunu_py.decoding.prompt_cache.prompt_cache_store import (
    LEAST,
    PromptCacheStore,
    SavedCache,
    Verified,
    is_forgotten,
)
from akunu_py.decoding.target import Target
from akunu_py.decoding.token_ids import common_prefix
from akunu_py.ngram.cost import CostCurve
from akunu_py.types import NotCached

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

    def verify_ahead(self, target: Target, prompt: Sequence[int]) -> Future[Verified] | None:
        """Check the file that `read` would load in a helper thread; None if there is none."""
        if len(prompt) < LEAST:
            return None
        best = self._best(prompt, target.reach(prompt))
        return self._store.verify_ahead(best) if isinstance(best, SavedCache) else None

    def _best(self, prompt: Sequence[int], reached: int) -> SavedCache | tuple[int, NotCached]:
        """Return the file worth loading, or its prompt tokens and why it is not.

        reached: prompt tokens in memory.
        """
        found = self._store.find(prompt, self._engine)
        if found is None:
            return 0, ""
        reach, saved = found
        shared = saved.metadata.shared(prompt)
        if reach - reached < LEAST:
            return shared, "slow disk" if reach > reached else "no checkpoint"
        if self._load_s(saved.size) >= self._prefill_s(reach - reached):
            return shared, "slow disk"
        return saved

    def _read_best(
        self, target: Target, prompt: Sequence[int], reached: int
    ) -> tuple[int, NotCached]:
        """Load the file of `_best` into `target` and measure the time. Returns as `read` does."""
        saved = self._best(prompt, reached)
        if not isinstance(saved, SavedCache):
            return saved
        shared = saved.metadata.shared(prompt)
        target.caches.make_room(saved.size)
        started = time.perf_counter()
        verified = self._store.verified_s(saved)
        history = self._store.load(saved, self._engine)
        if isinstance(history, str):
            return shared, history
        self._costs.load_rate = saved.size / (time.perf_counter() - started + verified)
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
        owner = history.owner
        wanted = owner.may_store and not is_forgotten(owner.conversation, owner.requested_at)
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
