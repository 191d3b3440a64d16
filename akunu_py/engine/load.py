"""Load an engine and its learned state by name; MLX is imported once the model is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from akunu_py.errors import ModelError, UsageError
from akunu_py.models.store import model_store
from akunu_py.settings import Settings, load_settings, settings_file
from akunu_py.text import parse_size, print_warnings, say
from akunu_py.types import DEFAULT_MODEL, LoadOptions, WireMode

if TYPE_CHECKING:
    from akunu_py.engine.drafters.learned_state import LearnedState
    from akunu_py.engine.engine import Engine


def find_model(requested: str | None, default: str, source: str = "") -> model_store.StoredModel:
    """Return the model `requested`, or `default`. Raises UnknownModel, DamagedModel.

    source: where `default` is from, for errors; the settings file if empty.
    """
    try:
        return model_store.check(model_store.resolve(requested or default))
    except ModelError as error:
        if requested or default == DEFAULT_MODEL:
            raise
        raise type(error)(f"{source or settings_file()}: {error}") from error


def load_engine(model: str | None, options: LoadOptions) -> Engine:
    """Load a model by name or directory (None: the default). Prints memory warnings to stderr."""
    engine = load_stored(find_model(model, load_settings().model), options)
    print_warnings(filter(None, [engine.plan.fit.note]))
    return engine


def open_model(
    model: model_store.StoredModel | str | None,
    options: LoadOptions,
    *,
    answer_cache: bool,
    settings: Settings | None = None,
    warnings: list[str] | None = None,
    prints_note: bool = True,
) -> tuple[Engine, LearnedState]:
    """Load a model with its learned state. None is the model in the settings.

    answer_cache: store answers and prompt caches, if the settings allow it. settings: read from the
    file if None. warnings: see `LearnedState`. prints_note: print the note about memory to stderr.
    """
    settings = settings or load_settings()
    if not isinstance(model, model_store.StoredModel):
        model = find_model(model, settings.model)
    engine = load_stored(model, options, settings)
    if prints_note:
        print_warnings(filter(None, [engine.plan.fit.note]))
    from akunu_py.engine.drafters.learned_state import LearnedState
    from akunu_py.engine.histories.prompt_cache_store import DiskLimits
    from akunu_py.engine.model import device

    keep = settings.answer_cache and answer_cache
    disk_bytes = parse_size(settings.prompt_cache_disk)
    layout, limits = f"{engine.plan.weights} on {device.device_name()}", None
    if engine.own_kernels:
        layout += ", own kernels"
    if engine.host_group is not None:  # the network changes the costs of a forward pass
        layout += f", {engine.host_group.split} among {engine.host_group.hosts.size}"
    elif keep and disk_bytes:  # caches of other hosts are not on this disk
        limits = DiskLimits(disk_bytes)
    digest = engine.tokens.digest
    return engine, LearnedState(
        engine.path, digest, layout, answer_cache=keep, disk_limits=limits, warnings=warnings
    )


def load_stored(
    found: model_store.StoredModel, options: LoadOptions, settings: Settings | None = None
) -> Engine:
    """Load an installed model. settings: read from the file if None."""
    model_store.check(found)
    if found.kind:
        raise UsageError(
            f"{found.name} is a drafter ({found.kind}), which cannot answer; name its model as "
            f"--model, and {found.name} as --draft-model"
        )
    from akunu_py.engine.engine import Engine

    settings = settings or load_settings()
    options = with_settings(options, settings)
    if options.hosts:
        return _load_partitioned(options.hosts, found, options)
    load = partial(Engine.load, found.path, options, name=found.name)
    if options.draft_model:
        return load(draft_model=_draft_model(options.draft_model))
    default = found.drafter or settings.draft_model if options.draft_model is None else ""
    return _load_with_default_draft_model(load, found.path, default)


def _load_partitioned(hosts: str, found: model_store.StoredModel, options: LoadOptions) -> Engine:
    """Load a model on several hosts, without neural drafters."""
    from akunu_py.engine.engine import Engine
    from akunu_py.engine.hosts.host_group import HostGroup
    from akunu_py.engine.hosts.hostfile import read_hosts

    host_group = HostGroup(read_hosts(hosts), found, options)
    try:
        options = replace(options, weights=host_group.weights, kv_bits=None)
        engine = Engine.load(found.path, options, name=found.name, host_group=host_group)
    except BaseException:
        host_group.close()
        raise
    for rank, partition in enumerate(host_group.partitions):
        say(f"akunu: {host_group.hosts.label(rank)} holds {partition}", error=True)
    return engine


def _load_with_default_draft_model(load: Callable[..., Engine], path: Path, default: str) -> Engine:
    """Load with the draft model of the settings; if that fails, load without it and note why."""
    try:
        small = _draft_model(default) if default else None
        return load() if small is None or small[1] == path else load(draft_model=small)
    except (UsageError, ModelError) as error:
        engine = load()
        fit = engine.plan.fit
        note = fit.note or f"the draft model {default} is not used: {error}"
        return replace(engine, plan=replace(engine.plan, fit=replace(fit, note=note)))


def _draft_model(name: str) -> tuple[str, Path]:
    small = model_store.resolve(name)
    model_store.check(small)
    return small.name, small.path


def with_settings(options: LoadOptions, settings: Settings) -> LoadOptions:
    """Fill in the memory limits of the settings where the options set none."""
    if settings.prompt_cache_memory and options.prompt_cache_memory is None:
        options = replace(options, prompt_cache_memory=parse_size(settings.prompt_cache_memory))
    if settings.memory_limit and options.memory_limit is None:
        options = replace(options, memory_limit=parse_size(settings.memory_limit))
    if options.wire is None:
        options = replace(options, wire=cast(WireMode, settings.wire))
    return options
