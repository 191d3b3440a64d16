"""Conversations: the tree of messages, and saving, finding, renaming and deleting it."""

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from akunu_py.chats import search
from akunu_py.chats.conversation_store import UNDO_S, ConversationStore
from akunu_py.chats.options import ChatOptions, options_of
from akunu_py.chats.tree import ChatMessage, ConversationTree, ToolRound, title_of, tree_of
from akunu_py.errors import ConversationError
from akunu_py.types import NO_TOKEN_LIMIT, GenerateOptions
from tests.support.chats import T0, add_prompt, branched, exchange_of, state


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


def test_removing_a_message_removes_its_descendants() -> None:
    tree = branched()
    tree.remove("queue-4")
    assert len(tree) == 4
    assert texts(tree)[2:] == ["Thanks."]
    tree.remove("queue-0")
    assert (len(tree), tree.active_branch(), tree.messages) == (0, [], [])
    tree.add(ChatMessage("user", "again"))
    assert texts(tree) == ["again"]


def test_unknown_and_other_parents_are_refused() -> None:
    tree = branched()
    with pytest.raises(ValueError, match="unknown"):
        tree.add(ChatMessage("user", "?", "nobody"))
    with pytest.raises(ValueError, match="already"):
        tree.add(tree["queue-0"])
    with pytest.raises(ValueError, match="cannot change its parent"):
        tree.replace(ChatMessage("assistant", "Other", "queue-0", id="queue-5"))


@pytest.mark.long
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


@pytest.mark.parametrize(("prompt", "title"), [
    ("What?", "What?"), ("\n\n  What\tis  this?\nMore", "What is this?"), ("", ""),
    ("word " * 40, "word " * 14 + "word…"), ("x" * 100, "x" * 79 + "…"),
])  # fmt: skip
def test_titles(prompt: str, title: str) -> None:
    assert title_of(prompt) == title
    assert len(title_of(prompt)) <= 80


@pytest.mark.parametrize(("name", "least", "most"), [
    ("temperature", 0, 5), ("max_tokens", 0, NO_TOKEN_LIMIT), ("top_p", 0, 1),
    ("seed", 0, (1 << 63) - 1), ("thinking_budget", -1, NO_TOKEN_LIMIT),
])  # fmt: skip
def test_stored_options_outside_their_bounds_are_ignored(
    name: str, least: float, most: float
) -> None:
    for bound in (least, most):
        assert getattr(options_of({name: bound, "unknown": 1}), name) == bound
    for value in (least - 1, math.inf, True, "1", None):
        assert options_of({name: value}) == ChatOptions()
    assert options_of({name: least + 0.5}).as_dict().keys() <= {"temperature", "top_p"}


def test_options_of_a_conversation_replace_those_of_the_settings() -> None:
    """`tests/tui/test_settings.py` has all of them."""
    settings = GenerateOptions(max_tokens=7)
    assert ChatOptions().apply(settings) == settings
    options = ChatOptions(0.5, 9, 0.25, 3, "off", -1)
    assert options.apply(settings).thinking_budget is None
    assert ChatOptions(max_tokens=0).apply(settings).max_tokens == NO_TOKEN_LIMIT
    assert options_of(options.as_dict()) == options
    assert options_of(["x"]) == ChatOptions()


# The store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "conversations.db"


@pytest.fixture
def store(path: Path) -> Iterator[ConversationStore]:
    store = ConversationStore.open(path)
    yield store
    store.close()


def titles(store: ConversationStore, words: str) -> list[str]:
    return [found.info.title for found in store.search(words)]


def test_saved_tree_round_trips(path: Path) -> None:
    tree = branched()
    store = ConversationStore.open(path)
    assert store.save_tree(tree) == 6
    assert state(store.load("queue")) == state(tree)
    store.close()
    assert {file.name for file in path.parent.iterdir()} == {path.name, f"{path.name}.lock"}
    store = ConversationStore.open(path)
    assert state(store.load("queue")) == state(tree)
    assert store.warnings == []
    store.close()


def test_message_by_message(store: ConversationStore) -> None:
    """As the chat saves them: each new message, and a growing answer repeatedly."""
    tree = branched()
    for message in tree.messages:
        store.save("queue", replace(message, text=f"{message.text} apples", stats=None))
        store.save("queue", message)
    store.activate_branch("queue", "queue-5")
    kept = store.load("queue")
    assert (kept.messages, kept.active_branch()) == (tree.messages, tree.active_branch())
    assert kept.title == "What is a queue?"
    assert (titles(store, "apples"), titles(store, "thanks")) == ([], [kept.title])


def test_the_active_branch_is_remembered(store: ConversationStore) -> None:
    tree = branched()
    store.save_tree(tree)
    for message in ("queue-3", "queue-2", "queue-5"):
        store.activate_branch("queue", message)
        tree.activate_branch(message)
        assert store.load("queue").active_branch() == tree.active_branch()


def test_messages_that_no_other_follows_can_be_removed(store: ConversationStore) -> None:
    tree = branched()
    store.save_tree(tree)
    store.remove("queue", ["queue-1", "queue-4", "queue-5"])  # another answer follows queue-1
    tree.remove("queue-4")
    assert state(store.load("queue")) == state(tree)
    assert titles(store, "welcome") == []
    assert titles(store, "thanks") == ["What is a queue?"]
    store.remove("queue", [message.id for message in tree.messages])
    assert (store.list(), titles(store, "queue")) == ([], []), "no empty conversation stays"


def test_changing_unknown_ids_has_no_effect(store: ConversationStore) -> None:
    store.save_tree(branched())
    store.remove("queue", ["nothing"])
    store.remove("nowhere", ["queue-0"])
    store.activate_branch("nowhere", "queue-2")
    store.set_options("nowhere", ChatOptions())
    assert state(store.load("queue")) == state(branched())


def test_descendants_of_an_erased_message_are_kept(store: ConversationStore) -> None:
    """Another process may erase a conversation that this process continues."""
    store.save("gone", ChatMessage("user", "More", "erased", id="a"))
    store.save("gone", ChatMessage("assistant", "Of course", "a", id="b"))
    assert [(each.text, each.parent) for each in store.load("gone").active_branch()] == [
        ("More", None),
        ("Of course", "a"),
    ]


def test_the_list(store: ConversationStore) -> None:
    store.save_tree(exchange_of("old", "Old one", "Yes", T0))
    store.save_tree(exchange_of("new", "New one", "  \n No", T0 + 1000))
    newer, older = store.list()
    assert (newer.id, newer.title, newer.messages, newer.model) == ("new", "New one", 2, "starter")
    assert (older.created, older.updated, older.preview) == (T0, T0 + 5, "Yes")
    store.save("old", ChatMessage("user", "Again", "old-1"))  # now
    assert [info.id for info in store.list()] == ["old", "new"]


def test_search(store: ConversationStore) -> None:
    store.save_tree(exchange_of("a", "How do I reverse a list?", "Use `xs[::-1]`.", T0))
    store.save_tree(exchange_of("b", "Déjà vu in C++", "Una sensación.", T0 + 10))
    store.save_tree(exchange_of("c", "我想学习中文", "很好！ Let us begin.", T0 + 20))
    for words, found in {
        "reverse": "a",
        "REV": "a",
        "reverse xs": "a",  # one word in the prompt, the other in the answer
        "reverse sensacion": "",
        "deja": "b",
        "sensación": "b",
        "c++": "b",
        "学习": "c",
        "中": "c",
        "习学": "",
        '"us begin"': "c",
        '"begin us"': "",
        '"unfinished quote': "",
        "u": "cba",  # us, una, use
        "": "cba",
        "  ": "cba",
        "++": "",
        'NEAR(" OR * AND (': "",
        "list: -x ^y": "",
    }.items():
        assert [hit.info.id for hit in store.search(words)] == list(found), words


def test_snippets_and_marks(store: ConversationStore) -> None:
    store.save_tree(exchange_of("c", "我想学习中文", "很好！\nLet us begin.", T0))
    (found,) = store.search("学习")
    assert (found.hit.message, found.hit.snippet, found.hit.marks) == (
        "c-0",
        "我想学习中文",
        ((2, 4),),
    )
    (found,) = store.search("beg us")
    marked = [found.hit.snippet[start:end] for start, end in found.hit.marks]
    assert (found.hit.snippet, marked) == ("很好！ Let us begin.", ["us", "begin"])
    (message,) = (each for each in store.load("c").messages if each.role == "assistant")
    before = ToolRound("One moment: I look it up.", ())
    store.save("c", replace(message, rounds=(before,)))
    (found,) = store.search("moment begin")
    assert found.hit.snippet == "One moment: I look it up. 很好！ Let us begin."
    store.rename("c", "Lessons")
    (found,) = store.search("lessons")
    assert (found.hit.message, found.hit.snippet) == (None, "")


@pytest.mark.long
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example("\x03:0", "0")
@example("\x02\x02 0 \x03", "0")
@given(st.text(max_size=30), st.text(max_size=30))
def test_any_text_can_be_saved_and_searched_for(
    store: ConversationStore, text: str, words: str
) -> None:
    store.save("any", ChatMessage("user", text, id="m"))
    (kept,) = store.load("any").messages
    assert kept.text == text.encode("utf-8", "replace").decode()
    for found in store.search(words):
        assert all(0 <= start < end <= len(found.hit.snippet) for start, end in found.hit.marks)


def test_rename(store: ConversationStore) -> None:
    store.save_tree(branched())
    store.rename("queue", "  Lines\nof people ")
    store.save("queue", ChatMessage("user", "What else?", "queue-5"))
    assert store.load("queue").title == "Lines"
    store.rename("queue", " ")
    assert titles(store, "lines") == ["Lines"]
    with pytest.raises(ConversationError, match="akunu chats list"):
        store.rename("nowhere", "x")


def test_a_title_that_the_user_changed_stays(store: ConversationStore) -> None:
    store.save_tree(branched())
    before = store.load("queue").title
    assert not store.retitle("queue", "another", "Lines")
    assert not store.retitle("nowhere", before, "Lines")
    assert titles(store, "lines") == []
    assert store.retitle("queue", before, "Lines")
    assert titles(store, "lines") == ["Lines"]
    store.rename("queue", "Mine")
    assert not store.retitle("queue", before, "Lines")
    assert store.load("queue").title == "Mine"


def test_delete_and_undo(store: ConversationStore) -> None:
    store.save_tree(exchange_of("a", "Apple", "Yes", T0))
    store.save_tree(exchange_of("b", "Banana", "Yes", T0 + 10))
    store.delete("a")
    store.delete("b")
    assert store.list() == []
    assert store.search("yes") == []
    assert store.recent_prompts(10) == []
    with pytest.raises(ConversationError):
        store.load("a")
    restored = [store.undo_delete() for _ in range(3)]
    assert [info.title if info else None for info in restored] == ["Banana", "Apple", None]
    assert titles(store, "yes") == ["Banana", "Apple"]


def test_an_answer_does_not_restore_a_deleted_conversation(store: ConversationStore) -> None:
    tree = branched()
    store.save_tree(tree)
    store.delete("queue")
    store.save("queue", replace(tree["queue-5"], text="You are most welcome."))
    assert store.list() == []
    store.save("queue", ChatMessage("user", "Still there?", "queue-5"))
    assert titles(store, "most welcome") == ["What is a queue?"]


def test_deleted_conversations_are_erased_after_a_day(
    store: ConversationStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save_tree(exchange_of("a", "Something zxqsecret", "zxqsecret", T0))
    store.save_tree(exchange_of("b", "Banana", "Yes", T0))
    store.delete("a")
    ConversationStore.open(path).close()
    assert b"zxqsecret" in bytes_of(path)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + UNDO_S + 1)
    ConversationStore.open(path).close()
    assert b"zxqsecret" not in bytes_of(path)
    assert store.undo_delete() is None
    assert titles(store, "") == ["Banana"]


def test_erase(store: ConversationStore, path: Path) -> None:
    store.save_tree(exchange_of("a", "Something zxqsecret", "zxqsecret", T0))
    store.save_tree(exchange_of("b", "Banana", "Yes", T0))
    store.delete("b")
    store.erase("a")
    store.save("a", ChatMessage("assistant", "zxqsecret", "a-0"))  # grows in another process
    assert b"zxqsecret" not in bytes_of(path)
    restored = store.undo_delete()
    assert restored is not None
    assert restored.id == "b"  # still within its day


def bytes_of(path: Path) -> bytes:
    return b"".join(file.read_bytes() for file in path.parent.iterdir())


def test_import_keeps_existing_messages(store: ConversationStore) -> None:
    tree = branched()
    store.save_tree(tree)
    store.rename("queue", "Mine")
    store.delete("queue")
    other = branched()
    other.replace(replace(other["queue-5"], text="altered"))
    add_prompt(other, "A new one", "queue-5")
    assert store.save_tree(other) == 1
    kept = store.load("queue")
    assert kept.title == "Mine"
    assert kept["queue-5"].text == "You are welcome."
    assert [message.text for message in kept.active_branch()][-1] == "A new one"


def test_resolve_id_prefix(store: ConversationStore) -> None:
    for name in ("abc1", "abd2"):
        store.save_tree(exchange_of(name, name, "yes", T0))
    assert store.resolve("abc").id == "abc1"
    for name in ("ab", "x", ""):
        with pytest.raises(ConversationError):
            store.resolve(name)


@pytest.mark.parametrize(("text", "snippet"), [
    ("ox " * 500 + "the cat and a dog " + "ox " * 500, "the cat and a dog"),
    ("x" * 5000 + " cat " + "x" * 5000 + " dog", "cat"),
    ("我" * 300 + "cat" + "我" * 300, "我cat我"),
    ("cat", "cat"),
])  # fmt: skip
def test_snippet_is_short_and_has_most_terms(
    store: ConversationStore, text: str, snippet: str
) -> None:
    store.save("one", ChatMessage("user", text))
    (found,) = store.search("cat")
    assert snippet in found.hit.snippet
    assert "cat" in [found.hit.snippet[start:end] for start, end in found.hit.marks]
    assert len(found.hit.snippet) <= search._BEFORE * 2 + search._AFTER + 2


def test_recent_prompts(store: ConversationStore) -> None:
    for number, prompt in enumerate(["one", "two", "one", "three"]):
        store.save_tree(exchange_of(f"c{number}", prompt, "yes", T0 + number))
    assert store.recent_prompts(10) == ["two", "one", "three"]
    assert store.recent_prompts(2) == ["one", "three"]
