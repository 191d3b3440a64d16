"""The prompt for a place in a buffer: what the model reads, and what is only drafted from.

What exceeds the budgets of the prompt is not lost: it is context to draft from, which costs no
pass. Everything moves as little as possible from one keystroke to the next, so that the cache and
the drafting tables stay valid.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from akunu_py.completion.fim import FimFamily, fill
from akunu_py.completion.tokens import CodeTokens

_CHARACTERS_A_TOKEN = 4  # of code; longer windows are never tried
_DRAFT_CONTEXT = 60_000  # characters of the buffer on each side of the cursor, and of other files
# A piece of it has so many characters at least, and ends before one in so many of the lines that
# begin in the first column.
_PIECE, _ENDS = 1000, 4
_TOP_LINE = re.compile(r"(?<=\n)[^\s\n][^\n]*")


@dataclass(frozen=True, slots=True)
class Prompt:
    """tokens: what the model reads. healed: the end of the prefix that is not among them, because
    the model samples it again. draft_context: what is drafted from, what changes least first; the
    first `files` of it are other files."""

    tokens: list[int]
    healed: str
    draft_context: list[tuple[int, ...]]
    files: int


@dataclass(frozen=True, slots=True)
class Budgets:
    """What the model reads of each part at most, in tokens."""

    prefix: int
    suffix: int
    files: int


def make_prompt(
    code: CodeTokens,
    family: FimFamily | None,
    budgets: Budgets,
    prefix: str,
    suffix: str,
    path: str,
    files: Sequence[tuple[str, str]] = (),
) -> Prompt:
    """The prompt for the place between `prefix` and `suffix` in the file `path`.

    family: None to continue the prefix. files: (path, text), the nearest first.
    """
    start = window_before(code, prefix, budgets.prefix)
    end = window_after(code, suffix, budgets.suffix) if family else 0
    read = _files_read(code, family, budgets.files, files)
    draft_context = encode_pieces(code, _unread_files(files, read))
    others = len(draft_context)
    draft_context += encode_pieces(code, [prefix[max(0, start - _DRAFT_CONTEXT) : start]])
    draft_context += encode_pieces(code, [suffix[end : end + _DRAFT_CONTEXT]])
    before = prefix[start:]
    if family is None:
        tokens, healed = code.heal(before)
        return Prompt([*code.opening, *tokens], healed, draft_context, others)
    values = {"prefix": before, "suffix": suffix[:end], "path": path}
    return Prompt(_fill_template(code, family, values, read), "", draft_context, others)


def window_before(code: CodeTokens, text: str, budget: int) -> int:
    """Where to begin reading `text` so that its rest has at most `budget` tokens.

    The place is the start of a line where there is one, and moves only when half of the budget has
    been typed: a place that moved with each letter would make everything be read again.
    """
    room = budget * _CHARACTERS_A_TOKEN
    while room > 1:
        if len(text) <= room:
            start = 0
        else:
            step = max(1, room // 2)
            start = -(-(len(text) - room) // step) * step
            line = text.find("\n", start - 1) + 1
            start = line if 0 < line < len(text) else start
        if len(code.encode(text[start:])) <= budget:
            return start
        room //= 2
    return len(text)


def window_after(code: CodeTokens, text: str, budget: int) -> int:
    """Where to stop reading `text` so that what was read has at most `budget` tokens; the end of
    a line where there is one."""
    room = budget * _CHARACTERS_A_TOKEN
    while room > 1:
        end = len(text)
        if end > room:
            line = text.rfind("\n", 0, room) + 1
            end = line or room
        if len(code.encode(text[:end])) <= budget:
            return end
        room //= 2
    return 0


def _files_read(
    code: CodeTokens, family: FimFamily | None, budget: int, files: Sequence[tuple[str, str]]
) -> dict[str, str]:
    """What the model reads of which files, the nearest last: next to the buffer."""
    if family is None or not family.reads_files:
        return {}
    read: dict[str, str] = {}
    for path, text in files:
        if not text:
            continue
        end = window_after(code, text, budget)
        if end == 0:
            break
        read[path] = text[:end]
        budget -= len(code.encode(text[:end]))
    return dict(reversed(read.items()))


def _unread_files(files: Sequence[tuple[str, str]], read: dict[str, str]) -> list[str]:
    """The texts to draft from, the nearest last, within the budget of characters."""
    room = _DRAFT_CONTEXT
    texts = []
    for path, text in files:
        unread = text[len(read.get(path, "")) :][:room]
        room -= len(unread)
        texts.append(unread)
    return texts[::-1]


def encode_pieces(code: CodeTokens, texts: Sequence[str]) -> list[tuple[int, ...]]:
    """Tokens of `texts`, encoded in pieces whose borders depend on their content (content-defined
    chunking), so that an edit changes one piece and the others need not be encoded again."""
    draft_context = []
    for text in texts:
        tokens: list[int] = []
        at = 0
        for line in _TOP_LINE.finditer(text):
            start = line.start()
            ends = crc32(line.group().encode("utf-8", "surrogatepass")) % _ENDS == 0
            if ends and start - at >= _PIECE:
                tokens += code.encode(text[at:start])
                at = start
        tokens += code.encode(text[at:])
        if tokens:
            draft_context.append(tuple(tokens))
    return draft_context


def _fill_template(
    code: CodeTokens, family: FimFamily, values: dict[str, str], read: dict[str, str]
) -> list[int]:
    template, files = family.prompt, []
    if read:
        template = family.prompt_with_files
        repository = {"repository": _repository([*read, values["path"]])}
        files = fill(family, family.repository, repository)
        for path, text in read.items():
            files += fill(family, family.file, {"path": path, "text": text})
    parts = [
        *fill(family, family.before, {}),
        *files,
        *fill(family, template, values),
        *fill(family, family.after, {}),
    ]
    tokens = list(code.opening)
    text = ""
    for part in parts:
        if part.kind == "text":
            text += part.text  # what meets at the border of two templates is encoded together
            continue
        tokens += code.encode(text)
        text = ""
        tokens += code.encode_bare(part.text) if part.kind == "suffix" else [code.token(part.text)]
    return tokens + list(code.encode(text))


def _repository(paths: Sequence[str]) -> str:
    """A name for what the paths have in common: its last directory."""
    directories = [os.path.dirname(path.replace("\\", "/")) for path in paths]
    try:
        common = os.path.commonpath(directories)
    except ValueError:  # relative paths beside absolute ones
        common = ""
    return os.path.basename(common) or "project"
