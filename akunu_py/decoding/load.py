"""From the name of a model to a loaded engine and its learned state.

MLX is imported when a model was found: that takes a second, which no mistake should wait for.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from akunu_py import paths
from akunu_py.arguments import loading_from
from akunu_py.errors import DamagedModel, DoesNotFit, UnknownModel, UnsupportedModel, UsageError
from akunu_py.models.store import store
from akunu_py.models.store.store import note_usage
from akunu_py.settings import Settings, load_settings
from akunu_py.text import parse_size, print_warnings, say
from akunu_py.types import LoadOptions

if TYPE_CHECKING:
    from akunu_py.decoding.generate.session import Generation
    from akunu_py.decoding.learned import LearnedState
    from akunu_py.decoding.model.engine import Engine


def load_engine(model: str | None, options: LoadOptions) -> Engine:
    """Loads the model of that name or directory, the one in the settings for None.

    Prints to stderr what the user should know of its fit; see `Engine.load` for the rest.
    """
    found = store.resolve(model or load_settings().model)
    engine = load_found(found, options)
    print_warnings([engine.plan.fit.note] if engine.plan.fit.note else [])
    return engine


def engine_from(args: argparse.Namespace) -> Engine:
    """The engine that the common options ask for."""
    return load_engine(args.model, loading_from(args))


def load_found(
    found: store.StoredModel, options: LoadOptions, settings: Settings | None = None
) -> Engine:
    """Loads a model that was found, and notes that it was used and what its weights took.

    settings: None for those in the file.
    """
    store.check(found)
    import mlx.core as mx

    from akunu_py.decoding.model.engine import Engine

    settings = settings or load_settings()
    options = _with_settings(options, settings)
    before = mx.get_active_memory()
    if options.hosts:
        engine = _load_divided(options.hosts, found, options)
    elif options.draft_model:
        draft_model = _draft_model(options.draft_model)
        engine = Engine.load(found.path, options, name=found.name, draft_model=draft_model)
    else:
        wanted = settings.draft_model if options.draft_model is None else ""
        engine = _load_with_setting(found, options, wanted)
    mx.reset_peak_memory()  # of laying out the weights, which is not what a session takes
    if found.manifest is not None:
        note_usage(
            found.name,
            weights=engine.plan.weights,
            estimated_weights=engine.plan.fit.estimate.weights,
            measured_weights=mx.get_active_memory() - before,
        )
    return engine


def _load_divided(divided: str, found: store.StoredModel, options: LoadOptions) -> Engine:
    """Among hosts. What drafts is what this one alone can know: the texts."""
    from akunu_py.decoding.hosts.hostfile import read_hosts
    from akunu_py.decoding.hosts.ring import Ring
    from akunu_py.decoding.model.engine import Engine

    ring = Ring(read_hosts(divided), found, options)
    try:
        options = replace(options, weights=ring.weights, kv_bits=None)
        engine = Engine.load(found.path, options, name=found.name, ring=ring)
    except BaseException:
        ring.close()
        raise
    for rank, holds in enumerate(ring.holds):
        say(f"akunu: {ring.hosts.label(rank)} holds {holds}", error=True)
    return engine


def _load_with_setting(found: store.StoredModel, options: LoadOptions, wanted: str) -> Engine:
    """Load with the draft model of the settings, or note why the model goes without it."""
    from akunu_py.decoding.model.engine import Engine

    load = partial(Engine.load, found.path, options, name=found.name)
    try:
        small = _draft_model(wanted) if wanted else None
        if small is None or small[1] == found.path:
            return load()
        return load(draft_model=small)
    except (UsageError, UnknownModel, DamagedModel, UnsupportedModel, DoesNotFit) as error:
        engine = load()
        fit = engine.plan.fit
        note = fit.note or f"without the draft_model of the settings: {error}"
        return replace(engine, plan=replace(engine.plan, fit=replace(fit, note=note)))


def _draft_model(name: str) -> tuple[str, Path]:
    small = store.resolve(name)
    store.check(small)
    return small.name, small.path


def _with_settings(options: LoadOptions, settings: Settings) -> LoadOptions:
    given: dict[str, Any] = {
        name: parse_size(size)
        for name, size in (
            ("cache_memory", settings.cache_memory),
            ("memory", settings.memory_limit),
        )
        if size and getattr(options, name) is None
    }
    return replace(options, **given)


def note_peak(engine: Engine, generation: Generation) -> None:
    """Notes what an answer took at most, beside what was expected for as many tokens."""
    import mlx.core as mx

    tokens = generation.stats.prompt_tokens + generation.stats.generated_tokens
    if engine.path.parent == paths.models_dir() and tokens:
        note_usage(
            engine.name,
            tokens=tokens,
            estimated_peak=engine.plan.fit.at(tokens).total,
            measured_peak=mx.get_peak_memory(),
        )


def load_learned(
    engine: Engine, *, no_memory: bool, settings: Settings | None = None
) -> LearnedState:
    """The learned state of the engine's model from earlier runs. settings: None for those in the
    file."""
    from akunu_py.decoding import device
    from akunu_py.decoding.learned import LearnedState
    from akunu_py.decoding.prompt_cache.store import DiskLimits, PromptCacheStore

    settings = settings or load_settings()
    layout = f"{engine.plan.weights} on {device.device_name()}"
    if engine.ring is not None:  # passes cost otherwise with a network between
        layout += f", {engine.ring.division} among {engine.ring.hosts.size}"
    memory = settings.memory and not no_memory
    size = parse_size(settings.cache_disk)
    whole = engine.ring is None  # or the others' parts of a cache would have to be kept, too
    caches = PromptCacheStore(engine.path, DiskLimits(size)) if memory and size and whole else None
    return LearnedState(engine.path, engine.tokens.digest, layout, memory=memory, caches=caches)
