"""What the user does with turns: send, edit, regenerate, continue, stop, copy, switch branches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from akunu_py.errors import UsageError
from akunu_py.text import collapse, typeable
from akunu_py.tui.controllers.answering import AnswerController
from akunu_py.tui.open_conversation import ChatTurn, Conversation
from akunu_py.tui.prompt.attachments import attach, join, mentions, missing, split
from akunu_py.tui.screens.main import ChatView
from akunu_py.tui.transcript.parser import parse


@dataclass(frozen=True, slots=True)
class CodeText:
    """A block of code in an answer. language: "" where none is named."""

    text: str
    language: str


@dataclass(eq=False)
class TurnController:
    """Makes turns in the conversation and has them answered. Nothing is overwritten: what is
    changed becomes a branch. Actions are on the turn of the chosen message, else the last one."""

    _conversation: Conversation
    _answering: AnswerController
    _view: ChatView
    _directory: Path  # where the files are that a prompt names
    _copy: Callable[[str], None]  # puts a text on the clipboard
    _edited: ChatTurn | None = None  # its prompt is in the box, in the place of `_draft`
    _draft: str = ""
    _sent_anyway: str = ""  # a prompt that names files which are none, once it was said
    _copied_block: tuple[str, int] = "", -1  # id of the answer, index of the block

    @property
    def is_editing(self) -> bool:
        return self._edited is not None

    @property
    def unsent(self) -> str:
        """What is in the box; while an earlier prompt is in it unchanged, what was there before."""
        text = self._view.prompt.whole
        prompt = split(self._edited.prompt.text)[0] if self._edited else ""
        return self._draft if self._edited and text == typeable(prompt) else text

    async def send(self, text: str) -> None:
        """Sends a prompt, with the files that it names; in the place of the one that is edited."""
        if mentions(text):
            names = await asyncio.to_thread(missing, text, self._directory)
            if names and text != self._sent_anyway:
                self._sent_anyway = text
                self._view.prompt.put_back(text)
                none = f"There is no file {', '.join(names)} here."
                self._view.refuse(f"{none} Enter again sends it as words.")
                return
            room = self._answering.context_length
            try:
                files = await asyncio.to_thread(attach, text, self._directory, room)
            except UsageError as error:
                self._view.prompt.put_back(text)
                self._view.refuse(str(error))
                return
            text = join(text, files)
        await self._view.hide_welcome()
        edited = self._edited
        self.leave_editing()
        if edited is not None:
            await self._answering.interrupt(discard=edited)
        if edited in self._conversation.turns:
            await self._answering.submit(self._conversation.edit(edited, text))
        else:
            await self._answering.submit(self._conversation.ask(text))
        if behind := self._answering.behind:
            self._ask_whether_to_wait(collapse(behind.tree.title))

    def _ask_whether_to_wait(self, title: str) -> None:
        """Another conversation is being answered: this answer waits, or that one ends."""

        async def carry_out(answer: str | None) -> None:
            if answer == "stop":
                await self._answering.stop_behind()
            elif answer == "back":
                await self._answering.interrupt()

        question = f"The model is still answering in another chat: {title}"
        choices = {
            "wait": "Wait until that answer is whole",
            "stop": "Stop that answer, and answer here",
            "back": "Take the prompt back",
        }
        self._view.ask(question, choices, carry_out)

    def edit(self) -> None:
        """Puts the prompt into the box; sent again, it is a branch."""
        turn = self._chosen_turn()
        if turn is None:
            self._view.refuse("There is nothing to edit yet.")
            return
        if self._edited is None:
            self._draft = self._view.prompt.text
        self._mark_edited(turn)
        self._view.prompt.write(split(turn.prompt.text)[0])
        self._view.prompt.focus()
        self._view.show_state()

    def leave_editing(self) -> None:
        """Puts what was in the box before an earlier prompt was edited back there."""
        if self._edited is not None:
            self._mark_edited(None)
            self._view.prompt.write(self._draft)

    def _mark_edited(self, turn: ChatTurn | None) -> None:
        self._edited = turn
        self._view.transcript.mark_edited(turn)

    async def stop(self) -> None:
        """Ends the answer and keeps it, else leaves editing."""
        if self._answering.is_busy:
            await self._answering.interrupt()
        else:
            self.leave_editing()
        self._view.transcript.leave()
        self._view.prompt.focus()
        self._view.show_state()

    async def regenerate(self) -> None:
        """Requests another answer to the same prompt; the old one stays as a branch."""
        turn = self._chosen_turn()
        if turn is None:
            self._view.refuse("There is no answer yet.")
            return
        await self._answering.interrupt()
        if turn not in self._conversation.turns:
            self._view.inform("That prompt is back in the box: it had no answer yet.")
            return
        again = self._conversation.regenerate(turn)
        again.constraint = turn.constraint
        await self._answering.submit(again)
        if self._view.is_choosing:
            self._view.transcript.choose(again, "answer")

    async def continue_answer(self) -> None:
        """Continues the last answer, where it was cut off or stopped."""
        if self._answering.is_busy:
            self._view.refuse("It is still answering. Esc stops it.")
            return
        turn = self._chosen_turn()
        if turn is None or turn is not self._conversation.turns[-1]:
            self._view.refuse("Only the last answer can go on.")
        elif turn.thinking and not turn.answer:
            why = "It was stopped before it said anything; answer again instead (Ctrl+G)."
            self._view.refuse(why)
        elif not turn.can_continue:
            self._view.refuse("The answer is complete: the model ended it.")
        else:
            await self._answering.resume(turn)

    async def switch_branch(self, direction: int) -> None:
        """Shows the branch before (-1) or after (1) that of the chosen message."""
        chosen = self._view.transcript.chosen
        if chosen is None:
            return
        if self._answering.is_busy:
            self._view.refuse("It is still answering. Esc stops it.")
            return
        turn, part = chosen
        message = turn.prompt.id if part == "prompt" else turn.reply_id
        sibling = self._conversation.switch_branch(message, direction)
        if sibling is None:
            which, count = self._conversation.branch_number(message)
            only = "It has no other branch."
            self._view.refuse(only if count == 1 else f"Branch {which} of {count}.")
            return
        self.leave_editing()
        await self._view.transcript.show_branch()
        for turn in self._conversation.turns:
            if sibling in (turn.prompt.id, turn.reply_id):
                self._view.transcript.choose(turn, part)

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
            self._view.transcript.mark_copied(chosen[0], "prompt")
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
                block = blocks[index]
                self.copy_block(block.text, block.language, index + 1, len(blocks))
                self._view.transcript.mark_copied(turn, "answer", block.text.expandtabs(4))
                return
        self._view.refuse("There is no block of code to copy.")

    def _chosen_turn(self) -> ChatTurn | None:
        """The turn of the chosen message, else the last one."""
        if chosen := self._view.transcript.chosen:
            return chosen[0]
        return self._conversation.turns[-1] if self._conversation.turns else None

    def _copy_answer(self, turn: ChatTurn | None) -> None:
        if turn is None or not turn.answer:
            self._view.refuse("There is no answer to copy yet.")
            return
        self._copy(turn.answer.strip())
        self._view.transcript.mark_copied(turn, "answer")
        self._view.inform("Copied the answer.")

    def copy_block(self, code: str, language: str, which: int = 1, count: int = 1) -> None:
        """Copies a block of code, the `which`th of `count`."""
        self._copy(code)
        lines = code.count("\n")
        what = f"{language} code" if language else "code"
        text = f"Copied {what}, {lines} line{'' if lines == 1 else 's'}"
        if self._answering.is_writing(code):
            text += " so far; it is still being written"
        if count > 1:
            text += f", block {which} of {count}; again copies the next"
        self._view.inform(f"{text}.")


def code_blocks(text: str) -> list[CodeText]:
    """The fenced and indented blocks of code in Markdown, in order."""
    return [
        CodeText(token.content, token.info.split()[0] if token.info.strip() else "")
        for token in parse(text)
        if token.type in ("fence", "code_block")
    ]
