"""Copying: messages, blocks of code and what the mouse selected, to the clipboard of the person."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from textual.widgets import Markdown

from akunu_py.tui.base import ChatBase
from akunu_py.tui.conversation import Turn
from akunu_py.tui.prompt.attachments import split
from akunu_py.tui.terminal.clipboard import find_program, run_program
from akunu_py.tui.transcript.markdown import markdown_parser


@dataclass(frozen=True, slots=True)
class Code:
    """A block of code in an answer. language: "" where it was not said."""

    text: str
    language: str


class Copying(ChatBase):
    """Actions that copy."""

    _copied_code: tuple[str, int] = ("", -1)  # of which answer, which block

    def copy_to_clipboard(self, text: str) -> None:
        """Also called by Textual, for what is selected in a text."""
        command = find_program()
        if command is None:
            super().copy_to_clipboard(text)  # OSC 52
        else:
            self._clipboard = text  # what Ctrl+V pastes
            self.run_worker(self._hand_over(command, text), group="clipboard")

    async def _hand_over(self, command: list[str], text: str) -> None:
        if not await asyncio.to_thread(run_program, command, text):
            super().copy_to_clipboard(text)

    def action_copy_answer(self) -> None:
        """The last answer, as the model wrote it: Markdown."""
        answered = [turn for turn in self._conversation.turns if turn.answer]
        self._copy_answer(answered[-1] if answered else None)

    def action_copy_message(self) -> None:
        """The chosen message, else the last answer."""
        chosen = self._transcript.chosen
        if chosen is None:
            self.action_copy_answer()
        elif chosen[1] == "answer":
            self._copy_answer(chosen[0])
        else:
            self.copy_to_clipboard(split(chosen[0].prompt.text)[0])
            self._say("Copied the prompt.")

    def action_copy_code(self) -> None:
        """The first block of code of the chosen or the last answer; again: the next one."""
        chosen = self._transcript.chosen
        turns = [chosen[0]] if chosen else self._conversation.turns[::-1]
        for turn in turns:
            if blocks := code_blocks(turn.answer):
                answer, last = self._copied_code
                block = (last + 1) % len(blocks) if answer == turn.reply_id else 0
                self._copied_code = turn.reply_id, block
                self._copy_code(blocks[block], block + 1, len(blocks))
                return
        self._say("There is no block of code to copy.")

    def on_markdown_link_clicked(self, event: Markdown.LinkClicked) -> None:
        # A model's link may lead anywhere, and over ssh a browser would open on this screen.
        self.copy_to_clipboard(event.href)
        self.notify(event.href, title="Link copied", markup=False)

    def _copy_answer(self, turn: Turn | None) -> None:
        if turn is None or not turn.answer:
            self._say("There is no answer to copy yet.")
            return
        self.copy_to_clipboard(turn.answer.strip())
        self._say("Copied the answer.")

    def _copy_code(self, code: Code, which: int, count: int) -> None:
        self.copy_to_clipboard(code.text)
        lines = code.text.count("\n")
        what = f"{code.language} code" if code.language else "code"
        more = f", block {which} of {count}; again copies the next" if count > 1 else ""
        self._say(f"Copied {what}, {lines} line{'' if lines == 1 else 's'}{more}.")


def code_blocks(text: str) -> list[Code]:
    """The fenced and indented blocks of code in Markdown, in order."""
    return [
        Code(token.content, token.info.split()[0] if token.info.strip() else "")
        for token in markdown_parser().parse(text)
        if token.type in ("fence", "code_block")
    ]
