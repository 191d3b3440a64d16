"""A model whose completions a function makes."""

from collections.abc import Callable, Sequence

from akunu_py.completion.completion_queue import CompletionJob
from akunu_py.completion.completion_request import Completion, CompletionRequest, EndCheck, finished
from akunu_py.engine.events import Event, Failed, LoadedModelFacts, SharedPasses
from akunu_py.engine.job import JobHandle
from akunu_py.types import Stats

Complete = Callable[[CompletionRequest, EndCheck, Callable[[str], None]], Completion]


class ScriptedLoop:
    """Runs one completion in a step; see `ModelLoop`."""

    engine = None
    shared = SharedPasses()
    slots = 1

    def __init__(self, name: str, complete: Complete) -> None:
        self.facts = LoadedModelFacts(name, "", 0, None, "")
        self._complete = complete

    def step(self, jobs: Sequence[JobHandle]) -> list[tuple[JobHandle, list[Event]]]:
        handle = jobs[0]
        job = handle.job
        assert isinstance(job, CompletionJob)
        try:
            return [(handle, [finished(self._complete(job.request, job.ended, job.on_text))])]
        except Exception as error:  # noqa: BLE001 - as of a model
            return [(handle, [Failed(error)])]

    def idle_step(self, stopped: Callable[[], bool], seconds: float | None) -> bool:
        return False

    def close(self) -> None:
        pass


class RecordingLoop(ScriptedLoop):
    """Completes each request with "text", and records it in `made`."""

    def __init__(self) -> None:
        super().__init__("recording", self.complete)
        self.made: list[CompletionRequest] = []

    def complete(self, request: CompletionRequest, *_: object) -> Completion:
        self.made.append(request)
        return Completion("text", "stop", Stats())
