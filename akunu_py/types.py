"""Data types that all packages share: options, messages, text pieces and statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Protocol, get_args

DraftMode = Literal["auto", "ngram", "mtp", "model", "exit", "fixed", "off"]
FinishReason = Literal["stop", "length", "context", "cancelled", "repetition"]
ConstraintKind = Literal["json_schema", "json", "regex", "choice", "grammar"]
WeightMode = Literal["auto", "keep", "float32", "bfloat16"]
WireMode = Literal["off", "weights", "all"]
DEFAULT_WIRE: WireMode = "weights"
SwitchMode = Literal["auto", "off"]
ThinkingMode = Literal["default", "on", "off", "low", "medium", "high"]

DRAFT_MODES: tuple[DraftMode, ...] = get_args(DraftMode)
NEURAL_MODES: tuple[DraftMode, ...] = ("mtp", "model", "exit")  # one neural drafter, no n-grams
SWITCH_MODES: tuple[SwitchMode, ...] = get_args(SwitchMode)
WEIGHT_MODES: tuple[WeightMode, ...] = get_args(WeightMode)
WIRE_MODES: tuple[WireMode, ...] = get_args(WireMode)
THINKING_MODES: tuple[ThinkingMode, ...] = get_args(ThinkingMode)
DEFAULT_MODEL = "starter"
DEFAULT_DRAFT_TOKENS = 4
MAX_TEMPERATURE = 5.0  # of the command line and the settings; above, models write nonsense
DEFAULT_MAX_TOKENS = 1024
NO_TOKEN_LIMIT = 1 << 30  # The context ends the answer first.


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Costs of the next pass of several requests."""

    costs: Sequence[float]  # with 0, 1, ... draft tokens of all requests
    rate: float  # tokens of all requests per unit of cost, in the long run


class Drafter(Protocol):
    """Proposes draft tokens from the token history.

    Each pass of the target is `propose`, `observe`, then `extend` with the pass's tokens. If a
    proposal is empty and `pipelines` is true, the next pass is proposed `ahead`, while the plain
    step is running. A pass shared with other requests is `offer`, `take`, then `extend`.
    """

    @property
    def pipelines(self) -> bool: ...

    def extend(self, tokens: Sequence[int]) -> None:
        """Append `tokens` to the history."""

    def propose(self, limit: int, *, ahead: bool = False) -> list[int]:
        """Draft up to `limit` tokens after the history; `ahead`: after its unknown next token.

        A draft with branches is a `TokenTree`.
        """

    def offer(self, limit: int, known: PassCosts | None = None) -> list[float]:
        """Return the chances of up to `limit` tokens; each divided by that of the one before it.

        known: costs of the pass; a neural drafter drafts where that pays. None: n-grams only.
        """

    def take(self, count: int) -> list[int]:
        """Return the first `count` of the offered tokens as the draft of a shared pass."""

    def observe(
        self, drafted: int, accepted: int, rows: int, seconds: float, *, pipelined: bool = False
    ) -> None:
        """Record a pass: draft tokens, accepted ones, rows, time, whether it was pipelined.

        seconds: NaN if unknown.
        """


class NeuralDrafter(Protocol):
    """A neural drafter: a smaller model, an MTP head, or the target's first layers.

    It follows the target's history and drops rejected tokens at the next `start_draft`. It samples
    with the target's noise at each position, so similar distributions usually give equal tokens.
    """

    key: str  # identifies its learned state
    relative_cost: float  # assumed cost of a token in plain steps, until measured
    longest: int  # maximum tokens per draft
    parallel: bool  # drafts all tokens in one pass, without n-gram predictions
    most_others: int  # alternatives to find for each draft token
    # Alternatives to the last draft token, with their shares of the remaining probability.
    others: Sequence[tuple[int, float]]

    @property
    def prefilled(self) -> int: ...  # approximate number of prefilled tokens of the current history

    def start_draft(self, known: Sequence[int]) -> bool:
        """Start a draft after `known`. Return False if more prefill is needed; then call again."""

    def draft_token(self) -> tuple[int, float]:
        """Return the next draft token (-1: none) and its confidence from 0 to 1."""

    def release(self) -> None:
        """Release state that does not belong to the target's history."""

    def clock(self) -> float:
        """Return the time in seconds."""


class DraftGuide(Protocol):
    """Walks a draft through the answer's grammar; see `Constraint`."""

    def begin_draft(self) -> None:
        """Start at the end of the history."""

    def forced(self) -> tuple[list[int], bool]:
        """Return the forced tokens, and whether they are certain or only probable."""

    def ending(self) -> tuple[list[int], int]:
        """Return a probable end of the current value, and the tokens it already has."""

    def choices(self) -> list[int]:
        """Return the first tokens of the texts that may follow, if these are few."""

    def advance(self, token: int) -> bool:
        """Accept draft token `token`; False if the grammar forbids it."""

    def end_draft(self) -> None:
        """Drop the draft."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A format that the whole answer must match."""

    kind: ConstraintKind
    text: str = ""  # JSON Schema, regular expression, or grammar in llguidance's Lark dialect
    choices: tuple[str, ...] = ()
    compact: bool = False  # JSON without whitespace
    open_objects: bool = False  # `properties` without `additionalProperties` allows others
    likely: tuple[str, ...] = ()  # grammars of likely answers, to draft from; narrowest first


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How tokens are sampled. Filters (top_p, min_p, top_k) need a temperature above 0."""

    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = 64  # last tokens that penalties apply to, prompt included
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, added to its logit)
    allowed_tokens: tuple[int, ...] = ()  # empty: all
    seed: int | None = None  # None: random
    # These two change the output: they accept drafts that exact sampling would reject.
    lenience: float = 1.0  # accept x with p(x) / lenience; greedy: if p(x) >= lenience * max p
    typical: float = 0.0  # accept x if p(x) > min(typical, sqrt(typical) * exp(-entropy))
    constraint: Constraint | None = None
    logprobs: int | None = None  # alternatives per token; None: no logprobs


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a model is loaded; None means automatic."""

    weights: WeightMode = "auto"
    kv_bits: int | None = None  # 4 or 8
    context: int | None = None  # maximum tokens of a session
    force: bool = False  # load a model that does not fit
    prompt_cache_memory: int | None = None  # bytes for prompt caches
    memory_limit: int | None = None  # bytes for model and caches
    reserved: int = 0  # bytes of the limit that other models of this process may use
    draft_model: str | None = None  # name or directory; "": none, whatever the settings say
    hosts: str | None = None  # a number of processes, or a hostfile
    wire: WireMode | None = None  # memory that macOS must keep; None: as in the settings
    kernels: SwitchMode = "auto"  # akunu's own, where a probe found them equal and faster
    exact: bool = False  # only passes whose rows have the bits of single rows


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """How an answer is generated."""

    max_tokens: int = DEFAULT_MAX_TOKENS
    draft: DraftMode = "auto"
    draft_tokens: int = DEFAULT_DRAFT_TOKENS  # maximum draft length of the mode "fixed"
    sampling: SamplingOptions = SamplingOptions()
    stop: tuple[str, ...] = ()  # stop sequences; not part of the answer
    stop_tokens: tuple[int, ...] = ()  # in addition to the model's
    may_store: bool = True  # the answer in the answer cache, its prompt cache on disk
    markers: tuple[str, ...] = ()  # special tokens that stay in the text
    thinking: ThinkingMode = "default"  # of a conversation: on, off, or how much
    thinking_budget: int | None = None  # maximum thinking tokens; None: no limit
    min_tokens: int = 0  # tokens before the answer may end
    draft_tree: SwitchMode = "auto"  # whether drafts may be token trees
    loop_guard: bool = False  # end an answer that repeats a block of tokens again and again
    conversation: str = ""  # its id, so that its prompt caches can be deleted with it
    # About the conversation, but no part of it, such as its title. It runs only while no other
    # request does, and leaves behind only the conversation's own prefix, as a prompt cache.
    side_request: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """Result of one pass of the target."""

    tokens: tuple[int, ...]
    accepted: int = 0  # the first of `tokens` that were draft tokens
    rejected: tuple[int, ...] = ()  # draft tokens after them
    seconds: float = 0.0  # wall time of the pass
    branches: tuple[tuple[int, ...], ...] = ()  # alternatives to `rejected` in a token tree
    drafted: int = 0  # draft tokens, those of all branches included


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs of a token before temperature, filters and penalties, under its constraint."""

    text: str
    logprob: float
    raw: bytes  # of the token, which may be a part of a character
    top: tuple[tuple[str, float, bytes], ...] = ()  # most likely alternatives, best first


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A piece as text for front ends."""

    text: str
    piece: Piece
    drafted: tuple[tuple[int, int], ...] = ()  # half-open ranges of `text` from accepted drafts
    thinking: str = ""  # a reasoning model's text before the answer
    ends: tuple[int, ...] = ()  # length of `text` after each token


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
    """Counts and times (seconds) of one answer. The first token counts as prefill."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that needed no prefill
    generated_tokens: int = 0
    target_passes: int = 0  # decode passes
    drafted: int = 0
    accepted: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    known_tokens: int = 0  # prompt tokens prefilled at some time before
    not_cached: NotCached = ""  # why `cached_tokens` is lower; see `Reuse`, `PromptCacheStore.read`

    def add(self, piece: Piece, *, from_prefill: bool) -> None:
        self.generated_tokens += len(piece.tokens)
        if not from_prefill:
            self.target_passes += 1
            self.drafted += piece.drafted
            self.accepted += piece.accepted

    def include(self, other: Stats) -> None:
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
        """Return all counts and derived rates, ready for JSON."""
        derived = {
            name: round(getattr(self, name), 4)
            for name in ("tokens_per_s", "tokens_per_pass", "acceptance_rate")
        }
        return asdict(self) | derived


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)  # JSON Schema of the arguments
    strict: bool = False  # only valid arguments can be sampled


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether tools are called."""

    mode: Literal["auto", "none", "required", "named"] = "auto"  # "named": `name`, exactly once
    name: str = ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call made by a model."""

    name: str
    arguments: str  # a JSON object
    id: str = ""  # referenced by the result's `tool_call_id`


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    thinking: str = ""  # of an assistant, before its answer
    tool_calls: tuple[ToolCall, ...] = ()  # of an assistant
    tool_call_id: str = ""  # of a "tool" message
    name: str = ""  # of a "tool" message: the tool


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stats: Stats = field(default_factory=Stats)
    thinking: str = ""
