"""What crosses the boundaries between the wings: options in, pieces and statistics out.

Plain values only: no arrays, no models, no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Protocol

DraftMode = Literal["auto", "ngram", "mtp", "model", "exit", "fixed", "off"]
FinishReason = Literal["stop", "length", "context", "cancelled"]
ConstraintKind = Literal["json_schema", "json", "regex", "choice", "grammar"]
WeightMode = Literal["auto", "keep", "float32", "bfloat16"]

DRAFT_MODES: tuple[DraftMode, ...] = ("auto", "ngram", "mtp", "model", "exit", "fixed", "off")
NETWORK_MODES: tuple[DraftMode, ...] = ("mtp", "model", "exit")  # a network's drafts alone
WEIGHT_MODES: tuple[WeightMode, ...] = ("auto", "keep", "float32", "bfloat16")
DEFAULT_MODEL = "starter"
DEFAULT_DRAFT_TOKENS = 4
DEFAULT_MAX_TOKENS = 1024


class Drafter(Protocol):
    """Proposes what comes next from the token history.

    The history grows by `extend`; each pass of the target over a proposal is `propose`, then
    `observe`, then `extend` with what the pass yielded.

    After a proposal of nothing `pipelines` says whether another pass is to be launched behind the
    plain step, before that is read. The next proposal is made `ahead` then: while a plain step is
    under way, which is observed and extends the history before the pass of the proposal does.
    """

    @property
    def pipelines(self) -> bool:
        """Whether plain steps are pipelined."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends `tokens` to the history."""

    def propose(self, limit: int, *, ahead: bool = False) -> list[int]:
        """Drafts at most `limit` tokens to follow the history or, `ahead`, the token after it,
        which is not known yet; none means a plain step."""

    def observe(
        self, drafted: int, accepted: int, rows: int, seconds: float, *, behind: bool = False
    ) -> None:
        """Takes in how a pass fared: how many tokens were drafted for it and accepted by the
        target, over how many rows it ran, how long after the pass before it was done (or after the
        start), and whether it was launched behind that one. There is one row more than drafted
        tokens, or several, where tokens had to be run again."""


class DraftNetwork(Protocol):
    """A network that drafts: a smaller model, heads of the target, the target's first layers.

    It goes on with the history that the target goes on with, keeps what it has read of it, and
    drops what turned out otherwise when it begins the next time. Its tokens are verified like any
    others. Where the target samples, it draws its own by the noise that the target draws with at
    the same position: so equal distributions give equal tokens, and close ones nearly always.

    key: what is learned of it is kept under that. share: what one of its tokens is taken to cost
    before that was measured, in plain steps of the target. reused: how much of the pass over a
    token of its draft was computed when it was drafted. longest: tokens that it drafts in a row at
    most. read: how many tokens of the last history it has read, about.
    """

    @property
    def name(self) -> str:
        """The draft mode that has it draft alone."""

    @property
    def key(self) -> str: ...

    @property
    def share(self) -> float: ...

    @property
    def reused(self) -> float: ...

    @property
    def longest(self) -> int: ...

    @property
    def read(self) -> int: ...

    def begin(self, known: Sequence[int]) -> bool:
        """Drafts from behind `known`, at least a token. False where so much of it was not read yet
        that it has read a part now, and wants to be asked again."""

    def guess(self) -> tuple[int, float]:
        """The token that comes next, -1 where it has none, and how sure it is, from 0 to 1. What it
        guesses next comes behind that."""

    def forget(self) -> None:
        """Gives back what it has read, but for what stays beside the target's history."""

    def clock(self) -> float:
        """Seconds, for how long it takes."""


class DraftGuide(Protocol):
    """Walks a draft through the grammar that the answer must match; see `Constraint`."""

    def begin_draft(self) -> None:
        """Starts at the end of the history."""

    def forced(self) -> tuple[list[int], bool]:
        """What follows, none where that is open, and whether it does for sure, or only as far as
        the answer keeps to its ways. The target may spell the same text with other tokens."""

    def ending(self) -> tuple[list[int], int]:
        """Where nothing is forced: how the value that is being written would end, with what would
        probably follow, none where it may not; and how many tokens of it there are."""

    def advance(self, token: int) -> bool:
        """Takes `token` as drafted; False, and no further, where the grammar forbids it."""

    def end_draft(self) -> None:
        """Forgets what was drafted."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer must match, whole: JSON of a schema, any JSON, a regular expression, one of
    several choices, or a grammar in llguidance's dialect of Lark.

    text: the schema as JSON, the expression or the grammar. compact: JSON without whitespace,
    which a model might have chosen otherwise. guesses: grammars of answers that are likelier than
    others, to draft by, the narrowest first.
    """

    kind: ConstraintKind
    text: str = ""
    choices: tuple[str, ...] = ()
    compact: bool = False
    guesses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How a token is chosen. Temperature 0 is greedy: the most likely one.

    The filters top_p, min_p and top_k apply at temperatures above 0; 1, 0 and 0 switch them off.
    The penalties (1, 0 and 0: none) look at the last `penalty_window` tokens, the prompt's too.
    logit_bias: (token, what is added to its logit). allowed_tokens: the only ones that may be
    sampled, empty for any. seed: None draws one. constraint: only what matches it is sampled; at
    every temperature, and before anything is filtered or accepted. logprobs: of how many of the
    likeliest tokens at each position they are kept, None for not even the sampled one's.

    These two accept drafts that exact sampling would not, so they change the output. lenience:
    1 is exact; a drafted x is accepted with probability p(x) / lenience, greedily where p(x) is at
    least lenience times the highest. typical: 0 is exact; a drafted x is accepted where p(x)
    exceeds typical, or sqrt(typical) * exp(-entropy of p) if that is less.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = 64
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_tokens: tuple[int, ...] = ()
    seed: int | None = None
    lenience: float = 1.0
    typical: float = 0.0
    constraint: Constraint | None = None
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a model is loaded; None leaves it to akunu.

    kv_bits: 4 or 8, of the KV cache. context: tokens that a session shall hold at most. force: load
    it though it will not fit. cache_memory: bytes that the KV caches of several texts may take
    together. memory: bytes that model and caches may take in all. draft_model: name or directory of
    a smaller one that may draft; "" for none whatever the settings say. hosts: what the model is
    divided among: a number of processes or a hostfile.
    """

    weights: WeightMode = "auto"
    kv_bits: int | None = None
    context: int | None = None
    force: bool = False
    cache_memory: int | None = None
    memory: int | None = None
    draft_model: str | None = None
    hosts: str | None = None


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """How to generate. `max_tokens` > 0; `draft_tokens` is the ceiling of a draft in `fixed`.

    stop: texts that end an answer; they are not part of it. stop_tokens: tokens that do, beside
    those of the model.
    remember: whether the answer joins the memory that later answers are drafted from.
    markers: texts that stay in the answer though they are special tokens of the model.
    conversation: which one it is of, so that what was read can be deleted with it; "" for none.
    """

    max_tokens: int = DEFAULT_MAX_TOKENS
    draft: DraftMode = "auto"
    draft_tokens: int = DEFAULT_DRAFT_TOKENS
    sampling: SamplingOptions = SamplingOptions()
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    remember: bool = True
    markers: tuple[str, ...] = ()
    conversation: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one pass of the target yielded.

    tokens: in order; the first `accepted` of them were drafted.
    rejected: drafted tokens that the target did not accept.
    seconds: wall time of the pass.
    """

    tokens: tuple[int, ...]
    accepted: int = 0
    rejected: tuple[int, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What the model thought of a token, before temperature, filters and penalties; under a
    constraint, among what that allows.

    text: of the token at its place. top: the likeliest at its place, the likeliest first, with
    their texts.
    """

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A piece as front ends see it: its text, and which characters of it were drafted.

    drafted: half-open ranges into `text` that came from accepted draft tokens.
    thinking: what a reasoning model wrote before the answer.
    """

    text: str
    piece: Piece
    drafted: tuple[tuple[int, int], ...] = ()
    thinking: str = ""


NotCached = Literal[
    "",
    "evicted",
    "no checkpoint",
    "changed",
    "slow disk",
    "damaged file",
    "other KV width",
    "other weights",
    "other context",
]


@dataclass(slots=True)
class Stats:
    """Counts and times of one answer. Times are in seconds.

    The first token comes from the prefill; every later one from a decode pass. So
    `target_passes` counts decode passes, and `tokens_per_pass` leaves the first token out.

    cached_tokens: of the prompt, which were not read again. known_tokens: those that were read
    before. not_cached: why those are more, or why they are not all but the end; see `Reuse` and
    `Recall.read`.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    target_passes: int = 0
    drafted: int = 0
    accepted: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    known_tokens: int = 0
    not_cached: NotCached = ""

    def add(self, piece: Piece, *, from_prefill: bool) -> None:
        """Counts a piece."""
        self.generated_tokens += len(piece.tokens)
        if not from_prefill:
            self.target_passes += 1
            self.drafted += piece.accepted + len(piece.rejected)
            self.accepted += piece.accepted

    def include(self, other: Stats) -> None:
        """Adds the counts and times of another answer."""
        for each in fields(self):
            if each.name != "not_cached":
                both = getattr(self, each.name) + getattr(other, each.name)
                setattr(self, each.name, both)

    @property
    def decoded_tokens(self) -> int:
        return max(0, self.generated_tokens - 1)

    @property
    def tokens_per_s(self) -> float:
        return self.decoded_tokens / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def tokens_per_pass(self) -> float:
        return self.decoded_tokens / self.target_passes if self.target_passes else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All counts and the derived rates, ready for JSON."""
        derived = {
            name: round(getattr(self, name), 4)
            for name in ("tokens_per_s", "tokens_per_pass", "acceptance_rate")
        }
        return asdict(self) | derived


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call.

    parameters: the JSON Schema of its arguments. strict: whether only arguments that fit it may be
    sampled.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether tools are called. "named": the one called `name`, and once; "required": at least one;
    "auto": as the model likes; "none": not at all."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str = ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model made. arguments: a JSON object, as text. id: what results refer to."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    thinking: what an assistant wrote before its answer. tool_calls: those that it made.
    tool_call_id, name: of a "tool" message, which call it is the result of, and of which tool.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stats: Stats = field(default_factory=Stats)
    thinking: str = ""
