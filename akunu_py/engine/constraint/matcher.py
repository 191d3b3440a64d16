"""Structured output: masks of the tokens that a grammar allows, by llguidance.

Masks apply to the logits before sampling. So answers keep the model's distribution among those that
match, and a forbidden draft token is never accepted. Verification walks the draft (consume, mask)
with a copy of the matcher.

A grammar cannot remember names, and small models repeat members without end. So masks also forbid
tokens that would repeat a key of the object.
"""

from __future__ import annotations

import json
import re
import threading
from bisect import bisect_left
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Literal

from llguidance import LLMatcher, LLTokenizer

from akunu_py.engine.constraint.likely_json import (
    JsonState,
    LikelyJson,
    LikelyText,
    advanced,
    choices_after,
)
from akunu_py.engine.constraint.masks import TokenMasks
from akunu_py.engine.model.tokens import TokenCodec
from akunu_py.engine.text.thinking import marker_tokens, unfinished_thinking
from akunu_py.errors import SchemaError, UsageError
from akunu_py.files import parse_json
from akunu_py.json_schema import grammar as json_grammar
from akunu_py.json_schema.layouts import COMPACT, FREE, LIKELY, UNORDERED, Layout
from akunu_py.json_schema.regex import LIMITS, byte_tables
from akunu_py.text import on_one_line
from akunu_py.types import Constraint

MAX_CONSTRAINT = 1 << 20  # characters of a schema, a grammar, an expression
COMPILE_SECONDS = 5.0
_FORCED_SPECIAL = re.compile(rb"\xff\[([0-9]+)\]")
_ESCAPE_OR_SLASH = re.compile(r"(\\.)|/", re.DOTALL)
_OPEN_ESCAPE = re.compile(r"(?:[^\\]|\\.)*\\", re.DOTALL)
_REGEX_REPORT = re.compile(r"regex parse error:\n {4}(.*)\n {4}( *)\^.*\nerror: (.*)")
_NAMES = {
    "json_schema": "the JSON schema",
    "json": "JSON",
    "regex": "the regular expression",
    "choice": "the choices",
    "grammar": "the grammar",
}
_State = Literal["start", "thinking", "thought", "structure"]  # "start": thinking may open


class ConstraintMatcher(TokenMasks):
    """The position of an answer in its grammar. Thinking is unconstrained, but cannot end it."""

    def __init__(self, codec: TokenCodec, constraint: Constraint, prompt: Sequence[int]) -> None:
        """Raises UsageError if the constraint cannot be enforced."""
        super().__init__(codec.vocabulary, codec.stop_tokens)
        self._name = _NAMES[constraint.kind]
        self._matcher = compile_constraint(codec, constraint)
        self._tables = token_tables(codec)
        self._likely = self._make_likely_text(codec, constraint)
        self._saved: tuple[Any, ...] = ()
        self._structure: list[int] = []  # tokens consumed by the matcher
        is_json = constraint.kind in ("json", "json_schema")
        self._key_tokens = key_tokens(self._tables) if is_json else None
        self._json = JsonState()
        self._start, self._end, self._newlines = _thinking_tokens(codec)
        self._state: _State = "structure" if not self._end else "start"
        if self._end and unfinished_thinking(codec.tokenizer, prompt) is not None:
            self._state = "thinking"
        self._thinking_tail: tuple[int, ...] = ()  # the last tokens of the thinking

    @property
    def complete(self) -> bool:
        return self._state == "structure" and self._matcher.is_stopped()

    @property
    def free(self) -> bool:
        return False

    def begin_draft(self) -> None:
        # A copy takes 2 us. The rollback of llguidance 1.9.1 does not restore everything.
        self._saved = (
            self._state, self._thinking_tail, len(self._structure), self._matcher, self._json
        )  # fmt: skip
        self._matcher = self._matcher.deep_copy()

    def forced(self) -> tuple[list[int], bool]:
        if self._state == "thinking" or self.complete:
            return [], True
        likely = self._likely
        if likely is not None and (tokens := likely.forced(self._structure, self._saved[2])):
            return tokens, False
        text = self._matcher.compute_ff_bytes()
        return forced_tokens(self._tables, text), True

    def ending(self) -> tuple[list[int], int]:
        if self._state != "structure" or self._likely is None:
            return [], 0
        return self._likely.ending()

    def choices(self) -> list[int]:
        if self._state == "thinking" or self.complete:
            return []
        if self._likely is not None:
            return self._likely.choices()
        encode = partial(forced_tokens, self._tables)
        return choices_after(self._matcher, self._decode, encode, encode)

    def _decode(self, token: int) -> bytes:
        is_special = self._tables.is_special_token(token)
        return b"" if is_special else self._tables.decode_bytes([token])

    def end_draft(self) -> None:
        self._state, self._thinking_tail, length, self._matcher, self._json = self._saved
        if len(self._structure) > length:
            del self._structure[length:]
            if self._likely is not None:
                self._likely.rewind(length)

    def _make_likely_text(self, codec: TokenCodec, constraint: Constraint) -> LikelyText | None:
        compile = partial(_start_compiling, codec, draft=True)
        grammars = [partial(compile, *each) for each in _draft_grammars(constraint)]
        if not grammars:
            return None
        if constraint.likely:
            return LikelyText(grammars, self._decode, partial(forced_tokens, self._tables))
        return LikelyJson(grammars, self._decode, self._tables.tokenize_bytes, constraint.compact)

    def mask(self) -> bytes:
        if self._state == "thinking":
            return self._without(self._every_token, self._stop_tokens)
        bits = self._matcher.compute_bitmask()[: len(self._every_token)]
        if self._matcher.is_error() or not any(bits):
            raise UsageError(self.failure())
        if self._key_tokens is not None and (repeated := self._key_tokens.repeating(self._json)):
            # A pattern may allow only names that the object already has.
            others = self._without(bits, repeated)
            bits = others if any(others) else bits
        return self._with(
            bits, {"start": self._start, "thought": self._newlines}.get(self._state, ())
        )

    def step(self, token: int) -> bool:
        if self._state == "thinking":
            if token in self._stop_tokens:
                return False
            self._thinking_tail = (*self._thinking_tail, token)[-len(self._end) :]
            if self._thinking_tail == self._end:
                self._state = "thought"
        elif self._state == "start" and token in self._start:
            self._state = "thinking"
        elif self._matcher.try_consume_tokens([token]) == 1:
            self._state = "structure"
            self._structure.append(token)
            if self._key_tokens is not None:
                self._json, _ = advanced(self._json, self._key_tokens.texts[token])
        elif not (self._state == "thought" and token in self._newlines):
            if token not in self._stop_tokens:
                return False
            # A request's stop token may also be text that fits.
            return bool(self._matcher.compute_bitmask()[token // 8] >> token % 8 & 1)
        return True

    def failure(self) -> str:
        reason = on_one_line(self._matcher.get_error()) or "no token of the model may follow"
        return f"{self._name} cannot be followed any further: {reason}; make it simpler"


def _draft_grammars(constraint: Constraint) -> list[tuple[Constraint, Layout]]:
    """Return the grammars to draft from, the narrowest first."""
    if constraint.likely:
        return [(replace(constraint, text=text, likely=()), FREE) for text in constraint.likely]
    if constraint.kind not in ("json_schema", "json"):
        return []
    return [
        (constraint, layout) for layout in (LIKELY, COMPACT if constraint.compact else UNORDERED)
    ]


def compile_constraint(codec: TokenCodec, constraint: Constraint) -> LLMatcher:
    """Compile a constraint. Raises UsageError if it is too large, too slow, or unsatisfiable."""
    name = _NAMES[constraint.kind]
    size = len(constraint.text) + sum(map(len, constraint.choices))
    if size > MAX_CONSTRAINT:
        raise UsageError(f"{name} must have {MAX_CONSTRAINT:,} characters at most, has {size:,}")
    if not codec.stop_tokens:
        raise UsageError(f"{codec.name} has no token that ends an answer, so {name} cannot be used")
    layout = COMPACT if constraint.compact else FREE
    future = _start_compiling(codec, constraint, layout)
    if not wait([future], COMPILE_SECONDS).done:
        raise UsageError(f"{name} took longer than {COMPILE_SECONDS:g} s; make it simpler")
    if isinstance(failure := future.exception(), UsageError):
        raise failure
    if failure is not None:
        reason = _reason(constraint, str(failure))
        raise UsageError(f"{name} cannot be used: {reason}") from failure
    return future.result().deep_copy()


def _reason(constraint: Constraint, failure: str) -> str:
    """Return the reason for a failure on one line; of a report on a regex, only the error."""
    found = _REGEX_REPORT.search(failure) if constraint.kind == "regex" else None
    if found is None:
        return on_one_line(failure)
    # The place is that in the escaped expression.
    return found[3] + f" at character {len(found[2]) + 1}" * (found[1] == constraint.text)


def compile_ahead(codec: TokenCodec, constraint: Constraint) -> list[Future[LLMatcher]]:
    """Compile all grammars of a constraint, so that the model's thread need not.

    Returns futures of those to draft from once the first grammar is ready. Raises UsageError.
    """
    compile_constraint(codec, constraint)
    if constraint.kind in ("json", "json_schema"):
        key_tokens(token_tables(codec))
    drafts = [_start_compiling(codec, *each, draft=True) for each in _draft_grammars(constraint)]
    wait(drafts[:1])
    return drafts


def _start_compiling(
    codec: TokenCodec, constraint: Constraint, layout: Layout, *, draft: bool = False
) -> Future[LLMatcher]:
    """Compile a constraint, or a grammar to draft from; JSON is drafted in bytes."""
    in_bytes = draft and constraint.kind != "grammar"
    tables = byte_tables() if in_bytes else token_tables(codec)
    return _compiling(tables, replace(constraint, likely=()), layout)


@lru_cache(128)  # a request with strict tools has three
def _compiling(tables: LLTokenizer, constraint: Constraint, layout: Layout) -> Future[LLMatcher]:
    """Compile a grammar in another thread. Copy the matcher before use.

    llguidance releases the GIL and limits its own work, so a compile that is too slow ends later.
    """
    future = Future[LLMatcher]()

    def run() -> None:
        try:
            future.set_result(_compile(tables, lark(constraint, layout)))
        except BaseException as error:  # noqa: BLE001  (a Rust panic is no Exception)
            future.set_exception(error)

    threading.Thread(target=run, name="grammar", daemon=True).start()
    return future


def matches(codec: TokenCodec, constraint: Constraint, text: str) -> bool:
    """Return whether `text` matches. Raises UsageError as `compile_constraint` does."""
    matcher = compile_constraint(codec, constraint)
    tokens = token_tables(codec).tokenize_bytes(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def lark(constraint: Constraint, layout: Layout, prefix: str = "") -> str:
    """Return the grammar in Lark. layout: of JSON. prefix: of our rule names. Raises UsageError."""
    kind = constraint.kind
    if kind in ("json_schema", "json"):
        return _json_grammar(constraint, layout, prefix)
    if constraint.compact:
        raise UsageError("compact is for JSON only: use a JSON schema, or any JSON")
    if kind == "grammar":
        return constraint.text
    if kind == "regex":
        if _OPEN_ESCAPE.fullmatch(constraint.text):
            raise UsageError("the regular expression cannot be used: it ends inside an escape")
        escaped = _ESCAPE_OR_SLASH.sub(lambda match: match[1] or r"\x{2f}", constraint.text)
        text = escaped.replace("\n", r"\n") or "(?:)"  # not the start of a comment
        return f"{prefix}start: {prefix.upper()}R\n{prefix.upper()}R: /{text}/\n"
    if not constraint.choices or not all(constraint.choices):
        raise UsageError("expected at least one choice, and no empty ones")
    return f"{prefix}start: {' | '.join(map(literal, constraint.choices))}\n"


def literal(text: str) -> str:
    """Return `text` as a string literal of a grammar."""
    # JSON leaves DEL unescaped, but strings in a grammar cannot contain it.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _json_grammar(constraint: Constraint, layout: Layout, prefix: str) -> str:
    try:
        schema = parse_json(constraint.text) if constraint.kind == "json_schema" else True
    except ValueError as error:
        raise UsageError(f"the JSON schema is not JSON: {error}") from error
    try:
        return json_grammar(schema, replace(layout, open_objects=constraint.open_objects), prefix)
    except SchemaError as error:
        raise refusal(_NAMES[constraint.kind], error) from error


def refusal(what: str, error: SchemaError) -> UsageError:
    """Return the error for a schema that no grammar expresses."""
    place = "" if error.place == "#" else f" at {error.place}"
    return UsageError(f"{what} cannot be used{place}: {on_one_line(str(error))}")


def _compile(tables: LLTokenizer, text: str) -> LLMatcher:
    """Compile a grammar in llguidance's dialect of Lark. Raises ValueError if it is unusable."""
    grammar = LLMatcher.grammar_from_lark(text)
    matcher = LLMatcher(tables, grammar, log_level=0, limits=LIMITS)
    # The first mask is the slowest to compute.
    mask = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.is_error() or not any(mask):
        raise ValueError(matcher.get_error() or "it allows no text")
    return matcher


def _thinking_tokens(codec: TokenCodec) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the opening token of thinking, if it is a single token, its end, and newlines."""
    markers = marker_tokens(codec.tokenizer)
    if markers is None or markers.in_channels:
        return (), (), ()
    encoded = [codec.encode_text(text) for text in ("\n", "\n\n")]
    newlines = tuple(tokens[0] for tokens in encoded if len(tokens) == 1)
    return markers.start if len(markers.start) == 1 else (), markers.end, newlines


_TABLES = 8  # models and sets of stop tokens; making a table takes up to some seconds
_lock = threading.Lock()
_tables: OrderedDict[tuple[str, int, frozenset[int]], LLTokenizer] = OrderedDict()


def token_tables(codec: TokenCodec) -> LLTokenizer:
    """Return a model's tables. Raises UsageError for tokenizers that llguidance does not know."""
    key = codec.digest, codec.vocabulary, codec.stop_tokens
    if (tables := _tables.get(key)) is None:
        text, ends = codec.tokenizer.backend_tokenizer.to_str(), sorted(codec.stop_tokens)
        try:
            tables = LLTokenizer(text, n_vocab=codec.vocabulary, eos_token=ends)
        except ValueError as error:
            reason = on_one_line(str(error))
            raise UsageError(
                f"constrained answers do not support the tokenizer of {codec.name}: {reason}"
            ) from error
        with _lock:
            _tables[key] = tables
            while len(_tables) > _TABLES:
                _tables.popitem(last=False)
    return tables


@lru_cache(_TABLES)
def key_tokens(tables: LLTokenizer) -> KeyTokens:
    """Return a model's tokens that can end a key."""
    return KeyTokens([tables.decode_bytes([token]) for token in range(tables.vocab_size)])


def forced_tokens(tables: LLTokenizer, text: bytes) -> list[int]:
    """Return the tokens of a matcher's forced text, which names special tokens by id."""
    tokens: list[int] = []
    for index, part in enumerate(_FORCED_SPECIAL.split(text)):
        tokens += [int(part)] if index % 2 else tables.tokenize_bytes(part) if part else []
    return tokens


_QUOTE = b'"'


class KeyTokens:
    """The tokens of a vocabulary that can end a key."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        """texts: of all tokens."""
        self.texts = texts
        self._tokens = [token for token, text in enumerate(texts) if _QUOTE in text]
        self._tokens.sort(key=texts.__getitem__)
        self._sorted = [texts[token] for token in self._tokens]
        self._whole: dict[bytes, list[int]] = defaultdict(list)  # by a string that is in the token
        for place, text in enumerate(self._sorted):
            for inner in text.split(_QUOTE)[1:-1]:
                self._whole[inner].append(place)

    def repeating(self, state: JsonState) -> list[int]:
        """Return the tokens that would repeat a key."""
        fresh, places = replace(state, repeated=False), set[int]()
        for used in {key for keys in state.keys for key in keys}:
            places.update(self._whole.get(used, ()))
            if state.key is not None and used.startswith(state.key):
                rest = used[len(state.key) :] + _QUOTE
                first = bisect_left(self._sorted, rest)
                last = bisect_left(self._sorted, rest[:-1] + b"#")  # the byte after the quote
                places.update(range(first, last))
        return [self._tokens[at] for at in places if advanced(fresh, self._sorted[at])[0].repeated]
