"""Stop sequences, thinking and channels in a streamed text: the same in any pieces."""

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from akunu_py.engine.engine import Engine
from akunu_py.engine.loop import StepLoop
from akunu_py.engine.text.reader import Kind, StopText, TextRun
from akunu_py.engine.text.stream_decoder import Detokenizer
from akunu_py.engine.text.thinking import (
    HARMONY,
    MUSE,
    Channels,
    ChannelSplitter,
    ThinkingSplitter,
    opens_thinking,
    special_tokens_in,
    thinking_markers,
    unfinished_thinking,
)
from akunu_py.errors import UsageError
from akunu_py.types import DraftMode, GenerateOptions, Message, SamplingOptions, TextPiece
from tests.support.jobs import chat_answer, chat_request
from tests.support.tiny_fim import HARMONY_MARKERS, load_tiny

START, END = "<think>", "</think>"
# Short markers that share beginnings, so that random text is full of them and of their parts.
SHORT = ("<<a", "<b")
ALPHABET = "ab\n\u00e9\u0301\U0001f600"
STOPS = st.lists(
    st.text(ALPHABET, min_size=1, max_size=4) | st.text("ab", min_size=1, max_size=6), max_size=5
)
Pieces = list[tuple[str, bool]]  # texts, and whether they were drafted
Marked = tuple[str, bool, Kind]


def pieces(alphabet: str) -> st.SearchStrategy[Pieces]:
    return st.lists(st.tuples(st.text(alphabet, max_size=8), st.booleans()), max_size=20)


def marked(runs: Iterable[TextRun]) -> list[Marked]:
    found = list[Marked]()
    for run in runs:
        drafted = {at for start, end in run.drafted for at in range(start, end)}
        found += [(c, at in drafted, run.kind) for at, c in enumerate(run.text)]
    return found


def whole(text: str, drafted: bool) -> list[tuple[int, int]]:
    """Return the drafted ranges of a text, which is all or nothing."""
    return [(0, len(text))] if drafted else []


def before_stop(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """Return the text before the stop that is complete first, the longest of several."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, ""


def unsure(text: str, stops: Sequence[str]) -> int:
    """Return how many characters at the end of the text may begin a stop."""
    longest = min(len(text), max((len(stop) for stop in stops), default=0))
    return next(
        (n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in stops)), 0
    )


@given(pieces(ALPHABET) | pieces("ab"), STOPS)
def test_text_before_a_stop_comes_out_as_early_as_it_is_certain(
    pieces: Pieces, stops: list[str]
) -> None:
    stopping, shown, seen = StopText(stops), list[TextRun](), ""
    for text, drafted in pieces:
        shown += stopping.add(text, whole(text, drafted))
        seen += text
        before, stop = before_stop(seen, stops)
        assert stopping.found == stop
        certain = len(before) if stop else len(seen) - unsure(seen, stops)
        assert "".join(run.text for run in shown) == seen[:certain]
    shown += stopping.finish()
    before, _ = before_stop(seen, stops)
    expected = [(c, drafted, "answer") for text, drafted in pieces for c in text]
    assert marked(shown) == expected[: len(before)]
    assert stopping.finish() == []


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one character") as caught:
        StopText(["a", ""])
    assert "\n" not in str(caught.value)


@pytest.mark.long
def test_long_stops_and_texts_take_linear_time() -> None:
    # Comparing afresh at each character would take hundreds of millions of steps.
    stopping = StopText(["a" * 10_000 + "b"])
    shown = sum(len(run.text) for _ in range(30_000) for run in stopping.add("a"))
    assert shown == 20_000
    assert stopping.add("b") == []
    assert stopping.found


def split_at_once(characters: Pieces, *, inside: bool) -> list[Marked]:
    """Return the characters of a whole text without its markers, each with its kind."""
    text = "".join(character for character, _ in characters)
    out: list[Marked] = []

    def skip(position: int, white: str | None) -> int:
        return len(text) - len(text[position:].lstrip(white))

    position = skip(0, "\r\n") if inside else 0
    while True:
        if inside:
            end = text.find(SHORT[1], position)
            stop = len(text) if end < 0 else end
            out += [(*mark, "thinking") for mark in characters[position:stop]]
            if end < 0:
                return out
            position, inside = skip(end + len(SHORT[1]), "\r\n"), False
        start = skip(position, None)
        if not text.startswith(SHORT[0], start):
            return out + [(*mark, "answer") for mark in characters[position:]]
        position, inside = skip(start + len(SHORT[0]), "\r\n"), True


@given(pieces("<ab \n"), st.booleans())
def test_thinking_is_split_off_early_and_never_taken_back(pieces: Pieces, inside: bool) -> None:
    splitter, seen, shown = ThinkingSplitter(*SHORT, inside=inside), Pieces(), list[Marked]()
    for text, drafted in pieces:
        runs = splitter.add(text, whole(text, drafted))
        assert all(run.text for run in runs)
        shown += marked(runs)
        seen += [(c, drafted) for c in text]
        split = split_at_once(seen, inside=inside)
        assert split[: len(shown)] == shown
        # Held back: part of a marker, and whitespace where a marker may follow it.
        late = "".join(c for c, _, _ in split[len(shown) :]).lstrip()
        assert len(late) < max(map(len, SHORT))
    shown += marked(splitter.finish())
    assert shown == split_at_once(seen, inside=inside)
    assert splitter.finish() == []


Splitter = ThinkingSplitter | ChannelSplitter
Case = tuple[Callable[[], Splitter], str, str, str]


def thinking(
    start: str | None = START, end: str | None = END, *, inside: bool = False
) -> Callable[[], Splitter]:
    return lambda: ThinkingSplitter(start, end, inside=inside)


def channels(kind: Channels) -> Callable[[], Splitter]:
    return lambda: ChannelSplitter(kind)


CALL = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
UNMARKED = " <think>\n</think>"
# A splitter, a text, its thinking and its answer.
CASES: list[Case] = [
    (thinking(), "<think>\nHm.\n</think>\n\nYes.", "Hm.\n", "Yes."),
    (thinking(inside=True), "\nHm.</think>\n\n  Yes.\n", "Hm.", "  Yes.\n"),
    *((thinking(start, end), UNMARKED, "", UNMARKED)
      for start, end in ((None, None), (START, None), (None, END))),
    (
        channels(HARMONY),
        "<|channel|>analysis<|message|>A.<|end|><|start|>assistant<|channel|>analysis"
        "<|message|>B.<|end|><|start|>assistant<|channel|>final<|message|>C", "A.B.", "C",
    ),
    (channels(HARMONY), CALL.removeprefix("<|start|>assistant") + "{}<|call|>", "", CALL + "{}"),
    (channels(HARMONY), "<|channel|>analysis<|message|>A<|end|>" + CALL + "{}", "A", CALL + "{}"),
    (
        channels(HARMONY), " to=functions.f<|channel|>commentary json<|message|>{}", "",
        "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}",
    ),
    (
        channels(MUSE), " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Yes.",
        "Hm.", "Yes.",
    ),
    *((channels(HARMONY), text, "", text) for text in ("No header.", '{"a": "<|"}', "<", "")),
]  # fmt: skip


def parts(splitter: Splitter, pieces: Iterable[str]) -> tuple[str, str]:
    """Return the thinking and the answer."""
    runs = [run for piece in pieces for run in splitter.add(piece)] + splitter.finish()
    kinds: tuple[Kind, Kind] = ("thinking", "answer")
    thinking, answer = ("".join(run.text for run in runs if run.kind == kind) for kind in kinds)
    return thinking, answer


@pytest.mark.parametrize(("make", "text", "thinking", "answer"), CASES)
def test_every_split_point(
    make: Callable[[], Splitter], text: str, thinking: str, answer: str
) -> None:
    for pieces in (list(text), *([text[:at], text[at:]] for at in range(len(text) + 1))):
        assert parts(make(), pieces) == (thinking, answer)


@pytest.mark.parametrize("case", [case for case in CASES if case[1].startswith("<|channel|>")])
def test_no_header_shows_where_an_answer_is_cut_off(case: Case) -> None:
    """Markers are single tokens, so an answer never ends within one."""
    make, text, thinking, answer = case
    for at in range(12, len(text)):
        if not re.search(r"<\|?[a-z]*\|?$", text[:at]):
            early = parts(make(), [text[:at]])
            assert thinking.startswith(early[0])
            assert answer.startswith(early[1])


def test_drafted_text_of_channels_stays_marked() -> None:
    splitter = ChannelSplitter(HARMONY)
    runs = splitter.add("<|channel|>final<|message|>a") + splitter.add("b", [(0, 1)])
    assert marked(runs) == [("a", False, "answer"), ("b", True, "answer")]


@pytest.mark.parametrize(("prompt", "markers", "opened"), [
    ("<|im_start|>assistant\n<think>\n", (START, END), True), ("<think>", (START, END), True),
    ("<think>\n\n</think>\n\n", (START, END), False),
    ("what does <think> mean?<|im_end|>assistant\n", (START, END), False),
    ("<think>", None, False), ("", (START, END), False),
])  # fmt: skip
def test_prompts_that_open_thinking(
    prompt: str, markers: tuple[str, str] | None, opened: bool
) -> None:
    assert opens_thinking(prompt, markers) is opened


def wrapped(*added: str, special: bool = False) -> Any:
    """Return a tokenizer of mlx-lm with a few words, and `added` as tokens of their own."""
    words = Tokenizer(WordLevel({"?": 0, "thought": 1, "hello": 2}, unk_token="?"))
    words.add_tokens([AddedToken(text, special=special, normalized=False) for text in added])
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?"))


@pytest.mark.parametrize(("added", "markers"), [
    ((START, END), (START, END)),
    (("<|channel>", "<channel|>"), ("<|channel>thought", "<channel|>")),
    ((START, END, "<mm:think>", "</mm:think>"), ("<mm:think>", "</mm:think>")),
    ((), None),
])  # fmt: skip
def test_markers_of_tokenizers(added: tuple[str, ...], markers: tuple[str, str] | None) -> None:
    special = added[:1] == ("<|channel>",)
    tokenizer = wrapped(*added, special=special)
    assert thinking_markers(tokenizer) == markers
    found = special_tokens_in(tokenizer, thinking_markers(tokenizer) or ())
    assert set(found.values()) == set(added if special else ())
    assert thinking_markers(object()) is None


LENGTH = 28  # tokens of a senseless answer that contains all stop sequences below
TEXTS = (
    "  leading spaces\n\n\ttabs\r\nand newlines  ",
    "日本語のテキスト、漢字とかな。한국어도.",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 🇳🇴 e\u0301 \u200f שלום",
)


def stream(engine: Engine, tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(engine.tokens.tokenizer)
    return [*(detokenizer.add(token) for token in tokens), detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_equals_the_whole_in_whole_characters(
    starter_engine: Engine, text: str
) -> None:
    pieces = stream(starter_engine, starter_engine.tokens.encode(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_of_many_tokens_comes_with_its_last_one(starter_engine: Engine) -> None:
    tokens = starter_engine.tokens.encode("🏳")
    assert len(tokens) > 1
    pieces = stream(starter_engine, tokens)
    assert pieces[: len(tokens)] == [""] * (len(tokens) - 1) + ["🏳"]
    assert "".join(stream(starter_engine, tokens[:-1])) == "\ufffd"


def test_random_tokens_lose_nothing(starter_engine: Engine) -> None:
    generator = random.Random(0)
    decode = starter_engine.tokens.tokenizer.decode
    for _ in range(50):
        tokens = [generator.randrange(17, 49152) for _ in range(30)]
        expected = decode(tokens, clean_up_tokenization_spaces=False)
        got = "".join(stream(starter_engine, tokens))
        # The number of U+FFFD for invalid UTF-8 depends on the grouping.
        assert got.replace("\ufffd", "") == expected.replace("\ufffd", "")


def test_the_end_of_the_prompt_is_context(starter_engine: Engine) -> None:
    *_, last = starter_engine.tokens.encode("The capital of France is")
    detokenizer = Detokenizer(starter_engine.tokens.tokenizer, last)
    answer = starter_engine.tokens.encode(" Paris")
    assert "".join(map(detokenizer.add, answer)) == " Paris"


# Answers that were stopped in their thinking or after it, and are continued.
TURNS = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
CHATML = ("<|im_end|>", "<think>", "<|im_start|>", "</think>")
# The markers, the end of the template, and what the model writes before and after its thinking.
TEMPLATES = {
    "opened": (CHATML, "<|im_start|>assistant\n<think>{{ '\n' }}", "", "\n</think>\n\n"),
    "by itself": (CHATML, "<|im_start|>assistant{{ '\n' }}", "<think>\n", "\n</think>\n\n"),
    "channels": (
        HARMONY_MARKERS, "<|start|>assistant", "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
    "off": (CHATML, "<|im_start|>assistant\n<think>\n\n</think>{{ '\n\n' }}", None, ""),
}  # fmt: skip
MESSAGES = [Message("user", "What does <think> mean?")]
THOUGHT, ANSWER = "First this.\nThen that", "So it is"


@pytest.fixture(scope="module", params=list(TEMPLATES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    markers, end, *_ = TEMPLATES[request.param]
    turns = TURNS if markers == CHATML else TURNS.replace("im_start", "start").replace("im_", "")
    directory = tmp_path_factory.mktemp("model")
    return load_tiny(directory, markers, request.param, template=turns + end)


def partial(thinking: str, content: str = "") -> list[Message]:
    return [*MESSAGES, Message("assistant", content, thinking=thinking)]


def test_the_prompt_of_a_partial_answer_ends_with_it(model: Engine) -> None:
    prompt, tokenizer = model.tokens.encode_chat(MESSAGES), model.tokens.tokenizer
    *_, before, between = TEMPLATES[model.name]
    for end in range(1, len(THOUGHT) + 1):
        expected = "" if before is None else before + THOUGHT[:end]
        tokens = model.tokens.encode_chat(partial(THOUGHT[:end]))
        assert tokens == prompt + model.tokens.encode_text(expected)
    thinking = "" if before is None else before + THOUGHT + between
    for end in range(1, len(ANSWER) + 1):
        tokens = model.tokens.encode_chat(partial(THOUGHT, ANSWER[:end]))
        assert tokens == prompt + model.tokens.encode_text(thinking + ANSWER[:end])
        assert unfinished_thinking(tokenizer, tokens) is None
    opened = model.name.startswith("opened")
    assert unfinished_thinking(tokenizer, prompt) == (0 if opened else None)


@pytest.mark.parametrize("model", ["off"], indirect=True)
@pytest.mark.parametrize("mode", ["off", "fixed", "auto"])
def test_a_stop_sequence_ends_the_answer_before_it(model: Engine, mode: DraftMode) -> None:
    letters = tuple((token, 1000.0) for token in model.tokens.encode_text("abc"))
    sampling = SamplingOptions(1.0, seed=3, logit_bias=letters)
    options = GenerateOptions(60, mode, sampling=sampling)
    whole = chat_answer(StepLoop(model), MESSAGES, options).text
    stop = whole[20:26]
    loop = StepLoop(model)
    request = chat_request(loop, MESSAGES, replace(options, stop=("never", stop)))
    pieces = [each for each in loop.stream(request) if isinstance(each, TextPiece)]
    assert request.text == "".join(piece.text for piece in pieces) == whole[: whole.index(stop)]
    assert request.finish_reason == "stop"
    assert whole.index(stop) < len(request.tokens) == request.stats.generated_tokens < 60
    for piece in pieces:
        assert all(0 <= start < end <= len(piece.text) for start, end in piece.drafted)


@pytest.mark.parametrize("model", [name for name in TEMPLATES if name != "off"], indirect=True)
def test_continued_thinking_equals_uninterrupted_thinking_and_its_budget(model: Engine) -> None:
    letters = tuple((token, 1000.0) for token in model.tokens.encode_text("abcdefgh"))
    sampling, budget = SamplingOptions(logit_bias=letters), len(THOUGHT) + 5
    options = GenerateOptions(45, "off", sampling=sampling, thinking_budget=budget)
    whole = chat_answer(StepLoop(model), partial(THOUGHT), options)
    assert len(whole.thinking) == 5
    for end in (1, 4):
        left = replace(options, max_tokens=options.max_tokens - end)
        messages = partial(THOUGHT + whole.thinking[:end])
        rest = chat_answer(StepLoop(model), messages, left)
        assert whole.thinking[:end] + rest.thinking == whole.thinking
        assert rest.text == whole.text
    newline = tuple(model.tokens.encode_text("\n"))
    options = GenerateOptions(3, "off", sampling=SamplingOptions(allowed_tokens=newline))
    assert chat_answer(StepLoop(model), partial(THOUGHT), options).thinking == "\n\n\n"
