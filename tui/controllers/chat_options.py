"""The options of the open conversation: the dialog, and /temperature."""

from __future__ import annotations

from dataclasses import dataclass, replace

from akunu_py.chats.options import ChatOptions
from akunu_py.tui.open_conversation import Conversation
from akunu_py.tui.screens.chat_options import ChatOptionsScreen, parse_option
from akunu_py.tui.screens.main import ChatView
from akunu_py.tui.screens.settings_form import SettingsController


@dataclass(eq=False)
class OptionsController:
    """Changes the options of the open conversation; they apply to its next answer."""

    _conversation: Conversation
    _settings: SettingsController
    _view: ChatView

    @property
    def label(self) -> str:
        """ "options" if the conversation has its own, else ""."""
        return "options" if self._conversation.tree.options != ChatOptions() else ""

    def open(self) -> None:
        """Open the dialog."""
        conversation = self._conversation.tree.conversation

        def use(options: ChatOptions | None) -> None:
            if options is not None and conversation == self._conversation.tree.conversation:
                self._apply(options)

        screen = ChatOptionsScreen(self._conversation.tree.options, self._settings.options)
        self._view.prompt.app.push_screen(screen, use)

    def use_temperature(self, number: str = "") -> None:
        try:
            temperature = parse_option("temperature", number)
        except ValueError as error:
            self._view.show_error(str(error))
            return
        self._apply(replace(self._conversation.tree.options, temperature=temperature))
        self._view.inform(f"Temperature of this chat: {temperature:g}")

    def _apply(self, options: ChatOptions) -> None:
        self._conversation.set_options(options)
        self._view.show_state()
