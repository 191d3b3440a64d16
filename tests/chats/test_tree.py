"""The tree of messages and its active branch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akunu_py.chats.tree import ChatMessage, ConversationTree, title_of, tree_of
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
