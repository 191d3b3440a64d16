"""Structured output fits its grammar, has the model's distribution, and is exact with drafts."""

import itertools
import json
import re
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import create_autospec

import llguidance
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel as Split
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from akunu_py.engine import kv_cache
from akunu_py.engine.constraint import matcher as constraint_module
from akunu_py.engine.constraint.answer_limits import compile_rules
from akunu_py.engine.constraint.matcher import (
    MAX_CONSTRAINT,
    ConstraintMatcher,
    compile_ahead,
    compile_constraint,
    lark,
    token_tables,
)
from akunu_py.engine.drafters.learned_state import UnsavedState
from akunu_py.engine.engine import Engine
from akunu_py.engine.loop import StepLoop
from akunu_py.engine.target import Target
from akunu_py.errors import UsageError
from akunu_py.json_schema.layouts import COMPACT, FREE
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.cost import CostCurve
from akunu_py.types import (
    SWITCH_MODES,
    Answer,
    Constraint,
    DraftMode,
    GenerateOptions,
    SamplingOptions,
    TextPiece,
)
from tests.support.drafters import FixedCosts
from tests.support.engines import altered
from tests.support.identity import Served, Submitted, answers_in_all_modes, naive
from tests.support.json_schema import exactly, is_valid
from tests.support.tiny import tiny_llama

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["get_weather", "get_news"]},
        "arguments": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"const": "x"}, "maxItems": 2},
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
CONSTRAINTS = {
    "schema": Constraint("json_schema", json.dumps(SCHEMA)),
    "compact": Constraint("json_schema", json.dumps(SCHEMA), compact=True),
    "one of": Constraint(
        "json_schema",
        '{"oneOf": [{"type": "object", "required": ["a"]}, {"properties": {"a": {"not": {}}}}]}',
    ),
    "json": Constraint("json"),
    "regex": Constraint("regex", r"[A-Z][a-z]+ (costs|weighs) [0-9]{1,3}\.[0-9]{2} (EUR|kg)"),
    "choice": Constraint("choice", choices=("yes", "no", "not at all", "ja", "ñandú \"q\" \\ \n.")),
    "grammar": Constraint("grammar", 'start: sum\nsum: NUM ("+" NUM)+ "=" NUM\nNUM: /[0-9]{1,3}/'),
}  # fmt: skip
TOKENS = 40
PROMPT = 'Call get_weather: {"name": "get_weather", "arguments": {"city": "Oslo"'


@pytest.fixture(scope="module")
def engine(shallow_starter: Engine) -> Engine:
    """A tiny model of random weights, with a tokenizer that knows all bytes and a few words."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer, backend.decoder = Split(add_prefix_space=False), ByteLevel()
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=["</s>", "<think>", "</think>"],
        initial_alphabet=Split.alphabet(),
        show_progress=False,
    )
    texts = [PROMPT, json.dumps(SCHEMA), json.dumps(SCHEMA, indent=1), "costs weighs yes no\n\n"]
    backend.train_from_iterator(texts * 3, trainer)
    size = backend.get_vocab_size()
    return altered(
        shallow_starter,
        model=tiny_llama(2, vocab_size=size + 7),  # weights are often wider than the tokenizer
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"),
        digest="tiny",
        vocabulary=size + 7,
        stop_tokens=frozenset([0]),
    )


def answered(engine: Engine, prompt: list[int], options: GenerateOptions) -> Answer:
    return StepLoop(engine).answer(prompt, options)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "temperature"), [(name, 0.8 * (place % 2)) for place, name in enumerate(CONSTRAINTS)]
)
def test_tokens_are_those_of_masked_plain_decoding(
    engine: Engine, name: str, temperature: float
) -> None:
    constraint, tables = CONSTRAINTS[name], token_tables(engine.tokens)
    sampling = SamplingOptions(temperature=temperature, seed=5, constraint=constraint)
    options, prompt = GenerateOptions(TOKENS, sampling=sampling), engine.tokens.encode(PROMPT)
    text = lark(constraint, COMPACT if constraint.compact else FREE)
    new_matcher = llguidance.LLMatcher(tables, llguidance.LLMatcher.grammar_from_lark(text))

    def masked(tokens: list[int], logits: mx.array) -> mx.array | None:
        """Mask by a new matcher for each step."""
        matcher = new_matcher.deep_copy()
        assert matcher.consume_tokens(tokens)
        allowed = np.frombuffer(matcher.compute_logit_bias(), np.uint8)
        return None if matcher.is_stopped() else mx.where(mx.array(allowed)[None], logits, -mx.inf)

    truth = naive(engine, prompt, options, masked)
    answers = answers_in_all_modes(engine, prompt, options, truth, seeds=range(3))
    stats = [answer.stats for answer in answers[3:]]
    accepted = sum(each.accepted for each in stats)
    assert len(truth) < 13 or 0 < accepted < sum(each.drafted for each in stats)
    answer = answers[-1]
    assert answer.finish_reason == "stop" or len(truth) == TOKENS
    if answer.finish_reason != "stop":
        return
    match constraint.kind:
        case "regex":
            assert re.fullmatch(constraint.text, answer.text)
        case "choice":
            assert answer.text in constraint.choices
        case "json_schema":
            assert is_valid(json.loads(constraint.text), exactly(answer.text))


def test_an_answer_cut_off_is_the_beginning_of_one_that_matches(engine: Engine) -> None:
    whole = {"type": "string", "minLength": 300, "pattern": "^a*$"}
    sampling = SamplingOptions(constraint=Constraint("json_schema", json.dumps(whole)))
    answer = answered(engine, [5, 6], GenerateOptions(12, sampling=sampling))
    assert answer.finish_reason == "length"
    assert re.fullmatch('"a+', answer.text)


REFUSED = {
    "not JSON": (Constraint("json_schema", '{"type": '), "not JSON"),
    "a place": (
        Constraint("json_schema", '{"properties": {"a/b": {"items": {"pattern": "(?<=a)"}}}}'),
        "at #/properties/a~1b/items: the pattern '(?<=a)' has a look-behind",
    ),
    "unsatisfiable": (
        Constraint("json_schema", '{"type": "integer", "minimum": 3, "maximum": 2}'),
        "cannot be used: no value can fit it",
    ),
    "values of a property": (
        Constraint(
            "json_schema",
            '{"required": ["a"], "properties": {"a": {"$ref": "#/$defs/c"}}, "type": "object", '
            '"$defs": {"c": {"type": "array", "minItems": 1, "items": {"allOf": [{"enum": [1]}, '
            '{"minimum": 2}]}}}}',
        ),
        "cannot be used at #/$defs/c/items: no value can fit it",
    ),
    "expression": (Constraint("regex", "a(b"), "used: unclosed group at character 2"),
    "nothing": (Constraint("regex", r"[^\s\S]"), "cannot be used"),
    "escape": (Constraint("regex", "a\\"), "inside an escape"),
    "too large": (Constraint("regex", "a" * (MAX_CONSTRAINT + 1)), "at most"),
    "no choice": (Constraint("choice"), "at least one choice"),
    "compact text": (Constraint("regex", "a", compact=True), "for JSON"),
}  # fmt: skip


@pytest.mark.parametrize(("constraint", "message"), REFUSED.values(), ids=REFUSED)
def test_constraints_that_cannot_be_enforced_are_refused_before_the_prefill(
    engine: Engine, constraint: Constraint, message: str
) -> None:
    options = GenerateOptions(sampling=SamplingOptions(constraint=constraint))
    with pytest.raises(UsageError, match=re.escape(message)):
        StepLoop(engine).request([5], options)


def test_a_constraint_that_compiles_for_too_long_is_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraint_module, "COMPILE_SECONDS", 0.0)
    names = {f"k{number}": {"type": "number", "multipleOf": number} for number in range(1, 90)}
    constraint = Constraint("json_schema", json.dumps({"properties": names}))
    with pytest.raises(UsageError, match=r"took longer than 0 s; make it simpler"):
        compile_constraint(engine.tokens, constraint)


@pytest.mark.parametrize("mode", ["fixed", "auto"])
def test_forced_text_is_drafted_and_verified(engine: Engine, mode: DraftMode) -> None:
    text = "the quick brown (fox|dog) jumps over the lazy (cat|cow) and never comes back"
    sampling = SamplingOptions(constraint=Constraint("regex", text))
    plain = answered(engine, [5, 6], GenerateOptions(200, "off", sampling=sampling))
    loop = StepLoop(engine, UnsavedState(FixedCosts({1: 1.0, 33: 1.1})))
    answer = loop.answer([5, 6], GenerateOptions(200, mode, 4, sampling))
    assert answer.tokens == plain.tokens
    assert re.fullmatch(text, answer.text)
    assert answer.stats.accepted
    # The random model likes to spell the text in tokens of its own, so not all is accepted.
    assert answer.stats.tokens_per_pass > 1.2
    assert loop.answer([5, 6], GenerateOptions(9, mode)).finish_reason == "length"


CHOICES = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "green", "dark blue"]},
        "size": {"enum": ["small", "large"]},
        "sent": {"type": "boolean"},
        "paid": {"type": "boolean"},
    },
    "required": ["color", "size", "sent", "paid"],
    "additionalProperties": False,
}


@pytest.mark.long
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
@pytest.mark.parametrize(
    "constraint",
    [Constraint("json_schema", json.dumps(CHOICES)), Constraint("regex", "((yes|no|costs) ){9}")],
    ids=["schema", "regex"],
)
def test_choices_are_verified_as_a_tree(
    engine: Engine, constraint: Constraint, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens from fewer passes, with trees; accepted branches move in the KV cache."""
    moved = create_autospec(kv_cache.move_rows, side_effect=kv_cache.move_rows)
    monkeypatch.setattr(kv_cache, "move_rows", moved)
    ticks = itertools.count(1)  # all passes take the same time
    monkeypatch.setattr(Target, "clock", staticmethod(lambda: float(next(ticks))))
    wait(compile_ahead(engine.tokens, constraint))
    samplings = [SamplingOptions(1.0, seed=seed, constraint=constraint) for seed in range(2)]
    alone = [answered(engine, [5, 6], GenerateOptions(64, "off", sampling=s)) for s in samplings]
    passes = dict[str, int]()
    for tree in SWITCH_MODES:
        options = [GenerateOptions(64, sampling=each, draft_tree=tree) for each in samplings]
        requests = [Submitted([5, 6], each) for each in options]
        for group in [requests] if shared else [[each] for each in requests]:
            served = Served(engine, learned=UnsavedState(FixedCosts({1: 1.0, 33: 1.01})))
            served.serve(group)
            assert bool(served.loop.runner.shared.passes) == shared
        for each, plain in zip(requests, alone, strict=True):
            stats = each.stats
            assert (tuple(each.tokens), each.started.text) == (plain.tokens, plain.text)
            assert stats.accepted < stats.drafted <= 33 * stats.target_passes
        passes[tree] = sum(each.stats.target_passes for each in requests)
    assert moved.called
    assert passes["auto"] < passes["off"]


def test_trees_wait_for_the_trial_that_runs_when_the_model_is_idle(engine: Engine) -> None:
    constraint = Constraint("regex", "((yes|no|costs) ){9}")
    sampling = SamplingOptions(1.0, seed=3, constraint=constraint)
    found = list[Answer]()
    for is_idle in (False, True):
        loop = StepLoop(engine, UnsavedState(FixedCosts({1: 1.0, 33: 1.01})))
        loop.answer([5, 6], GenerateOptions(8, sampling=sampling))
        loop.idle_step(seconds=None if is_idle else 1.0)
        found.append(loop.answer([5, 6], GenerateOptions(64, sampling=sampling)))
    first, second = found
    assert first.tokens == second.tokens
    assert first.stats.target_passes > second.stats.target_passes


@pytest.mark.parametrize(("constraint", "before", "choices"), [
    (Constraint("json_schema", json.dumps(CHOICES)), '{"color": "', {"red", "green", "dark"}),
    (Constraint("json_schema", json.dumps(CHOICES)), '{"color": "dark', set()),
    (Constraint("json_schema", '{"type": ["boolean", "null"]}'), "", {"true", "false", "null"}),
    (Constraint("json_schema", '{"type": "string"}'), '"', set()),
    (Constraint("json_schema", '{"type": "integer"}'), "", set()),
    (Constraint("choice", choices=("yes", "no", "maybe")), "", {"yes", "no", "maybe"}),
    (Constraint("regex", "(yes|no)-(yes|no)"), "yes-", {"yes", "no"}),
    (Constraint("regex", "[a-z]+"), "", set()),
])  # fmt: skip
def test_choices_of_a_grammar_are_found_where_they_are_few(
    shallow_starter: Engine, constraint: Constraint, before: str, choices: set[str]
) -> None:
    tokenizer = shallow_starter.tokens.tokenizer
    wait(compile_ahead(shallow_starter.tokens, constraint))
    matcher = ConstraintMatcher(shallow_starter.tokens, constraint, [5])
    matcher.consume(tokenizer.encode(before, add_special_tokens=False))
    matcher.begin_draft()
    found = matcher.choices() if not matcher.forced()[0] else []
    matcher.end_draft()
    assert {tokenizer.decode([token]) for token in found} == choices


def test_forbidden_predictions_are_not_drafted(engine: Engine) -> None:
    prompt = engine.tokens.encode("one two one two one two one")
    sampling = SamplingOptions(constraint=Constraint("regex", "[x-z]{30}"))
    loop = StepLoop(engine)
    request = loop.request(prompt, GenerateOptions(20, "fixed", 4, sampling))
    pieces = [each.piece for each in loop.stream(request) if isinstance(each, TextPiece)]
    assert not set(prompt) & {token for each in pieces for token in (*each.tokens, *each.rejected)}


@pytest.mark.parametrize(("compact", "indent"), [(False, None), (False, 2), (True, None)])
def test_the_text_after_the_end_of_a_value_is_predicted(
    shallow_starter: Engine, compact: bool, indent: int | None
) -> None:
    schema = {
        "type": "object",
        "properties": {
            "first_name": {"type": "string"},
            "ages": {"type": "array", "items": {"type": "integer"}, "maxItems": 1},
            "size": {"type": "object", "properties": {"in_metres": {"type": "number"}}},
            "remark": {"type": "string"},
        },
    }
    value = {"first_name": 'A "b" C, d', "ages": [123], "size": {"in_metres": 0.75}, "remark": "x"}
    layout: Any = {"separators": (",", ":")} if compact else {"indent": indent}
    text = json.dumps(value, **layout)
    tokens = shallow_starter.tokens.tokenizer.encode(text, add_special_tokens=False)
    constraint = Constraint("json_schema", json.dumps(schema), compact=compact)
    wait(compile_ahead(shallow_starter.tokens, constraint))
    matcher = ConstraintMatcher(shallow_starter.tokens, constraint, [5])
    found = 0
    for place, token in enumerate(tokens):
        matcher.begin_draft()
        ends, written = ([], 0) if matcher.forced()[0] else matcher.ending()
        matcher.end_draft()
        if ends:
            assert written > 0
            behind = shallow_starter.tokens.tokenizer.decode(ends).rstrip()
            rest = shallow_starter.tokens.tokenizer.decode(tokens[place:])
            if rest.startswith(behind[0]):  # the only one behind "x" ends what is behind it as well
                assert rest.startswith(behind)
                found += 1
        matcher.consume([token])
    assert found >= 4


def test_forced_text_replaces_a_forbidden_prediction(shallow_starter: Engine) -> None:
    encode = shallow_starter.tokens.tokenizer.encode
    schema = {"properties": {"topic": {"type": "string"}}, "required": ["topic"]}
    constraint = Constraint("json_schema", json.dumps({"type": "object"} | schema))
    prompt, begun = encode('"topic": {"a": 1}, ' * 9), encode('{"topic":', add_special_tokens=False)
    wait(compile_ahead(shallow_starter.tokens, constraint))
    matcher = ConstraintMatcher(shallow_starter.tokens, constraint, prompt)
    drafter = AutoDrafter(CostCurve({1: 1.0, 33: 1.1}))
    drafter.extend([*prompt, *begun])
    assert shallow_starter.tokens.tokenizer.decode(drafter.propose(1)) == ' {"'
    matcher.consume(begun)
    drafter.guide = matcher
    assert shallow_starter.tokens.tokenizer.decode(drafter.propose(1)) == ' "'


@pytest.mark.parametrize(("schema", "text", "key", "repeats"), [
    ({}, '{"name": 1, "age": {"name": 2}, "', "name", True),
    ({}, '{"name": 1, "age": {"', "name", False),
    ({}, '[{"name": 1}, {"', "name", False),
    ({}, '{"name": "a, ", "a": {"b": ["x", "', "name", False),
    ({}, '{"a\\"b": 1, "', 'a\\"b', True),
    ({}, '{"": 1, ', '"', True),
    ({}, '{":": 1, ', '":', True),
    (
        {"patternProperties": {"^a$": {}}, "additionalProperties": False}, '{"a": 1, "', "a",
        False,
    ),
])  # fmt: skip
def test_no_key_is_written_twice(
    shallow_starter: Engine, schema: Any, text: str, key: str, repeats: bool
) -> None:
    """Except where a pattern allows nothing else; at every place of a draft, too."""
    encode = partial(shallow_starter.tokens.tokenizer.encode, add_special_tokens=False)
    constraint = Constraint("json_schema", json.dumps({"type": ["object", "array"]} | schema))
    matcher = ConstraintMatcher(shallow_starter.tokens, constraint, [5])
    logits = mx.zeros((1, shallow_starter.tokens.vocabulary))

    def allowed(token: int, draft: Sequence[int]) -> bool:
        rows = mx.broadcast_to(logits, (1 + len(draft), logits.shape[1]))
        return bool(np.isfinite(np.array(matcher.masked(rows, draft)[-1]))[token])

    begun, (*inner, end) = encode(text), encode(key + '"')
    assert allowed(end, [*begun, *inner]) is not repeats
    matcher.consume([*begun, *inner])
    assert allowed(end, []) is not repeats


@pytest.mark.parametrize("opened_by", ["prompt", "model"])
def test_a_model_may_think_before_the_structure(engine: Engine, opened_by: str) -> None:
    engine = altered(engine, tokenizer=TokenizerWrapper(engine.tokens.tokenizer))
    encode = engine.tokens.encode
    words, (newline,), (yes, *_) = encode("so\n"), encode("\n"), encode("yes")
    assert engine.tokens.tokenizer.decode([yes]) == "yes"  # and not the letter alone
    opening = [1] if opened_by == "model" else []
    prompt = [*encode("Why?"), *([] if opening else [1])]
    matcher = ConstraintMatcher(engine.tokens, Constraint("choice", choices=("yes", "no")), prompt)

    def allowed(draft: Sequence[int]) -> set[int]:
        logits = mx.zeros((len(draft) + 1, engine.tokens.vocabulary))
        return set(np.flatnonzero(np.isfinite(np.array(matcher.masked(logits, draft)[-1]))))

    if opening:
        assert {yes, 1} <= allowed([])
        assert newline not in allowed([])
        assert 1 not in allowed(encode("n")[:1])
    everything = set(range(engine.tokens.vocabulary)) - engine.tokens.stop_tokens
    assert allowed([*opening, *words]) == everything
    assert allowed([*opening, *words, 2]) == allowed([*opening, 2, newline])
    assert {yes, newline} <= allowed([*opening, 2]) < everything - {1}
    thought = [*opening, *words, 2, newline]
    assert matcher.consume([*thought, yes, yes]) == [*thought, yes]
    assert matcher.complete
    codec = replace(engine.tokens, stop_tokens=engine.tokens.stop_tokens | {newline})
    matcher = ConstraintMatcher(codec, Constraint("choice", choices=("yes", "no")), prompt)
    assert matcher.consume([*opening, yes, 2, newline])[-1] == newline


def test_a_stop_token_that_is_text_of_the_grammar_ends_the_answer(engine: Engine) -> None:
    *before, stop = engine.tokens.encode_text("12:")
    sampling = SamplingOptions(constraint=Constraint("regex", "12:[0-9]"))
    answer = answered(engine, [5, 6], GenerateOptions(9, sampling=sampling, stop_tokens=(stop,)))
    assert (answer.tokens, answer.finish_reason) == ((*before, stop), "stop")


def test_rejected_drafts_leave_no_trace_in_the_matcher(engine: Engine) -> None:
    names = {"count": {"type": "integer"}, "title": {"type": "string"}, "done": {"type": "null"}}
    schema = {"type": "object", "properties": names, "additionalProperties": False}
    constraint = Constraint("json_schema", json.dumps(schema))
    encode = token_tables(engine.tokens).tokenize_str
    for drafted, written in itertools.permutations(names, 2):
        found = []
        for drafts in ([encode(f'"{drafted}":')], []):
            matcher = ConstraintMatcher(engine.tokens, constraint, [])
            matcher.consume(encode("{"))
            for draft in drafts:
                matcher.masked(mx.zeros((1 + len(draft), engine.tokens.vocabulary)), draft)
            matcher.consume(encode(f'"{written}'))
            end = encode('":')
            found.append(matcher.masked(mx.zeros((1 + len(end), engine.tokens.vocabulary)), end))
            ahead = matcher.masked_ahead(mx.zeros((1, engine.tokens.vocabulary)))
            assert mx.array_equal(ahead, found[-1][:1])
        assert mx.array_equal(*found), (drafted, written)


def test_tables_of_several_models_and_stop_tokens_are_made_once(engine: Engine) -> None:
    codecs = [
        replace(engine.tokens, stop_tokens=engine.tokens.stop_tokens | {token})
        for token in range(5, 9)
    ]
    made = [token_tables(each) for each in codecs]
    assert all(token_tables(each) is tables for each, tables in zip(codecs, made, strict=True))


@pytest.mark.parametrize("fails", [False, True])
def test_the_thread_of_the_model_waits_for_no_grammar(
    fails: bool, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grammars to draft from that never compile, or are too large, change no token."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    constraint = Constraint("json_schema", json.dumps(schema | {"additionalProperties": False}))
    options = GenerateOptions(60, sampling=SamplingOptions(constraint=constraint))
    expected = StepLoop(engine).answer([5, 6], options).tokens
    start = constraint_module._start_compiling
    compile_rules(engine.tokens, options)

    def never(*args: Any, draft: bool = False) -> Any:
        future = Future[Any]()
        if fails:
            future.set_exception(UsageError("its grammar becomes too large"))
        return future if draft else start(*args)

    monkeypatch.setattr(constraint_module, "_start_compiling", never)
    monkeypatch.setattr(constraint_module, "_compile", lambda *args: pytest.fail("compiled again"))
    loop = StepLoop(engine)
    request = loop.request([5, 6], options)
    list(loop.stream(request))
    assert tuple(request.tokens) == expected
