"""Engine: a loaded model, immutable. Front ends use it through a `StepLoop`."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from akunu_py.engine import kv_cache
from akunu_py.engine.events import LoadedModelFacts
from akunu_py.engine.model import blas_threads, device, wired
from akunu_py.engine.model.drafters import (
    DraftModel,
    MtpHead,
    PublishedDrafter,
    check_draft_model,
    open_drafter,
    open_head,
)
from akunu_py.engine.model.exact_rows import ExactRows
from akunu_py.engine.model.load_plan import LoadPlan, make_plan, memory_limit, needs
from akunu_py.engine.model.token_ids import first_invalid
from akunu_py.engine.model.tokens import TokenCodec
from akunu_py.engine.template import chat_template
from akunu_py.engine.tools.rendering import template_features
from akunu_py.errors import PromptTooLong, UnsupportedModel, UsageError
from akunu_py.kernels.probe import use_kernels
from akunu_py.models.drafters.drafter_config import read_config
from akunu_py.models.load.mlx_loader import OpenModel, open_directory
from akunu_py.models.load.model_files import as_error
from akunu_py.models.load.safetensors import files_digest
from akunu_py.types import LoadOptions

if TYPE_CHECKING:
    from akunu_py.engine.hosts.host_group import HostGroup

_DEFAULTS = LoadOptions()


@dataclass(frozen=True, slots=True)
class Embedding:
    """The embedding of one text."""

    values: list[float]  # of length 1
    tokens: int  # of the text


@dataclass(frozen=True, slots=True)
class Engine:
    """A model that is ready to run."""

    plan: LoadPlan
    tokens: TokenCodec
    model: Any  # of mlx-lm, or a wrapper that runs it on all hosts
    no_draft_reason: str | None  # why drafts cannot be rolled back, None if they can
    recurrent: bool  # after a rejected draft, accepted tokens must run again
    draft_model: DraftModel | PublishedDrafter | None = None
    mtp_head: MtpHead | None = None
    no_mtp_head_reason: str = "it was not looked for"  # why there is no `mtp_head`
    identity: str = ""  # see `model_digest`
    needs_checkpoints: bool = False  # its KV cache cannot be cut at any position
    load_s: float = 0.0  # loading time in seconds
    host_group: HostGroup | None = None  # the other hosts, if the model is split over several
    own_kernels: bool = False  # whether any layer uses akunu's own kernels
    exact: ExactRows | None = None  # row counts of `--exact`

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

        draft_model: its name and directory, instead of the name in `options`. host_group: the other
        hosts of a model that is split.

        Raises DamagedModel or UnsupportedModel for all failures of mlx-lm; UsageError for bad
        `options` or a draft model with other tokens; DoesNotFit before weights are read.
        """
        started = time.perf_counter()
        blas_threads.adapt()  # begins to measure the load
        with as_error(f"the model in {path} cannot be loaded"):
            engine = _load(
                open_directory(path), name or path.name, options, draft_model, host_group
            )
        return replace(engine, load_s=time.perf_counter() - started)

    def embed(
        self, text: str | Sequence[int], *, dimensions: int | None = None, truncate: bool = False
    ) -> Embedding:
        """Return the embedding of a text or token ids; call in the thread that owns the model.

        It is the normalized hidden state of the last token, for which Qwen3-Embedding and similar
        decoders are trained (Zhang et al., 2025). dimensions: keep only the first ones. truncate:
        leave out the end of a text that exceeds the context, but not its last token. Raises
        UsageError for an empty text, token ids outside the vocabulary or too many dimensions,
        PromptTooLong, UnsupportedModel.
        """
        tokens = self.tokens.encode(text) if isinstance(text, str) else list(text)
        if not tokens or first_invalid(tokens, self.tokens.vocabulary) is not None:
            raise UsageError("input: expected a text or token ids of the embedding model")
        maximum = self.plan.context_length
        if truncate and len(tokens) > maximum:
            tokens[maximum - 1 :] = tokens[-1:]  # the tokenizer of some models adds an end
        if len(tokens) > maximum:
            message = f"input: {len(tokens)} tokens exceed the context of {maximum} tokens"
            raise PromptTooLong(message, len(tokens), maximum)
        body = getattr(self.model, "model", None)
        if not callable(body):
            raise UnsupportedModel(f"{self.name} cannot make embeddings; use Qwen3-Embedding")
        hidden = body(mx.array([tokens]))[0, -1].astype(mx.float32)
        if dimensions is not None and dimensions > hidden.size:
            raise UsageError(f"dimensions: expected at most {hidden.size}, got {dimensions}")
        hidden = hidden[:dimensions]
        values = hidden * mx.rsqrt(mx.sum(hidden * hidden) + 1e-12)
        return Embedding(values.tolist(), len(tokens))


def facts_of(engine: Engine) -> LoadedModelFacts:
    """Return the facts of a model loaded here."""
    return LoadedModelFacts(
        engine.name,
        engine.plan.weights,
        engine.plan.context_length,
        engine.no_draft_reason,
        engine.plan.fit.note,
        shows_tools=template_features(engine.tokens.tokenizer).tools,
    )


def _load(
    opened: OpenModel,
    name: str,
    options: LoadOptions,
    draft_model: tuple[str, Path] | None,
    host_group: HostGroup | None,
) -> Engine:
    model, head, no_head = opened.model, None, "the model is split over several hosts"
    if host_group is not None:
        itemsize = host_group.keep_partition(model)
    else:
        itemsize = device.convert_weights(model, options.weights)
    own = needs(opened, options.kv_bits, itemsize)
    small = separate = None
    if draft_model:
        config = read_config(draft_model[1])
        if config is not None and config.kind == "mtp":
            separate = draft_model[1]
        else:
            small = open_drafter(*draft_model, config, options.weights, opened, own)
    if host_group is None:
        limit = memory_limit(options)
        head, no_head = open_head(opened, options.weights, own, limit, separate)
    own_kernels = False
    modules = [*([small.model] if small else []), *([head.chain] if head else [])]
    drafters = [each.needs for each in (small, head) if each]
    plan = make_plan(name, opened, own, options, drafters, partitioned=host_group is not None)
    with ThreadPoolExecutor(1) as pool:  # meanwhile the device reads the weights
        identity = pool.submit(model_digest, opened.files.path, plan.weights)
        loading = pool.submit(TokenCodec.load, plan.name, opened.files, opened.vocabulary)
        if host_group is None:
            mx.eval(model.parameters())
            own_kernels = options.kernels == "auto" and use_kernels(model, exact=options.exact)
        else:
            model, context = host_group.start(model, plan.context_length)
            plan = replace(plan, context_length=context)
        tokens = loading.result()
    # The generator's graph keeps the random weights of new layers until it is evaluated.
    mx.eval(mx.random.state)
    cache = kv_cache.new_cache(model, plan.kv_bits)
    if isinstance(small, DraftModel):
        check_draft_model(small, tokens)
    mx.eval([each.parameters() for each in modules])
    wired.wire(opened.model, plan.wire, [opened.model, *modules], plan.fit.estimate.working)
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
        draft_model=small,
        mtp_head=head,
        no_mtp_head_reason=no_head,
        host_group=host_group,
        own_kernels=own_kernels,
        exact=ExactRows(model, plan.kv_bits) if options.exact else None,
    )


def model_digest(model: Path, weights: str) -> str:
    """Return a digest of what computes a KV cache. Call while the weights are loaded.

    It covers the files, the format of the weights (`weights`), the device, and the versions of mlx
    and mlx-lm. Raises DamagedModel and OSError.
    """
    parts = weights, device.device_name(), version("mlx"), version("mlx-lm"), files_digest(model)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
