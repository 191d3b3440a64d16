"""The options of a chat: set in a dialog, used for its answers, and kept with it.

To accept new pictures: pytest tests/tui/test_chat_options.py --snapshot-update, then look at them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.pilot import Pilot
from textual.widgets import Input, Select, Static

from akunu_py.chats.conversation_store import ConversationStore
from akunu_py.chats.json import as_json, read_json
from akunu_py.chats.options import BOUNDS, FRACTIONS, ChatOptions, options_of
from akunu_py.chats.tree import ConversationTree
from akunu_py.settings import Settings
from akunu_py.tui.screens.chat_options import ChatOptionsScreen, parse_option
from akunu_py.tui.workers.store_thread import StoreThread
from akunu_py.types import NO_TOKEN_LIMIT, THINKING_MODES, GenerateOptions, SamplingOptions
from tests.support.chats import branched
from tests.support.tui_chat import Chat, chat, until
from tests.support.tui_host import Compare, Host, sizes_and_themes

SOME = ChatOptions(0.25, 300, 0.5, 7, "low", 64)
OPTIONS = st.builds(
    ChatOptions,
    st.none() | st.floats(0, 5),
    st.none() | st.integers(0, 1 << 30),
    st.none() | st.floats(0, 1),
    st.none() | st.integers(0, (1 << 63) - 1),
    st.sampled_from(THINKING_MODES),
    st.none() | st.integers(-1, 1 << 30),
)


def asked(it: Chat) -> GenerateOptions:
    """How the next answer is made."""
    return it.app.conversation.tree.options.apply(it.app.settings.options)


async def fill(it: Chat, **values: str) -> None:
    await it.send("/options")
    await until(it.pilot, lambda: isinstance(it.app.screen, ChatOptionsScreen))
    for name, value in values.items():
        it.app.screen.query_one(f"#{name}", Input).value = value


async def test_the_dialog_changes_this_chat_only(own_directories: None) -> None:
    async with chat() as it:
        it.app.settings.options = GenerateOptions(NO_TOKEN_LIMIT, thinking_budget=900)
        plain = asked(it)
        assert plain.max_tokens == NO_TOKEN_LIMIT
        await fill(it, temperature="0,25", top_p=".5", seed="7", max_tokens="300")
        it.app.screen.query_one("#thinking", Select).value = "low"
        it.app.screen.query_one("#thinking_budget", Input).value = "64"
        await it.press("enter")
        assert it.app.conversation.tree.options == SOME
        assert it.box.border_title == "starter · options"
        sampling = SamplingOptions(0.25, 0.5, seed=7)
        expected = GenerateOptions(300, sampling=sampling, thinking="low", thinking_budget=64)
        assert asked(it) == expected
        await it.send("hello")
        await it.answer("Hi.")
        await it.press("ctrl+n")
        assert asked(it) == plain
        assert it.box.border_title == "starter"


async def test_a_field_that_is_wrong_is_named_and_escape_changes_nothing() -> None:
    wrong = {
        "temperature": ("6", "Temperature: expected a number from 0 to 5, found '6'"),
        "top_p": ("1.5", "Top-p: expected a number from 0 to 1, found '1.5'"),
        "seed": ("-1", "Seed: expected an integer of 0 or more, found '-1'"),
        "max_tokens": ("-", "Answer limit: expected an integer of 0 or more, found '-'"),
        "thinking_budget": ("-2", "Thinking limit: expected an integer of -1 or more, found '-2'"),
    }
    async with chat() as it:
        for name, (value, message) in wrong.items():
            await fill(it, **{name: value})
            await it.press("enter")
            assert str(it.app.screen.query_one("#say", Static).render()) == message
            assert it.app.focused is it.app.screen.query_one(f"#{name}")
            await it.press("escape")
        assert it.app.conversation.tree.options == ChatOptions()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_tokens", 1 << 30, 1 << 30),
        ("max_tokens", (1 << 30) + 1, "expected an integer of at most 1073741824"),
        ("thinking_budget", 1 << 40, "expected an integer of at most 1073741824"),
        ("seed", 1 << 63, "expected an integer of at most 9223372036854775807"),
        ("temperature", 1 << 63, "expected a number from 0 to 5"),
    ],
)
def test_a_value_that_is_too_large_names_the_largest(
    name: str, value: int, expected: int | str
) -> None:
    if isinstance(expected, int):
        assert parse_option(name, str(value)) == expected
        return
    with pytest.raises(ValueError, match=f"^{expected}, found '{value}'$"):
        parse_option(name, str(value))


async def test_all_fields_can_be_emptied() -> None:
    async with chat() as it:
        it.app.conversation.set_options(SOME)
        await fill(it)
        assert it.app.screen.query_one("#seed", Input).value == "7"
        await it.press("ctrl+d", "ctrl+s")
        assert it.app.conversation.tree.options == ChatOptions()


async def test_the_options_are_kept_with_the_chat(tmp_path: Path) -> None:
    """Also those that were set before its first prompt."""
    store = StoreThread(tmp_path / "conversations.db")
    async with chat(store=store) as it:
        await it.send("/temperature 0.25")
        await it.send("hello")
        await it.answer("Hi.")
        first = it.app.conversation.tree.conversation
        await it.press("ctrl+n")
        await it.send("another")
        await it.answer("Yes.", turn=2)
        second = it.app.conversation.tree.conversation
        await fill(it, seed="3")
        await it.press("enter")
        await it.press("ctrl+n")
        await it.app.open_chat(first)
        assert it.app.conversation.tree.options == ChatOptions(temperature=0.25)
        await it.app.open_chat(second)
        assert it.app.conversation.tree.options == ChatOptions(seed=3)
    assert store.close(10)


@given(options=OPTIONS)
def test_options_are_exported_imported_and_stored(
    options: ChatOptions, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tree = branched()
    tree.options = options
    (back,) = read_json(as_json([tree]), "file")
    assert back.options == options
    store = ConversationStore.open(tmp_path_factory.mktemp("chats") / "conversations.db")
    store.save_tree(tree)
    assert store.load("queue").options == options
    store.set_options("queue", ChatOptions())
    assert store.load("queue").options == ChatOptions()
    store.set_options("unknown", options)
    store.close()


@given(name=st.sampled_from(sorted(BOUNDS)), value=st.integers(-3, 9) | st.floats(-1, 6))
def test_what_can_be_typed_can_be_stored(name: str, value: float) -> None:
    try:
        parsed = parse_option(name, str(value))
    except ValueError:
        parsed = None
    least, most = BOUNDS[name]
    fits = least <= value <= most and (isinstance(value, int) or name in FRACTIONS)
    assert (parsed is not None) == fits
    if fits:
        assert getattr(options_of({name: parsed}), name) == parsed


def test_damaged_options_are_ignored() -> None:
    damaged: tuple[object, ...] = (
        None, 3, [], {"seed": "x"}, {"top_p": 2}, {"thinking": "much"}, {"other": 1},
        {"temperature": True}, {"max_tokens": 1.5}, {"temperature": float("nan")},
    )  # fmt: skip
    for wrong in damaged:
        assert options_of(wrong) == ChatOptions()
    tree = ConversationTree()
    assert "options" not in as_json([tree])


async def test_a_limit_is_a_setting() -> None:
    settings = Settings(max_tokens=200, thinking_budget=0)
    async with chat() as it:
        assert it.app.settings.current.token_limit == NO_TOKEN_LIMIT
        it.app.settings.apply(settings)
        assert (asked(it).max_tokens, asked(it).thinking_budget) == (200, 0)
        it.app.settings.apply(Settings())
        assert (asked(it).max_tokens, asked(it).thinking_budget) == (NO_TOKEN_LIMIT, None)
        it.app.conversation.set_options(ChatOptions(max_tokens=0, thinking_budget=-1))
        it.app.settings.apply(settings)
        assert (asked(it).max_tokens, asked(it).thinking_budget) == (NO_TOKEN_LIMIT, None)


@sizes_and_themes("light")
def test_picture_of_the_options(snap_compare: Compare, size: tuple[int, int], theme: str) -> None:
    defaults = GenerateOptions(NO_TOKEN_LIMIT, sampling=SamplingOptions(0.7, 0.95))
    host = Host(ChatOptionsScreen(ChatOptions(seed=7, thinking="low"), defaults), theme)

    async def at_rest(pilot: Pilot[None]) -> None:
        await pilot.pause()

    assert snap_compare(host, terminal_size=size, run_before=at_rest)
