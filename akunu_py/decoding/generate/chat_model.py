"""The chat's view of answers in progress, from a model in this process or a server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from akunu_py.decoding.events import PrefillProgress
from akunu_py.types import FinishReason, GenerateOptions, Message, Stats, TextPiece

if TYPE_CHECKING:  # a second or two, which the thread of the model spends
    from akunu_py.decoding.generate.session import Request, Session, Step
    from akunu_py.decoding.learned_state import LearnedState
    from akunu_py.decoding.model.engine import Engine


@dataclass(frozen=True, slots=True)
class Gauges:
    """Measurements besides the counts of one answer."""

    memory: int = 0  # bytes of model, cache and activations
    speedup: float | None = None  # over plain decoding, by the cost model; None: unknown


@dataclass(frozen=True, slots=True)
class ServedModelFacts:
    """Facts about a model for users; see `Engine`."""

    name: str
    weights: str
    context_length: int
    no_draft: str | None
    note: str  # how it fits into memory
    server: str = ""  # address of the server that runs it; "": loaded here


@dataclass(frozen=True, slots=True)
class ShownPiece:
    """Result of one pass."""

    piece: TextPiece
    rejected: str = ""  # text of rejected draft tokens
    from_prefill: bool = False


class ShownAnswer(Protocol):
    """One answer in progress."""

    @property
    def stats(self) -> Stats: ...

    @property
    def finish_reason(self) -> FinishReason | None: ...

    def steps(self) -> Iterator[PrefillProgress | ShownPiece]:
        """Yield steps; see `Request.steps`. Raises ServerGone if the server is lost."""

    def cancel(self) -> None:
        """End the answer soon. Callable from any thread."""

    def gauges(self) -> Gauges: ...


class ChatModel(Protocol):
    """Answers conversations, in one thread."""

    @property
    def facts(self) -> ServedModelFacts: ...

    def gauges(self) -> Gauges:
        """Return the measurements while idle."""

    def answer(self, messages: Sequence[Message], options: GenerateOptions) -> ShownAnswer:
        """Start to answer the last message, or to continue it if it is an answer."""

    def save_idle(self, stopped: Callable[[], bool], seconds: float | None) -> bool:
        """See `Session.save_idle`."""


def facts_of(engine: Engine) -> ServedModelFacts:
    """Return the facts of a model loaded here."""
    return ServedModelFacts(
        engine.name,
        engine.plan.weights,
        engine.plan.context_length,
        engine.no_draft_reason,
        engine.plan.fit.note,
    )


class LoadedChat:
    """A model loaded in this thread. on_answered: called after every finished answer."""

    def __init__(
        self,
        engine: Engine,
        learned: LearnedState | None = None,
        on_answered: Callable[[Engine, Request], None] = lambda engine, request: None,
    ) -> None:
        self.facts = facts_of(engine)
        self._engine, self._learned = engine, learned
        self._on_answered = on_answered
        self._session: Session | None = None

    def gauges(self) -> Gauges:
        return Gauges(_memory())

    def answer(self, messages: Sequence[Message], options: GenerateOptions) -> LoadedAnswer:
        from akunu_py.decoding.generate.session import Session

        self._session = self._session or Session(self._engine, self._learned)
        return LoadedAnswer(self._session, messages, options, self._on_answered)

    def save_idle(self, stopped: Callable[[], bool], seconds: float | None) -> bool:
        return self._session is not None and self._session.save_idle(stopped, seconds)


class LoadedAnswer:
    """One answer of a session; see `ShownAnswer`."""

    def __init__(
        self,
        session: Session,
        messages: Sequence[Message],
        options: GenerateOptions,
        on_answered: Callable[[Engine, Request], None] = lambda engine, request: None,
    ) -> None:
        self._session, self._on_answered = session, on_answered
        self.request = session.chat(messages, options)
        self._before = session.drafting.neural_seconds
        self._rows: Counter[int] = Counter()  # passes by rows
        self.cancel = self.request.cancel

    @property
    def stats(self) -> Stats:
        return self.request.stats

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.request.finish_reason

    def steps(self) -> Iterator[PrefillProgress | ShownPiece]:
        for step in self.request.steps():
            yield from self.show([step])
        self._on_answered(self._session.engine, self.request)

    def show(self, steps: Sequence[Step]) -> list[PrefillProgress | ShownPiece]:
        """Return the results of a step as the chat shows them."""
        return [step if isinstance(step, PrefillProgress) else self._shown(step) for step in steps]

    def _shown(self, step: TextPiece) -> ShownPiece:
        first = not self.stats.target_passes
        if step.piece.tokens and not first:
            self._rows[1 + step.piece.accepted + len(step.piece.rejected)] += 1
        return ShownPiece(step, self._rejected_text(step), first)

    def _rejected_text(self, piece: TextPiece) -> str:
        """Return the rejected draft as text after the accepted tokens."""
        drafted = piece.piece.rejected
        if not drafted:
            return ""
        decode, tokens = self._session.engine.tokens.tokenizer.decode, self.request.tokens
        before = len(tokens) - len(piece.piece.tokens) + piece.piece.accepted
        anchor = tokens[before - 1 : before]
        return str(decode([*anchor, *drafted]))[len(decode(anchor)) :]

    def gauges(self) -> Gauges:
        """Return memory and speedup: plain cost of the tokens over the cost of the passes."""
        stats = self.stats
        costs = self._session.drafting.costs(stats.prompt_tokens + stats.generated_tokens)
        speedup = None
        if costs is not None and stats.drafted:
            spent = sum(
                costs[min(each, len(costs)) - 1] * count for each, count in self._rows.items()
            )
            spent += max(0.0, self._session.drafting.neural_seconds - self._before)
            speedup = stats.decoded_tokens * costs[0] / spent
        return Gauges(_memory(), speedup)


def _memory() -> int:
    """Return the bytes that MLX holds."""
    import mlx.core as mx

    return int(mx.get_active_memory())
