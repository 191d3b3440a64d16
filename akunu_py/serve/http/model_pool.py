"""The served models, which share one memory limit.

A request uses its model while it runs. A model that does not fit next to the loaded ones waits
until the least recently used of them is idle and unloaded. All state belongs to the event loop.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from akunu_py.engine.engine import Engine
from akunu_py.engine.events import SharedPasses
from akunu_py.engine.host import ModelHost, State
from akunu_py.engine.job import ModelLoop
from akunu_py.errors import AkunuError, MemoryInUse
from akunu_py.serve.dialect.request_errors import RequestError, ServerStopping
from akunu_py.serve.dialect.service import Embedder, Service

_SAVE_S = 10.0  # for the prompt caches of a model; loading the next one takes about as long
_MAX_ENDING = 64
_LATEST = ":latest"  # Ollama's clients add it to names


class ServedModel:
    """A model of the server, loaded or not."""

    def __init__(
        self,
        names: Sequence[str],  # accepted in requests; the model's own name first
        load: Callable[[int], ModelLoop],  # bytes reserved for other models; see `ModelHost`
        make_service: Callable[[Engine, str], Service],  # for the loaded engine and its name
        *,
        idle_s: float | None = None,  # see `ModelHost`
        context_length: int = 0,  # the model's own maximum, in tokens
    ) -> None:
        self.names = tuple(names)
        self.requests = 0  # that use the model now
        self.last_use = 0  # sequence number of the last request
        self.loads = 0
        self.reserved = 0  # bytes for other models at the next load
        self.unloading = False  # no new request may use the model
        self.embeds = False  # see `ModelPool`
        # Ids of requests that akunu's own clients want to end early, with the text so far.
        self.ending: deque[str] = deque(maxlen=_MAX_ENDING)
        self.make_service = make_service
        self.may_unload = idle_s is not None  # while no other model needs its memory
        self.context_length = context_length  # of the loaded model, if any
        self._created = int(time.time())
        self._service: Service | None = None
        self.host = ModelHost(lambda: load(self.reserved), idle_s=idle_s, on_state=self._on_state)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def is_ready(self) -> bool:
        """Whether a request can use the model at once."""
        return self.host.engine is not None and not self.unloading

    @property
    def memory(self) -> int:
        """The bytes that the loaded model may use."""
        engine = self.host.engine
        return 0 if engine is None else engine.plan.memory

    def _on_state(self, state: State) -> None:
        self.loads += state == "ready"
        if state == "unloaded":
            self._service = None

    def service(self) -> Service:
        """Return the service, after loading the model if needed; raises what loading raises."""
        self.host.start()
        engine = self.host.engine or self.host.call(lambda engine: engine).result()
        if self._service is None or self._service.engine is not engine:
            self._service = replace(self.make_service(engine, self.name), ending=self.ending)
            self.context_length = engine.plan.context_length
        return self._service

    def embedder(self) -> Embedder:
        return Embedder(self.name, self.host)

    def description(self) -> dict[str, Any]:
        """Return the model in the format of OpenAI's and Anthropic's model lists."""
        facts = self.host.facts
        date = datetime.fromtimestamp(self._created, UTC).isoformat().replace("+00:00", "Z")
        return {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "akunu",
            "type": "model",
            "display_name": self.name,
            "created_at": date,
            "context_length": self.context_length,
            "embeds": self.embeds,
            "state": self.host.state,
            "not_batched": None if facts is None else facts.not_batched,
            "drafter": None if facts is None else facts.drafter,
            "acceptance": [] if facts is None else facts.acceptance,
        }

    async def unload(self) -> None:
        """Unload the model, which no request may use. Its next load begins at once."""
        self._service = None  # it refers to the model
        await asyncio.wrap_future(self.host.unload(_SAVE_S))


def _not_found(message: str) -> RequestError:
    return RequestError(message, 404, param="model", code="model_not_found")


def _unknown(name: str, models: Sequence[ServedModel], option: str = "--model") -> RequestError:
    served = ", ".join(model.name for model in models)
    return _not_found(
        f"this server serves {served}, not {name[:100]!r}; request {models[0].name}, or start the "
        f"server with: akunu serve {option} NAME"
    )


class ModelPool:
    """The models of the server."""

    def __init__(self, models: Sequence[ServedModel], embedding: ServedModel | None = None) -> None:
        """embedding: the model for embeddings; it shares no name with the others."""
        self.models = tuple(models)
        self.embedding = embedding
        self.all_models = self.models if embedding is None else (*models, embedding)
        if embedding is not None:
            embedding.embeds = True
        self._by_name = {name: model for model in self.all_models for name in model.names}
        self._waiting: list[tuple[ServedModel, asyncio.Future[None]]] = []  # in order of arrival
        self._loader: asyncio.Task[None] | None = None  # loads one model after the other
        self._changed = asyncio.Event()  # a request ended, or stopped waiting
        self._uses = 0
        self._closing = False

    def model_for(
        self, name: str | None, *, embeds: bool = False, strict: bool = False
    ) -> ServedModel:
        """Return the model that answers a request; the first one for an unknown name.

        Agents request names such as claude-haiku, and an error would end their session. embeds:
        return the embedding model. strict: raise RequestError for an unknown name.
        """
        models = self.models if not embeds else () if self.embedding is None else (self.embedding,)
        if not models:
            raise _not_found("no embedding model; start the server with --embedding-model NAME")
        if name is None or not name.strip():
            return models[0]
        found = self._find(name)
        if found in models:
            return found
        if strict:
            raise _unknown(name, models, "--embedding-model" if embeds else "--model")
        return models[0]

    def get(self, name: str) -> ServedModel:
        """Return the model with a name. Raises RequestError if there is none."""
        if found := self._find(name):
            return found
        raise _unknown(name, self.models)

    def _find(self, name: str) -> ServedModel | None:
        return self._by_name.get(name) or self._by_name.get(name.removesuffix(_LATEST))

    @contextlib.asynccontextmanager
    async def use(self, model: ServedModel) -> AsyncIterator[ServedModel]:
        """Load a model if needed; keep it loaded in the block. Raises what loading raises."""
        self._uses += 1
        model.last_use = self._uses
        await self._admit(model)
        try:
            yield model
        finally:
            model.requests -= 1
            self._changed.set()

    async def _admit(self, model: ServedModel) -> None:
        """Wait until a request may use the model, and count it."""
        if self._closing:
            raise ServerStopping
        if model.is_ready:
            model.requests += 1
            return
        admitted = asyncio.get_running_loop().create_future()
        entry = model, admitted
        self._waiting.append(entry)
        if self._loader is None or self._loader.done():
            self._changed = asyncio.Event()
            self._loader = asyncio.create_task(self._load_waiting())
        try:
            await admitted  # the loader counts the request
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled() and not admitted.exception():
                model.requests -= 1
            raise
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)
            self._changed.set()

    def release(self, model: ServedModel) -> None:
        """Unload a model that no request uses, unless another one is being loaded."""
        if self._loader is None or self._loader.done():
            self._loader = asyncio.create_task(self._release(model))

    async def _release(self, model: ServedModel) -> None:
        """Unload a model, then load those that requests wait for."""
        if model.is_ready and model.may_unload and not model.requests:
            model.unloading = True
            try:
                await model.unload()
            finally:
                model.unloading = False
        await self._load_waiting()

    async def _load_waiting(self) -> None:
        """Load the models that requests wait for, in the order of the first request of each."""
        while self._waiting:
            model = self._waiting[0][0]
            error: Exception | None = None
            try:
                await self._load(model)
            except AkunuError as failure:
                error = RequestError(f"cannot load {model.name}: {failure}", 503)
            except Exception as failure:  # noqa: BLE001 - for the requests
                error = failure
            self._admit_waiting(model, error)

    def _admit_waiting(self, model: ServedModel, error: Exception | None) -> None:
        entries = [entry for entry in self._waiting if entry[0] is model]
        self._waiting = [entry for entry in self._waiting if entry[0] is not model]
        for _, admitted in entries:
            if admitted.done():  # the client disconnected
                continue
            if error is None:
                model.requests += 1
                admitted.set_result(None)
            else:
                admitted.set_exception(error)

    def _is_wanted(self, model: ServedModel) -> bool:
        return any(each is model and not admitted.done() for each, admitted in self._waiting)

    async def _load(self, model: ServedModel) -> None:
        """Load a model, and unload others while it does not fit next to them."""
        while self._is_wanted(model) and not model.is_ready:
            if self._closing:
                raise ServerStopping
            loaded = [each for each in self.all_models if each is not model and each.memory]
            model.reserved = sum(each.memory for each in loaded)
            model.host.start()
            try:
                await asyncio.wrap_future(model.host.call(lambda engine: None))
                return
            except MemoryInUse:
                pass
            await model.unload()  # so that it loads at once
            least = min(loaded, key=lambda each: (each.requests > 0, each.last_use))
            await self._unload(least, model)

    async def _unload(self, model: ServedModel, wanted: ServedModel) -> None:
        """Unload a model once its requests end, unless no request waits for `wanted`."""
        model.unloading = True  # new requests wait, so that the running ones can end
        try:
            while model.requests and self._is_wanted(wanted) and not self._closing:
                self._changed.clear()
                await self._changed.wait()
            if not model.requests:
                await model.unload()
        finally:
            model.unloading = False

    def close(self, finish_s: float = 0.0) -> bool:
        """Close the models' threads, see `ModelHost.close`; return False if one is still busy."""
        self._closing = True
        with ThreadPoolExecutor(len(self.all_models)) as threads:
            return all(threads.map(lambda model: model.host.close(finish_s), self.all_models))

    def abandon(self, why: AkunuError) -> None:
        """Fail all requests now; see `ModelHost.abandon`."""
        self._closing = True
        for model in self.all_models:
            model.host.abandon(why)

    def metrics(self) -> dict[str, dict[str, int]]:
        """Return the metrics of each model, by its name."""
        waiting = [model for model, _ in self._waiting]
        found = {}
        for model in self.all_models:
            facts = model.host.facts
            acceptance = facts.acceptance if facts else ()
            found[model.name] = {
                "model_loaded": int(model.host.engine is not None),
                "model_batched": int(facts is not None and facts.not_batched is None),
                "model_acceptance_percent": round(100 * acceptance[0]) if acceptance else 0,
                "model_loads_total": model.loads,
                "model_requests": model.requests + waiting.count(model),
            }
        return found

    @property
    def shared(self) -> SharedPasses:
        """The counters of shared passes of all models, without the embedding model."""
        return sum((model.host.shared for model in self.models), SharedPasses())
