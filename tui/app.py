"""The chat app: key bindings, and the routing of keys and messages to controllers."""

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from textual import on, work
from textual.app import ComposeResult, SuspendNotSupported
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.filter import LineFilter
from textual.message import Message
from textual.widgets import Markdown

from akunu_py import crashes
from akunu_py.chats.options import ChatOptions
from akunu_py.files import read_bounded, write_atomically
from akunu_py.settings import Settings
from akunu_py.text import collapse
from akunu_py.tui import themes
from akunu_py.tui.controllers.answering import AnswerController
from akunu_py.tui.controllers.library import LibraryController, Resume
from akunu_py.tui.controllers.side_requests import CompactionController, TitleController
from akunu_py.tui.controllers.tool_consent import ToolController
from akunu_py.tui.controllers.turns import FindController, TurnController
from akunu_py.tui.open_conversation import Conversation
from akunu_py.tui.prompt.box import PromptBox
from akunu_py.tui.prompt.slash_commands import parse as parse_command
from akunu_py.tui.screens.consent import ConsentPanel
from akunu_py.tui.screens.conversation_list import (
    ChosenConversation,
    ConversationDeleted,
    ConversationRenamed,
    ConversationsScreen,
)
from akunu_py.tui.screens.help import HelpScreen, help_sections
from akunu_py.tui.screens.lists import HistoryScreen, ThemesScreen, ToolsScreen
from akunu_py.tui.screens.main import (
    BUSY_HINTS,
    CHOOSING_HINTS,
    EDITING_HINTS,
    IDLE_HINTS,
    ChatView,
    Welcome,
    describe_privacy,
)
from akunu_py.tui.screens.model_picker import ModelsScreen
from akunu_py.tui.screens.settings_form import SettingsController, SettingsScreen
from akunu_py.tui.status import MessageLine, report_errors
from akunu_py.tui.terminal import ChatDriver, clipboard_command, copy_with, edit_text, find_editor
from akunu_py.tui.themes import Background
from akunu_py.tui.transcript.code import CodeBlock
from akunu_py.tui.transcript.find import HitMarks
from akunu_py.tui.transcript.markdown import AnswerText
from akunu_py.tui.workers.chat_client import AnswerFinished, AnswerMessage, ChatClient, TitleWritten
from akunu_py.tui.workers.downloads import DownloadEnded, Downloads, DownloadUpdate
from akunu_py.tui.workers.store_thread import SavingFailed, SavingResumed, StoreThread, StoreWarning
from akunu_py.tui.workers.tool_servers import ToolServerMessage, ToolServers
from akunu_py.types import GenerateOptions
from akunu_py.workarounds.textual_app import OrderedInputApp, PacedApp, ThemedApp

_QUIT_WINDOW_S = 3.0  # A second Ctrl+C within this time quits.
_WIDE, _HIGH = 60, 16  # columns and rows; a smaller screen has no title row
_MAX_STATE_BYTES = 4 << 20  # of the state file
_STATE: dict[str, type] = {"unsent": list, "failed": dict}


def load_state(path: Path) -> dict[str, Any]:
    """Load the last run's state: "unsent" texts, and errors of "failed" MCP servers."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        state = json.loads(read_bounded(path, _MAX_STATE_BYTES))
        if isinstance(state, dict) and all(
            isinstance(state.get(name, kind()), kind) for name, kind in _STATE.items()
        ):
            state["unsent"] = [each for each in state.get("unsent", ()) if isinstance(each, str)]
            return state
    return {}


def save_state(path: Path, state: dict[str, Any], before: dict[str, Any]) -> None:
    """Save the state, readable only by its owner. Write errors are ignored.

    before: the state at the start. Unsent texts that other chats saved since then are kept.
    """
    saved, known = load_state(path), [*before.get("unsent", ()), *state["unsent"]]
    others = [text for text in saved.get("unsent", ()) if text not in known]
    state = state | {"unsent": others + state["unsent"]}
    if saved != state:
        with contextlib.suppress(OSError, ValueError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(state).encode())


@dataclass
class ChatConfig:
    """The model, options, threads and saved state that `ChatApp` starts with."""

    model: str
    options: GenerateOptions
    session: ChatClient
    store: StoreThread
    settings: Settings = field(default_factory=Settings)
    directory: Path = field(default_factory=Path.cwd)  # for @file names and exports
    background: Background | None = None  # of the terminal
    server: str = ""  # address that receives the prompts, "" for this machine
    tools: ToolServers = field(default_factory=lambda: ToolServers(()))  # MCP servers
    missing: bool = False  # The model must be downloaded first.
    memory_limit: int | None = None  # bytes for model and caches; None: all that is available
    problems: Sequence[str] = ()  # invalid settings, one line each
    resume: Resume | None = None  # the conversation to open first
    state: dict[str, Any] = field(default_factory=dict)  # of the last run; see `load_state`
    # Finds the system's copy program; None: the terminal copies.
    copy_program: Callable[[], list[str] | None] = clipboard_command


class ChatApp(OrderedInputApp[None], PacedApp[None], ThemedApp[None]):
    """A chat with a model; controllers share the conversation and the view."""

    CSS_PATH = Path(__file__).with_name("chat.tcss")
    TITLE = "akunu"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "Cancel editing; stop the answer"),
        Binding("f1", "help", "Keys and commands; also ? in an empty box"),
        Binding("f2", "show_drafting", "Show or hide drafts and branches"),
        Binding("f3", "toggle_thinking", "Show or hide thinking"),
        Binding("f4", "models", "Models"),
        Binding("f5", "regenerate", "Regenerate the answer on a new branch"),
        Binding("f6", "edit", "Edit and resend your last message"),
        Binding("f7", "copy_answer", "Copy the last answer"),
        Binding("f8", "copy_code", "Copy a code block; repeat for the next"),
        Binding("f9", "continue", "Continue an unfinished answer"),
        Binding("ctrl+n", "new_chat", "New chat"),
        Binding("ctrl+o", "conversations", "Earlier chats"),
        Binding("ctrl+s", "settings", "Settings"),
        Binding("ctrl+q", "quit", "Quit", priority=True),
    ]
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (_WIDE, "-normal")]  # noqa: RUF012 - as in Textual
    VERTICAL_BREAKPOINTS = [(0, "-low"), (_HIGH, "-high"), (32, "-tall")]  # noqa: RUF012

    def __init__(self, config: ChatConfig) -> None:
        super().__init__(driver_class=ChatDriver)
        session, store, directory = config.session, config.store, config.directory
        self._config = config
        for theme in themes.OURS:
            self.register_theme(theme)
        self.start_with_theme(self._theme_name(config.settings.theme))
        self._last_ctrl_c = -_QUIT_WINDOW_S  # time of the last Ctrl+C that had nothing to stop
        self.downloads = Downloads(self.post_from_thread)
        self.conversation = Conversation(store=store)
        self.view = ChatView(
            self.notify, self._show_state, self._make_welcome, self.conversation, directory
        )
        self.tools = ToolController(
            config.tools, self.view, self.conversation, config.state.get("failed", {})
        )
        self.settings = SettingsController(
            config.settings, config.options, self.view, self.show_theme
        )
        self.answering = AnswerController(
            config.model,
            self.conversation,
            self.view,
            self.settings,
            session,
            self.downloads,
            self.tools,
            config.missing,
        )
        self.turns = TurnController(
            self.conversation, self.answering, self.view, directory, self.copy_to_clipboard
        )
        self.library = LibraryController(
            self.conversation, self.answering, self.turns, self.view, store, directory
        )
        self.view.prompt.count_tokens = session.count_tokens
        self.compaction = CompactionController(self.conversation, self.answering, self.view)
        self.titles = TitleController(self.answering, self.view, self.settings, session, store)
        self.answering.on_end = (self.titles.on_end, self.compaction.on_end)

        self.find = FindController(self.conversation, self.view, HitMarks())

        # Textual finds the action of a key or command by its name here.
        self.action_edit = self.turns.edit
        self.action_regenerate = self.turns.regenerate
        self.action_continue = self.turns.continue_answer
        self.action_branch = self.turns.switch_branch
        self.action_answer_json = self.answering.use_json
        self.action_take_back = self.answering.unqueue_last
        self.action_copy_answer = self.turns.copy_answer
        self.action_copy_message = self.turns.copy_message
        self.action_copy_code = self.turns.copy_code
        self.action_new_chat = self.library.new
        self.action_private_chat = partial(self.library.new, private=True)
        self.action_export = self.library.export
        self.action_compact = self.compaction.compact
        self.action_show_drafting = self.view.toggle_drafting
        self.action_toggle_thinking = self.view.toggle_thinking
        self.action_send = self.view.prompt.send
        self.action_choose_message = self.view.transcript.focus
        self.action_page = self.view.transcript.action_page
        self.action_begin = self.view.transcript.action_begin
        self.action_follow = self.view.transcript.action_follow
        self.action_wrap_code = self.view.transcript.action_wrap_code

    def get_css_variables(self) -> dict[str, str]:
        self.theme_variables = themes.with_derived_colors(super().get_css_variables())
        return self.theme_variables

    def notify(self, message: str, *, title: str = "", **options: Any) -> None:
        """Show a message in the open dialog's message line, else above the prompt."""
        text = f"{title}: {message}" if title else message
        is_error = options.get("severity", "information") != "information"
        lines = self.screen.query(MessageLine).results() if self.screen_stack else ()
        next(iter(lines), self.view.message).show(text, is_error=is_error)

    def watch_title(self, title: str) -> None:
        if isinstance(self._driver, ChatDriver):
            self._driver.show_title(title if title == self.TITLE else f"{title} · akunu")

    @property
    def state(self) -> dict[str, Any]:
        """What to keep for the next run; see `load_state`."""
        unsent = [text] if (text := self.turns.unsent_text) else []
        return {"unsent": unsent, "failed": self.tools.offered.failed}

    @property
    def failure(self) -> Exception | None:
        """The unexpected exception that ended the chat, if any."""
        return self._exception

    def _handle_exception(self, error: Exception) -> None:
        # Textual's handler prints local variables, which include the user's prompts.
        self._return_code = 1
        if self._exception is None:
            self._exception = error
            self._exception_event.set()
        self._close_messages_no_wait()

    def compose(self) -> ComposeResult:
        yield from self.view.compose()

    def on_load(self) -> None:
        # A kill must restore the terminal. Not SIGHUP: the terminal is gone, and writing to it
        # would block forever; the default handler exits at once.
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
                asyncio.get_running_loop().add_signal_handler(number, self.exit)

    async def on_mount(self) -> None:
        themes.set_motion(self, reduced=self.settings.current.reduced_motion)
        self.view.prompt.focus()
        await self.view.show_welcome()
        self.view.show_state()
        self.answering.start(self.post_from_thread)
        self.tools.start(self.post_from_thread)
        self._config.store.start(self.post_from_thread)
        self.run_worker(self._open_initial_chat())
        for text in reversed(self._config.state.get("unsent", ())):
            self.view.prompt.put_back(self.view.prompt.prompt_of(text))
        if self._config.problems:
            await self.view.add_notice("\n".join(self._config.problems))

    async def _open_initial_chat(self) -> None:
        await self.library.load_earlier_prompts()
        await self.library.claim()
        if self._config.resume is not None:
            words = await self.library.resume(self._config.resume)
            if words is not None:
                self.action_conversations(words)
        elif infos := await self.library.list():
            if welcome := self.view.welcome:
                welcome.show_last_chat(infos[0].title)
            self._update_last_chat_offer()

    def show_theme(self, setting: str) -> None:
        self.theme = self._theme_name(setting)

    def _theme_name(self, setting: str) -> str:
        colors = self.console.color_system
        return themes.theme_name(setting, self._config.background, colors)

    def copy_to_clipboard(self, text: str) -> None:
        """Copy `text`. Textual calls this for selected text, too."""
        command = self._config.copy_program()
        if command is None:
            super().copy_to_clipboard(text)  # OSC 52
        else:
            self._clipboard = text  # what Ctrl+V pastes
            self.run_worker(self._run_copy_program(command, text), group="clipboard")

    async def _run_copy_program(self, command: list[str], text: str) -> None:
        if not await asyncio.to_thread(copy_with, command, text):
            super().copy_to_clipboard(text)

    def _make_welcome(self) -> Welcome:
        privacy = describe_privacy(self._config.server, self._config.tools.names)
        welcome = Welcome(self.answering.model, privacy)
        if self.answering.needs_download:
            welcome.offer_download()
        return welcome

    def _show_state(self) -> None:
        view, tree, settings = self.view, self.conversation.tree, self.settings.current
        is_private, is_editing = self.conversation.is_private, self.turns.edited is not None
        has_title_row = self.size.width >= _WIDE and self.size.height >= _HIGH
        if view.is_choosing:
            view.prompt.hints = CHOOSING_HINTS
        elif is_editing:
            view.prompt.hints = EDITING_HINTS
        else:
            view.prompt.hints = BUSY_HINTS if self.answering.is_busy else IDLE_HINTS
        labels = (
            "" if has_title_row else self.answering.model,
            "private" if is_private else "",
            settings.persona or ("system prompt" if settings.system_prompt else ""),
            "options" if tree.options != ChatOptions() else "",
        )
        heading = " · ".join(filter(None, labels))
        view.prompt.heading = "editing an earlier prompt" if is_editing else heading
        view.prompt.has_queued_prompt = self.answering.has_queued_prompt
        title = "private chat" if is_private else collapse(tree.title)
        self.title = title or self.TITLE
        view.title_row.title, view.title_row.model = title, self.answering.model

    # Prompts and turns

    async def on_prompt_box_submitted(self, event: PromptBox.Submitted) -> None:
        errors_before = self.view.error_count
        call = None
        with report_errors(self.view.show_error):
            call = parse_command(event.full_text)
            if call is None:
                await self.turns.send(event.text, event.pastes)
                return
            command, argument = call
            arguments = (argument,) if command.argument else ()
            await self.run_action(("app", command.action, arguments))
        if self.view.error_count > errors_before and (call is None or argument):
            self.view.prompt.put_back(event.text)

    @work(group="editor")
    async def action_edit_prompt(self) -> None:
        """Suspend the chat and edit the prompt in the user's editor; answers continue."""
        prompt, loop = self.view.prompt, asyncio.get_running_loop()
        before = text = prompt.full_text
        problem = ""
        loop.add_signal_handler(signal.SIGINT, lambda: None)  # The editor handles Ctrl+C.
        try:
            with self.suspend():
                try:  # An exception must not leave `suspend`, which would not resume.
                    text = (await edit_text(before)).rstrip("\n")
                except OSError as error:
                    problem = f"{error.strerror or error}; set EDITOR to your editor"
        except SuspendNotSupported as error:
            problem = str(error)
        finally:
            loop.add_signal_handler(signal.SIGINT, self.exit)
        if problem:
            self.view.show_error(f"cannot open {find_editor()[0]}: {problem}")
        elif prompt.full_text != before:  # A prompt was put back meanwhile.
            prompt.put_back(text)
        elif text != before:
            prompt.write(text)

    @on(PromptBox.Changed)
    def _update_last_chat_offer(self) -> None:
        if welcome := self.view.welcome:
            welcome.set_class(bool(self.view.prompt.text), "-typed")

    async def action_accept_offer(self) -> None:
        """Handle Enter in an empty box: do what the start page offers, if anything."""
        welcome = self.view.welcome
        if welcome and self.answering.needs_download:
            self.answering.download_missing()
        elif welcome and welcome.offers_last_chat:
            await self.library.continue_last()

    def action_search_prompts(self) -> None:
        def use(prompt: str | None) -> None:
            if prompt is not None:
                self.view.prompt.write(prompt)

        if self.view.prompt.sent_prompts:
            self.push_screen(HistoryScreen(self.view.prompt.sent_prompts), use)
        else:
            self.view.show_error("There are no earlier prompts yet.")

    def get_line_filters(self) -> Sequence[LineFilter]:
        is_marking = self.find.is_active and len(self.screen_stack) == 1
        # Before Textual's filters: they convert the color by which the current hit is recognized.
        return [*([self.find.marks] if is_marking else []), *super().get_line_filters()]

    def action_find(self, words: str = "", message: str = "") -> None:
        """Find text in the open chat, or start typing it; see `FindController.find`."""
        if words:
            self.run_worker(self.find.find(words, message), group="find", exclusive=True)
        else:
            self.view.prompt.write("/find ")
            self.view.prompt.focus()

    def action_find_next(self, direction: int) -> None:
        self.run_worker(self.find.step(direction), group="find", exclusive=True)

    async def action_stop(self) -> None:
        self.workers.cancel_group(self, "find")
        ends_search = self.find.is_active and self.view.is_choosing
        self.find.end()
        if ends_search:
            self.view.prompt.focus()
        else:
            await self.turns.stop()

    def on_markdown_link_clicked(self, event: Markdown.LinkClicked) -> None:
        # Links from a model are untrusted, and over ssh a browser would open on this machine.
        self.copy_to_clipboard(event.href)
        self.notify(event.href, title="Link copied", markup=False)

    def on_code_block_copy_requested(self, event: CodeBlock.CopyRequested) -> None:
        self.turns.copy_block(f"{event.block.code}\n", event.block.lexer)

    def on_answer_text_drawing_failed(self, event: AnswerText.DrawingFailed) -> None:
        file = crashes.save_report(event.error)
        where = f"; the details are in {file}" if file else ""
        error = type(event.error).__name__
        self.view.show_error(f"bug: {error} while drawing this answer; shown as plain text{where}")

    def post_from_thread(self, message: Message) -> None:
        """Post a message from another thread; ignored once the event loop is closed."""
        with contextlib.suppress(RuntimeError):
            self.post_message(message)

    @on(AnswerMessage)
    async def _receive(self, message: AnswerMessage) -> None:
        if isinstance(message, TitleWritten):
            self.run_worker(self.titles.receive(message))
            return
        await self.answering.receive(message)
        if isinstance(message, AnswerFinished):
            self._focus_question()

    # Tools

    @on(ToolServerMessage)
    async def _receive_from_tools(self, message: ToolServerMessage) -> None:
        await self.answering.receive_from_tools(message)
        if isinstance(self.screen, ToolsScreen):
            self.screen.draw()
        self._focus_question()

    async def on_consent_panel_decided(self, event: ConsentPanel.Decided) -> None:
        self.view.prompt.focus()
        await self.answering.decide(event.consent)
        self._focus_question()

    def _focus_question(self) -> None:
        is_idle = self.focused is self.view.prompt and not self.view.prompt.text
        if is_idle and self.view.consent.is_asking:
            self.view.consent.take_focus()

    def action_focus_next(self) -> None:
        """Move the focus from the prompt box to the question about a tool call, if any."""
        prompt, welcome = self.view.prompt, self.view.welcome
        question = welcome.question_after(prompt.text) if welcome else None
        if self.view.consent.is_asking and self.focused is prompt:
            self.view.consent.take_focus()
        elif question and self.focused is prompt:
            prompt.write(question)
        else:
            super().action_focus_next()

    def action_tools(self) -> None:
        self.push_screen(ToolsScreen(self.tools.offered, self.tools.context_length))

    # Conversations

    def action_conversations(self, words: str = "") -> None:
        store, current = self._config.store, self.conversation.tree.conversation
        progress, unread = self.answering.progress, self.answering.unread
        chats = ConversationsScreen(store, current, progress, unread, words)
        self.push_screen(chats, self._open_chosen)

    async def _open_chosen(self, chosen: ChosenConversation | None) -> None:
        """Open a conversation of the list; the words of the search stay marked."""
        await self.library.open(chosen)
        if chosen and chosen.message and chosen.words:
            # Behind the scrolling to the message.
            self.call_after_refresh(self.action_find, chosen.words, chosen.message)

    async def on_conversation_deleted(self, message: ConversationDeleted) -> None:
        await self.library.on_deleted(message.conversation)

    def on_conversation_renamed(self, message: ConversationRenamed) -> None:
        self.titles.keep(message.conversation)
        self.answering.set_title(message.conversation, message.title)

    async def on_saving_failed(self, message: SavingFailed) -> None:
        await self.view.add_notice(f"This chat is not saved for now: {message.error}", "error")

    def on_saving_resumed(self, message: SavingResumed) -> None:
        self.view.inform("Everything is saved again.")
        self.run_worker(self.library.claim())  # The failure closed the file with the locks.

    async def on_store_warning(self, message: StoreWarning) -> None:
        await self.view.add_notice(message.text)

    async def action_rename_chat(self, title: str = "") -> None:
        if title and self.conversation.turns:
            self.titles.keep(self.conversation.tree.conversation)
        await self.library.rename(title)

    # Models

    def action_models(self) -> None:
        limit = self._config.memory_limit
        models = ModelsScreen(self.answering.model, self.downloads, limit)
        self.push_screen(models, self.answering.use_model)

    async def action_use_model(self, name: str = "") -> None:
        if name:
            await self.answering.use_model(name)
        else:
            self.action_models()

    def on_download_update(self, message: DownloadUpdate) -> None:
        self.answering.on_download_update(message)
        if screen := self._models_screen():
            screen.show_download_update(message)

    async def on_download_ended(self, message: DownloadEnded) -> None:
        screen = self._models_screen()
        if screen is not None:
            screen.show_download_ended(message)
        await self.answering.on_download_ended(message, is_listed=screen is not None)

    def _models_screen(self) -> ModelsScreen | None:
        return next((each for each in self.screen_stack if isinstance(each, ModelsScreen)), None)

    # Settings

    def action_settings(self) -> None:
        form = SettingsScreen(
            self.conversation.tree.options, self.settings.current, self.settings.options
        )
        self.push_screen(form, self._apply_settings)

    async def _apply_settings(self, saved: tuple[ChatOptions, Settings] | None) -> None:
        if saved is None:
            return
        options, settings = saved
        model = self.settings.current.model
        self.conversation.set_options(options)
        self.settings.apply(settings)
        self.show_theme(settings.theme)
        themes.set_motion(self, reduced=settings.reduced_motion)
        if settings.model != model:
            await self.answering.use_model(settings.model)

    def action_use_theme(self, name: str | None = "") -> None:
        """Use a theme; "" opens the gallery of themes, None changes nothing."""
        if name:
            self.settings.use_theme(name)
        elif name is not None:
            gallery = ThemesScreen(self.settings.current.theme, self.show_theme)
            self.push_screen(gallery, self.action_use_theme)

    # The view, and help

    def on_resize(self, event: Resize) -> None:
        self.view.align(event.size.width)
        self.call_later(self._show_state)  # at the new size

    def on_descendant_focus(self) -> None:
        self.view.show_state()

    def action_help(self) -> None:
        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen(help_sections(self)))

    def action_help_quit(self) -> None:
        """On Ctrl+C without a selection: during an answer as Esc, else empty the box, else quit."""
        now = time.monotonic()
        if self.answering.is_busy:
            self.call_next(self.turns.stop)
        elif self.view.prompt.text:
            self.view.prompt.empty()
            self.view.inform("Cleared. Up restores it.")
        elif now - self._last_ctrl_c < _QUIT_WINDOW_S:
            self.exit()
        else:
            self._last_ctrl_c = now
            self.view.inform("Press Ctrl+C again to quit.")
