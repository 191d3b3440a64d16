"""Markdown and JSON export, JSON import, and tool calls in both."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from akunu_py.chats.conversation_store import ConversationStore
from akunu_py.chats.export import as_markdown, export, file_name, self_contained, write_new
from akunu_py.chats.json import as_json, read_json
from akunu_py.chats.tree import ChatMessage, ConversationTree, ToolRound, ToolUse, messages_of
from akunu_py.errors import ConversationError
from akunu_py.types import Message, ToolCall
from tests.support.chats import T0, add_answer, add_prompt, branched, exchange_of, state
from tests.support.paths import GOLDEN

pytestmark = pytest.mark.usefixtures("utc")


def test_markdown() -> None:
    assert as_markdown(branched()) == (GOLDEN / "conversation.md").read_text("utf-8")


def headings(text: str) -> list[str]:
    tokens = MarkdownIt("commonmark").parse(text)
    return [
        tokens[place + 1].content
        for place, token in enumerate(tokens)
        if token.type == "heading_open" and token.level == 0
    ]


@settings(max_examples=120)
@example("1. a list\n\n   ```\n   code")
@example("````\n```\n````\n```sh\nls")
@example("<script>\n```\n")
@given(st.text(alphabet="a `~<>!-#*\n\t?[]/pre", max_size=40))
def test_any_markdown_is_self_contained(text: str) -> None:
    around = f"# before\n\n{self_contained(text)}\n\n# after\n"
    assert headings(around)[-1:] == ["after"]


def test_titles_are_escaped_and_unfinished_blocks_end_with_their_message() -> None:
    tree = exchange_of("c", "*bold* <b> [link](x) `code`", "Here:\n\n```python\nprint(", T0)
    add_prompt(tree, "And now?", "c-1")
    text = as_markdown(tree)
    parsed = MarkdownIt("commonmark").parse(text)
    assert [token.type for token in parsed[1].children or []] == ["text"]
    assert headings(text)[1:] == ["You", "starter", "You"]


def test_json_round_trips() -> None:
    trees = [
        branched(),
        exchange_of("lists", "我想 \ud83d\ude00", "Yes", T0),
        ConversationTree("empty"),
    ]
    again = read_json(as_json(trees), "file")
    assert list(map(state, again)) == list(map(state, trees))


def broken(change: Callable[[dict[str, Any]], object]) -> str:
    """Return the JSON of a conversation with one change."""
    content = json.loads(as_json([branched()]))
    change(content)
    return json.dumps(content)


def message(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = content["conversations"][0]["messages"][1]
    return found


@pytest.mark.parametrize(("change", "expected"), [
    (lambda it: it.update(format="other"), "akunu-conversations"),
    (lambda it: it.update(version=2), "expected version 1, found 2"),
    (lambda it: it.update(conversations={}), "a list of conversations"),
    (lambda it: it["conversations"][0].update(id="../x"), "an id of letters"),
    (lambda it: it["conversations"][0].pop("title"), "a title, found None"),
    (lambda it: message(it).update(role="tool"), "that may follow user, found 'tool'"),
    (lambda it: message(it).update(role="user"), "that may follow user, found 'user'"),
    (lambda it: message(it).update(parent=None), "that may follow nothing, found 'assistant'"),
    (lambda it: message(it).update(parent="later"), "unknown parent: later"),
    (lambda it: message(it).update(parent=["x"]), "an id of letters"),
    (lambda it: message(it).update(id="queue-0"), "already exists"),
    (lambda it: message(it).update(text=None), "a string for text"),
    (lambda it: message(it).update(created=float("nan")), "NaN is not JSON"),
    (lambda it: message(it).update(created=1e300), "a time, found 1e+300"),
    (lambda it: message(it).update(created=True), "a time"),
    (lambda it: message(it).update(finish_reason="tired"), "a reason, found 'tired'"),
    (lambda it: message(it).update(stats={"drafted": "many"}), "a number for drafted"),
    (lambda it: message(it).update(stats=[]), "statistics"),
])  # fmt: skip
def test_invalid_exports_are_refused(
    change: Callable[[dict[str, Any]], object], expected: str
) -> None:
    with pytest.raises(ConversationError) as caught:
        read_json(broken(change), "talk.json")
    assert str(caught.value).startswith("cannot import talk.json: ")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "[" * 100_000, '{"format": 1}'])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(ConversationError, match="cannot import"):
        read_json(text, "file")


def test_unknown_statistics_are_ignored() -> None:
    text = broken(lambda it: message(it)["stats"].update(new_measure={"a": 1}))
    assert read_json(text, "file")[0].messages == branched().messages


def test_empty_answer_is_not_exported() -> None:
    tree = ConversationTree("c", "Hello")
    question = add_prompt(tree, "Hello")
    add_answer(tree, "", question.id, finish=None)
    assert as_markdown(tree).count("##") == 1
    tree.replace(replace(tree["c-1"], text="Hi the"))
    assert as_markdown(tree).endswith("Hi the\n\n*not finished*\n")
    assert as_markdown(ConversationTree("c")) == "# Untitled\n"


def test_authors() -> None:
    tree = ConversationTree("c", "Hello")
    tree.add(ChatMessage("system", "Be kind.", id="s"))
    question = add_prompt(tree, "Hello", "s")
    tree.add(replace(add_answer(copy.copy(tree), "Hi", question.id), model="", id="other"))
    assert headings(as_markdown(tree)) == ["Hello", "System", "You", "Assistant"]


@pytest.mark.parametrize(("title", "name"), [
    ("What is a queue?", "what-is-a-queue.md"),
    ("../../etc/passwd", "etc-passwd.md"),
    ("Ärger: 我想", "ärger-我想.md"),
    ("❤️ हिन्दी _में_", "हिन्दी-में.md"),
    ("…", "conversation.md"),
    ("x" * 300, "conversation.md"),
    ("x" * 29 + " " + "y" * 30, "x" * 29 + "-" + "y" * 30 + ".md"),  # 60 bytes
    ("x" * 29 + " " + "y" * 31, "x" * 29 + ".md"),
])  # fmt: skip
def test_file_names(title: str, name: str) -> None:
    assert file_name(title, "markdown") == name


def test_no_file_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "talk.md"
    names = [write_new(path, str(number), numbered=True).name for number in range(3)]
    assert names == ["talk.md", "talk-2.md", "talk-3.md"]
    assert path.read_text() == "0"
    with pytest.raises(ConversationError, match="exists"):
        write_new(path, "other")
    with pytest.raises(ConversationError, match="cannot write"):
        write_new(path / "inside.md", "other")
    with pytest.raises(ConversationError, match=r"cannot write .*~nouser/talk\.md"):
        export(ConversationTree(), tmp_path, "~nouser/talk.md")


# Tool calls


CALLS = (ToolCall("read", '{"path": "a```.txt"}', "c1"), ToolCall("list", "{}", "c2"))
ROUNDS = (
    ToolRound(
        "Let me look.",
        (ToolUse(CALLS[0], "files", "done", "x\x1b[2J"), ToolUse(CALLS[1], "files", "denied")),
        "Hm.",
    ),
    ToolRound("", (ToolUse(ToolCall("<b>", "not JSON", "c3"), "", "failed", "no tool '<b>'"),)),
)


def with_rounds() -> ConversationTree:
    """A tool-using answer and a branch without tools, which is active."""
    tree = ConversationTree("tools", "Which files?")
    question = add_prompt(tree, "Which files?")
    answer = add_answer(tree, "One file.", question.id)
    tree.replace(replace(answer, rounds=ROUNDS))
    add_answer(tree, "No idea.", question.id)
    tree.activate_branch(answer.id)
    return tree


def test_rounds_are_stored_with_their_branch(tmp_path: Path) -> None:
    tree = with_rounds()
    store = ConversationStore.open(tmp_path / "c.db")
    store.save_tree(tree)
    answer = tree.active_branch()[-1]
    more = replace(answer, rounds=(*ROUNDS, ToolRound("Wait.", (ToolUse(CALLS[0]),))))
    store.save("tools", more)
    store.close()
    store = ConversationStore.open(tmp_path / "c.db")
    kept = store.load("tools")
    store.close()
    assert kept.active_branch()[-1] == more
    assert [each.rounds for each in kept.messages] == [(), more.rounds, ()]


def test_json_keeps_rounds() -> None:
    tree = with_rounds()
    text = as_json([tree])
    (read,) = read_json(text, "file")
    assert read.messages == tree.messages
    assert '"rounds"' not in as_json([ConversationTree("x")])
    for name, wrong in (("outcome", "allowed"), ("result", None), ("id", 5)):
        values = json.loads(text)
        values["conversations"][0]["messages"][1]["rounds"][0]["calls"][0][name] = wrong
        with pytest.raises(ConversationError, match="cannot import file"):
            read_json(json.dumps(values), "file")


def test_markdown_shows_calls_and_results() -> None:
    text = as_markdown(with_rounds())
    assert "\x1b" not in text
    start, end = text.index("Let me look."), text.index("<details><summary>Tool: list (denied)")
    assert (
        text[start:end]
        == """\
Let me look.

<details><summary>Tool: read (done)</summary>

````json
{"path": "a```.txt"}
````

```text
x␛[2J
```

</details>

"""
    )
    for part in (
        "<summary>Thinking</summary>\n\nHm.\n",
        "```text\nThe user did not allow this call.\n```",
        "Tool: &lt;b> (failed)</summary>\n\n```json\nnot JSON\n```\n\n```text\nno tool '<b>'\n```",
    ):
        assert part in text
    assert text.endswith("</details>\n\nOne file.\n")


def test_every_call_has_a_result_for_the_model() -> None:
    cut_off = ToolRound("", tuple(ToolUse(CALLS[0], "", each) for each in ("waiting", "running")))
    messages = messages_of([ROUNDS[0], cut_off])
    assert messages[:3] == [
        Message("assistant", "Let me look.", tool_calls=CALLS),
        Message("tool", "x\x1b[2J", tool_call_id="c1", name="read"),
        Message("tool", "The user did not allow this call.", tool_call_id="c2", name="list"),
    ]
    assert all("stopped" in each.content for each in messages[4:])
    assert messages_of(ROUNDS, thinking=True)[0].thinking == "Hm."
