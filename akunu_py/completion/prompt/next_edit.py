"""Next edits: the prompt for a model trained to predict edits, and the change in its answer.

The prompt has the recent edits and the lines around the cursor; the answer has those lines, edited.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from akunu_py.completion.prompt.layout import (
    CodeTokens,
    Names,
    Prompt,
    PromptPart,
    check_tokens,
    relative,
)
from akunu_py.completion.request import BufferEdit, Change, CompletionRequest
from akunu_py.completion.stops import Cut

_HEADER = 8  # tokens before the rewritten lines, which the drafter matches
_CURSOR = "<|user_cursor|>"


@dataclass(frozen=True, slots=True)
class Window:
    """The lines of a buffer that may be rewritten, and some context."""

    first: int  # number of the first line, from 0
    lines: tuple[str, ...]
    row: int  # of the cursor, relative to `first`
    column: int
    before: str = ""  # context lines, each with its end
    after: str = ""

    @property
    def text(self) -> str:
        """Return the lines with their ends."""
        return "".join(line + "\n" for line in self.lines)

    def with_cursor(self, mark: str) -> str:
        """Return the text with a mark at the cursor."""
        at = sum(len(line) + 1 for line in self.lines[: self.row]) + self.column
        return self.text[:at] + mark + self.text[at:]


@dataclass(frozen=True, slots=True)
class EditFormat:
    """The prompt and answer format of one family of models."""

    name: str
    named: re.Pattern[str]  # matches the names of its models
    tokens: tuple[str, ...]  # required in the vocabulary
    window: Callable[[Sequence[str], int, int], Window]  # lines of a buffer, row, column
    write: Callable[[Window, Sequence[BufferEdit], str], list[PromptPart]]  # edits, path
    stop: tuple[str, ...]  # tokens that end the answer
    end: str = ""  # text that ends the answer


class EditAnswer:
    """Parses an answer into a change."""

    def __init__(self, edit_format: EditFormat, window: Window, room: int) -> None:
        """room: maximum tokens of the answer."""
        self._format, self._window = edit_format, window
        self.room = room

    def cut(self, output: str, *, final: bool) -> Cut:
        """Return no text at the cursor, and True once the answer has ended."""
        return Cut("", done=bool(self._format.end) and self._format.end in output)

    def change(self, output: str) -> Change | None:
        """Return the changed lines of the window, None for no change."""
        window = self._window
        written = output.partition(self._format.end)[0] if self._format.end else output
        written = written.replace(_CURSOR, "").removesuffix("\n")
        if not written or written == "NO_EDITS":
            return None
        old, new = list(window.lines), written.split("\n")
        for lines in (old, new):  # models do not preserve trailing empty lines
            while lines and not lines[-1].strip():
                lines.pop()
        before = _common(old, new)
        after = _common(old[before:], new[before:], backward=True)
        if before + after == len(old) == len(new):
            return None
        first, last = window.first + before, window.first + len(old) - after
        return Change(first, last, tuple(new[before : len(new) - after]))


def make_edit_prompt(
    code: CodeTokens, edit_format: EditFormat, request: CompletionRequest, names: Names
) -> tuple[Prompt, EditAnswer]:
    """Return the prompt for the cursor position and the parser of the answer."""
    lines = (request.prefix + request.suffix).split("\n")
    row = request.prefix.count("\n")
    window = edit_format.window(lines, row, len(request.prefix) - request.prefix.rfind("\n") - 1)
    edits = [
        BufferEdit(
            relative(each.path, names.root), _with_lf(each.before), _with_lf(each.after), each.line
        )
        for each in (request.edits or ())[-LATEST:]
    ]
    tokens = code.encode_parts(edit_format.write(window, edits, names.path))
    copied = code.encode(window.text)
    # The answer starts like the window, so the first token already has a draft.
    draft = (*tokens[-_HEADER:], *copied)
    answer = EditAnswer(edit_format, window, len(copied) + max(1, request.max_tokens))
    return Prompt(tokens, 0, "", [draft], 0), answer


def find_edit_format(name: str, vocabulary: Container[str], model: str) -> EditFormat | None:
    """Return the format called `name`, for "auto" that of the model's name, None if there is none.

    Raises UsageError if the vocabulary lacks its tokens.
    """
    model_name = re.sub(r"[\s_]+", "-", model.lower())
    for edit_format in FORMATS:
        if name == edit_format.name:
            check_tokens(name, edit_format.tokens, vocabulary, model)
            return edit_format
        known = all(token in vocabulary for token in edit_format.tokens)
        if name == "auto" and known and edit_format.named.search(model_name):
            return edit_format
    return None


# ---- the formats


def _zeta_window(lines: Sequence[str], row: int, column: int) -> Window:
    """Return 350 tokens to rewrite and 150 around them, three characters per token, as in Zed."""
    first, last = _grow(lines, row, row + 1, 350 * 3)
    top, bottom = _grow(lines, first, last, 150 * 3)
    before = "".join(line + "\n" for line in lines[top:first])
    after = "\n".join(lines[last:bottom])
    return Window(first, tuple(lines[first:last]), row - first, column, before, after)


def _grow(lines: Sequence[str], first: int, last: int, room: int) -> tuple[int, int]:
    """Extend first:last by lines above and below in turn, up to `room` characters."""
    while True:
        grown = False
        for above in (True, False):
            if (first == 0) if above else (last == len(lines)):
                continue
            cost = len(lines[first - 1 if above else last]) + 1
            if cost <= room:
                room, grown = room - cost, True
                first, last = (first - 1, last) if above else (first, last + 1)
        if not grown:
            return first, last


def _write_zeta(window: Window, edits: Sequence[BufferEdit], path: str) -> list[PromptPart]:
    after = window.after if window.after.endswith("\n") else window.after + "\n"
    history = "".join(f"--- a/{each.path}\n+++ b/{each.path}\n{unified(each)}" for each in edits)
    past = []
    if history:
        edited = PromptPart("text", f"edit_history\n{history}\n")
        past = [PromptPart("token", "<filename>"), edited]
    lines = window.with_cursor(_CURSOR)
    return [
        PromptPart("token", "<[fim-suffix]>"),
        PromptPart("text", after),
        PromptPart("token", "<[fim-prefix]>"),
        *past,
        PromptPart("token", "<filename>"),
        PromptPart("text", f"{path}\n{window.before}<<<<<<< CURRENT\n{lines}=======\n"),
        PromptPart("token", "<[fim-middle]>"),
    ]


def _sweep_window(lines: Sequence[str], row: int, column: int) -> Window:
    """Return 21 lines with the cursor in the middle."""
    first = max(0, row - 10)
    return Window(first, tuple(lines[first : row + 11]), row - first, column)


def _write_sweep(window: Window, edits: Sequence[BufferEdit], path: str) -> list[PromptPart]:
    """Return the parts of the prompt; an edit in the window shows as its original text."""
    original, past = window.text, list(edits)
    if past and past[-1].path == path and past[-1].after in window.text:
        last = past.pop()
        original = window.text.replace(last.after, last.before, 1)
    texts = [
        f"{each.path}.diff\noriginal:\n{with_end(each.before)}updated:\n{with_end(each.after)}"
        for each in past
    ]
    texts += [f"original/{path}\n{original}", f"current/{path}\n{window.text}", f"updated/{path}\n"]
    return [
        part
        for text in texts
        for part in (PromptPart("token", "<|file_sep|>"), PromptPart("text", text))
    ]


FORMATS = (
    # Source: github.com/zed-industries/zed crates/zeta_prompt, V0211SeedCoder, called Zeta2.
    EditFormat(
        "zeta-2",
        re.compile(r"zeta-?2(?!\.?\d)"),
        ("<[fim-suffix]>", "<[fim-prefix]>", "<[fim-middle]>"),
        _zeta_window,
        _write_zeta,
        ("<[end▁of▁sentence]>", "<[fim-suffix]>", "<[fim-prefix]>", "<[fim-middle]>"),
        ">>>>>>> UPDATED",
    ),
    # Source: huggingface.co/sweepai/sweep-next-edit-1.5B run_model.py; 21 lines:
    # blog.sweep.dev/posts/oss-next-edit; the last newline: github.com/sweepai/vscode-nes.
    EditFormat(
        "sweep-next-edit",
        re.compile(r"sweep-next-edit(?!-v2)"),
        ("<|file_sep|>",),
        _sweep_window,
        _write_sweep,
        ("<|endoftext|>", "<|file_sep|>", "<|im_end|>", "<|fim_prefix|>", "<|repo_name|>"),
    ),
)


def _with_lf(text: str) -> str:
    return text.replace("\r\n", "\n")


# ---- recent edits


LATEST = 6  # maximum recent edits
_CONTEXT = 3  # lines around an edit
_NEAR = 8  # lines; changes within this distance belong to the same edit


class RecentEdits:
    """The last edits in all buffers, oldest first. A change near the last edit joins it."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}  # of the buffers, by path
        self._done: deque[BufferEdit] = deque(maxlen=LATEST)
        self._base: tuple[str, str] | None = None  # path, and text before the current edit

    def opened(self, path: str, text: str) -> None:
        self._texts[path] = text

    def changed(self, path: str, text: str) -> None:
        before = self._texts.get(path, text)
        step, current = difference(path, before, text), self._current_edit()
        self._texts[path] = text
        if step is None:
            return
        if current is None or current.path != path or not _is_near(current, step):
            if current is not None:
                self._done.append(current)
            self._base = path, before

    def __iter__(self) -> Iterator[BufferEdit]:
        current = self._current_edit()
        yield from [*self._done, *([current] if current else [])][-LATEST:]

    def _current_edit(self) -> BufferEdit | None:
        if self._base is None:
            return None
        path, base = self._base
        return difference(path, base, self._texts[path])


def _is_near(one: BufferEdit, other: BufferEdit) -> bool:
    end = one.line + one.after.count("\n")
    return one.line - _NEAR <= other.line and other.line + other.before.count("\n") <= end + _NEAR


def difference(path: str, before: str, after: str) -> BufferEdit | None:
    """Return the change from one text to another with some context, None if there is none."""
    if before == after:
        return None
    same = _common(before, after)
    same_end = _common(before[same:], after[same:], backward=True)
    start = before.rfind("\n", 0, same) + 1
    for _ in range(_CONTEXT):
        start = before.rfind("\n", 0, max(0, start - 1)) + 1 if start else 0
    end = len(before) - same_end
    for _ in range(_CONTEXT + 1):
        end = (before.find("\n", end) + 1 or len(before)) if end < len(before) else end
    rest = len(before) - end
    return BufferEdit(
        path, before[start:end], after[start : len(after) - rest], before.count("\n", 0, start)
    )


def _common(one: Sequence[str], other: Sequence[str], *, backward: bool = False) -> int:
    """Return the length of the common prefix of two texts or lists, or of their common suffix."""
    longest = min(len(one), len(other))

    def differ(count: int) -> bool:
        if backward:
            return one[len(one) - count :] != other[len(other) - count :]
        return one[:count] != other[:count]

    return bisect_left(range(1, longest + 1), True, key=differ)


def unified(edit: BufferEdit) -> str:
    """Return the edit as a unified diff without file names."""
    old, new = with_end(edit.before).splitlines(True), with_end(edit.after).splitlines(True)
    parts = []
    for group in SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(_CONTEXT):
        (_, i1, _, j1, _), (_, _, i2, _, j2) = group[0], group[-1]
        parts.append(f"@@ -{edit.line + i1 + 1},{i2 - i1} +{edit.line + j1 + 1},{j2 - j1} @@\n")
        for kind, a, b, c, d in group:
            sign = " " if kind == "equal" else "-"
            parts += [sign + line for line in old[a:b]]
            if kind != "equal":
                parts += ["+" + line for line in new[c:d]]
    return "".join(parts)


def with_end(text: str) -> str:
    """Return the text with a newline at its end, if it is not empty."""
    return text if not text or text.endswith("\n") else text + "\n"
