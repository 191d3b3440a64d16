"""Changing what was said: edit a prompt, answer again, go on with an answer; branches.

Nothing is overwritten: what is changed becomes a branch, which Left and Right reach.
"""

from __future__ import annotations

from akunu_py.tui.answering import Answering
from akunu_py.tui.prompt.attachments import split


class Editing(Answering):
    """Actions on a turn: that of the chosen message, else the last one."""

    def action_edit(self) -> None:
        """Puts the prompt into the box; sent again, it is a branch."""
        turn = self._chosen_turn()
        if turn is None:
            self._say("There is nothing to edit yet.")
            return
        if self._edited is None:
            self._draft = self._prompt.text
        self._edited = turn
        self._prompt.write(split(turn.prompt.text)[0])
        self._prompt.focus()
        self._show_hints()

    async def action_regenerate(self) -> None:
        """Asks for another answer to the same prompt; the old one stays as a branch."""
        turn = self._chosen_turn()
        if turn is None:
            self._say("There is no answer yet.")
            return
        await self._interrupt()
        if turn not in self._conversation.turns:
            self._say("That prompt is back in the box: it had no answer yet.")
            return
        again = self._conversation.answer_again(turn)
        await self._ask(again)
        if self.focused is self._transcript:
            self._transcript.choose(again, "answer")

    async def action_continue(self) -> None:
        """Goes on with the last answer, where it was cut off or stopped."""
        if self._is_busy:
            self._say("It is still answering. Esc stops it.")
            return
        turn = self._chosen_turn()
        if turn is None or turn is not self._conversation.turns[-1]:
            self._say("Only the last answer can go on.")
        elif turn.thinking and not turn.answer:
            self._say("It was stopped before it said anything; answer again instead (Ctrl+G).")
        elif not turn.can_go_on:
            self._say("The answer is complete: the model ended it.")
        else:
            turn.state = "waiting"
            self._waiting.append(turn)
            self._ask_next()

    async def action_branch(self, direction: int) -> None:
        """Shows the branch before (-1) or after (1) that of the chosen message."""
        chosen = self._transcript.chosen
        if chosen is None:
            return
        if self._is_busy:
            self._say("It is still answering. Esc stops it.")
            return
        turn, part = chosen
        message = turn.prompt.id if part == "prompt" else turn.reply_id
        begins = self._conversation.turn_to(message, direction)
        if begins is None:
            which, count = self._conversation.place(message)
            self._say("It has no other branch." if count == 1 else f"Branch {which} of {count}.")
            return
        if self._keeper is not None:
            self._keeper.choose(self._conversation.tree.conversation, begins)
        self._leave_editing()
        await self._transcript.read_branch()
        for turn in self._conversation.turns:
            if begins in (turn.prompt.id, turn.reply_id):
                self._transcript.choose(turn, part)
