"""Imported conversations that somebody altered: refused in one clear line, or kept and shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from akunu_py.chats.conversation_store import ConversationStore
from akunu_py.chats.export import as_markdown
from akunu_py.chats.json import as_json, read_json
from tests.reliability.fuzz import changed, clear, damaged, explore, lengths
from tests.support.chats import branched


def read_and_show(text: str, store: ConversationStore) -> None:
    """Imports conversations, keeps them, loads them again and shows them in all forms."""
    for tree in read_json(text, "file"):
        store.save_tree(tree)
        again = store.load(tree.conversation)
        assert [message.id for message in again.messages]
        as_markdown(again)
        for message in again.messages:
            if message.stats:
                message.stats.as_dict()
        assert read_json(as_json([again]), "again")
        store.list()


@lengths(125)
def test_conversations(examples: int, tmp_path: Path) -> None:
    store = ConversationStore.open(tmp_path / "conversations.db")
    whole = json.loads(as_json([branched()]))

    def check(value: Any) -> None:
        with clear():
            read_and_show(json.dumps(value), store)

    explore(check, examples, changed(whole))
    store.close()


@lengths(30)
def test_conversations_with_bytes_turned_over(examples: int, tmp_path: Path) -> None:
    store = ConversationStore.open(tmp_path / "conversations.db")

    def check(data: bytes) -> None:
        with clear():
            read_and_show(data.decode("utf-8", "replace"), store)

    explore(check, examples, damaged(as_json([branched()]).encode()))
    store.close()
