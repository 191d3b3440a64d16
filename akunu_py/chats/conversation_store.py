"""Stores all conversations in one SQLite database.

Calls may wait for the disk or another process; the chat uses a worker thread. Use a store only in
the thread that opened it. All database problems raise ConversationError.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from akunu_py.chats import rows
from akunu_py.chats.database import DatabaseFile
from akunu_py.chats.options import ChatOptions
from akunu_py.chats.search import SearchHit, find_matches, searchable, terms_of
from akunu_py.chats.tree import ChatMessage, ConversationInfo, ConversationTree, title_of, tree_of
from akunu_py.errors import ConversationError

UNDO_S = 24 * 3600.0  # time to restore a deleted conversation
_TITLE_LENGTH = 200

_SAVE_CONVERSATION = """
INSERT INTO conversations (id, title, created, updated, model)
VALUES (:id, :title, :now, :now, :model)
ON CONFLICT (id) DO UPDATE SET
    updated = iif(typeof(updated) IN ('real', 'integer'), max(updated, :now), :now),
    title = CASE coalesce(title, '') WHEN '' THEN :title ELSE title END,
    model = CASE :model WHEN '' THEN coalesce(model, '') ELSE :model END,
    deleted = CASE :role WHEN 'user' THEN NULL ELSE deleted END
"""
_SAVE_MESSAGE = f"""
INSERT INTO messages ({rows.MESSAGE_COLUMNS}, conversation, chosen)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)
ON CONFLICT (conversation, id) DO UPDATE SET text = ?4, thinking = ?5, model = ?7, stats = ?8,
    finish_reason = ?9, rounds = ?10
"""
_ACTIVATE = "UPDATE messages SET chosen = ? WHERE conversation = ? AND number = ?"
_LAST_CHOICE = """
SELECT max(chosen) FROM messages WHERE conversation = ? AND typeof(chosen) = 'integer'
"""
_MAX_CHOICE = 2**62  # only a damaged file has higher values
# A number and rows.MESSAGE_COLUMNS without content: enough for the tree structure.
_TREE_COLUMNS = "number, id, parent, role, '', '', 0, '', NULL, NULL, NULL"
_PROMPTS = """
SELECT text FROM messages m JOIN conversations c ON c.number = m.conversation
WHERE role = 'user' AND deleted IS NULL GROUP BY text ORDER BY max(m.created) DESC LIMIT ?
"""


@dataclass(frozen=True, slots=True)
class SearchResult:
    info: ConversationInfo
    hit: SearchHit


class ConversationStore:
    """The queries and changes of a conversation database."""

    def __init__(self, file: DatabaseFile) -> None:
        self._file = file
        self._database = file.database
        self.warnings = file.warnings  # damaged files set aside while opening

    @classmethod
    def open(cls, path: Path) -> ConversationStore:
        """Open, create or migrate the database at `path`; set a damaged one aside.

        Erases conversations deleted more than UNDO_S ago. Raises ConversationError.
        """
        store = cls(DatabaseFile(path))
        with contextlib.suppress(ConversationError):  # a full disk, another writer: try next time
            store._erase_deleted()
        return store

    def close(self) -> None:
        self._file.close()

    def hold(self, conversations: Collection[str]) -> set[str]:
        """Mark the conversations that this process has open; return those open in another one."""
        return self._file.hold(conversations)

    # Messages

    def save(self, conversation: str, message: ChatMessage, title: str = "") -> None:
        """Save a new message, or the new state of a message; its parent and role never change.

        The first prompt creates the conversation, titled `title` or by the prompt. A new prompt
        restores a deleted conversation; an answer in an erased one is dropped.
        """
        with self._file.transaction():
            number = self._find_number(conversation)
            if number is not None or message.role == "user":
                place = self._last_activation(number) + 1
                self._save(conversation, message, title, time.time(), place)

    def save_tree(self, tree: ConversationTree) -> int:
        """Save all branches; keep existing messages. Return the number of added messages."""
        with self._file.transaction() as database:
            number = self._find_number(tree.conversation)
            known = self._row_numbers(number)
            new = [message for message in tree.messages if message.id not in known]
            for place, message in enumerate(new, self._last_activation(number) + 1):
                self._save(tree.conversation, message, tree.title, message.created, place)
            number = self._find_number(tree.conversation)
            database.execute("UPDATE conversations SET deleted = NULL WHERE number = ?", (number,))
            if new:
                self._activate(number, tree.active_siblings())
            if options := rows.options_text(tree.options):
                update = "UPDATE conversations SET options = ifnull(options, ?) WHERE number = ?"
                database.execute(update, (options, number))
        return len(new)

    def activate_branch(self, conversation: str, message: str) -> None:
        """Activate the branch from the root to `message`, if the message exists."""
        with self._file.transaction():
            number = self._find_number(conversation)
            parents = {each.id: each.parent for _, each in self._rows(number, _TREE_COLUMNS)}
            branch: list[str] = []
            ancestor: str | None = message
            while ancestor in parents:
                branch.append(ancestor)
                ancestor = parents[ancestor]
            self._activate(number, branch)

    def remove(self, conversation: str, messages: Collection[str]) -> None:
        """Erase those of `messages` that no remaining one follows, then an empty conversation."""
        with self._file.transaction() as database:
            number = self._find_number(conversation)
            followed = set[str | None]()
            numbers = []
            for row, each in reversed([*self._rows(number, _TREE_COLUMNS)]):
                if each.id in messages and each.id not in followed:
                    numbers.append((row,))
                else:
                    followed.add(each.parent)
            database.executemany("DELETE FROM message_index WHERE rowid = ?", numbers)
            database.executemany("DELETE FROM messages WHERE number = ?", numbers)
            if numbers and not self._row_numbers(number):
                database.execute("DELETE FROM title_index WHERE rowid = ?", (number,))
                database.execute("DELETE FROM conversations WHERE number = ?", (number,))

    # Finding and reading conversations

    def list(self) -> Sequence[ConversationInfo]:
        """Return all conversations, latest first."""
        with self._file.convert_errors():
            return [*self._infos().values()]

    def search(self, words: str) -> Sequence[SearchResult]:
        """Return the conversations that contain all `words` (all if empty), latest first."""
        with self._file.convert_errors():
            infos = self._infos()
            if not words.strip():
                return [SearchResult(info, SearchHit()) for info in infos.values()]
            hits = find_matches(self._database, terms_of(rows.storable(words)))
            return [SearchResult(infos[number], hits[number]) for number in infos if number in hits]

    def load(self, conversation: str) -> ConversationTree:
        """Return a conversation. Raises ConversationError if it does not exist."""
        with self._file.convert_errors():
            number = self._require_number(conversation)
            query = "SELECT title, options FROM conversations WHERE number = ? AND deleted IS NULL"
            row = self._database.execute(query, (number,)).fetchone()
            if row is None:
                raise _unknown_conversation(conversation)
            messages = dict(self._rows(number))
            in_order = "SELECT number FROM messages WHERE conversation = ? ORDER BY chosen"
            chosen = [each for (each,) in self._database.execute(in_order, (number,))]
            ids = [messages[each].id for each in chosen if each in messages]
            title, options = rows.text_of(row[0]), rows.options_in(row[1])
            try:
                return tree_of(conversation, title, messages.values(), ids, options)
            except ValueError as error:  # two messages with one id
                raise ConversationError(
                    f"conversation {conversation} is damaged: {error}"
                ) from error

    def resolve(self, name: str) -> ConversationInfo:
        """Return the conversation whose id starts with `name`. Raises ConversationError."""
        found = [info for info in self.list() if info.id.startswith(name)] if name else []
        if len(found) > 1:
            raise ConversationError(
                f"{len(found)} conversations have ids that start with {name!r}; type more of the id"
            )
        if not found:
            raise _unknown_conversation(name)
        return found[0]

    def recent_prompts(self, limit: int) -> Sequence[str]:
        """Return the user's last unique prompts of all conversations, oldest first."""
        with self._file.convert_errors():
            found = self._database.execute(_PROMPTS, (limit,)).fetchall()
            return [rows.text_of(text) for (text,) in reversed(found)]

    # Changing conversations

    def rename(self, conversation: str, title: str) -> None:
        """Rename a conversation. An empty title changes nothing."""
        if not (title := title_of(rows.storable(title), _TITLE_LENGTH)):
            return
        with self._file.transaction():
            self._set_title(self._require_number(conversation), title)

    def retitle(self, conversation: str, before: str, title: str) -> bool:
        """Replace the title `before` of a conversation; return False if it has another one."""
        before, title = (title_of(rows.storable(each), _TITLE_LENGTH) for each in (before, title))
        query = "SELECT 1 FROM conversations WHERE number = ? AND title = ?"
        with self._file.transaction() as database:
            number = self._find_number(conversation)
            if number is None or not database.execute(query, (number, before)).fetchone():
                return False
            self._set_title(number, title)
        return True

    def _set_title(self, number: int, title: str) -> None:
        update = "UPDATE conversations SET title = ? WHERE number = ?"
        self._database.execute(update, (title, number))
        self._index("title_index", number, title)

    def set_options(self, conversation: str, options: ChatOptions) -> None:
        """Replace the options of a conversation, if it exists."""
        values = rows.options_text(options), self._find_number(conversation)
        with self._file.transaction() as database:
            database.execute("UPDATE conversations SET options = ? WHERE number = ?", values)

    def delete(self, conversation: str) -> None:
        """Delete a conversation; `undo_delete` can restore it for UNDO_S."""
        with self._file.transaction() as database:
            values = (time.time(), self._require_number(conversation))
            database.execute("UPDATE conversations SET deleted = ? WHERE number = ?", values)

    def undo_delete(self) -> ConversationInfo | None:
        """Restore the last deleted conversation, if any."""
        with self._file.transaction() as database:
            query = """SELECT number FROM conversations WHERE deleted NOTNULL
                ORDER BY deleted DESC LIMIT 1"""
            row = database.execute(query).fetchone()
            if row is None:
                return None
            database.execute("UPDATE conversations SET deleted = NULL WHERE number = ?", row)
            return self._infos()[row[0]]

    def erase(self, conversation: str) -> None:
        with self._file.convert_errors():
            self._erase([self._require_number(conversation)])

    def _erase_deleted(self) -> None:
        query = "SELECT number FROM conversations WHERE deleted <= ?"
        with self._file.convert_errors():
            found = self._database.execute(query, (time.time() - UNDO_S,)).fetchall()
            if found:
                self._erase([number for (number,) in found])

    # Inside a transaction

    def _erase(self, conversations: Sequence[int]) -> None:
        parameters = [(number,) for number in conversations]
        messages = "SELECT number FROM messages WHERE conversation = ?"
        with self._file.transaction() as database:
            database.executemany(
                f"DELETE FROM message_index WHERE rowid IN ({messages})", parameters
            )
            database.executemany("DELETE FROM title_index WHERE rowid = ?", parameters)
            database.executemany("DELETE FROM conversations WHERE number = ?", parameters)
            # An index keeps words of deleted rows until its segments are merged.
            for index in ("message_index", "title_index"):
                database.execute(f"INSERT INTO {index} ({index}) VALUES ('optimize')")
        with self._file.convert_errors():
            database.execute("PRAGMA wal_checkpoint (TRUNCATE)")

    def _save(
        self, conversation: str, message: ChatMessage, title: str, now: float, place: int
    ) -> None:
        """Save a message. place: the `chosen` value of a new message."""
        if title:
            title = title_of(rows.storable(title), _TITLE_LENGTH)
        elif message.role == "user":
            title = title_of(rows.storable(message.text))
        query = "SELECT number FROM conversations WHERE id = ? AND title <> ''"
        is_titled = self._database.execute(query, (conversation,)).fetchone() is not None
        named = {
            "id": conversation,
            "title": title,
            "now": now,
            "model": rows.storable(message.model),
        }
        self._database.execute(_SAVE_CONVERSATION, named | {"role": message.role})
        number = self._require_number(conversation)
        self._database.execute(_SAVE_MESSAGE, (*rows.values_of(message), number, place))
        query = "SELECT number, text, rounds FROM messages WHERE conversation = ? AND id = ?"
        row, *texts = self._database.execute(query, (number, message.id)).fetchone()
        self._index("message_index", row, rows.all_text(*texts))
        if title and not is_titled:
            self._index("title_index", number, title)

    def _index(self, index: str, number: int, text: str) -> None:
        self._database.execute(f"DELETE FROM {index} WHERE rowid = ?", (number,))
        insert = f"INSERT INTO {index} (rowid, words) VALUES (?, ?)"
        self._database.execute(insert, (number, searchable(text)))

    def _activate(self, conversation: int | None, messages: Iterable[str]) -> None:
        """Record `messages`, if they exist, as the latest choices of branches, in order."""
        numbers = self._row_numbers(conversation)
        first = self._last_activation(conversation) + 1
        known = [numbers[message] for message in messages if message in numbers]
        self._database.executemany(
            _ACTIVATE, [(first + place, conversation, number) for place, number in enumerate(known)]
        )

    def _last_activation(self, conversation: int | None) -> int:
        (last,) = self._database.execute(_LAST_CHOICE, (conversation,)).fetchone()
        return min(last or 0, _MAX_CHOICE)

    def _infos(self) -> dict[int, ConversationInfo]:
        query = f"""SELECT {rows.INFO_COLUMNS} FROM conversations c WHERE deleted IS NULL
            ORDER BY updated DESC, number DESC"""
        return dict(rows.info_of(row) for row in self._database.execute(query))

    def _rows(
        self, conversation: int | None, columns: str = f"number, {rows.MESSAGE_COLUMNS}"
    ) -> Iterator[tuple[int, ChatMessage]]:
        query = f"SELECT {columns} FROM messages WHERE conversation = ? ORDER BY number"
        return rows.messages_of(self._database.execute(query, (conversation,)))

    def _row_numbers(self, conversation: int | None) -> dict[str, int]:
        return {message.id: number for number, message in self._rows(conversation, _TREE_COLUMNS)}

    def _find_number(self, conversation: str) -> int | None:
        """Return the row number of a conversation, None if it does not exist."""
        query = "SELECT number FROM conversations WHERE id = ?"
        row: tuple[int] | None = self._database.execute(query, (conversation,)).fetchone()
        return row[0] if row else None

    def _require_number(self, conversation: str) -> int:
        number = self._find_number(conversation)
        if number is None:
            raise _unknown_conversation(conversation)
        return number


def _unknown_conversation(name: str) -> ConversationError:
    return ConversationError(f"no conversation with id {name!r}; list them: akunu chats list")
