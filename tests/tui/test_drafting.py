"""Seeing the drafting, the thinking and the numbers."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from akunu_py.engine.events import Gauges
from akunu_py.tui.status import StatusLine
from akunu_py.tui.transcript.drafting import DraftedSection, DraftingPanel, sparkline
from akunu_py.tui.transcript.markdown import AnswerMarkdown
from akunu_py.tui.transcript.turn import ThinkingView
from akunu_py.tui.workers.chat_client import AnswerFinished, ModelLoaded, PieceArrived
from akunu_py.types import Message
from tests.support.tui_chat import GAUGES, STATS, chat


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
            whole = "answering · 1:01 · 11 of 8k context · 20 tokens/s"
            assert it.status_line.endswith(whole) == (width >= 60)
        await it.finish()
        it.status.phase = "loading"  # another model: its time starts here
        assert ":" not in it.status_line


@pytest.mark.long
async def test_the_drafting_view_of_all_answers_and_back() -> None:
    async with chat() as it:
        await it.send("one")
        await it.piece("Hello world", (0, 5))
        await it.finish()
        await it.send("two")
        await it.piece("And ")
        await it.press("f2")
        await it.piece("on and", (0, 2), (2, 4))
        assert it.drafted == ["Hello world", "And on and"]
        spans = [stretch.render().spans for stretch in it.app.query(DraftedSection)]
        assert [[(span.start, span.end) for span in each] for each in spans] == [[(0, 5)], [(4, 8)]]
        assert not any(text.display for text in it.app.query(AnswerMarkdown))
        await it.press("f2")
        await it.piece(" on")
        assert it.drafted == []
        assert it.markdown == ["Hello world", "And on and on"]
        assert all(text.display for text in it.app.query(AnswerMarkdown))


async def test_a_long_drafting_view_has_all_spans_and_rejected_drafts_in_their_places() -> None:
    async with chat() as it:
        await it.send("go")
        await it.press("f2")
        for number in range(200):
            rejected = ((4, f"<{number}>"),)
            text = f"line {number}\nand on"
            it.app.post_message(PieceArrived(1, text, ((3, 9),), STATS, rejected=rejected))
        await it.post()
        turn = it.app.conversation.turns[0]
        stretches = [stretch.render() for stretch in it.app.query(DraftedSection)]
        assert len(stretches) > 1
        (shown,) = it.drafted
        assert shown == "".join(f"line<{number}> {number}\nand on" for number in range(200))
        marked = "".join(
            each.plain[span.start : span.end] for each in stretches for span in each.spans
        )
        expected = "".join(turn.answer[start:end] for start, end in turn.spans)
        assert re.sub(r"<\d+>|\n", "", marked) == expected.replace("\n", "")


async def test_code_keeps_its_indentation() -> None:
    """Rejected drafts in an indentation stand behind it, and their own line breaks are marks."""
    answer = "if x:\n    y = 1\n\n    z()\n\tend\n"
    async with chat() as it:
        await it.send("go")
        await it.press("f2")
        at = answer.index
        rejected = ((at("    y"), "    pass\n    "), (at("z") - 2, "  w"), (at("z"), "\n        v"))
        await it.post(PieceArrived(1, answer, ((6, 10),), STATS, rejected=rejected))
        (section,) = it.app.query(DraftedSection)
        assert section.render().plain == "if x:\n    pass⏎y = 1\n\n    w⏎vz()\n    end\n"
        struck = [span for span in section.render().spans if span.style.strike]  # type: ignore[union-attr]
        assert [section.render().plain[span.start : span.end] for span in struck] == [
            "pass⏎", "w", "⏎v",
        ]  # fmt: skip


async def test_the_panel_shows_words_a_step_and_the_speedup() -> None:
    async with chat() as it:
        await it.send("go")
        await it.press("f2")
        await it.post(PieceArrived(1, "abc", (), STATS, passes=(1, 3, 8, 20), gauges=GAUGES))
        panel = it.app.query_one(DraftingPanel)
        assert str(panel.render()).startswith("akunu guesses ahead"), "it explains itself once"
        assert "▁▃██ 2.0 words a step, about 1.3x faster (estimate)" in str(panel.render())
        many = replace(STATS, target_passes=11, accepted=2)
        for stats, speedup, words in (
            (STATS, 1.04, "no faster than one by one (estimate)"),
            (STATS, 0.8, "0.8x as fast (estimate)"),
            (many, 1.0, "words a step, no faster: new text, little to copy"),
        ):
            await it.post(PieceArrived(1, "x", (), stats, gauges=Gauges(0, speedup)))
            assert words in str(panel.render())
        cached = replace(STATS, cached_tokens=1200, known_tokens=1500, not_cached="evicted")
        await it.post(AnswerFinished(1, "stop", cached, Gauges()))
        assert "faster" not in str(panel.render())
        await it.press("f2")
        assert not panel.display
        await it.press("f2")
        assert str(panel.render()).split("\n")[2] == (
            "50% of 10 guesses right · 1,200 cached tokens, 300 recomputed: evicted"
        )


def test_a_sparkline_shows_the_last_passes() -> None:
    assert sparkline([], 4) == "····"
    assert sparkline([1, 2, 9], 4) == "·▁▂█"
    assert sparkline([5, 1, 1, 1, 2], 4) == "▁▁▁▂"


async def test_thinking_is_folded_and_opens() -> None:
    async with chat() as it:
        await it.send("go")
        await it.post(PieceArrived(1, "", (), STATS, thinking="Let me see.\n[b]Hm"))
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


async def test_stopping_while_it_thinks_keeps_the_thoughts() -> None:
    async with chat() as it:
        await it.send("go")
        await it.post(PieceArrived(1, "", (), STATS, thinking="Hm."))
        await it.press("escape")
        assert (it.prompts, it.feet) == (["go"], ["■ stopped; F9 continues"])
        await it.press("f9")
        assert it.history == [Message("user", "go"), Message("assistant", "", thinking="Hm.")]
