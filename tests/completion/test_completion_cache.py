"""When the rest of an earlier completion is the answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akunu_py.completion.completion_cache import CompletionCache
from akunu_py.completion.request import Completion, CompletionRequest, SourceFile
from akunu_py.types import Stats

ASKED = CompletionRequest("def f(items):\n    return ", "\n\nprint(f([1]))\n", path="a.py")
TEXT = 'sorted(items, key=lambda item: (item[0], {"a": item["b"]}))'


def cache(text: str = TEXT, asked: CompletionRequest = ASKED) -> CompletionCache:
    made = CompletionCache()
    made.add(asked, Completion(text, "stop", Stats()))
    return made


def test_every_letter_of_it_and_nothing_else() -> None:
    known = cache()
    for at in range(len(TEXT)):
        request = replace(ASKED, prefix=ASKED.prefix + TEXT[:at])
        found = known.find(request)
        assert found is not None
        assert (found.text, found.reused) == (TEXT[at:], True)
        wrong = "?" if TEXT[at] != "?" else "!"
        assert known.find(replace(request, prefix=request.prefix + wrong)) is None
        assert known.find(replace(request, suffix="\n")) is None
        assert known.find(replace(request, path="b.py")) is None
        assert known.find(replace(request, max_tokens=7)) is None


def test_edits_in_other_files_do_not_matter() -> None:
    files = (SourceFile("b.py", "x = 1\n"),)
    found = cache().find(replace(ASKED, files=files))
    assert found is not None
    assert found.text == TEXT


PAIRS = {"(": ")", "[": "]", "{": "}", '"': '"'}


def closed_by_an_editor(typed: str) -> str:
    """What an editor that closes brackets and quotes has put behind `typed`."""
    stack: list[str] = []
    for letter in typed:
        if stack and letter == stack[-1]:
            stack.pop()  # typed over
        elif letter in PAIRS:
            stack.append(PAIRS[letter])
    return "".join(reversed(stack))


nested = st.recursive(
    st.sampled_from(["a", "b + 1", '"text"', "items"]),
    lambda inner: st.tuples(st.sampled_from(["f({})", "[{}]", "x[{}]", "({})"]), inner).map(
        lambda both: both[0].format(both[1])
    ),
)


@pytest.mark.long
@given(nested)
@pytest.mark.parametrize("opening", ["(", "["])
def test_what_the_editor_closed_is_not_given_again(opening: str, inner: str) -> None:
    """Up to the bracket that stands behind the cursor, at every place where one was closed."""
    text = f"call{opening}{inner}, 1{PAIRS[opening]}"
    known = cache(text)
    for at in range(1, len(text)):
        typed = text[:at]
        closed = closed_by_an_editor(typed)
        if not closed or len(closed) > 3 or typed.count('"') % 2:
            continue
        request = replace(ASKED, prefix=ASKED.prefix + typed, suffix=closed + ASKED.suffix)
        found = known.find(request)
        rest = found.text if found else ""
        assert (typed + rest + closed).startswith(text[: len(typed + rest) + 1])
        assert rest or text[at] == closed[0]
    assert known.find(replace(ASKED, suffix="x" + ASKED.suffix)) is None


def test_a_block_that_the_editor_closed() -> None:
    known = cache("{\n    return 1\n}", replace(ASKED, prefix="int f() "))
    request = replace(ASKED, prefix="int f() {\n    ", suffix="\n}" + ASKED.suffix)
    found = known.find(request)
    assert found is not None
    assert found.text == "return 1"


def test_cancelled_ones_and_what_was_only_read_are_not_kept() -> None:
    known = CompletionCache()
    known.add(ASKED, Completion("a", "cancelled", Stats()))
    known.add(replace(ASKED, max_tokens=0), Completion("", "length", Stats()))
    assert known.find(ASKED) is None
    known.add(ASKED, Completion("ab", "time", Stats()))
    assert known.find(ASKED) is None  # more is wanted
    found = known.find(replace(ASKED, prefix=ASKED.prefix + "a"))
    assert found is not None
    assert (found.text, found.finish_reason) == ("b", "time")
