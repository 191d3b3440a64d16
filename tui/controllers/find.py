"""/find in the open chat: marked hits, and the way from one to the next."""

from __future__ import annotations

from dataclasses import dataclass

from akunu_py.tui.open_conversation import ChatTurn, Conversation
from akunu_py.tui.prompt.attachments import full_prompt
from akunu_py.tui.screens.main import ChatView
from akunu_py.tui.transcript.find import HitMarks, pattern_of, plain_text
from akunu_py.tui.transcript.view import Part

FoundText = tuple[ChatTurn, Part, int]  # the last: number of the hit in that part


@dataclass(eq=False)
class FindController:
    """Finds text in the prompts and answers of the open branch."""

    _conversation: Conversation
    _view: ChatView
    marks: HitMarks
    _words: str = ""
    _current: FoundText | None = None

    @property
    def is_active(self) -> bool:
        return bool(self._words)

    async def find(self, words: str) -> None:
        """Mark `words` and go to the last hit."""
        self._words, self._current = words, None
        self.marks.pattern = pattern_of(words)
        self._view.transcript.redraw()
        hits = self._hits()
        if not hits:
            self.end()
            self._view.show_error(f"Not found in this chat: {words}")
            return
        self._view.transcript.focus()
        await self._go_to(hits, len(hits) - 1)

    async def step(self, direction: int) -> None:
        """Go to the previous (-1) or next (1) hit; from the last one to the first."""
        if not self._words:
            self._view.show_error("Nothing to find yet; /find TEXT looks in this chat.")
            return
        hits = self._hits()
        if not hits:
            self._view.show_error(f"Not found in this chat: {self._words}")
            return
        now = hits.index(self._current) if self._current in hits else len(hits) - direction
        await self._go_to(hits, (now + direction) % len(hits))

    def end(self) -> None:
        """Remove the marks."""
        if self._words:
            self._words, self._current, self.marks.pattern = "", None, None
            self._view.transcript.mark_hit(None)
            self._view.transcript.redraw()

    async def _go_to(self, hits: list[FoundText], place: int) -> None:
        turn, part, index = self._current = hits[place]
        await self._view.transcript.show_hit(turn, part, index, pattern_of(self._words))
        count = f"{place + 1:,} of {len(hits):,}"
        self._view.inform(f"Found {count}: {self._words} · n next · N previous · Esc ends")

    def _hits(self) -> list[FoundText]:
        """Return all hits of the branch, in order."""
        return [hit for turn in self._conversation.turns for hit in self._hits_in(turn)]

    def _hits_in(self, turn: ChatTurn) -> list[FoundText]:
        pattern = pattern_of(self._words)
        texts: dict[Part, str] = {"prompt": full_prompt(turn.prompt.text)}
        # Parsing takes long, so only where there may be a hit.
        words = self._words.casefold().split()
        if all(word in turn.answer.casefold() for word in words):
            texts["answer"] = plain_text(turn.answer)
        return [
            (turn, part, index)
            for part, text in texts.items()
            for index, _ in enumerate(pattern.finditer(text))
        ]
