"""Every message of every conversation, in one SQLite database; all reading and changing of its
tables.

Calls are short but may wait for the disk or for another program: the chat makes them in a thread of
its own, commands make them directly. A store belongs to the thread that opened it. Whatever is
wrong with the database is a ConversationError.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from akunu_py.chats.database import DatabaseFile
from akunu_py.chats.json import stats_of
from akunu_py.chats.search import Hit, find, searchable, terms_of
from akunu_py.chats.tree import ChatMessage, ConversationInfo, Tree, title_of, tree_of
from akunu_py.errors import ConversationError

UNDO_S = 24 * 3600.0  # how long a deleted conversation can be restored
_TITLE_LENGTH = 200

_INFO_COLUMNS = """
number, id, title, created, updated, model,
(SELECT count(*) FROM messages m WHERE m.conversation = c.number AND m.text <> ''),
(SELECT substr(text, 1, 300) FROM messages m WHERE m.conversation = c.number AND m.text <> ''
    ORDER BY m.number DESC LIMIT 1)
"""
_MESSAGE_COLUMNS = "id, parent, role, text, thinking, created, model, stats, finish_reason"
_SAVE_CONVERSATION = """
INSERT INTO conversations (id, title, created, updated, model)
VALUES (:id, :title, :now, :now, :model)
ON CONFLICT (id) DO UPDATE SET
    updated = max(updated, :now),
    title = CASE title WHEN '' THEN :title ELSE title END,
    model = CASE :model WHEN '' THEN model ELSE :model END,
    deleted = CASE :role WHEN 'user' THEN NULL ELSE deleted END
"""
_SAVE_MESSAGE = f"""
INSERT INTO messages ({_MESSAGE_COLUMNS}, conversation, chosen)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10,
    (SELECT coalesce(max(chosen), 0) + 1 FROM messages WHERE conversation = ?10))
ON CONFLICT (conversation, id) DO UPDATE SET text = ?4, thinking = ?5, model = ?7, stats = ?8,
    finish_reason = ?9
"""
_CHOOSE = """
UPDATE messages SET chosen = (SELECT max(chosen) + 1 FROM messages WHERE conversation = ?1)
WHERE conversation = ?1 AND id = ?2
"""
# The ids of a message and of all its ancestors, or of all its descendants.
_BRANCH = """
WITH RECURSIVE branch (id) AS (
    SELECT id FROM messages WHERE conversation = ?1 AND id = ?2
    UNION
    SELECT m.{next} FROM messages m JOIN branch ON m.{previous} = branch.id
    WHERE m.conversation = ?1 AND m.{next} NOTNULL
)
SELECT id FROM branch
"""
_ANCESTORS = _BRANCH.format(next="parent", previous="id")
_DESCENDANTS = _BRANCH.format(next="id", previous="parent")
_PROMPTS = """
SELECT text FROM messages m JOIN conversations c ON c.number = m.conversation
WHERE role = 'user' AND deleted IS NULL GROUP BY text ORDER BY max(m.created) DESC LIMIT ?
"""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """A conversation that was found, and where the words are."""

    info: ConversationInfo
    hit: Hit


class ConversationStore:
    """All conversations. `warnings`: what had to be set aside when it was opened."""

    def __init__(self, file: DatabaseFile) -> None:
        self._file = file
        self._database = file.database
        self.warnings = file.warnings

    @classmethod
    def open(cls, path: Path) -> ConversationStore:
        """Opens the database at `path`, which is made where it is missing, brought up to date where
        it is older and set aside where it is damaged. Raises ConversationError.

        Erases what was deleted more than UNDO_S ago.
        """
        store = cls(DatabaseFile(path))
        with contextlib.suppress(ConversationError):  # a full disk, another writer: some other time
            store.erase_deleted(time.time() - UNDO_S)
        return store

    def close(self) -> None:
        self._file.close()

    # Messages

    def save(self, conversation: str, message: ChatMessage, title: str = "") -> None:
        """Saves a message, or its new state: its parent and its role stay as they are.

        A conversation begins with its first message; its title is `title`, or its first prompt. A
        prompt in a conversation that was deleted meanwhile restores it.
        """
        with self._file.transaction():
            self._save(conversation, message, title, time.time())

    def save_tree(self, tree: Tree) -> int:
        """Saves a whole conversation, its branches and which of them are active; returns how many
        of its messages are new here. Messages that are here already stay as they are."""
        with self._file.transaction() as database:
            known = {message.id for message in self._messages(tree.conversation)}
            new = [message for message in tree.messages if message.id not in known]
            for message in new:
                self._save(tree.conversation, message, tree.title, message.created)
            restore = "UPDATE conversations SET deleted = NULL WHERE id = ?"
            database.execute(restore, (tree.conversation,))
            if new:
                self._choose(tree.conversation, tree.chosen())
        return len(new)

    def choose(self, conversation: str, message: str) -> None:
        """Makes the branch that leads to `message` the active one, if it is here."""
        with self._file.transaction() as database:
            branch = database.execute(_ANCESTORS, (self._find(conversation), message))
            self._choose(conversation, [row[0] for row in branch.fetchall()])

    def remove(self, conversation: str, message: str) -> None:
        """Erases a message, if it is here, and all its descendants."""
        with self._file.transaction() as database:
            branch = self._find(conversation), message
            number = (
                f"SELECT number FROM messages WHERE conversation = ?1 AND id IN ({_DESCENDANTS})"
            )
            numbers = database.execute(number, branch).fetchall()
            database.executemany("DELETE FROM message_index WHERE rowid = ?", numbers)
            database.executemany("DELETE FROM messages WHERE number = ?", numbers)

    # Finding and reading conversations

    def list(self) -> Sequence[ConversationInfo]:
        """All conversations, the latest first."""
        with self._file.errors():
            return [*self._infos().values()]

    def search(self, words: str) -> Sequence[SearchResult]:
        """The conversations in which all of `words` are, the latest first; all for no words."""
        with self._file.errors():
            infos = self._infos()
            if not words.strip():
                return [SearchResult(info, Hit()) for info in infos.values()]
            hits = find(self._database, terms_of(words))
            return [SearchResult(infos[number], hits[number]) for number in infos if number in hits]

    def load(self, conversation: str) -> Tree:
        """A whole conversation. Raises ConversationError where it is not here."""
        with self._file.errors():
            query = "SELECT title FROM conversations WHERE id = ? AND deleted IS NULL"
            row = self._database.execute(query, (conversation,)).fetchone()
            if row is None:
                raise _unknown(conversation)
            in_order = "SELECT id FROM messages WHERE conversation = ? ORDER BY chosen"
            chosen = self._database.execute(in_order, (self._number(conversation),))
            messages = self._messages(conversation)
            return tree_of(conversation, row[0], messages, (row[0] for row in chosen))

    def resolve(self, name: str) -> ConversationInfo:
        """The one conversation whose id begins with `name`. Raises ConversationError."""
        found = [info for info in self.list() if info.id.startswith(name)] if name else []
        if len(found) > 1:
            raise ConversationError(
                f"{len(found)} conversations have an id that begins with {name!r}; give more of it"
            )
        if not found:
            raise _unknown(name)
        return found[0]

    def recent_prompts(self, limit: int) -> Sequence[str]:
        """The user's last prompts, over all conversations, oldest first, no text twice."""
        with self._file.errors():
            return [row[0] for row in self._database.execute(_PROMPTS, (limit,))][::-1]

    # Changing conversations

    def rename(self, conversation: str, title: str) -> None:
        """Gives a conversation another title; an empty one changes nothing."""
        if not (title := title_of(_storable(title), _TITLE_LENGTH)):
            return
        with self._file.transaction() as database:
            number = self._number(conversation)
            database.execute("UPDATE conversations SET title = ? WHERE number = ?", (title, number))
            self._index("title_index", number, title)

    def delete(self, conversation: str) -> None:
        """Deletes a conversation; `undo_delete` restores it, for UNDO_S."""
        with self._file.transaction() as database:
            gone = (time.time(), self._number(conversation))
            database.execute("UPDATE conversations SET deleted = ? WHERE number = ?", gone)

    def undo_delete(self) -> ConversationInfo | None:
        """Restores the conversation that was deleted last; None where there is none."""
        with self._file.transaction() as database:
            query = """SELECT number FROM conversations WHERE deleted NOTNULL
                ORDER BY deleted DESC LIMIT 1"""
            row = database.execute(query).fetchone()
            if row is None:
                return None
            database.execute("UPDATE conversations SET deleted = NULL WHERE number = ?", row)
            return self._infos()[row[0]]

    def erase(self, conversation: str) -> None:
        """Erases a conversation for good."""
        with self._file.errors():
            self._erase([self._number(conversation)])

    def erase_deleted(self, before: float) -> int:
        """Erases for good what was deleted before that time; returns how many conversations."""
        query = "SELECT number FROM conversations WHERE deleted <= ?"
        with self._file.errors():
            numbers = [row[0] for row in self._database.execute(query, (before,))]
        if numbers:
            self._erase(numbers)
        return len(numbers)

    # Inside a transaction

    def _erase(self, conversations: Sequence[int]) -> None:
        doomed = [(number,) for number in conversations]
        messages = "SELECT number FROM messages WHERE conversation = ?"
        with self._file.transaction() as database:
            database.executemany(f"DELETE FROM message_index WHERE rowid IN ({messages})", doomed)
            database.executemany("DELETE FROM title_index WHERE rowid = ?", doomed)
            database.executemany("DELETE FROM conversations WHERE number = ?", doomed)
            # An index keeps the words of rows that are gone until its parts are merged.
            for index in ("message_index", "title_index"):
                database.execute(f"INSERT INTO {index} ({index}) VALUES ('optimize')")
        with self._file.errors():
            database.execute("PRAGMA wal_checkpoint (TRUNCATE)")

    def _save(self, conversation: str, message: ChatMessage, title: str, now: float) -> None:
        if title:
            title = title_of(_storable(title), _TITLE_LENGTH)
        elif message.role == "user":
            title = title_of(_storable(message.text))
        named = {"id": conversation, "title": title, "now": now, "model": message.model}
        self._database.execute(_SAVE_CONVERSATION, named | {"role": message.role})
        number = self._number(conversation)
        self._database.execute(_SAVE_MESSAGE, (*_values_of(message), number))
        query = "SELECT number, text FROM messages WHERE conversation = ? AND id = ?"
        row = self._database.execute(query, (number, message.id)).fetchone()
        self._index("message_index", *row)
        if title:
            query = "SELECT number, title FROM conversations WHERE number = ?"
            self._index("title_index", *self._database.execute(query, (number,)).fetchone())

    def _index(self, index: str, number: int, text: str) -> None:
        """Replaces the words that are indexed under `number` by those of `text`."""
        self._database.execute(f"DELETE FROM {index} WHERE rowid = ?", (number,))
        insert = f"INSERT INTO {index} (rowid, words) VALUES (?, ?)"
        self._database.execute(insert, (number, searchable(text)))

    def _choose(self, conversation: str, messages: Iterable[str]) -> None:
        number = self._find(conversation)
        self._database.executemany(_CHOOSE, [(number, message) for message in messages])

    def _infos(self) -> dict[int, ConversationInfo]:
        query = f"""SELECT {_INFO_COLUMNS} FROM conversations c WHERE deleted IS NULL
            ORDER BY updated DESC, number DESC"""
        return dict(_info_of(row) for row in self._database.execute(query))

    def _messages(self, conversation: str) -> Sequence[ChatMessage]:
        query = f"""SELECT {_MESSAGE_COLUMNS} FROM messages WHERE conversation =
            (SELECT number FROM conversations WHERE id = ?) ORDER BY number"""
        return [*_messages_of(self._database.execute(query, (conversation,)))]

    def _find(self, conversation: str) -> int | None:
        query = "SELECT number FROM conversations WHERE id = ?"
        row: tuple[int] | None = self._database.execute(query, (conversation,)).fetchone()
        return row[0] if row else None

    def _number(self, conversation: str) -> int:
        number = self._find(conversation)
        if number is None:
            raise _unknown(conversation)
        return number


def _unknown(name: str) -> ConversationError:
    return ConversationError(
        f"no conversation has an id that begins with {name!r}; `akunu chats list` shows them"
    )


def _info_of(row: tuple[Any, ...]) -> tuple[int, ConversationInfo]:
    """A row of _INFO_COLUMNS: the number of the conversation, and what a list shows of it."""
    number, conversation, title, created, updated, model, messages, preview = row
    info = ConversationInfo(conversation, title, created, updated, messages, model, preview or "")
    return number, info


def _messages_of(rows: Iterable[tuple[Any, ...]]) -> Iterator[ChatMessage]:
    """Rows of _MESSAGE_COLUMNS, oldest first. A message whose parent is not here gets none."""
    seen: set[str] = set()
    for message_id, parent, role, text, thinking, created, model, stats, finish in rows:
        message = ChatMessage(
            role=role,
            text=text,
            parent=parent,
            thinking=thinking,
            model=model,
            stats=stats_of(json.loads(stats)) if stats else None,
            finish_reason=finish,
            created=created,
            id=message_id,
        )
        seen.add(message_id)
        yield message if parent in seen else replace(message, parent=None)


def _values_of(message: ChatMessage) -> tuple[Any, ...]:
    """A message as the values of _MESSAGE_COLUMNS."""
    stats = json.dumps(asdict(message.stats)) if message.stats else None
    texts = _storable(message.text), _storable(message.thinking)
    head = message.id, message.parent, message.role
    return (*head, *texts, message.created, message.model, stats, message.finish_reason)


def _storable(text: str) -> str:
    """`text` without lone surrogates, which no encoder takes."""
    return text.encode("utf-8", "replace").decode("utf-8")
