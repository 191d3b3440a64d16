"""The tree of messages and its active branch."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akunu_py.chats.options import ChatOptions, options_of
from akunu_py.chats.tree import ChatMessage, ConversationTree, title_of, tree_of
from akunu_py.types import NO_TOKEN_LIMIT, GenerateOptions
from tests.support.chats import branched


def texts(tree: ConversationTree) -> list[str]:
    return [message.text for message in tree.active_branch()]


def test_the_active_branch() -> None:
    tree = branched()
    assert texts(tree)[1:] == ["First in, first *out*.", "Thank you!", "You are welcome."]
    assert tree.siblings("queue-1") == ("queue-1", "queue-2")
    assert (tree.neighbor("queue-1", 1), tree.neighbor("queue-1", -1)) == ("queue-2", None)
    tree.activate("queue-2")
    assert texts(tree)[1:] == ["A line of people."]
    tree.activate("queue-1")
    assert texts(tree)[2:] == ["Thank you!", "You are welcome."]  # as it was left


def test_choose_activates_all_ancestors() -> None:
    tree = branched()
    tree.activate("queue-2")
    tree.activate_branch("queue-3")
    assert texts(tree)[1:] == ["First in, first *out*.", "Thanks."]


def test_removing_a_message_removes_its_descendants() -> None:
    tree = branched()
    tree.remove("queue-4")
    assert len(tree) == 4
    assert texts(tree)[2:] == ["Thanks."]
    tree.remove("queue-0")
    assert (len(tree), tree.active_branch(), tree.messages) == (0, [], [])
    tree.add(ChatMessage("user", "again"))
    assert texts(tree) == ["again"]


def test_replacing() -> None:
    tree = branched()
    tree.replace(ChatMessage("assistant", "Other", "queue-4", id="queue-5"))
    assert texts(tree)[-1] == "Other"
    with pytest.raises(ValueError, match="cannot change its parent"):
        tree.replace(ChatMessage("assistant", "Other", "queue-0", id="queue-5"))


def test_unknown_parents_are_refused() -> None:
    tree = branched()
    with pytest.raises(ValueError, match="unknown"):
        tree.add(ChatMessage("user", "?", "nobody"))
    with pytest.raises(ValueError, match="already"):
        tree.add(tree["queue-0"])


@pytest.mark.long
@settings(deadline=None)
@given(st.data())
def test_tree_of_rebuilds_any_tree(data: st.DataObject) -> None:
    tree = ConversationTree("c", "title")
    for number in range(data.draw(st.integers(0, 20))):
        parents = [None, *(message.id for message in tree.messages)]
        parent = data.draw(st.sampled_from(parents))
        tree.add(ChatMessage("user", f"text {number}", parent, id=str(number)))
        if data.draw(st.booleans()):
            tree.activate_branch(data.draw(st.sampled_from([each.id for each in tree.messages])))
    again = tree_of("c", "title", tree.messages, tree.active_siblings())
    assert again.messages == tree.messages
    assert again.active_branch() == tree.active_branch()
    for message in tree.messages:
        tree.activate_branch(message.id)
        again.activate_branch(message.id)
        assert message in tree.active_branch()
        assert again.active_branch() == tree.active_branch()


@pytest.mark.parametrize(
    ("prompt", "title"),
    [
        ("What?", "What?"),
        ("\n\n  What\tis  this?\nMore", "What is this?"),
        ("", ""),
        ("word " * 40, "word " * 14 + "word…"),
        ("x" * 100, "x" * 79 + "…"),
    ],
)
def test_titles(prompt: str, title: str) -> None:
    assert title_of(prompt) == title
    assert len(title_of(prompt)) <= 80


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("temperature", 0, 5),
        ("max_tokens", 0, NO_TOKEN_LIMIT),
        ("top_p", 0, 1),
        ("seed", 0, (1 << 63) - 1),
        ("thinking_budget", -1, NO_TOKEN_LIMIT),
    ],
)
def test_stored_options_outside_their_bounds_are_ignored(
    name: str, least: float, most: float
) -> None:
    for bound in (least, most):
        assert getattr(options_of({name: bound, "unknown": 1}), name) == bound
    for value in (least - 1, math.inf, True, "1", None):
        assert options_of({name: value}) == ChatOptions()
    assert options_of({name: least + 0.5}).as_dict().keys() <= {"temperature", "top_p"}


def test_options_of_a_conversation_replace_those_of_the_settings() -> None:
    settings = GenerateOptions(max_tokens=7)
    assert ChatOptions().apply(settings) == settings
    options = ChatOptions(0.5, 9, 0.25, 3, "off", -1)
    changed = options.apply(settings)
    sampling = changed.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.25, 3)
    assert (changed.max_tokens, changed.thinking, changed.thinking_budget) == (9, "off", None)
    assert ChatOptions(max_tokens=0, thinking_budget=5).apply(settings).thinking_budget == 5
    assert ChatOptions(max_tokens=0).apply(settings).max_tokens == NO_TOKEN_LIMIT
    assert options_of(options.as_dict()) == options
    assert options_of(["x"]) == ChatOptions()
