"""A chat client and what it posts."""

import queue
from collections.abc import Callable
from typing import Any

from akunu_py.engine.job import ModelLoop
from akunu_py.tui.workers.chat_client import AnswerFailed, AnswerFinished, ChatClient


class RecordedClient:
    """A chat client and its messages."""

    def __init__(self, name: str, load: Callable[[str], ModelLoop]) -> None:
        self.messages = queue.Queue[Any]()
        self.thread = ChatClient(name, load)

    def next(self) -> Any:
        return self.messages.get(timeout=60)

    def until_end(self) -> list[Any]:
        """Return all messages of an answer."""
        found = [self.next()]
        while not isinstance(found[-1], AnswerFinished | AnswerFailed):
            found.append(self.next())
        return found
