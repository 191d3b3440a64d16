"""Seeing the drafting, the thinking and the numbers."""

from dataclasses import replace

import pytest
from textual.content import Content

from akunu_py.chats.tree import ChatMessage
from akunu_py.engine.events import Rejected, Span, TextDelta
from akunu_py.tui.open_conversation import ChatTurn
from akunu_py.tui.status import StatusLine
from akunu_py.tui.transcript.drafting import DraftingPanel, DraftMarks
from akunu_py.tui.transcript.turn import ThinkingView
from akunu_py.tui.workers.chat_client import AnswerFinished, ModelLoaded, PieceArrived
from akunu_py.types import Message
from tests.support.tui_chat import SPEEDUP, STATS, Chat, chat


async def test_the_status_line_fits_any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """It omits unknown values; while it answers, time passes and the mark moves."""
    async with chat(size=(20, 24), loaded=False) as it:
        assert it.status_line[2:13] == "loading the"
        await it.post(ModelLoaded("starter", 8192))
        assert it.status_line == "● ready"
        await it.send("one")
        await it.piece("1")
        for width in (20, 40, 60, 80):
            await it.resize(width, 24)
            marks = set()
            for second in range(1, 5):
                monkeypatch.setattr(StatusLine, "clock", lambda now=second / 4 + 60: now)
                line = it.status_line
                assert len(line) <= it.status.size.width
                marks.add(line[0])
            assert len(marks) == 4
            whole = "answering · 1:01 · 20 tokens/s"
            assert it.status_line.endswith(whole) == (width >= 40)
        await it.finish()
        it.status.phase = "loading"  # another model: its time starts here
        assert ":" not in it.status_line


@pytest.mark.long
async def test_f2_marks_the_drafts_of_all_answers_as_markdown_draws_them() -> None:
    async with chat(size=(80, 40)) as it:
        await it.send("one")
        await it.piece("Hello **world**", (0, 5))
        await it.finish()
        await it.send("two")
        await it.piece("And ")
        await it.press("f2")
        text = "more\n\n| a | bcd |\n|---|---|\n| e | f |\n\n```python\ndef f():\n"
        at = text.index
        rejected, branches = ((at("e |"), "no"), (at("f():"), "gh")), ((at("f |"), "so"),)
        spans = ((0, 4), (at("cd"), at("cd") + 2))
        await it.post(PieceArrived(2, TextDelta(text, spans, rejected, branches=branches)))
        await it.piece("    return 1\n```\n", (4, 10))
        await it.rest()
        assert it.drafts("underline") == "Hello more cd return"
        assert it.drafts("strike") == "no gh"
        assert "noe │ f" in it.screen, "a table"
        assert "def ghf():" in it.screen, "a code block"
        assert "F2 branches" in it.screen
        await it.press("f2")
        await it.rest()
        assert it.drafts("strike") == "no so gh"
        assert "F2 back" in it.screen
        await it.press("f2")
        await it.rest()
        assert it.drafts("underline") == it.drafts("strike") == ""


@pytest.mark.parametrize(("source", "drawn", "accepted", "rejected", "shown", "marked"), [
    ("a **bc**d e", "a bcd e", (4, 9), (), "a bcd e", "bcd"),
    ("[to](http://x.org/a) a b", "to a b", (21, 22), (), "to a b", "a"),
    (r"is \(\alpha\) it", "is α it", (14, 16), ((14, "at"),), "is α atit", "at it"),
    ("a b", "a b", (0, 0), ((3, " c"),), "a b c", " c"),
    ("if x:\n    y", "if x:\n    y", (10, 11), ((6, "  z"),), "if x:\n    zy", "z y"),
    ("if x:\n    y", "if x:\n    y", (0, 0), ((8, "  w\n v"),), "if x:\n    w⏎vy", "w⏎v"),
    ("\ty = 1", "    y = 1", (1, 2), ((0, "\tz"),), "    zy = 1", "z y"),
])  # fmt: skip
def test_drafts_are_marked_where_they_are_drawn(
    source: str, drawn: str, accepted: Span, rejected: tuple[Rejected, ...], shown: str, marked: str
) -> None:
    """Rejected drafts in an indentation stand behind it, and their own line breaks are marks."""
    turn = ChatTurn(ChatMessage("user", "go"), f"before {source}")
    turn.spans = [(accepted[0] + 7, accepted[1] + 7)]
    turn.rejected = [(7 + place, draft) for place, draft in rejected]
    (text,) = DraftMarks(turn, "drafts")([Content(drawn)], source, 7)
    spans = sorted(
        (span for span in text.spans if span.start < span.end), key=lambda span: span.start
    )
    assert (text.plain, " ".join(text.plain[span.start : span.end] for span in spans)) == (
        shown,
        marked,
    )


async def test_the_panel_shows_words_a_step_and_the_speedup(it: Chat) -> None:
    await it.send("go")
    await it.press("f2")
    await it.post(PieceArrived(1, TextDelta("abc", (), (), (1, 3, 8, 20), STATS, SPEEDUP)))
    panel = it.app.query_one(DraftingPanel)
    assert "\n2.0 words a step, about 1.3x faster (estimate)\n" in str(panel.render())
    row = it.app.view.title_row
    assert str(row.render()).endswith("▁▂▇█ 1.3x   starter · 11 of 8k context")
    await it.post(PieceArrived(1, TextDelta("x", (), (), (1,) * 20, STATS, SPEEDUP)))
    assert "▁" not in str(row.render()), "drafting does nothing"
    many = replace(STATS, target_passes=11, accepted=2)
    for stats, speedup, words in (
        (STATS, 1.04, "no faster than one by one (estimate)"),
        (STATS, 0.8, "0.8x as fast (estimate)"),
        (many, 1.0, "words a step, no faster: new text, little to copy"),
    ):
        await it.post(PieceArrived(1, TextDelta("x", stats=stats, speedup=speedup)))
        assert words in str(panel.render())
    cached = replace(STATS, cached_tokens=1200, known_tokens=1500, not_cached="evicted")
    await it.post(AnswerFinished(1, "stop", cached))
    await it.press("f2")
    assert not panel.display
    await it.press("f2")
    assert str(panel.render()).split("\n")[2] == (
        "50% of 10 drafts accepted · 1,200 cached tokens, 300 recomputed: evicted"
    )


async def test_thinking_is_folded_opens_and_is_kept_when_it_is_stopped(it: Chat) -> None:
    await it.send("go")
    await it.post(PieceArrived(1, TextDelta("", stats=STATS), "Let me see.\n[b]Hm"))
    view = it.app.query_one(ThinkingView)
    head, body = view.query_one(".head"), view.query_one(".body")
    assert "thinking…  4 words" in str(head.render())
    assert not body.display
    await it.press("f3")
    assert str(body.render()) == "Let me see.\n[b]Hm"
    await it.answer("Yes.")
    assert "thought" in str(head.render())
    await it.pilot.click(".head")
    assert not body.display
    await it.send("and?")
    assert it.history == [
        Message("user", "go"),
        Message("assistant", "Yes."),
        Message("user", "and?"),
    ]
    await it.post(PieceArrived(2, TextDelta("", stats=STATS), "Hm."))
    await it.press("escape")
    assert (it.prompts, it.feet) == (["go", "and?"], ["", "■ stopped; F9 continues"])
    await it.press("f9")
    assert it.history[-1] == Message("assistant", "", thinking="Hm.")
