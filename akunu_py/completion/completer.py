"""Completions from a model. A completer belongs to the thread that uses it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace

from akunu_py.completion.completion_cache import CompletionCache
from akunu_py.completion.prompt.layout import (
    Budgets,
    CodeTokens,
    Names,
    Prompt,
    find_family,
    load_families,
    make_prompt,
    name_files,
    relative,
)
from akunu_py.completion.prompt.next_edit import (
    FORMATS,
    EditAnswer,
    find_edit_format,
    make_edit_prompt,
)
from akunu_py.completion.prompt.related import RelatedFiles, names_near
from akunu_py.completion.request import (
    CompleteOptions,
    Completion,
    CompletionReason,
    CompletionRequest,
    EndCheck,
    check_request,
    has_crlf,
    time_limit,
    with_crlf,
    with_unix_newlines,
)
from akunu_py.completion.stops import CompletionStops, Cut, is_markdown, strip_fence
from akunu_py.decoding.events import PrefillProgress, PromptProcessed
from akunu_py.decoding.generate import memory_guard
from akunu_py.decoding.generate.session import Generation, Session
from akunu_py.decoding.learned_state import LearnedState
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.token_ids import common_prefix
from akunu_py.errors import UsageError
from akunu_py.types import GenerateOptions, SamplingOptions, Stats, TextPiece

_RESERVED = 1024  # tokens of the context for the completion
_REPLACEMENT = "\ufffd"  # decoded from invalid bytes
_SECTION = 12  # tokens of the format around a piece of another file
_CHEAP = 64  # tokens of the buffer that may need prefill again
_DEFAULT = CompleteOptions()
_GREEDY = SamplingOptions()
_SLICE_S = 0.1  # maximum duration of a prefill chunk, to notice time limits and new requests


class Completer:
    """Completes one request after the other, with a prompt cache and a completion cache."""

    def __init__(
        self,
        engine: Engine,
        options: CompleteOptions = _DEFAULT,
        learned: LearnedState | None = None,
        session: Session | None = None,
    ) -> None:
        """learned: source of drafts; completions are not added, as each keystroke repeats them.

        Raises UsageError if the model lacks the format in `options`.
        """
        self.options = options
        self.code = CodeTokens(engine.tokens.tokenizer, engine.tokens.vocabulary)
        # None if the model was not trained to predict changes, or to fill in the middle.
        self.edit_format = find_edit_format(options.fim, self.code, engine.name)
        fim = "none" if self.edit_format else options.fim
        self.family = find_family(fim, self.code, engine.name)
        others = [family.stop for family in load_families().values()]
        others += [form.stop for form in FORMATS]
        ends = [self.family.stop] if self.family else others
        markers = tuple(token for stop in ends for token in stop)
        stops = engine.tokens.stop_tokens | self.code.marker_ids(markers)
        self.engine = replace(engine, tokens=replace(engine.tokens, stop_tokens=stops))
        self._learned = learned
        self._budgets = _budgets(options, engine.plan.context_length)
        self._cache = CompletionCache()
        self._related = RelatedFiles()
        if session is not None:
            self.session = self.share(session)
        else:
            self.session = Session(self.engine, learned)
            self.session.turn.chunk_seconds = _SLICE_S

    @property
    def name(self) -> str:
        """Return the name of the model."""
        return self.engine.name

    def release_under_pressure(self) -> None:
        """Release memory under pressure."""
        memory_guard.release_under_pressure(self.session.target.caches)

    def close(self) -> None:
        """Save the learned costs for the next run."""
        if self._learned is not None:
            self._learned.save_costs()

    def complete(
        self,
        request: CompletionRequest,
        ended: EndCheck | None = None,
        on_text: Callable[[str], None] = lambda text: None,
    ) -> Completion:
        """Return the completion; see `steps`."""
        steps = self.steps(self.session, request, ended, on_text)
        while True:
            try:
                next(steps)
            except StopIteration as last:
                completion: Completion = last.value
                return completion

    def share(self, session: Session) -> Session:
        """Return another session of the same model for `steps`."""
        return session.sharing(self.engine)

    def steps(
        self,
        session: Session,
        request: CompletionRequest,
        ended: EndCheck | None = None,
        on_text: Callable[[str], None] = lambda text: None,
        sampling: SamplingOptions = _GREEDY,
    ) -> Generator[PrefillProgress | PromptProcessed | None, None, Completion]:
        """Generate the completion; a step is a pass or a chunk of the prompt.

        ended: polled around every pass; returns the reason to end (default: the time limit of the
        request). on_text: gets the final parts. sampling: options except the temperature. Raises
        UsageError for an invalid request.
        """
        check_request(request)
        ended = ended or time_limit(request.seconds)
        crlf = has_crlf(request)
        unix = with_unix_newlines(request) if crlf else request
        emit = (lambda text: on_text(text.replace("\n", "\r\n"))) if crlf else on_text
        completion = self._cache.find(unix) if unix.max_tokens else None
        if completion is not None:
            if completion.text:
                emit(completion.text)
        elif not (unix.prefix + (unix.suffix if self.family or unix.edits else "")).strip():
            completion = Completion("", "stop", Stats())  # without text, models invent some
        else:
            run = _Run(self, session, unix, ended, emit, sampling)
            yield from run.steps()
            completion = run.finish()
            self._cache.add(unix, completion)
        return with_crlf(completion) if crlf else completion

    def recall(self, request: CompletionRequest) -> Completion | None:
        """Return the rest of an earlier completion whose beginning was typed. Thread-safe."""
        if not has_crlf(request):
            return self._cache.find(request)
        completion = self._cache.find(with_unix_newlines(request))
        return with_crlf(completion) if completion else None

    def edit_prompt(self, request: CompletionRequest) -> tuple[Prompt, EditAnswer]:
        """Return the prompt for the next change and the parser of its answer.

        Raises UsageError if the model was not trained to predict changes.
        """
        if self.edit_format is None:
            known = ", ".join(form.name for form in FORMATS)
            raise UsageError(
                f"{self.name} is not known to predict edits; choose a format with --fim: {known}"
            )
        names = name_files(request.path, request.language, request.root, ())
        return make_edit_prompt(self.code, self.edit_format, request, names)

    def prompt(self, request: CompletionRequest, session: Session | None = None) -> Prompt:
        """Return the prompt for `request`. session: has the cached prefix (default: own)."""
        session = session or self.session
        others = [file for file in request.files if not request.path or file.path != request.path]
        paths = [file.path for file in others]
        names = name_files(request.path, request.language, request.root, paths)
        files = [(relative(file.path, names.root), file.text) for file in others]
        prompt = self._make_prompt(request, names, files)
        if files and self._budgets.files and self.family and self.family.reads_files:
            cached = common_prefix(session.target.tokens, prompt.tokens)
            if self._choose_related(request, files, prompt.ahead, cached):
                prompt = self._make_prompt(request, names, files)
        return prompt

    def _choose_related(
        self, request: CompletionRequest, files: list[tuple[str, str]], ahead: int, cached: int
    ) -> bool:
        """Choose the pieces of other files again if that adds no latency; return True if it did.

        It adds none if the buffer needs prefill from its start anyway, or if no client waits.
        ahead: prompt tokens before the buffer. cached: cached prompt tokens.
        """
        related, waits = self._related, request.max_tokens > 0
        near = names_near(request.prefix, request.suffix, request.recent)
        if cached >= ahead + _CHEAP and related.chosen() and (waits or related.has(files, near)):
            return False
        budget = self._budgets.files
        fresh = min(budget, self.options.fresh_tokens) if waits else budget
        related.choose(files, near, self._section_tokens, budget, fresh, cached)
        return True

    def _section_tokens(self, text: str) -> int:
        return len(self.code.encode(text)) + _SECTION

    def _make_prompt(
        self, request: CompletionRequest, names: Names, files: list[tuple[str, str]]
    ) -> Prompt:
        formats = self.code, self.family, self._budgets
        related = self._related.chosen()
        prompt = make_prompt(*formats, request.prefix, request.suffix, names, files, related)
        if not prompt.tokens:  # nothing fits the budget, and the model has no BOS token
            prompt = replace(prompt, tokens=sorted(self.engine.tokens.stop_tokens)[:1])
        return prompt


class _Run:
    """One unfinished completion."""

    def __init__(
        self,
        completer: Completer,
        session: Session,
        request: CompletionRequest,
        ended: EndCheck,
        on_text: Callable[[str], None],
        sampling: SamplingOptions,
    ) -> None:
        self._completer = completer
        self._session = session
        self._request = request
        self._ended = ended
        self._on_text = on_text
        self._sampling = replace(sampling, temperature=request.temperature)
        self._edit: EditAnswer | None = None
        self._stops: CompletionStops | EditAnswer
        if request.edits is None:
            self._prompt = completer.prompt(request, session)
            self._stops = CompletionStops(request.prefix, request.suffix, request.max_lines)
        else:
            self._prompt, self._edit = completer.edit_prompt(request)
            self._stops = self._edit
        self._stats = Stats(prompt_tokens=len(self._prompt.tokens))
        fenced = completer.family is not None and completer.family.fenced
        self._fenced = fenced and not is_markdown(request.path, request.language)
        self._output = ""  # of the model, after the cursor
        self._cut = Cut("")
        self._reason: CompletionReason | None = None
        self._out_of_tokens = False
        self._begun = False

    def steps(self) -> Generator[PrefillProgress | PromptProcessed | None]:
        """Generate up to the end of the completion; `finish` returns it."""
        code, tokens = self._completer.code, self._prompt.tokens
        healed = self._prompt.healed
        while healed and self._reason is None:
            # Token healing: the model samples the end of the prefix again.
            generation = self._generation(tokens, 1, code.compatible_tokens(healed))
            yield from self._generate(generation, healing=True)
            if not generation.tokens:
                return
            sampled = code.text(generation.tokens[-1])
            self._append(sampled[len(healed) :])
            healed = healed[len(sampled) :]
            tokens = [*tokens, *generation.tokens]
        if self._reason is None:
            room = self._edit.room if self._edit else max(1, self._request.max_tokens)
            last = self._generation(tokens, room)
            yield from self._generate(last)
            self._out_of_tokens = last.finish_reason in ("length", "context")

    def _generation(
        self, tokens: list[int], max_tokens: int, allowed_tokens: tuple[int, ...] = ()
    ) -> Generation:
        """Start a generation after `tokens`. allowed_tokens: empty allows all."""
        shared = self._completer.options
        sampling = replace(self._sampling, allowed_tokens=allowed_tokens)
        options = GenerateOptions(
            max_tokens, shared.draft, shared.draft_tokens, sampling, remember=False
        )
        return self._session.generate(tokens, options, self._prompt.draft_context)

    def _generate(
        self, generation: Generation, *, healing: bool = False
    ) -> Generator[PrefillProgress | PromptProcessed | None]:
        """Generate up to the end of the completion. With `healing`, the caller adds the text."""
        for step in generation.steps():
            if not isinstance(step, PrefillProgress) and not healing:
                self._append(step.text)
            if self._reason is None:
                self._check(generation, step)
            if self._reason and not isinstance(step, PrefillProgress):
                break
            if isinstance(step, PrefillProgress) or self._begun:
                yield step if isinstance(step, PrefillProgress) else None
            else:
                self._begun = True
                yield PromptProcessed(len(self._prompt.tokens), generation.stats.cached_tokens)
        if self._reason is None and generation.finish_reason == "cancelled":
            self._reason = "cancelled"
        _add(self._stats, generation.stats)

    def _check(self, generation: Generation, step: PrefillProgress | TextPiece) -> None:
        """Cancel the generation at a reason to end, or after the prefill for max_tokens 0."""
        self._reason = self._ended()
        prefilled = isinstance(step, PrefillProgress) and step.done == step.total
        if self._reason is None and prefilled and not self._request.max_tokens:
            self._reason = "length"
        if self._reason:
            generation.cancel()

    def _append(self, text: str) -> None:
        whole, broken, _ = text.partition(_REPLACEMENT)
        self._output += whole
        self._update()
        if broken and self._reason is None:
            self._reason = "stop"

    def _update(self, *, final: bool = False) -> None:
        """Cut the output to the completion, and emit its new part."""
        closed = False
        code = self._output
        if self._fenced:
            code, closed = strip_fence(code, final=final)
        cut = self._stops.cut(code, final=final or closed)
        if len(cut.text) > len(self._cut.text):
            self._on_text(cut.text[len(self._cut.text) :])
        self._cut = replace(cut, done=cut.done or closed)
        if self._cut.done:
            self._reason = "length" if cut.full else "stop"

    def finish(self) -> Completion:
        """Return the completion, the best text so far if nothing else ended it."""
        if not self._cut.done:
            reason = self._reason
            self._update(final=True)
            self._reason = reason or self._reason or ("length" if self._out_of_tokens else "stop")
        assert self._reason is not None
        draft_only = sum(len(tokens) for tokens in self._prompt.draft_context)
        stopped = self._reason == "stop"
        change = self._edit.change(self._output) if self._edit and stopped else None
        return Completion(self._cut.text, self._reason, self._stats, draft_only, change=change)


def _budgets(options: CompleteOptions, context: int) -> Budgets:
    """Return the budgets, scaled down so that prompt and completion fit the context."""
    wanted = options.prefix_tokens, options.suffix_tokens
    if min(*wanted, options.file_tokens) < 0 or options.prefix_tokens < 1:
        raise UsageError(
            "the token budgets must be 0 or more, and 1 or more for the prefix, got "
            f"{(*wanted, options.file_tokens)}"
        )
    # 256 tokens for the format, including paths.
    room = max(16, context - min(_RESERVED, context // 4) - 256)
    share = min(1.0, room / sum(wanted))
    prefix, suffix = (int(tokens * share) for tokens in wanted)
    return Budgets(prefix, suffix, min(options.file_tokens, max(0, room - prefix - suffix)))


def _add(total: Stats, part: Stats) -> None:
    """Add the statistics of a generation; token healing takes several."""
    if total.generated_tokens == 0:
        total.cached_tokens = part.cached_tokens
    else:
        total.target_passes += 1  # its first token comes from a pass, not from the prefill
    counts = ("generated_tokens", "target_passes", "drafted", "accepted", "prefill_s", "decode_s")
    for name in counts:
        setattr(total, name, getattr(total, name) + getattr(part, name))
