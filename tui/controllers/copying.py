"""Copying messages and blocks of code to the clipboard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from akunu_py.tui.conversation import Conversation, Turn
from akunu_py.tui.prompt.files import split
from akunu_py.tui.transcript.markdown import markdown_parser
from akunu_py.tui.view import ChatView


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """A block of code in an answer. language: "" where none is named."""

    text: str
    language: str


@dataclass(eq=False)
class CopyController:
    """Copies the chosen message, else the last answer."""

    _conversation: Conversation
    _view: ChatView
    _copy: Callable[[str], None]  # puts a text on the clipboard
    _copied_block: tuple[str, int] = "", -1  # id of the answer, index of the block

    def copy_answer(self) -> None:
        """Copies the last answer, as the model wrote it: Markdown."""
        answered = [turn for turn in self._conversation.turns if turn.answer]
        self._copy_answer(answered[-1] if answered else None)

    def copy_message(self) -> None:
        """Copies the chosen message, else the last answer."""
        chosen = self._view.transcript.chosen
        if chosen is None:
            self.copy_answer()
        elif chosen[1] == "answer":
            self._copy_answer(chosen[0])
        else:
            self._copy(split(chosen[0].prompt.text)[0])
            self._view.inform("Copied the prompt.")

    def copy_code(self) -> None:
        """Copies the first block of code of the chosen or the last answer; again: the next one."""
        chosen = self._view.transcript.chosen
        turns = [chosen[0]] if chosen else self._conversation.turns[::-1]
        for turn in turns:
            if blocks := code_blocks(turn.answer):
                answer, last = self._copied_block
                index = (last + 1) % len(blocks) if answer == turn.reply_id else 0
                self._copied_block = turn.reply_id, index
                self._copy_block(blocks[index], index + 1, len(blocks))
                return
        self._view.inform("There is no block of code to copy.")

    def _copy_answer(self, turn: Turn | None) -> None:
        if turn is None or not turn.answer:
            self._view.inform("There is no answer to copy yet.")
            return
        self._copy(turn.answer.strip())
        self._view.inform("Copied the answer.")

    def _copy_block(self, block: CodeBlock, which: int, count: int) -> None:
        self._copy(block.text)
        lines = block.text.count("\n")
        what = f"{block.language} code" if block.language else "code"
        more = f", block {which} of {count}; again copies the next" if count > 1 else ""
        self._view.inform(f"Copied {what}, {lines} line{'' if lines == 1 else 's'}{more}.")


def code_blocks(text: str) -> list[CodeBlock]:
    """The fenced and indented blocks of code in Markdown, in order."""
    return [
        CodeBlock(token.content, token.info.split()[0] if token.info.strip() else "")
        for token in markdown_parser().parse(text)
        if token.type in ("fence", "code_block")
    ]
