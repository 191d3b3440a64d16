"""The calls that are found in an answer, as events."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from akunu_py.decoding.generate.events import CallArguments, CallBegun, CallEnded, Event
from akunu_py.decoding.tool_calls.reader import Malformed
from akunu_py.types import Tool

_NAME = re.compile(r"[\w.:/-]{1,256}")


class Calls:
    """Takes down what a format finds. `made`: how many calls are complete."""

    def __init__(
        self,
        tools: Sequence[Tool],
        emit: Callable[[Event], None],
        new_id: Callable[[], str],
        *,
        allowed: bool = True,
    ) -> None:
        """allowed: whether there may be calls at all."""
        self._tools = {tool.name: tool for tool in tools}
        self._emit, self._new_id = emit, new_id
        self.allowed = allowed
        self.known_only = False  # whether a call must be of one of `tools`
        self.open = False
        self.made = 0
        self._first = True  # of the parameters of the call

    def begin(self, name: str) -> None:
        """Raises Malformed for what is no name of a function. The id is ours: those that models
        write are not unique in a conversation."""
        name = name.strip()
        known = not self.known_only or name in self._tools
        if not self.allowed or self.open or not known or not _NAME.fullmatch(name):
            raise Malformed
        self.open = self._first = True
        self._emit(CallBegun(self._new_id(), name))

    def arguments(self, text: str) -> None:
        """More of the JSON object."""
        self._emit(CallArguments(text))

    def parameter(self, name: str) -> None:
        """Another member of the object, whose value follows as `arguments`."""
        self.arguments(("{" if self._first else ", ") + json.dumps(name, ensure_ascii=False) + ": ")
        self._first = False

    def end(self, *, parameters: bool = False) -> None:
        """parameters: whether the object was made of such."""
        if parameters:
            self.arguments("{}" if self._first else "}")
        self.open = False
        self.made += 1
        self._emit(CallEnded())

    def schema(self, name: str) -> Mapping[str, Any]:
        """The schema of the arguments of a tool; an empty one for a tool that is not known."""
        tool = self._tools.get(name.strip())
        return tool.parameters if tool else {}
