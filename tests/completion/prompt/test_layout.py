"""What the model reads and what the drafter sees: budgets, cuts at lines, healing."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from string import punctuation

import pytest

from akunu_py.completion.completer import Completer
from akunu_py.completion.prompt.layout import CodeTokens, encode_pieces, window_after, window_before
from akunu_py.completion.request import CompleteOptions, CompletionRequest, SourceFile
from akunu_py.decoding.model.engine import Engine
from akunu_py.errors import UsageError
from tests.support.complete import complete
from tests.support.tiny_fim import load_tiny

LINES = [f"value_{number} = compute({number}, 'text {number}')\n" for number in range(400)]
TEXT = "".join(LINES)


@pytest.fixture(scope="module")
def code(starter_engine: Engine) -> CodeTokens:
    return CodeTokens(starter_engine.tokens.tokenizer, starter_engine.tokens.vocabulary)


@pytest.mark.parametrize("budget", [1, 5, 64, 1000, 100_000])
def test_windows_keep_to_their_budget_and_to_lines(code: CodeTokens, budget: int) -> None:
    start, end = window_before(code, TEXT, budget), window_after(code, TEXT, budget)
    assert len(code.encode(TEXT[start:])) <= budget
    assert len(code.encode(TEXT[:end])) <= budget
    if budget >= 64:
        assert start == 0 or TEXT[start - 1] == "\n"
        assert TEXT[end - 1] == "\n"
        # Most of what there is room for is used.
        assert len(code.encode(TEXT[start:])) >= min(budget, len(code.encode(TEXT))) * 0.6
        assert len(code.encode(TEXT[:end])) >= min(budget, len(code.encode(TEXT))) * 0.7


def test_the_window_seldom_moves_while_one_types(code: CodeTokens) -> None:
    starts = [window_before(code, TEXT[:end], 256) for end in range(6000, 9000, 10)]
    assert starts == sorted(starts)
    assert len(set(starts)) <= len(starts) / 20


def test_a_long_line_is_cut_where_it_must(code: CodeTokens) -> None:
    line = "x" * 40_000
    assert 0 < len(code.encode(line[window_before(code, line, 100) :])) <= 100
    assert 0 < len(code.encode(line[: window_after(code, line, 100)])) <= 100


def test_what_is_not_read_is_evidence(starter_engine: Engine) -> None:
    completer = Completer(starter_engine, CompleteOptions(prefix_tokens=128))
    asked = CompletionRequest(
        TEXT, "rest()\n", files=(SourceFile("a.py", "near()\n"), SourceFile("b", "far"))
    )
    made = completer.prompt(asked)
    assert len(made.tokens) <= 128
    decode = completer.engine.tokens.tokenizer.decode
    far, near, before, after = (decode(list(tokens)) for tokens in made.draft_context)
    assert (far, near, after) == ("far", "near()\n", "rest()\n")
    read = decode(made.tokens) + made.healed
    assert before + read == TEXT


def test_a_buffer_is_not_its_own_neighbour(starter_engine: Engine) -> None:
    asked = CompletionRequest(
        "a", "", "a.py", files=(SourceFile("a.py", "old"), SourceFile("b.py", "new"))
    )
    draft_context = Completer(starter_engine).prompt(asked).draft_context
    assert [starter_engine.tokens.tokenizer.decode(list(tokens)) for tokens in draft_context] == [
        "new"
    ]


def test_an_empty_neighbour_does_not_hide_the_next(tmp_path: Path) -> None:
    markers = ["<|endoftext|>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
    engine = load_tiny(tmp_path, [*markers, "<repo_name>", "<file_sep>"])
    files = (SourceFile("a.py", ""), SourceFile("b.py", "value = 1\n"))
    completer = Completer(engine, CompleteOptions(fim="starcoder2"))
    made = completer.prompt(CompletionRequest("value", "y", "c.py", files=files))
    assert "<file_sep>b.py\nvalue = 1\n<file_sep>" in engine.tokens.tokenizer.decode(made.tokens)


def test_evidence_has_the_tokens_that_the_model_would_say(code: CodeTokens) -> None:
    """Encoding in pieces, for the sake of what is cached, changes next to nothing."""
    text = Path("akunu_py/decoding/generate/session.py").read_text(encoding="utf-8")
    whole = list(code.encode(text))
    (pieces,) = encode_pieces(code, [text])
    assert abs(len(pieces) - len(whole)) <= len(whole) / 50


@pytest.mark.parametrize(
    ("prefix", "healed"),
    [
        ("import os\nimport s", " s"),
        ("def f(", "("),
        ("https:", ":"),
        ("def main() -", " -"),
        ("if x =", " ="),
        ("std:", ":"),
        ("return ", " "),
        ("def f(x):\n    ", "\n    "),
        ("x = 'é", "é"),
        ("x", ""),
    ],
)
def test_the_end_of_a_prefix_is_said_again(code: CodeTokens, prefix: str, healed: str) -> None:
    tokens, text = code.heal(prefix)
    assert text == healed
    allowed = code.compatible_tokens(healed) if healed else ()
    texts = [code.text(token) for token in allowed]
    assert all(each.startswith(healed) or healed.startswith(each) for each in texts)
    # The tokens that were taken away are one way to write it.
    taken = code.encode(prefix)[len(tokens) :]
    assert len(taken) != 1 or taken[0] in allowed


def test_whatever_a_longer_token_could_have_begun_is_healed(code: CodeTokens) -> None:
    """Behind punctuation: healed is the last token where another one begins with its text."""
    texts = {code.text(token) for token in range(49_152)}
    pairs = ["".join(pair) for pair in product(punctuation, repeat=2)]
    for end in [*punctuation, *pairs[::8]]:
        text = f"a {end}"
        last = code.text(code.encode(text)[-1])
        longer = any(each.startswith(last) for each in texts if len(each) > len(last))
        tokens, healed = code.heal(text)
        assert healed == (last if longer else ""), text
        assert code.encode(text)[: len(tokens)] == tokens


def test_short_contexts_shrink_the_budgets(tmp_path: Path) -> None:
    engine = load_tiny(tmp_path, ["<|endoftext|>"])
    completer = Completer(engine, CompleteOptions(prefix_tokens=10**6, suffix_tokens=10**6))
    done = complete(completer, CompletionRequest("x = 1\n" * 2000, "y = 2\n" * 2000, max_tokens=4))
    assert done.stats.prompt_tokens < engine.plan.context_length
    with pytest.raises(UsageError, match="budgets"):
        Completer(engine, CompleteOptions(suffix_tokens=-1))
