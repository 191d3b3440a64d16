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
from functools import lru_cache
from pathlib import Path
from zlib import crc32

from akunu_py.completion.fim import FimFamily, fill
from akunu_py.completion.tokens import CodeTokens

_CHARACTERS_A_TOKEN = 4  # of code, about
_LONGEST = 8  # characters a token, of the longest text that is tried
_PATH = 200  # characters of a path that the model reads, its end
_VERSION_CONTROL = (".git", ".hg", ".svn", ".jj")
_DRAFT_CONTEXT = 60_000  # characters of the buffer on each side of the cursor, and of other files
# How a comment begins, and ends, in files with such an ending or of such a language.
_COMMENTS = {
    "#": "py pyi python sh bash shellscript zsh rb ruby pl pm perl yml yaml toml r jl ex exs "
    "elixir mk makefile dockerfile tf nix coffee ps1",
    "//": "js mjs cjs jsx ts tsx javascript typescript javascriptreact typescriptreact java kt cs "
    "c kotlin swift h cc cpp hpp cxx m mm csharp go rs rust php scala dart zig scss less proto",
    "--": "lua sql hs haskell elm adb ads vhd",
    "<!-- -->": "html htm xml svg vue md markdown",
    "/* */": "css",
    ";": "lisp el clj scm asm",
    "%": "tex latex erl erlang",
}
# A piece of it has so many characters at least, and ends before one in so many of the lines that
# begin in the first column.
_PIECE, _ENDS = 1000, 4
_TOP_LINE = re.compile(r"(?<=\n)[^\s\n][^\n]*")


@dataclass(frozen=True, slots=True)
class Prompt:
    """tokens: what the model reads, the first `ahead` of them before the buffer. healed: the end of
    the prefix that is not among them, because the model samples it again. draft_context: what is
    drafted from, what changes least first; the first `files` of it are other files."""

    tokens: list[int]
    ahead: int
    healed: str
    draft_context: list[tuple[int, ...]]
    files: int


@dataclass(frozen=True, slots=True)
class Budgets:
    """What the model reads of each part at most, in tokens."""

    prefix: int
    suffix: int
    files: int


@dataclass(frozen=True, slots=True)
class Names:
    """What the buffer is called in a prompt, relative to `root`, and what that is called. known:
    whether its path or its language is; else `path` is made up."""

    path: str
    repository: str
    root: str
    known: bool


def make_prompt(
    code: CodeTokens,
    family: FimFamily | None,
    budgets: Budgets,
    prefix: str,
    suffix: str,
    names: Names,
    files: Sequence[tuple[str, str]] = (),
    read: Sequence[tuple[str, str]] = (),
) -> Prompt:
    """The prompt for the place between `prefix` and `suffix` in a file.

    family: None to continue the prefix. files: (path, text), to draft from, the nearest first.
    read: what the model reads of them, where its family reads files.
    """
    start = window_before(code, prefix, budgets.prefix)
    end = window_after(code, suffix, budgets.suffix) if family else 0
    draft_context = encode_pieces(code, _within([text for _, text in files], _DRAFT_CONTEXT)[::-1])
    others = len(draft_context)
    draft_context += encode_pieces(code, [prefix[max(0, start - _DRAFT_CONTEXT) : start]])
    draft_context += encode_pieces(code, [suffix[end : end + _DRAFT_CONTEXT]])
    before = prefix[start:]
    shown = family and (family.has_path or (read and family.reads_files))
    if names.known and not shown:
        before = comment_line(names.path) + before
    if family is None:
        begun, healed = code.heal(before)
        return Prompt([*code.opening, *begun], 0, healed, draft_context, others)
    values = {"prefix": before, "suffix": suffix[:end]}
    tokens, ahead = _fill_template(code, family, values, names, read if family.reads_files else ())
    return Prompt(tokens, ahead, "", draft_context, others)


def window_before(code: CodeTokens, text: str, budget: int) -> int:
    """Where to begin reading `text` so that its rest has at most `budget` tokens.

    The place is the first start of a line behind a multiple of `budget` characters, so that it
    moves only when about a quarter of the budget has been typed: a place that moved with each
    letter would make everything be read again.
    """
    if budget < 1 or not text:
        return len(text)

    def start(step: int) -> int:
        at = min(step * budget, len(text))
        line = text.find("\n", at - 1) + 1 if at else 0
        return line if 0 < line < len(text) and line - at < 2 * budget else at

    step = max(0, -(-(len(text) - _CHARACTERS_A_TOKEN * budget) // budget))
    fits = len(code.encode(text[start(step) :])) <= budget
    while not fits and step * budget < len(text):
        step += 1
        fits = len(code.encode(text[start(step) :])) <= budget
    while fits and step > 0 and len(code.encode(text[start(step - 1) :])) <= budget:
        step -= 1
    return start(step) if fits else len(text)


def window_after(code: CodeTokens, text: str, budget: int) -> int:
    """Where to stop reading `text` so that what was read has at most `budget` tokens; the end of
    a line where there is one."""
    if budget < 1:
        return 0
    room = min(len(text), _LONGEST * budget)
    tokens = len(code.encode(text[:room]))
    while tokens > budget:
        room = max(1, min(room - 1, room * budget // tokens))
        tokens = len(code.encode(text[:room]))
    line = text.rfind("\n", 0, room) + 1
    end = room if room == len(text) or line < room // 2 else line
    while end > 1 and len(code.encode(text[:end])) > budget:  # the border of a token moved
        end -= 1
    return end if len(code.encode(text[:end])) <= budget else 0


def comment_line(path: str) -> str:
    """The path in a comment of its language, for models that were told no other way."""
    ending = os.path.basename(path).rpartition(".")[2].lower()
    for before, endings in _COMMENTS.items():
        if ending in endings.split():
            opening, _, closing = before.partition(" ")
            return f"{opening} {path} {closing}".rstrip() + "\n"
    return ""


def _within(texts: Sequence[str], room: int) -> list[str]:
    """The first of `texts`, `room` characters together."""
    found = []
    for text in texts:
        found.append(text[:room])
        room -= len(found[-1])
    return found


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
    code: CodeTokens,
    family: FimFamily,
    values: dict[str, str],
    names: Names,
    read: Sequence[tuple[str, str]],
) -> tuple[list[int], int]:
    """(The tokens, how many of them come before the buffer)."""
    template, files = family.prompt, []
    if read or (family.path_alone and names.known):
        template = family.prompt_with_files
        files = fill(family, family.repository, {"repository": names.repository})
        for path, text in read:
            files += fill(family, family.file, {"path": path, "text": text})
    ahead = [*fill(family, family.before, {}), *files]
    buffer = fill(family, template, {**values, "path": names.path})
    parts = [*ahead, *buffer, *fill(family, family.after, {})]
    tokens = list(code.opening)
    count, text = 0, ""
    for number, part in enumerate(parts):
        if number == len(ahead):
            count = len(tokens) + len(code.encode(text))
        if part.kind == "text":
            text += part.text  # what meets at the border of two templates is encoded together
            continue
        tokens += code.encode(text)
        text = ""
        tokens += code.encode_bare(part.text) if part.kind == "suffix" else [code.token(part.text)]
    return tokens + list(code.encode(text)), count


def name_files(path: str, language: str, root: str, others: Sequence[str]) -> Names:
    """What the buffer is called. root: the directory of the project, empty where unknown; then it
    is the nearest that is under version control, else what all paths have in common."""
    common = _common([path, *others])
    root = root or find_root(path) or (common if os.path.isabs(common) else "")
    repository = os.path.basename((root or common).replace("\\", "/").rstrip("/")) or "project"
    name = relative(path, root) if path else f"untitled{f'.{language}' if language else ''}"
    return Names(name, repository, root, known=bool(path or language))


def relative(path: str, root: str) -> str:
    """`path` as seen from `root`, where it is below; at most its end."""
    path, root = path.replace("\\", "/"), root.replace("\\", "/").rstrip("/")
    if root and path.startswith(f"{root}/"):
        path = path[len(root) + 1 :]
    return path[-_PATH:]


@lru_cache(256)
def find_root(path: str) -> str:
    """The nearest directory above `path` that is under version control; empty where none is."""
    if not os.path.isabs(path):
        return ""
    for directory in Path(path).parents:
        if any((directory / marker).exists() for marker in _VERSION_CONTROL):
            return str(directory)
    return ""


def _common(paths: Sequence[str]) -> str:
    """The directory that the paths have in common."""
    directories = [os.path.dirname(path.replace("\\", "/")) for path in paths if path]
    try:
        return os.path.commonpath(directories)
    except ValueError:  # none, or relative paths beside absolute ones
        return ""
