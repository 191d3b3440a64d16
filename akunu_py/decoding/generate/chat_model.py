"""What a chat shows of answers while they are made, whoever makes them: a model in this program, or
a server that has one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from akunu_py.decoding.events import Reading
from akunu_py.types import FinishReason, GenerateOptions, Message, Stats, TextPiece

if TYPE_CHECKING:  # a second or two, which the thread of the model spends
    from akunu_py.decoding.generate.session import Generation, Session
    from akunu_py.decoding.learned import LearnedState
    from akunu_py.decoding.model.engine import Engine


@dataclass(frozen=True, slots=True)
class Gauges:
    """What was measured besides the counts of one answer.

    memory: bytes that the model, its cache and the work on them take. speedup: times faster than
    plain decoding, by the planner's estimate of what passes cost; None before it knows.
    """

    memory: int = 0
    speedup: float | None = None


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What users are told of a model; see `Engine`. note: of how it fits into memory. server: the
    address of the one that has it loaded, "" where it is loaded here."""

    name: str
    weights: str
    context_length: int
    no_draft: str | None
    note: str
    server: str = ""


@dataclass(frozen=True, slots=True)
class ShownPiece:
    """What a pass yielded. rejected: the text of drafted tokens that were not accepted.
    from_prefill: whether it was that of the prompt's end."""

    piece: TextPiece
    rejected: str = ""
    from_prefill: bool = False


class ShownAnswer(Protocol):
    """One answer while it is made. finish_reason: None until the end."""

    @property
    def stats(self) -> Stats:
        """Of the answer so far."""

    @property
    def finish_reason(self) -> FinishReason | None: ...

    def steps(self) -> Iterator[Reading | ShownPiece]:
        """See `Generation.steps`. Raises ServerGone where there will be no more."""

    def cancel(self) -> None:
        """Ends it soon. May be called from any thread."""

    def gauges(self) -> Gauges:
        """Of the answer so far."""


class ChatModel(Protocol):
    """Answers conversations, in one thread."""

    @property
    def facts(self) -> ModelFacts: ...

    def gauges(self) -> Gauges:
        """While nothing is answered."""

    def answer(self, messages: Sequence[Message], options: GenerateOptions) -> ShownAnswer:
        """Begins to answer the last message, or to continue it where it is an answer."""

    def save_idle(self, stopped: Callable[[], bool], seconds: float | None) -> bool:
        """See `Session.save_idle`."""


def facts_of(engine: Engine) -> ModelFacts:
    """Of a model that is loaded here."""
    return ModelFacts(
        engine.name,
        engine.plan.weights,
        engine.plan.context_length,
        engine.no_draft,
        engine.plan.fit.note,
    )


class LoadedChat:
    """A model that was loaded in this thread. on_answered: called after every answer that ended."""

    def __init__(
        self,
        engine: Engine,
        learned: LearnedState | None = None,
        on_answered: Callable[[Engine, Generation], None] = lambda engine, generation: None,
    ) -> None:
        self.facts = facts_of(engine)
        self._engine, self._learned = engine, learned
        self._on_answered = on_answered
        self._session: Session | None = None

    def gauges(self) -> Gauges:
        """See `ChatModel`."""
        return Gauges(_memory())

    def answer(self, messages: Sequence[Message], options: GenerateOptions) -> LoadedAnswer:
        """See `ChatModel`."""
        from akunu_py.decoding.generate.session import Session

        self._session = self._session or Session(self._engine, self._learned)
        return LoadedAnswer(self._session, messages, options, self._on_answered)

    def save_idle(self, stopped: Callable[[], bool], seconds: float | None) -> bool:
        """See `ChatModel`."""
        return self._session is not None and self._session.save_idle(stopped, seconds)


class LoadedAnswer:
    """One answer of a session; see `ShownAnswer`."""

    def __init__(
        self,
        session: Session,
        messages: Sequence[Message],
        options: GenerateOptions,
        on_answered: Callable[[Engine, Generation], None] = lambda engine, generation: None,
    ) -> None:
        self._session, self._on_answered = session, on_answered
        self._generation = session.chat(messages, options)
        self._before = session.drafting.network_seconds
        self._rows: Counter[int] = Counter()  # passes by the rows that they ran over
        self.cancel = self._generation.cancel

    @property
    def stats(self) -> Stats:
        return self._generation.stats

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._generation.finish_reason

    def steps(self) -> Iterator[Reading | ShownPiece]:
        """See `ShownAnswer`."""
        for step in self._generation.steps():
            if isinstance(step, Reading):
                yield step
                continue
            first = not self.stats.target_passes
            if step.piece.tokens and not first:
                self._rows[1 + step.piece.accepted + len(step.piece.rejected)] += 1
            yield ShownPiece(step, self._rejected_text(step), first)
        self._on_answered(self._session.engine, self._generation)

    def _rejected_text(self, piece: TextPiece) -> str:
        """The rejected draft of a pass, as text that follows what was accepted."""
        drafted = piece.piece.rejected
        if not drafted:
            return ""
        decode, tokens = self._session.engine.tokens.tokenizer.decode, self._generation.tokens
        before = len(tokens) - len(piece.piece.tokens) + piece.piece.accepted
        anchor = tokens[before - 1 : before]
        return str(decode([*anchor, *drafted]))[len(decode(anchor)) :]

    def gauges(self) -> Gauges:
        """The speed-up is what as many tokens cost without drafting, over what these passes
        cost."""
        stats = self.stats
        costs = self._session.drafting.costs(stats.prompt_tokens + stats.generated_tokens)
        speedup = None
        if costs is not None and stats.drafted:
            spent = sum(
                costs[min(each, len(costs)) - 1] * count for each, count in self._rows.items()
            )
            spent += max(0.0, self._session.drafting.network_seconds - self._before)
            speedup = stats.decoded_tokens * costs[0] / spent
        return Gauges(_memory(), speedup)


def _memory() -> int:
    """Bytes that MLX holds."""
    import mlx.core as mx

    return int(mx.get_active_memory())
