"""Work grows linearly with messages; counted in SQLite steps or calls, not timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from akunu_py.chats import export, search
from akunu_py.chats.conversation_store import ConversationStore
from akunu_py.chats.export import as_markdown
from akunu_py.chats.json import as_json
from akunu_py.chats.tree import ChatMessage, ConversationTree, tree_of

_STEPS = 100  # of SQLite's machine, between two calls of its progress handler
_LINEAR = 2.6  # twice as much, and what sorting and merging add


def long(messages: int, text: str = "a word") -> ConversationTree:
    """Prompts, each with two answers."""
    found: list[ChatMessage] = []
    parent = None
    for number in range(messages // 3):
        asked = ChatMessage("user", text, parent, id=f"p{number}")
        found.append(asked)
        found += [
            ChatMessage("assistant", text, asked.id, id=f"{name}{number}") for name in ("b", "a")
        ]
        parent = f"a{number}"
    return tree_of("long", "A long one", found)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ConversationStore]:
    store = ConversationStore.open(tmp_path / "conversations.db")
    yield store
    store.close()


def steps(store: ConversationStore, action: Callable[[], object]) -> int:
    """Return the number of SQLite virtual machine steps of `action`."""
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return 0

    store._database.set_progress_handler(count, _STEPS)
    action()
    store._database.set_progress_handler(None, 0)
    return calls


def test_import_choose_and_remove_are_linear(store: ConversationStore) -> None:
    counted = []
    for size in (600, 1200):
        tree = long(size)
        branch = tree.active_branch()
        actions: list[Callable[[], object]] = [
            lambda tree=tree: store.save_tree(tree),  # type: ignore[misc]
            lambda tree=tree: store.save_tree(tree),  # type: ignore[misc]
            lambda: store.load("long"),
            lambda branch=branch: store.activate_branch("long", branch[-1].id),  # type: ignore[misc]
            lambda branch=branch: store.remove("long", branch[0].id),  # type: ignore[misc]
        ]
        counted.append([steps(store, action) for action in actions])
    for one, two in zip(*counted, strict=True):
        assert 10 < two < _LINEAR * one + 10, counted


def test_search_of_repeated_word_is_linear(store: ConversationStore) -> None:
    """FTS5's own snippets took 120 s for 0.8 MB of one word."""
    store.save("one", ChatMessage("user", "walrus " * 120_000))
    (found,) = store.search("walrus")
    assert found.hit.snippet.startswith("walrus walrus")
    assert len(found.hit.snippet) <= 200
    assert len(found.hit.marks) > 5


@pytest.mark.parametrize(
    ("text", "snippet"),
    [
        ("ox " * 500 + "the cat and a dog " + "ox " * 500, "the cat and a dog"),
        ("x" * 5000 + " cat " + "x" * 5000 + " dog", "cat"),
        ("我" * 300 + "cat" + "我" * 300, "我cat我"),
        ("cat", "cat"),
    ],
)
def test_snippet_is_short_and_has_most_terms(
    store: ConversationStore, text: str, snippet: str
) -> None:
    store.save("one", ChatMessage("user", text))
    (found,) = store.search("cat")
    assert snippet in found.hit.snippet
    assert "cat" in [found.hit.snippet[start:end] for start, end in found.hit.marks]
    assert len(found.hit.snippet) <= search._BEFORE * 2 + search._AFTER + 2


def test_markdown_is_parsed_only_for_possible_open_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []
    blocks = export._block_parser()

    class Counting:
        def parse(self, text: str) -> object:
            parsed.append(len(text))
            return blocks.parse(text)

    monkeypatch.setattr(export, "_block_parser", Counting)
    as_markdown(long(3000))
    assert parsed == []
    as_markdown(long(300, "```\nx\n```"))
    assert len(parsed) == 200
    parsed.clear()
    fences = "\n".join("~" * (3 + number) for number in range(500, 0, -1))
    assert export.self_contained(f"{'`' * 600}\n{fences}").endswith("`" * 601)
    assert len(parsed) <= 2 + export._MAX_FENCES


def test_json_of_a_long_conversation_is_linear() -> None:
    assert as_json([long(3000)]).count('"role"') == 3000
