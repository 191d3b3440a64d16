"""Actions on turns: send, edit, regenerate, continue, stop, copy, branch, find."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from akunu_py.chats.search import fold
from akunu_py.errors import UsageError
from akunu_py.text import typeable
from akunu_py.tui.controllers.answering import AnswerController
from akunu_py.tui.open_conversation import SUMMARY_PROMPT, ChatTurn, Conversation
from akunu_py.tui.prompt.attachments import (
    Attachment,
    attach,
    full_prompt,
    join_files,
    mentions,
    missing_files,
)
from akunu_py.tui.screens.main import ChatView
from akunu_py.tui.transcript.find import HitMarks, phrase_finder, plain_text, search_finder
from akunu_py.tui.transcript.markdown_parser import parse
from akunu_py.tui.transcript.view import Part


@dataclass(eq=False)
class TurnController:
    """Runs actions on turns. Nothing is overwritten: a change becomes a branch."""

    _conversation: Conversation
    _answering: AnswerController
    _view: ChatView
    _directory: Path  # for @file names
    _copy: Callable[[str], None]  # copies text to the clipboard
    edited: ChatTurn | None = None  # the turn whose prompt is in the box
    _draft: str = ""  # previous contents of the box
    _warned_prompt: str = ""  # a prompt with missing files, after the warning
    _copied_block: tuple[str, int] = "", -1  # reply id and index of the last copied block

    @property
    def unsent_text(self) -> str:
        """The unsent text of the prompt box; an unchanged edited prompt does not count."""
        box = self._view.prompt
        prompt = box.prompt_of(self.edited.prompt.text) if self.edited else ""
        if self._conversation.is_private:
            return ""
        return self._draft if self.edited and box.text == typeable(prompt) else box.message

    async def send(self, text: str, pastes: Sequence[Attachment] = ()) -> None:
        """Send a prompt with its files, in place of the prompt being edited, if any.

        Raises UsageError for a prompt that cannot be sent now.
        """
        if any(turn.summarizes for turn in self._answering.pending() if turn in self._conversation):
            raise UsageError("The summary is not finished yet. Esc stops it.")
        attached = list(pastes)
        if mentions(text):
            names = await asyncio.to_thread(missing_files, text, self._directory)
            if names and text != self._warned_prompt:
                self._warned_prompt = text
                none = f"File not found: {', '.join(names)}."
                raise UsageError(f"{none} Press Enter again to send it as text.")
            room = self._answering.context_length
            attached += await asyncio.to_thread(attach, text, self._directory, room)
        text = join_files(text, attached)
        if welcome := self._view.welcome:
            await welcome.remove()
        edited = self.edited
        self.stop_editing()
        if edited is not None:
            await self._answering.interrupt(discard=edited)
        prompt = edited.prompt.id if edited else ""  # F5 may have replaced the turn
        turn = next((each for each in self._conversation.turns if each.prompt.id == prompt), None)
        if turn is not None:
            await self._answering.submit(self._conversation.edit(turn, text))
        else:
            await self._answering.submit(self._conversation.ask(text))

    def edit(self) -> None:
        """Put the prompt into the box; sending it creates a branch."""
        turn = self._changeable_turn("There is no message to edit yet.")
        if turn is None:
            return
        if self.edited is None:
            self._draft = self._view.prompt.text
        self._mark_edited(turn)
        self._view.prompt.write(self._view.prompt.prompt_of(turn.prompt.text))
        self._view.prompt.focus()
        self._view.show_state()

    def stop_editing(self) -> None:
        if self.edited is not None:
            self._mark_edited(None)
            self._view.prompt.empty()  # Up restores the edited text.
            self._view.prompt.write(self._draft)

    def _mark_edited(self, turn: ChatTurn | None) -> None:
        self.edited = turn
        self._view.transcript.mark_edited(turn)

    async def stop(self) -> None:
        """Stop editing, else take back the last queued prompt, else stop the answer."""
        if self.edited is not None:
            self.stop_editing()
        elif self._answering.has_queued_prompt:
            await self._answering.unqueue_last()
        elif self._answering.is_busy:
            await self._answering.interrupt()
        self._view.prompt.focus()
        self._view.show_state()

    async def regenerate(self) -> None:
        """Regenerate the answer; the old answer stays as a branch."""
        turn = self._changeable_turn("There is no answer yet.")
        if turn is None:
            return
        await self._answering.interrupt()
        if turn not in self._conversation.turns:
            self._view.inform("The prompt is back in the box because it had no answer yet.")
            return
        again = self._conversation.regenerate(turn)
        again.constraint = turn.constraint
        await self._answering.submit(again)
        if self._view.is_choosing:
            self._view.transcript.choose(again, "answer")

    async def continue_answer(self) -> None:
        if self._answering.refuse_while_busy():
            return
        turn = self._chosen_turn()
        if turn is None or turn is not self._conversation.turns[-1]:
            self._view.show_error("Only the last answer can be continued.")
        elif not turn.has_output:
            self._view.show_error("There is nothing to continue yet; F5 tries again.")
        elif not turn.can_continue:
            self._view.show_error("The answer is already complete.")
        else:
            if self._conversation.is_elsewhere:  # where the answer may still grow
                self._conversation.shorten(turn, turn.answer)
                await self._view.transcript.show_branch()
            await self._answering.resume(self._conversation.turns[-1])

    async def switch_branch(self, direction: int) -> None:
        """Show the branch before (-1) or after (1) that of the chosen message."""
        chosen = self._view.transcript.chosen
        if chosen is None or self._answering.refuse_while_busy():
            return
        turn, part = chosen
        message = turn.prompt.id if part == "prompt" else turn.reply_id
        sibling = self._conversation.switch_branch(message, direction)
        if sibling is None:
            which, count = self._conversation.branch_number(message)
            only = "This message has no other branch."
            self._view.show_error(only if count == 1 else f"Branch {which} of {count}.")
            return
        self.stop_editing()
        await self._view.transcript.show_branch()
        for turn in self._conversation.turns:
            if sibling in (turn.prompt.id, turn.reply_id):
                self._view.transcript.choose(turn, part)

    def copy_answer(self, turn: ChatTurn | None = None) -> None:
        """Copy the answer of `turn`, or the last answer, as Markdown."""
        turns = [turn] if turn else self._conversation.turns
        answers = [each.answer for each in turns if each.answer]
        if answers:
            self._copy(answers[-1].strip())
            self._view.inform("Copied the answer.")
        else:
            self._view.show_error("There is no answer to copy yet.")

    def copy_message(self) -> None:
        """Copy the chosen message, else the last answer."""
        chosen = self._view.transcript.chosen
        if chosen is None:
            self.copy_answer()
        elif chosen[1] == "answer":
            self.copy_answer(chosen[0])
        else:
            self._copy(full_prompt(chosen[0].prompt.text))
            self._view.inform("Copied the prompt.")

    def copy_code(self) -> None:
        """Copy the first code block of the chosen or last answer; repeated calls cycle."""
        chosen = self._view.transcript.chosen
        turns = [chosen[0]] if chosen else self._conversation.turns[::-1]
        for turn in turns:
            if blocks := code_blocks(turn.markdown_prefix + turn.answer):
                answer, last = self._copied_block
                index = (last + 1) % len(blocks) if answer == turn.reply_id else 0
                self._copied_block = turn.reply_id, index
                code, language = blocks[index]
                self.copy_block(code, language, index + 1, len(blocks))
                return
        self._view.show_error("There is no code block to copy.")

    def _changeable_turn(self, none: str) -> ChatTurn | None:
        """Return the turn to change. For none, or a summary, show an error and return None."""
        turn = self._chosen_turn()
        if turn is None or turn.prompt.text == SUMMARY_PROMPT:
            summary = "Press ← on this summary for the original chat, then use /compact."
            self._view.show_error(summary if turn else none)
            return None
        return turn

    def _chosen_turn(self) -> ChatTurn | None:
        if chosen := self._view.transcript.chosen:
            return chosen[0]
        return self._conversation.turns[-1] if self._conversation.turns else None

    def copy_block(self, code: str, language: str, which: int = 1, count: int = 1) -> None:
        """Copy a code block, number `which` of `count`."""
        self._copy(code)
        lines = code.count("\n")
        what = f"{language} code" if language else "code"
        text = f"Copied {what}, {lines} line{'' if lines == 1 else 's'}"
        if count > 1:
            text += f", block {which} of {count}; repeat for the next"
        self._view.inform(f"{text}.")


def code_blocks(text: str) -> list[tuple[str, str]]:
    """Return the fenced and indented code blocks of Markdown, with their languages."""
    return [
        (token.content, token.info.split()[0] if token.info.strip() else "")
        for token in parse(text)
        if token.type in ("fence", "code_block")
    ]


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

    async def find(self, words: str, message: str = "") -> None:
        """Mark `words`, go to the last hit; for a search, mark each, go to `message`."""
        self._words, self._current = words, None
        self.marks.find = search_finder(words) if message else phrase_finder(words)
        self._view.transcript.redraw()
        hits = self._hits()
        if not hits:
            self.end()
            self._view.show_error(f"Not found in this chat: {words}")
            return
        self._view.transcript.focus()
        ids = [turn.prompt.id if part == "prompt" else turn.reply_id for turn, part, _ in hits]
        await self._go_to(hits, ids.index(message) if message in ids else len(hits) - 1)

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
        if self._words:
            self._words, self._current = "", None
            self._view.transcript.mark_hit(None)
            self._view.transcript.redraw()

    async def _go_to(self, hits: list[FoundText], place: int) -> None:
        turn, part, index = self._current = hits[place]
        await self._view.transcript.show_hit(turn, part, index, self.marks.find)
        count = f"{place + 1:,} of {len(hits):,}"
        self._view.inform(f"Found {count}: {self._words} · n next · N previous · Esc ends")

    def _hits(self) -> list[FoundText]:
        words = fold(self._words).replace('"', " ").split()
        hits: list[FoundText] = []
        for turn in self._conversation.turns:
            texts: dict[Part, str] = {"prompt": full_prompt(turn.prompt.text)}
            # Parsing takes long, so only where there may be a hit.
            answer = "\0".join([*(each.text for each in turn.rounds), turn.answer])
            folded = fold(answer)
            if any(word in folded for word in words) or self.marks.find(answer):
                texts["answer"] = "\0".join(map(plain_text, answer.split("\0")))
            for part, text in texts.items():
                hits += [(turn, part, at) for at, _ in enumerate(self.marks.find(text))]
        return hits
