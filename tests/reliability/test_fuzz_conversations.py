"""Imported conversations that somebody altered: refused in one clear line, or kept and shown."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from hypothesis import strategies as st

from akunu_py.chats.export import as_markdown, render
from akunu_py.chats.json import as_json, read_json
from akunu_py.chats.store import ConversationStore
from tests.reliability.fuzz import TEXTS, changed, clear, damaged, explore, lengths
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


@lengths(25)
def test_conversations_as_pictures(examples: int, tmp_path: Path) -> None:
    """Whatever was said makes a picture that XML readers take."""
    tree = branched()
    prompt, answer = tree.path()[:2]

    def check(texts: tuple[str, str]) -> None:
        changed = copy.deepcopy(tree)
        for message, text in zip((prompt, answer), texts, strict=True):
            changed.replace(type(message)(**{**_fields(message), "text": text}))
        picture = render(changed, "svg")
        ElementTree.fromstring(picture)
        assert "\x1b" not in picture

    explore(check, examples, st.tuples(TEXTS, st.text(max_size=60)))


def _fields(message: Any) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__dataclass_fields__}
