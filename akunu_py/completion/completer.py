"""Completions from a model. A completer belongs to the thread that uses it."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from akunu_py.completion.completion_request import (
    CompleteOptions,
    Completion,
    CompletionReason,
    CompletionRequest,
    EndCheck,
    finished,
    has_crlf,
    with_crlf,
    with_unix_newlines,
)
from akunu_py.completion.prompt.layout import (
    CodeTokens,
    Names,
    Prompt,
    find_family,
    load_families,
    make_prompt,
    name_files,
    relative,
)
from akunu_py.completion.prompt.related import RelatedFiles, names_near
from akunu_py.completion.stops import CompletionStops, Cut, is_markdown, strip_fence
from akunu_py.engine.drafters.learned_state import LearnedState
from akunu_py.engine.engine import Engine
from akunu_py.engine.events import Event, PrefillProgress, PromptProcessed, TextDelta
from akunu_py.engine.job import RunningJob
from akunu_py.engine.loop import StepLoop
from akunu_py.engine.model import device
from akunu_py.engine.request import Request, Status, Step
from akunu_py.types import GenerateOptions, SamplingOptions, Stats

_REPLACEMENT = "\ufffd"  # decoded from invalid bytes
_SECTION = 12  # tokens of the format around a piece of another file
_CHEAP = 64  # tokens of the buffer that may need prefill again
_CACHES_DIVISOR = 16  # prompt caches use at most 1/16 of the machine's memory
_DEFAULT = CompleteOptions()
_GREEDY = SamplingOptions()
_SLICE_S = 0.1  # maximum duration of a prefill chunk, to notice time limits and new requests


class Completer:
    """Completes one request after the other, with a prompt cache."""

    def __init__(
        self,
        engine: Engine,
        options: CompleteOptions = _DEFAULT,
        learned: LearnedState | None = None,
        loop: StepLoop | None = None,
    ) -> None:
        """learned: source of drafts; completions are not added, as each keystroke repeats them.

        Raises UsageError if the model lacks the format in `options`.
        """
        self.code = CodeTokens(engine.tokens.tokenizer, engine.tokens.vocabulary)
        # None if the model was not trained to fill in the middle.
        self.family = find_family(options.fim, self.code, engine.name)
        families = [self.family] if self.family else load_families().values()
        markers = [token for family in families for token in family.stop]
        stops = engine.tokens.stop_tokens | self.code.marker_ids(markers)
        self.engine = replace(engine, tokens=replace(engine.tokens, stop_tokens=stops))
        self.conversation = secrets.token_hex(8)  # of its requests, for the drafter
        self.options = options.fitting(engine.plan.context_length)
        self._related = RelatedFiles()
        self.loop = loop or StepLoop(self.engine, learned, 1, chunk_seconds=_SLICE_S)

    def begin(
        self,
        loop: StepLoop,
        request: CompletionRequest,
        ended: EndCheck,
        on_text: Callable[[str], None],
        sampling: SamplingOptions = _GREEDY,
    ) -> RunningJob:
        """Begin the completion.

        ended: polled around every step. on_text: gets the final parts. sampling: options except
        the temperature. Raises UsageError for a temperature out of range.
        """
        text = request.prefix + (request.suffix if self.family else "")
        if ended() == "cancelled":
            return EmptyCompletion("cancelled")
        if not text.strip():  # models would invent some
            return EmptyCompletion("stop")
        return CompletionRun(self, loop, request, ended, on_text, sampling)

    def prompt(self, request: CompletionRequest, loop: StepLoop | None = None) -> Prompt:
        """Return the prompt for `request`. loop: has the cached prefix (default: own)."""
        names = name_files(request.path, request.language, request.root)
        files = [
            (relative(file.path, names.root), file.text.replace("\r\n", "\n"))  # as in the buffer
            for file in request.files
            if not request.path or file.path != request.path
        ]
        prompt = self._make_prompt(request, names, files)
        if files and self.options.file_tokens and self.family and self.family.file:
            cached, _ = (loop or self.loop).runner.caches.best(prompt.tokens)
            if self._choose_related(request, files, prompt.ahead, cached):
                prompt = self._make_prompt(request, names, files)
        return prompt

    def _choose_related(
        self, request: CompletionRequest, files: list[tuple[str, str]], ahead: int, cached: int
    ) -> bool:
        """Choose the pieces of other files again if that adds no latency; return True if it did.

        It adds none if the buffer needs prefill from its start anyway, or if no client waits
        (`max_tokens` is 0). The first choice is always made. `fresh_tokens` limits the choice while
        a client waits.
        ahead: prompt tokens before the buffer. cached: cached prompt tokens.
        """
        related, waits = self._related, request.max_tokens > 0
        near = names_near(request.prefix, request.suffix, request.recent)
        if (
            cached >= ahead + _CHEAP
            and related.sections()
            and (waits or related.covers(files, near))
        ):
            return False
        budget = self.options.file_tokens
        fresh = min(budget, self.options.fresh_tokens) if waits else budget
        related.update(
            files, near, lambda text: len(self.code.encode(text)) + _SECTION, budget, fresh, cached
        )
        return True

    def _make_prompt(
        self, request: CompletionRequest, names: Names, files: list[tuple[str, str]]
    ) -> Prompt:
        formats = self.code, self.family, self.options
        related = self._related.sections() if files else []  # not those of another request
        prompt = make_prompt(*formats, request.prefix, request.suffix, names, files, related)
        if not prompt.tokens:  # nothing fits the budget, and the model has no BOS token
            prompt = replace(prompt, tokens=sorted(self.engine.tokens.stop_tokens)[:1])
        return prompt


@dataclass(frozen=True, slots=True)
class EmptyCompletion:
    """A completion that needs no pass, as a `RunningJob`."""

    reason: CompletionReason
    request: ClassVar[None] = None

    def add(self, steps: Sequence[Step]) -> list[Event]:
        return [finished(Completion("", self.reason, Stats()))]


class CompletionRun:
    """A completion that the model makes: token healing takes some requests of its own."""

    def __init__(
        self,
        completer: Completer,
        loop: StepLoop,
        request: CompletionRequest,
        ended: EndCheck,
        on_text: Callable[[str], None],
        sampling: SamplingOptions,
    ) -> None:
        self._completer = completer
        self._loop = loop
        self._crlf = has_crlf(request)  # models get LF newlines
        request = with_unix_newlines(request) if self._crlf else request
        self._request = request
        self._ended = ended
        self._on_text = on_text
        self._new: list[Event] = []  # text since the last step
        self._sampling = replace(sampling, temperature=request.temperature)
        self._prompt = completer.prompt(request, loop)
        self._stops = CompletionStops(request)
        self._stats = Stats(prompt_tokens=len(self._prompt.tokens))
        fenced = completer.family is not None and completer.family.fenced
        self._fenced = fenced and not is_markdown(request.path, request.language)
        self._tokens = self._prompt.tokens  # of the next request
        self._healed = self._prompt.healed  # end of the prefix that the model samples again
        self._output = ""  # of the model, after the cursor
        self._cut = Cut("")
        self._reason: CompletionReason | None = None
        self._out_of_tokens = False
        self._begun = False
        self.request: Request | None = None  # the request that runs now, None at the end
        self._begin_next()

    def _begin_next(self) -> None:
        """Begin the next request: one token for each step of token healing, then the rest."""
        sampling, shared = self._sampling, self._completer.options
        max_tokens = max(1, self._request.max_tokens)
        if self._healed:
            allowed = self._completer.code.compatible_tokens(self._healed)
            sampling, max_tokens = replace(sampling, allowed_tokens=allowed), 1
        options = GenerateOptions(
            max_tokens,
            shared.draft,
            shared.draft_tokens,
            sampling,
            stop_tokens=tuple(self._completer.engine.tokens.stop_tokens),
            may_store=False,
            conversation=self._completer.conversation,
        )
        self.request = self._loop.request(self._tokens, options, self._prompt.draft_context)

    def add(self, steps: Sequence[Step]) -> list[Event]:
        """Add the results of a step of `request`; return progress, new text and the end."""
        request, events = self.request, list[Event]()
        assert request is not None
        for step in steps:
            if self._reason and not isinstance(step, PrefillProgress):
                break
            events += self._add(request, step)
        if self._reason and self._begun:
            self._loop.runner.close(request)
        if request.status is Status.FINISHED:
            self._end_request(request)
        end = [finished(self._complete())] if self.request is None else []
        events += [*self._new, *end]
        self._new.clear()
        return events

    def _add(self, request: Request, step: Step) -> list[Event]:
        if isinstance(step, PrefillProgress):
            self._check(request, step)
            return [step]
        if not self._healed:
            self._append(step.text)
        if self._reason is None:
            self._check(request, step)
        if self._begun:
            return []
        self._begun = True
        return [PromptProcessed(len(self._prompt.tokens), request.stats.cached_tokens)]

    def _check(self, request: Request, step: Step) -> None:
        """Cancel the request at a reason to end, or after the prefill for max_tokens 0."""
        if self._reason is None:
            self._reason = self._ended()
        prefilled = isinstance(step, PrefillProgress) and step.done == step.total
        if self._reason is None and prefilled and not self._request.max_tokens:
            self._reason = "length"
        if self._reason:
            request.cancel()

    def _end_request(self, request: Request) -> None:
        self.request = None
        if self._reason is None and request.finish_reason == "cancelled":
            self._reason = "cancelled"
        part = replace(request.stats, prompt_tokens=0, known_tokens=0)
        if self._stats.generated_tokens:  # its first token comes from a pass, not from the prefill
            part = replace(part, cached_tokens=0, target_passes=part.target_passes + 1)
        self._stats.include(part)
        if not self._healed:
            self._out_of_tokens = request.finish_reason in ("length", "context")
            return
        if not request.tokens:
            return
        sampled = self._completer.code.text(request.tokens[-1])
        self._append(sampled[len(self._healed) :])
        self._healed = self._healed[len(sampled) :]
        self._tokens = [*self._tokens, *request.tokens]
        if self._reason is None:
            self._begin_next()

    def _append(self, text: str) -> None:
        whole, broken, _ = text.partition(_REPLACEMENT)
        self._output += whole
        self._update()
        if broken and self._reason is None:
            self._reason = "stop"

    def _update(self, *, final: bool = False) -> None:
        closed = False
        code = self._output
        if self._fenced:
            code, closed = strip_fence(code, final=final)
        cut = self._stops.cut(code, final=final or closed)
        if new := cut.text[len(self._cut.text) :]:
            new = new.replace("\n", "\r\n") if self._crlf else new
            self._on_text(new)
            self._new.append(TextDelta(new))
        self._cut = replace(cut, done=cut.done or closed)
        if self._cut.done:
            self._reason = "length" if cut.full else "stop"

    def _complete(self) -> Completion:
        """Return the completion, the best text so far if nothing else ended it."""
        if not self._cut.done:
            reason = self._reason
            self._update(final=True)
            self._reason = reason or self._reason or ("length" if self._out_of_tokens else "stop")
        assert self._reason is not None
        draft_only = sum(len(tokens) for tokens in self._prompt.draft_context)
        made = Completion(self._cut.text, self._reason, self._stats, draft_only)
        return with_crlf(made) if self._crlf else made


def with_small_caches(engine: Engine) -> Engine:
    """Return the engine with a low limit of prompt caches, for a helper that always runs."""
    plan = engine.plan
    memory = min(plan.prompt_cache_memory, device.total_memory() // _CACHES_DIVISOR)
    return replace(engine, plan=replace(plan, prompt_cache_memory=memory))
