"""Tool calls in saved chats: stored, exported, imported, and told to the model again."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from akunu_py.chats.conversation_store import ConversationStore
from akunu_py.chats.export import as_markdown
from akunu_py.chats.json import as_json, read_json
from akunu_py.chats.tool_rounds import ToolRound, ToolUse, messages_of
from akunu_py.chats.tree import ConversationTree
from akunu_py.errors import ConversationError
from akunu_py.types import Message, ToolCall
from tests.support.chats import add_answer, add_prompt

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
    asked = add_prompt(tree, "Which files?")
    answer = add_answer(tree, "One file.", asked.id)
    tree.replace(replace(answer, rounds=ROUNDS))
    add_answer(tree, "No idea.", asked.id)
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


@pytest.mark.parametrize("value", ["{", "[]", "[5]", '[{"text": 1}]', b"\xff", 5, "[" * 100_000])
def test_damaged_rounds_are_dropped(tmp_path: Path, value: object) -> None:
    store = ConversationStore.open(tmp_path / "c.db")
    store.save_tree(with_rounds())
    store.close()
    database = sqlite3.connect(tmp_path / "c.db")
    database.execute("UPDATE messages SET rounds = ?", (value,))
    database.commit()
    database.close()
    store = ConversationStore.open(tmp_path / "c.db")
    assert [each.rounds for each in store.load("tools").messages] == [(), (), ()]
    store.close()


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
    shown = text[text.index("## starter") :]
    assert (
        shown
        == """\
## starter

<details><summary>Thinking</summary>

Hm.

</details>

Let me look.

<details><summary>Tool: read (done)</summary>

````json
{"path": "a```.txt"}
````

```text
x␛[2J
```

</details>

<details><summary>Tool: list (denied)</summary>

```json
{}
```

```text
The user did not allow this call.
```

</details>

<details><summary>Tool: &lt;b> (failed)</summary>

```json
not JSON
```

```text
no tool '<b>'
```

</details>

One file.
"""
    )


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
