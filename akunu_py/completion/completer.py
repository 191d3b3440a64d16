"""From a cursor in a buffer to the text that belongs there.

A completer belongs to the thread that uses it, as its session does; protocols and threads are the
adapters' business (`jsonl`, `lsp`, `filter`, `thread`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from akunu_py.completion.fence import is_markdown, unfenced
from akunu_py.completion.fim import find_family, load_families
from akunu_py.completion.prompt import Budgets, Prompt, make_prompt
from akunu_py.completion.recall import Recall
from akunu_py.completion.stops import CompletionStops, Cut
from akunu_py.completion.tokens import CodeTokens
from akunu_py.completion.types import (
    Completion,
    CompletionReason,
    CompletionRequest,
    SourceFile,
    check_request,
)
from akunu_py.decoding.engine import Engine
from akunu_py.decoding.learned import LearnedState
from akunu_py.decoding.session import Generation, Session
from akunu_py.errors import UsageError
from akunu_py.types import (
    DEFAULT_DRAFT_TOKENS,
    DraftMode,
    GenerateOptions,
    SamplingOptions,
    Stats,
)

__all__ = ["CompleteOptions", "Completer", "Completion", "CompletionRequest", "SourceFile"]

_ANSWER = 1024  # tokens of the context that are left for what is said
_HALF = "\ufffd"  # what bytes that make no character are decoded to
_PATH = 200  # characters of a path that the model reads, its end


@dataclass(frozen=True, slots=True)
class CompleteOptions:
    """How to complete, the same for all requests of a completer.

    fim: the name of a fill-in-the-middle family, "none" for plain continuation, "auto" to
    recognise it. prefix_tokens, suffix_tokens, file_tokens: what the model reads of each at most;
    less where its context is short.
    """

    fim: str = "auto"
    prefix_tokens: int = 1536
    suffix_tokens: int = 512
    file_tokens: int = 512
    draft: DraftMode = "auto"
    draft_tokens: int = DEFAULT_DRAFT_TOKENS


class Completer:
    """Completes at cursors, one request after the other, and remembers from one to the next: what
    the model has read, what was drafted from, and what was said.

    family: how the model is asked to fill in the middle, None where it continues the prefix.
    """

    def __init__(
        self,
        engine: Engine,
        options: CompleteOptions = CompleteOptions(),
        learned: LearnedState | None = None,
    ) -> None:
        """learned: what earlier runs learned. Its memory is drafted from; completions are not
        added to it, because they repeat each other at every keystroke. Raises UsageError where
        the model cannot do what `options` ask for."""
        self.options = options
        self.code = CodeTokens(engine.tokenizer)
        self.family = find_family(options.fim, self.code, engine.name)
        families = [self.family] if self.family else load_families().values()
        markers = tuple(token for family in families for token in family.stop)
        stops = engine.stop_tokens | self.code.marker_ids(markers)
        self.engine = replace(engine, stop_tokens=stops)
        self._learned = learned
        self._budgets = _budgets(options, engine.context_length)
        self._recall = Recall()
        self.reset()

    def reset(self) -> None:
        """Forgets the session: what its cache holds is not known after an error."""
        self.session = Session(self.engine, self._learned)

    def close(self) -> None:
        """Keeps what was learned about costs for the next run."""
        if self._learned is not None:
            self._learned.save_curve()

    def complete(
        self,
        request: CompletionRequest,
        cancelled: Callable[[], bool] = lambda: False,
        on_text: Callable[[str], None] = lambda text: None,
    ) -> Completion:
        """The completion; `on_text` is given its parts as they become certain.

        `cancelled` is asked before and after every pass. Raises UsageError for a request that
        cannot be honoured.
        """
        check_request(request)
        windows = "\r\n" in request.prefix or "\r\n" in request.suffix
        asked = _with_unix_line_ends(request) if windows else request
        give = (lambda text: on_text(text.replace("\n", "\r\n"))) if windows else on_text
        done = self._recall.find(asked)
        if done is None and not (asked.prefix + (asked.suffix if self.family else "")).strip():
            done = Completion("", "stop", Stats())  # whatever a model says of nothing is made up
        if done is None:
            done = _Making(self, asked, cancelled, give).run()
            self._recall.remember(asked, done)
        elif done.text:
            give(done.text)
        return replace(done, text=done.text.replace("\n", "\r\n")) if windows else done

    def prompt(self, request: CompletionRequest) -> Prompt:
        """What the model reads for `request`, and what is drafted from."""
        files = [
            (file.path[-_PATH:], file.text)
            for file in request.files
            if not request.path or file.path != request.path
        ]
        language = f".{request.language}" if request.language else ""
        made = make_prompt(
            self.code,
            self.family,
            self._budgets,
            request.prefix,
            request.suffix,
            (request.path or f"untitled{language}")[-_PATH:],
            files,
        )
        if not made.tokens:  # nothing that fits the budget, and no token that begins texts
            made = replace(made, tokens=sorted(self.engine.stop_tokens)[:1])
        return made


class _Making:
    """One completion while it is made."""

    def __init__(
        self,
        completer: Completer,
        request: CompletionRequest,
        cancelled: Callable[[], bool],
        on_text: Callable[[str], None],
    ) -> None:
        self._completer = completer
        self._request = request
        self._cancelled = cancelled
        self._on_text = on_text
        self._started = time.monotonic()
        self._prompt = completer.prompt(request)
        self._stops = CompletionStops(request.prefix, request.suffix, request.max_lines)
        self._stats = Stats(prompt_tokens=len(self._prompt.tokens))
        fenced = completer.family is not None and completer.family.fenced
        self._fenced = fenced and not is_markdown(request.path, request.language)
        self._text = ""  # all that was said
        self._cut = Cut("")
        self._why: CompletionReason | None = None
        self._full = False  # whether the model was not allowed to say more

    def run(self) -> Completion:
        """Makes it."""
        code, tokens = self._completer.code, self._prompt.tokens
        healed = self._prompt.healed
        while healed and self._why is None:
            # The end of the prefix is said again, in the tokens that the model chooses for it.
            again = self._generate(tokens, 1, code.along(healed))
            if again is None:
                return self._done()
            said = code.text(again.tokens[-1])
            self._take(said[len(healed) :])
            healed = healed[len(said) :]
            tokens = [*tokens, *again.tokens]
        if self._why is None:
            last = self._generate(tokens, self._request.max_tokens)
            self._full = last is not None and last.finish_reason in ("length", "context")
        return self._done()

    def _generate(
        self, tokens: list[int], max_tokens: int, allowed_tokens: tuple[int, ...] = ()
    ) -> Generation | None:
        """Lets the model go on behind `tokens`, up to where the completion ends.

        allowed_tokens: the only tokens that may be sampled, empty for any; what comes of them is
        left to the caller. None where nothing was sampled.
        """
        options = self._completer.options
        sampling = SamplingOptions(
            temperature=self._request.temperature, allowed_tokens=allowed_tokens
        )
        generation = self._completer.session.generate(
            tokens,
            GenerateOptions(
                max_tokens, options.draft, options.draft_tokens, sampling, remember=False
            ),
            self._prompt.draft_context,
        )
        generation.on_prefill = lambda done, total: self._due(generation)
        for piece in generation:
            if not allowed_tokens:
                self._take(piece.text)
            if self._why is None:
                self._due(generation)
            if self._why:
                break
        _add(self._stats, generation.stats)
        return generation if generation.tokens else None

    def _due(self, generation: Generation) -> None:
        """Ends the answer where nobody waits for more of it."""
        seconds = self._request.seconds
        if self._cancelled():
            self._why = "cancelled"
        elif seconds is not None and time.monotonic() - self._started >= seconds:
            self._why = "time"
        if self._why:
            generation.cancel()

    def _take(self, text: str) -> None:
        whole, half, _ = text.partition(_HALF)
        self._text += whole
        self._tell(self._cut_now())
        if half and self._why is None:
            self._why = "stop"

    def _cut_now(self, *, final: bool = False) -> Cut:
        """What of all that was said is the completion."""
        if not self._fenced:
            return self._stops.cut(self._text, final=final)
        code, closed = unfenced(self._text, final=final)
        cut = self._stops.cut(code, final=final or closed)
        return replace(cut, done=cut.done or closed)

    def _tell(self, cut: Cut) -> None:
        if len(cut.text) > len(self._cut.text):
            self._on_text(cut.text[len(self._cut.text) :])
        self._cut = cut
        if cut.done:
            self._why = "length" if cut.full else "stop"

    def _done(self) -> Completion:
        """The best text so far, if nothing else ended it."""
        if not self._cut.done:
            why = self._why
            self._tell(self._cut_now(final=True))
            self._why = why or self._why or ("length" if self._full else "stop")
        assert self._why is not None
        unread = sum(len(tokens) for tokens in self._prompt.draft_context)
        return Completion(self._cut.text, self._why, self._stats, unread)


def _budgets(options: CompleteOptions, context: int) -> Budgets:
    """The budgets, made smaller together where the context cannot hold them and an answer."""
    wanted = options.prefix_tokens, options.suffix_tokens, options.file_tokens
    if min(wanted) < 0 or options.prefix_tokens < 1:
        raise UsageError(f"the budgets must be 0 or more, and 1 for the prefix, got {wanted}")
    # The answer, and the tokens of the format, paths among them.
    room = max(16, context - min(_ANSWER, context // 4) - 256)
    share = min(1.0, room / sum(wanted))
    return Budgets(*(int(tokens * share) for tokens in wanted))


def _with_unix_line_ends(request: CompletionRequest) -> CompletionRequest:
    """The request as models know text. A cursor between the two characters is before both."""
    prefix, suffix = request.prefix, request.suffix
    if prefix.endswith("\r") and suffix.startswith("\n"):
        prefix = prefix[:-1]
    return replace(
        request, prefix=prefix.replace("\r\n", "\n"), suffix=suffix.replace("\r\n", "\n")
    )


def _add(total: Stats, part: Stats) -> None:
    """Adds up the answers that one completion is made of where its first tokens are healed."""
    if total.generated_tokens == 0:
        total.cached_tokens = part.cached_tokens
    else:
        total.target_passes += 1  # its first token came from a pass, not from the prefill
    for name in (
        "generated_tokens",
        "target_passes",
        "drafted",
        "accepted",
        "prefill_s",
        "decode_s",
    ):
        setattr(total, name, getattr(total, name) + getattr(part, name))
