"""Engine: a loaded model, immutable. Front ends use it through sessions."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from akunu_py.decoding import blas_threads, device, kv_cache, wired
from akunu_py.decoding.chat_format import chat_template
from akunu_py.decoding.load_plan import LoadPlan, make_plan, memory_limit, needs
from akunu_py.decoding.model.drafters import (
    DraftModel,
    MtpHead,
    check_draft_model,
    check_tokens,
    open_draft_model,
    open_head,
)
from akunu_py.decoding.model.identity import model_digest
from akunu_py.decoding.model.tokens import TokenCodec
from akunu_py.models.load.fit import MemoryNeeds
from akunu_py.models.load.mlx_loader import OpenModel, open_model
from akunu_py.models.load.model_files import as_error
from akunu_py.types import LoadOptions

if TYPE_CHECKING:
    from akunu_py.decoding.hosts.host_group import HostGroup

_DEFAULTS = LoadOptions()


@dataclass(frozen=True, slots=True)
class Engine:
    """A model that is ready to run."""

    plan: LoadPlan
    tokens: TokenCodec
    model: Any  # of mlx-lm, or a wrapper that runs it on all hosts
    no_draft_reason: str | None  # why drafts cannot be rolled back, None if they can
    recurrent: bool  # after a rejected draft, accepted tokens must run again
    draft_model: DraftModel | None = None
    mtp_head: MtpHead | None = None
    no_mtp_head_reason: str = "it was not looked for"  # why there is no `mtp_head`
    identity: str = ""  # see `model_digest`
    needs_checkpoints: bool = False  # its KV cache cannot be cut at any position
    load_s: float = 0.0  # loading time in seconds
    host_group: HostGroup | None = None  # the other hosts, if the model is split over several

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def path(self) -> Path:
        return self.plan.path

    @classmethod
    def load(
        cls,
        path: Path,
        options: LoadOptions = _DEFAULTS,
        *,
        name: str | None = None,
        draft_model: tuple[str, Path] | None = None,
        host_group: HostGroup | None = None,
    ) -> Engine:
        """Load the model in the directory `path`.

        draft_model, ring: override the draft model and hosts of `options`.

        Raises DamagedModel or UnsupportedModel for all failures of mlx-lm; UsageError for bad
        `options` or a draft model with other tokens; DoesNotFit before weights are read.
        """
        started = time.perf_counter()
        blas_threads.adapt()  # begins to measure the load
        name = name or path.name
        with as_error(f"the model in {path} cannot be loaded"):
            parts = open_parts(path, options, draft_model, host_group)
            needs = [each.needs for each in parts.drafters]
            split = host_group is not None
            plan = make_plan(name, parts.opened, parts.needs, options, needs, partitioned=split)
            engine = load(parts, plan)
        return replace(engine, load_s=time.perf_counter() - started)

    def with_draft_model(self, small: Engine) -> Engine:
        """Return this engine with draft model `small`. Raises UsageError if its tokens differ."""
        check_tokens(small.tokens, self.tokens)
        needed, width = small.plan.fit.needs, small.tokens.vocabulary
        share = needed.weights / max(1, self.plan.fit.needs.weights)
        draft = DraftModel(small.name, small.path, small.model, width, needed, share)
        return replace(self, draft_model=draft)


@dataclass(frozen=True, slots=True)
class ModelParts:
    """A model and its neural drafters, opened but without weights."""

    opened: OpenModel
    needs: MemoryNeeds  # of the model alone
    draft_model: DraftModel | None = None
    mtp_head: MtpHead | None = None
    no_mtp_head_reason: str = "the model is split over several hosts"
    host_group: HostGroup | None = None

    @property
    def drafters(self) -> list[DraftModel | MtpHead]:
        return [each for each in (self.draft_model, self.mtp_head) if each]

    @property
    def modules(self) -> list[Any]:
        """All modules with weights in this process."""
        small, head = self.draft_model, self.mtp_head
        modules = [self.opened.model, small and small.model, head and head.head]
        return [each for each in modules if each is not None]


def open_parts(
    path: Path,
    options: LoadOptions,
    draft_model: tuple[str, Path] | None,
    host_group: HostGroup | None,
) -> ModelParts:
    """Open the model in `path` and its neural drafters; see `Engine.load`."""
    opened = open_model(path)
    if host_group is not None:
        itemsize = host_group.keep_partition(opened.model)
    else:
        itemsize = device.convert_weights(opened.model, options.weights)
    own = needs(opened, options.kv_bits, itemsize)
    small = open_draft_model(*draft_model, options.weights, own) if draft_model else None
    if host_group is not None:
        return ModelParts(opened, own, small, host_group=host_group)
    head, no_head = open_head(opened, options.weights, own, memory_limit(options))
    return ModelParts(opened, own, small, head, no_head)


def load(parts: ModelParts, plan: LoadPlan) -> Engine:
    """Read the weights of `parts` according to the plan. Raises what `Engine.load` does."""
    opened, host_group = parts.opened, parts.host_group
    model = opened.model
    with ThreadPoolExecutor(1) as pool:  # meanwhile the device reads the weights
        identity = pool.submit(model_digest, opened.files.path, plan.weights)
        loading = pool.submit(TokenCodec.load, plan.name, opened.files, opened.vocabulary)
        if host_group is None:
            mx.eval(model.parameters())
        else:
            model, context = host_group.start(model, plan.context_length)
            plan = replace(plan, context_length=context)
        tokens = loading.result()
    # The generator's graph keeps the random weights of new layers until it is evaluated.
    mx.eval(mx.random.state)
    cache = kv_cache.new_cache(model, plan.kv_bits)
    if parts.draft_model is not None:
        check_draft_model(parts.draft_model, tokens)
        mx.eval(parts.draft_model.model.parameters())
    if parts.mtp_head is not None:
        mx.eval(parts.mtp_head.head.parameters())
    wired.wire(opened.model, plan.wire, parts.modules, plan.fit.estimate.working)
    if tokens.tokenizer.has_chat_template:
        chat_template.start()
    return Engine(
        plan=plan,
        tokens=tokens,
        model=model,
        no_draft_reason=kv_cache.no_rollback_reason(cache),
        recurrent=kv_cache.is_recurrent(cache),
        identity=identity.result(),
        needs_checkpoints=kv_cache.needs_checkpoints(cache),
        draft_model=parts.draft_model,
        mtp_head=parts.mtp_head,
        no_mtp_head_reason=parts.no_mtp_head_reason,
        host_group=host_group,
    )
