"""Prompt text that an answer repeats in another form: without line numbers, or as JSON."""

import json
from collections.abc import Sequence
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akunu_py.bench.curve import parse_curve
from akunu_py.bench.replay import (
    ReplayCounts,
    Trace,
    TraceItem,
    replay_item,
    replay_trace,
    trace_rewrites,
)
from akunu_py.engine.answer import prompt_rewrites
from akunu_py.engine.drafters.drafter import DrafterPool, TrackedDrafter
from akunu_py.engine.drafters.learned_state import UnsavedState
from akunu_py.engine.engine import Engine
from akunu_py.engine.target import Target
from akunu_py.engine.text.prompt_rewrites import PromptRewrites, rewrite
from akunu_py.types import GenerateOptions

CODE = """class Queue:
    def __init__(self, name: str) -> None:
        self.name = name or "queue"
        self.waiting = []

    def put(self, item: object) -> None:
        self.waiting.append(item)
        print(f"{self.name}: {item!r} is number {len(self.waiting)}\\n")

    def first(self) -> object:
        return self.waiting[0]
"""
LINE_FORMS = ("{:6}\t{}", "{}:{}", "{:>4}|{}", "{:6}→{}")  # of `cat -n`, SWE-agent and editors
OPTIONS = GenerateOptions(max_tokens=64, draft="ngram")


def numbered(text: str, form: str) -> str:
    lines = enumerate(text.split("\n")[:-1], 1)
    return "".join(form.format(number, line) + "\n" for number, line in lines)


def as_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@pytest.mark.parametrize("form", LINE_FORMS)
@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r"), max_size=9)
    )
)
def test_listings_lose_their_numbers(form: str, lines: list[str]) -> None:
    text = "".join(f"x{line}\n" for line in lines)
    found = list(rewrite(f"The file:\n{numbered(text, form)}</file>\n"))
    assert found[-2:] == ([text, as_json(text)[1:-1]] if len(lines) >= 3 else found[-2:])
    assert as_json(text)[1:-1] in found or len(lines) < 3


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_json_strings_are_decoded(text: str) -> None:
    text += "\n1\n2\n"
    assert next(rewrite(f'{{"path": "a", "content": {as_json(text)}}}')) == text


@given(st.text(st.sampled_from('"\\n1\t: \n{}')))
def test_any_text_is_accepted(text: str) -> None:
    list(rewrite(text))


def test_a_listing_inside_a_json_string_is_rewritten() -> None:
    inside = as_json(numbered(CODE, LINE_FORMS[0]))
    assert {CODE, as_json(CODE)[1:-1]} <= set(rewrite(f'{{"output": {inside}}}'))


def test_ordinary_text_is_not_rewritten() -> None:
    assert not list(rewrite(f'{CODE}\n12:30 lunch\n13:00 work\nHe said "no\\n" twice.\n'))


def recorded_rewrites() -> tuple[PromptRewrites, Mock]:
    """Return rewrites with a token per letter, and their encoder."""
    encode = Mock(side_effect=lambda text: list(map(ord, text)))
    return PromptRewrites(encode, lambda tokens: "".join(map(chr, tokens))), encode


def test_only_new_text_is_encoded() -> None:
    rewrites, encode = recorded_rewrites()
    first, second = (list(map(ord, numbered(code, "{}:{}"))) for code in (CODE, CODE.upper()))
    found = rewrites.of(first)
    assert found == rewrites.of([*first, ord("I")])
    assert len(found) == encode.call_count == 2
    both = rewrites.of([*first, *map(ord, "\nThis file too:\n"), *second])
    assert both[:2] == found
    assert rewrites.of(second) == both[2:]
    assert len(both) == encode.call_count == 4


def test_too_long_text_is_encoded_once() -> None:
    rewrites, encode = recorded_rewrites()
    prompt = list(map(ord, numbered("x" * 20_000 + "\na\nb\n", "{}:{}")))
    assert rewrites.of(prompt) == []
    assert rewrites.of([*prompt, *map(ord, "y" * 200)]) == []
    assert encode.call_count == 1


def test_the_last_rewrites_count() -> None:
    long = "x" * 9_000 + "\n"
    rewrites = PromptRewrites(
        lambda text: list(text.encode()), lambda tokens: bytes(tokens).decode()
    )
    found = rewrites.of(list(numbered(long + "a\nb\n", "{}:{}").encode()))
    assert [bytes(tokens).decode() for tokens in found] == [long.replace("\n", "\\n") + "a\\nb\\n"]


WRITTEN = {  # the forms in which a prompt shows the code, and an answer repeats it
    "number, then JSON": (numbered(CODE, LINE_FORMS[0]), as_json(CODE)),
    "number, then text": (numbered(CODE, LINE_FORMS[1]), CODE),
    "JSON, then text": (f'{{"content": {as_json(CODE)}}}', CODE),
}


def drafter_of(
    engine: Engine, options: GenerateOptions, prompt: list[int], context: Sequence[list[int]]
) -> TrackedDrafter:
    """Return a drafter that knows `prompt` and draft context."""
    pool, target = DrafterPool(engine, UnsavedState()), Target(engine.model)
    drafter = pool.take(target, options, prompt, context)
    drafter.follow(options, prompt, len(prompt))
    return drafter


@pytest.mark.parametrize("form", WRITTEN)
def test_requests_and_replays_draft_the_rewritten_text(shallow_starter: Engine, form: str) -> None:
    shown, answer = WRITTEN[form]
    encode, counts = shallow_starter.tokens.encode_text, ReplayCounts()
    prompt, output = encode(f"{shown}\nAnswer:\n"), tuple(encode(answer))
    rewrites = prompt_rewrites(shallow_starter, prompt, OPTIONS)
    drafter = drafter_of(shallow_starter, OPTIONS, prompt, rewrites)
    replay_item(TraceItem((), output), drafter, parse_curve("m5max"), counts)
    assert counts.passes < len(output) / 8
    item = TraceItem(tuple(prompt), output)
    trace = Trace("HuggingFaceTB/SmolLM2-135M-Instruct", {"patch": (item,)})
    scores = [
        replay_trace(trace, parse_curve("m5max"), "auto", rewrites=found)["patch"]["score"]
        for found in (None, trace_rewrites(trace))
    ]
    assert scores[1] > 1.5 * scores[0]


def test_drafter_that_knows_a_listing_suits_it(shallow_starter: Engine) -> None:
    """Its rewrites stand before the history, and count neither as known nor as lost."""
    text = "".join(f"{number:6}\tvalue = {number}\n" for number in range(20))
    prompt = shallow_starter.tokens.encode_text(text)
    rewrites = prompt_rewrites(shallow_starter, prompt, GenerateOptions())
    assert rewrites
    drafter = drafter_of(shallow_starter, GenerateOptions(), prompt, rewrites)
    assert drafter.overlap(prompt) == len(prompt)
    assert drafter.overlap(prompt[:-3]) == len(prompt) - 6
