"""Grammars of JSON schemas: they allow what fits, all of it, and can always be completed."""

import json
import random
import re
from dataclasses import replace
from decimal import Decimal
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from akunu_py.errors import SchemaError, Unsatisfiable
from akunu_py.json_schema import grammar, rules, scalars
from akunu_py.json_schema.layouts import COMPACT, FREE, Layout
from akunu_py.json_schema.patterns import content_matching, is_found
from akunu_py.json_schema.regex import LIMITS, byte_tables, matches, quoted
from tests.support.json_schema import is_valid, schemas, values

ATOMS = ["a", "b", ".", r"\d", r"\w", r"\s", "[a-c]", '[^a"]', r"\n", r"\x41", "é"]


OPEN = replace(FREE, open_objects=True)  # the meaning of the standard


@lru_cache(8)
def compiled(written: str) -> LLMatcher:
    made = LLMatcher.grammar_from_lark(written)
    return LLMatcher(byte_tables(), made, log_level=0, limits=LIMITS)


def matcher(schema: Any, layout: Layout = OPEN) -> LLMatcher:
    """Of bytes. Raises SchemaError."""
    return compiled(grammar(schema, layout)).deep_copy()


def allows(schema: Any, text: str, layout: Layout = OPEN) -> bool:
    return completes(matcher(schema, layout), text)


def completes(made: LLMatcher, text: str) -> bool:
    """Return whether the grammar of a new matcher allows `text`."""
    assert not made.is_error(), made.get_error()
    data = list(text.encode())
    return made.try_consume_tokens(data) == len(data) and made.is_accepting()


@pytest.mark.long
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(schemas, st.lists(values, min_size=1, max_size=5), st.integers())
@example({"oneOf": [{"minimum": 2}, {"multipleOf": 7}]}, [1, 2, 7, 0, "a"], 1)
@example({"contains": {"const": 1}, "maxItems": 2}, [[1], [1, 1], [2], [1, 2], [2, 2, 1]], 1)
@example({"not": {"patternProperties": {"b": {"type": "null"}}}}, [{}, {"b": 1}, {"b": None}], 1)
@example({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, [{"a": 1}, {"b": 1}, 3], 1)
@example(
    {"items": {"enum": ["a", 1, None, 2]}, "uniqueItems": True, "minItems": 2, "maxItems": 3},
    [["a"], ["a", 1], ["a", "a"], [2, None, 1], [1, 2, None, "a"], [], 5],
    1,
)
@example(
    {
        "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": {"const": None},
        "minItems": 1, "maxItems": 3,
    },
    [[], [1], [1, "a"], [1, "a", None], [1, "a", None, None], ["a"], [1, 2], [1, "a", 3]],
    1,
)  # fmt: skip
@example({"not": {"additionalProperties": {"const": 1}}}, [{}, {"a": 1}, {"a": 1, "b": 2}, 3], 1)
@example(
    {"not": {"patternProperties": {"^a": {}}, "additionalProperties": {"const": 1}}},
    [{"a": 2}, {"b": 1}, {"b": 2}, {"ab": 5, "b": 3}, {}],
    1,
)
@example({"required": ["a"], "properties": {"a": False}}, [{"a": 1}, {}, 3], 1)
@example({"enum": [[1, {"a": "b"}], {"a": [2]}]}, [[1, {"a": "b"}], {"a": [2]}, [1], {}], 1)
@example({"not": {"contains": {"const": 1}}}, [[1], [2], [], [2, 1], 3], 1)
@example(
    {"not": {"prefixItems": [{"const": 1}], "items": {"const": 2}}},
    [[], [1], [2], [1, 2], [1, 3], [2, 2], "a"],
    1,
)
@example({"dependentSchemas": {"a": {"required": ["b"]}}}, [{"a": 1}, {"a": 1, "b": 2}, {}], 1)
@example({"not": {"propertyNames": {"pattern": "^a"}}}, [{"a": 1}, {"b": 1}, {}, 3], 1)
@example({"not": {"minProperties": 1, "maxProperties": 2}}, [{}, {"a": 1}, 3], 1)
@example({"required": ["b"], "minProperties": 2}, [{"ab": None, "b": None}, {"b": None}], 1)
def test_grammar_allows_the_values_that_fit_and_nothing_else(
    schema: Any, instances: list[Any], seed: int
) -> None:
    """And every start of a text can be completed to a value that fits."""
    try:
        grammar(schema)
    except SchemaError as refused:
        if "no value can fit" in str(refused):
            assert not any(is_valid(schema, each) for each in instances)
            return
        assume(False)
    made = matcher(schema)
    for each in instances:
        fits, orders = is_valid(schema, each), (each, backwards(each))
        for indent in (None, 2):  # counted properties have a fixed order
            texts = {json.dumps(value, ensure_ascii=False, indent=indent) for value in orders}
            assert any(completes(made.deep_copy(), text) for text in texts) == fits, texts
    walked = walk(made, random.Random(seed))
    assert walked is None or is_valid(schema, json.loads(walked)), walked


def backwards(value: Any) -> Any:
    """Return `value` with the properties of all objects in reverse order."""
    if isinstance(value, dict):
        return {name: backwards(each) for name, each in reversed(value.items())}
    return [backwards(each) for each in value] if isinstance(value, list) else value


def walk(made: LLMatcher, chance: random.Random) -> str | None:
    """Return a text that the grammar allows, drawn byte by byte; None if it becomes too long."""
    text, end = bytearray(), byte_tables().eos_token
    while not made.is_stopped() and len(text) < 400:
        mask = made.compute_bitmask()
        allowed = [byte for byte in range(end + 1) if mask[byte // 8] >> byte % 8 & 1]
        assert allowed, text
        if end in allowed and (chance.random() < 0.5 or len(allowed) == 1):
            return text.decode()
        # No whitespace without end, and few of the thousand ways to spell a character.
        allowed = [byte for byte in allowed if byte < 256]
        likely = [byte for byte in allowed if byte in b'{}[]":,ab0123456789.-tfn'] or allowed
        ends = [byte for byte in likely if byte in b'}]"'] if len(text) > 30 else []
        byte = chance.choice(ends or likely)
        assert made.consume_token(byte)
        text.append(byte)
    return text.decode() if made.is_stopped() else None


def test_a_schema_may_refer_to_itself() -> None:
    tree = {
        "properties": {
            "value": {"oneOf": [{"type": "integer"}, {"const": "leaf"}]},
            "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
        },
        "required": ["value"],
        "additionalProperties": False,
    }
    schema = {"$ref": "#/$defs/tree", "$defs": {"tree": tree | {"type": "object"}}}
    value = {"value": 1, "children": [{"value": "leaf"}, {"children": [], "value": 3}]}
    assert allows(schema, json.dumps(value))
    assert not allows(schema, json.dumps(value).replace("leaf", "loaf"))
    endless = {"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"}
    with pytest.raises(SchemaError, match="no value can fit"):
        grammar(endless)
    with pytest.raises(SchemaError, match="refers to nothing but itself"):
        grammar({"allOf": [{"$ref": "#"}]})


def test_references_by_identifier_and_by_anchor() -> None:
    schema = {
        "$id": "http://a.b/c/d.json",
        "items": {"anyOf": [{"$ref": to} for to in ("e.json#/x", "#here", "d.json#/$defs/q~1")]},
        "$defs": {
            "one": {"$id": "e.json", "x": {"const": 1}}, "two": {"$anchor": "here", "const": 2},
            "q/": {"const": 3},
        },
    }  # fmt: skip
    assert allows(schema, "[1, 2, 3]")
    assert not allows(schema, "[4]")


def test_keywords_next_to_a_reference_are_ignored_in_old_dialects_only() -> None:
    schema = {"$ref": "#/$defs/low", "enum": [1], "$defs": {"low": {"maximum": 2}}}
    old = schema | {"$schema": "http://json-schema.org/draft-07/schema#"}
    assert [allows(each, "2") for each in (schema, old)] == [False, True]


def test_properties_come_in_any_order_but_not_twice() -> None:
    schema = {"properties": {"a": {}, "b": {"type": "null"}}, "required": ["b"]}
    assert allows(schema, '{"b": null, "x": 1, "a": 2}')
    assert allows(schema, '{"a": 2, "b": null}')
    assert not allows(schema, '{"a": 2, "a": 2, "b": null}')
    assert allows(schema, '{"a":2,"b":null}', COMPACT)
    assert not allows(schema, '{"b":null,"a":2}', COMPACT)
    assert not allows(schema, '{"a": 2,"b":null}', COMPACT)


CLOSED = [
    ({"properties": {"a": {}}}, [{}, {"a": 1}], [{"b": 1}, {"a": 1, "b": 1}]),
    ({"properties": {}}, [{}], [{"a": 1}]),
    ({"properties": {"a": {}}, "required": ["b"]}, [{"a": 1, "b": 2}], [{"a": 1}]),
    ({"properties": {"a": {}}, "minProperties": 1}, [{"a": 1}], [{}, {"a": 1, "b": 1}]),
    ({"properties": {"a": {}}, "minProperties": 2}, [{"a": 1, "b": 1}], [{"a": 1}]),
    ({"properties": {"a": {}}, "additionalProperties": {}}, [{"a": 1, "b": 1}], []),
    ({"properties": {"a": {}}, "additionalProperties": {"type": "null"}}, [{"b": None}], []),
    ({"properties": {"a": {}}, "patternProperties": {"^b": {}}}, [{"b": 1, "c": 1}], []),
    ({"required": ["a"]}, [{"a": 1, "b": 1}], []),
    ({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
     [{"a": 1, "b": 1}], [{"c": 1}]),
    ({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}},
                                            "additionalProperties": True}]}, [{"c": 1}], []),
    ({"oneOf": [{"properties": {"k": {"const": k}, k: {}}, "required": ["k"]} for k in "ab"]},
     [{"k": "a", "a": 1}], [{"k": "a", "b": 1}, {"k": "b", "x": 1}]),
    ({"properties": {"in": {"properties": {"a": {}}}}}, [{"in": {"a": 1}}], [{"in": {"b": 1}}]),
    ({"properties": {"a": {}}, "not": {"properties": {"a": {"const": 1}}}},
     [{"a": 2}], [{"a": 1}, {"a": 2, "b": 1}]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "right", "wrong"), CLOSED)
def test_answers_have_the_properties_that_a_schema_lists(
    schema: Any, right: list[Any], wrong: list[Any]
) -> None:
    """Unless it mentions others, or the layout follows the standard."""
    schema = {"type": "object", **schema}
    for value in right:
        assert allows(schema, json.dumps(value), FREE), value
    for value in wrong:
        assert not allows(schema, json.dumps(value), FREE), value
        assert allows(schema, json.dumps(value)) == is_valid(schema, value)


@pytest.mark.parametrize("indent", [None, 1, 4, "\t"])
def test_json_has_line_breaks_but_no_blank_lines(indent: Any) -> None:
    value = {"a": [1, {"b": [2, [], {}]}], "c": {}}
    text = json.dumps(value, indent=indent)
    for written in (text, text.replace("\n", "\r\n"), text.replace(",", ", ")):
        assert allows(True, written)
    for wrong in ("{\n\n\n}", '{"a":\n \n1}', "{" + " " * 200 + "}", "[1,\n\n2]"):
        assert not allows(True, wrong)


@pytest.mark.parametrize("kind", ["number", "integer"])
def test_digits_end(kind: str) -> None:
    for schema, most in (({"type": kind}, 40), ({"type": kind, "minimum": 10**60}, 10**3)):
        assert allows(schema, "1" * most)
        assert allows(schema, "1" * (most + 1)) == ("minimum" in schema)
    assert not allows({}, "1." + "1" * 41)


@pytest.mark.parametrize("layout", [FREE, COMPACT])
def test_an_object_may_have_thousands_of_free_properties(layout: Layout) -> None:
    members = {f"k{number}": number for number in range(2100)}
    schema = {"additionalProperties": {"type": "integer"}}
    assert allows(schema, json.dumps(members, separators=(",", ":")), layout)


@given(
    st.recursive(
        st.sampled_from(ATOMS),
        lambda inner: (
            st.builds("({}|{})".format, inner, inner)
            | st.builds("{}{}".format, inner, inner)
            | st.builds("(?:{}){}".format, inner, st.sampled_from("*+?"))
            | st.builds("(?:{}){{1,2}}".format, inner)
            | st.builds("^{}".format, inner)
            | st.builds("{}$".format, inner)
        ),
        max_leaves=6,
    ),
    st.lists(st.text('ab1 é"\nA\\', max_size=5), min_size=1, max_size=6),
)  # fmt: skip
def test_a_pattern_is_found_where_it_is(pattern: str, texts: list[str]) -> None:
    try:
        content = content_matching(pattern)
    except SchemaError:
        assume(False)
    there = re.compile(pattern.replace("$", r"\Z"), re.ASCII)
    for text in texts:
        assert is_found(pattern, text) == bool(there.search(text)), text
        written = json.dumps(text, ensure_ascii=False)
        assert matches(quoted(content), written.encode()) == is_found(pattern, text)


@pytest.mark.parametrize(("schema", "reason"), [
    (1, "expected a schema, found 1"),
    ({"type": "foo"}, 'unknown type "foo"'),
    ({"$ref": "#/x"}, "'#/x' is not"),
    ({"type": "array", "uniqueItems": True}, "for items of an enum only"),
    ({"pattern": r"(?<=a)b"}, "look-behind"),
    ({"pattern": r"(a)\1"}, "back-reference"),
    ({"pattern": r"\bword"}, "word boundary"),
    ({"pattern": "a(?!b)"}, "look-ahead"),
    ({"pattern": "(?:^a|b)*"}, "an anchor in a repetition"),
    ({"pattern": "a(b$)c"}, "an anchor within the text"),
    ({"pattern": "(?:^|)" * 20}, "too many alternatives with anchors"),
    ({"pattern": "(a"}, "not closed"),
    ({"pattern": "a{9999999}"}, "the repetition"),
    ({"pattern": r"\p{Script=Greek}"}, "Unicode property"),
    ({"multipleOf": 0.7}, "multipleOf"),
    ({"minLength": 1e400}, "minLength must be an integer of at least 0, is inf"),
    ({"multipleOf": 1e400}, "multipleOf must be above 0 and finite"),
    ({"not": {"multipleOf": 1.5}}, "multipleOf"),
    ({"contains": {"const": 1}, "maxContains": 1}, "not supported"),
    ({"contains": {"const": 1}, "minContains": 2}, "not supported"),
    ({"enum": list(range(61))}, "60 values at most"),
    (
        {"allOf": [{"anyOf": [{"required": [a + b]} for a in "abcdef"]} for b in "12345678"]},
        "make it simpler",
    ),
])  # fmt: skip
def test_unsupported_schemas_are_refused_with_their_place(schema: Any, reason: str) -> None:
    unique = {"type": "array", "uniqueItems": True} if "60 values" in reason else {}
    with pytest.raises(SchemaError, match=re.escape(reason)) as refused:
        grammar({"items": schema, **unique})
    assert refused.value.place == ("#" if unique else "#/items")


bounds = st.decimals(-30, 30, places=2) | st.integers(-1200, 1200).map(Decimal)


@given(bounds, bounds, st.booleans(), st.lists(bounds, min_size=1, max_size=8))
def test_bounds_of_numbers(
    low: Decimal, high: Decimal, strictly: bool, tried: list[Decimal]
) -> None:
    keys = ("exclusiveMinimum", "exclusiveMaximum") if strictly else ("minimum", "maximum")
    schema = {"type": "number", keys[0]: float(low), keys[1]: float(high)}
    tried = [*tried, low, high, low + Decimal("0.01"), high - Decimal("0.01"), high / 2]
    try:
        texts = [f"{float(each):f}".rstrip("0").removesuffix(".") for each in tried]
        found = [allows(schema, text) for text in texts]
    except SchemaError:
        found = [False] * len(tried)
    assert found == [is_valid(schema, json.loads(text)) for text in texts]


@pytest.mark.long
@settings(max_examples=20)
@given(
    st.lists(st.sampled_from([1, 2, 3, 7, 10, 12, 0.5, 2.5, 0.01]), min_size=1, max_size=2),
    st.sampled_from([{}, {"multipleOf": 3}, {"const": 21}, {"type": "integer"}, {"maximum": 9}]),
    st.integers(-1200, 1200).map(Decimal),
    st.integers(-1200, 1200).map(Decimal),
    st.lists(bounds, min_size=1, max_size=8),
)
@example([7], {"const": 28}, Decimal(-1100), Decimal(1107), [Decimal(28), Decimal(-1099)])
def test_multiples(
    steps: list[float], never: Any, low: Decimal, high: Decimal, tried: list[Decimal]
) -> None:
    schema = {
        "type": "number",
        "allOf": [{"multipleOf": step} for step in steps],
        "anyOf": [{"minimum": float(high)}, {"exclusiveMaximum": float(low)}],
        "not": never or False,
    }
    steps_tried = (
        each // Decimal(str(step)) * Decimal(str(step)) for each in tried for step in steps
    )
    instances = [json.loads(f"{each.normalize():f}") for each in (*tried, *steps_tried, low, high)]
    try:
        made = matcher(schema)
    except Unsatisfiable:
        assert not any(is_valid(schema, each) for each in instances)
        return
    except SchemaError:
        assume(False)
    for each in instances:
        data = list(json.dumps(each).encode())
        taken = made.try_consume_tokens(data)
        found = taken == len(data) and made.is_accepting()
        made.rollback(taken)
        assert found == is_valid(schema, each), each


def test_multiples_between_bounds_may_be_of_any_number() -> None:
    schema = {"minimum": 1, "maximum": 9, "multipleOf": 0.7}
    assert allows(schema, "2.8")
    assert not allows(schema, "2.7")
    assert allows({"contains": {"const": 1}, "minContains": 0}, "[2]")


def test_too_large_grammars_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_MAX_SYMBOLS", 500)
    grammar({"properties": {f"{number}": {} for number in range(20)}})
    with pytest.raises(SchemaError, match="grammar becomes too large"):
        grammar({"properties": {f"{number}": {} for number in range(90)}})
    monkeypatch.undo()
    monkeypatch.setattr(scalars, "_MAX_STATES", 50)
    with pytest.raises(SchemaError, match="too many states") as refused:
        grammar({"items": {"multipleOf": 97}})
    assert refused.value.place == "#/items"


@pytest.mark.parametrize(("name", "right", "wrong"), [
    ("date-time", "2024-02-29T23:59:60.5+01:00", "2024-02-30T00:00:00Z"),
    ("date", "1999-12-31", "1999-13-01"), ("time", "12:00:00Z", "25:00:00Z"),
    ("email", "a.b@c.de", "a.b"), ("hostname", "a-b.c", "-a"),
    ("ipv4", "1.2.3.255", "1.2.3.256"), ("ipv6", "fe80::1:2", "1::2::3"),
    ("uuid", "123e4567-e89b-12d3-a456-426614174000", "123e4567"),
    ("uri", "https://a.b:1/c?d#e", "a b"), ("json-pointer", "/a~1/0", "a"),
    ("regex", "^a(b|[c\\]])*$", "(a"),
])  # fmt: skip
def test_formats(name: str, right: str, wrong: str) -> None:
    assert allows({"format": name}, json.dumps(right, ensure_ascii=False))
    assert not allows({"format": name}, json.dumps(wrong, ensure_ascii=False))
