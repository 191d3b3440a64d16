"""The chat: its screen, its keys, and how it begins and ends.

Puts the parts together (see `base`); each part owns its actions and the messages it hears.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.driver import Driver

from akunu_py.tui.copying import Copying
from akunu_py.tui.editing import Editing
from akunu_py.tui.help.palette import ChatCommands
from akunu_py.tui.help.screen import HelpScreen, sections
from akunu_py.tui.library.controller import Keeping
from akunu_py.tui.prompt.box import PromptBox
from akunu_py.tui.prompt.popup import SuggestionPopup
from akunu_py.tui.status import StatusLine
from akunu_py.tui.switching import Switching
from akunu_py.tui.terminal import themes
from akunu_py.tui.terminal.driver import ChatDriver
from akunu_py.tui.transcript.drafting import DraftingPanel
from akunu_py.tui.transcript.view import Transcript


class ChatApp(Editing, Keeping, Copying, Switching):
    """A conversation with a model, and all that belongs to it."""

    CSS_PATH = ["chat.tcss", "help/palette.tcss"]  # noqa: RUF012 - declared so in Textual
    TITLE = "akunu"
    COMMANDS: ClassVar = {ChatCommands}
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "Stop the answer; leave what is open"),
        Binding("f1", "help", "Keys and commands; ? in an empty box too"),
        Binding("f2,ctrl+t", "show_drafting", "See the drafting"),
        Binding("f3", "toggle_thinking", "Unfold or fold the thinking"),
        Binding("f4,ctrl+l", "models", "Models"),
        Binding("f5,ctrl+g", "regenerate", "Answer again, on a branch of its own"),
        Binding("f6", "edit", "Edit your last message and send it again"),
        Binding("f7", "copy_answer", "Copy the last answer"),
        Binding("f8", "copy_code", "Copy a block of code; again for the next"),
        Binding("f9", "continue", "Go on with an answer that was cut off"),
        Binding("ctrl+n", "new_chat", "New chat"),
        Binding("ctrl+o", "conversations", "Earlier chats"),
        Binding("ctrl+s", "settings", "Settings"),
        Binding("ctrl+q", "quit", "Quit", priority=True),
    ]
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (60, "-normal")]  # noqa: RUF012 - declared so there
    VERTICAL_BREAKPOINTS = [(0, "-low"), (16, "-high")]  # noqa: RUF012

    def get_driver_class(self) -> type[Driver]:
        return ChatDriver

    def compose(self) -> ComposeResult:
        yield Transcript(self._conversation, self._welcome(), id="transcript")
        yield DraftingPanel(id="drafting")
        popup = SuggestionPopup(self._setup.folder, id="completion")
        yield popup
        yield PromptBox("Ask something", popup, id="prompt")
        yield StatusLine(id="status")

    async def on_mount(self) -> None:
        themes.install(self)
        self.show_theme(self._settings.theme)
        themes.set_motion(self, reduced=self._settings.reduced_motion)
        self._prompt.focus()
        self._show_hints()
        if self._session is not None:
            self._session.start(self.post_message, load=not self._absent)
        if self._absent:
            self._fetch()
        if self._keeper is not None:
            self._keeper.start(self.post_message)
            self.run_worker(self.recall_prompts())
        # A kill must leave the terminal as it was. Not SIGHUP: the terminal has gone then, and to
        # write the farewell to it would block for ever; the default ends us at once.
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
                asyncio.get_running_loop().add_signal_handler(number, self.exit)

    def action_help(self) -> None:
        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen(sections(self)))

    def action_help_quit(self) -> None:
        """Ctrl+C with nothing selected."""
        busy = "Esc stops the answer. " if self._active else ""
        self._say(f"{busy}Ctrl+Q quits. Ctrl+C copies what is selected.")

    def action_show_drafting(self) -> None:
        self._transcript.drafting = not self._transcript.drafting
        self._panel.display = self._transcript.drafting

    def action_toggle_thinking(self) -> None:
        self._transcript.thinking = not self._transcript.thinking

    def action_attach(self, file: str = "") -> None:
        """Names a file in the prompt, or begins to."""
        name = f'"{file}"' if " " in file else file
        self._prompt.name_file(name)

    def on_descendant_focus(self) -> None:
        self._show_hints()

    def on_transcript_left(self) -> None:
        self._prompt.focus()

    def on_prompt_box_help_wanted(self) -> None:
        self.action_help()

    async def on_prompt_box_paged(self, event: PromptBox.Paged) -> None:
        await self._transcript.action_page(event.direction)
