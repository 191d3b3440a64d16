"""The prompt for a place in a buffer: what the model reads, and what is only drafted from.

What exceeds the budgets of the prompt is not lost: it is context to draft from, which costs no
pass. Everything moves as little as possible from one keystroke to the next, so that the cache and
the drafting tables stay valid.
"""

from __future__ import annotations

import bisect
import os
import re
import tomllib
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any
from zlib import crc32

from akunu_py.errors import UsageError

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
    """The prompt tokens of a place in a buffer, and the draft context."""

    tokens: list[int]
    ahead: int  # number of tokens before the buffer
    healed: str  # the end of the prefix that the model samples again
    draft_context: list[tuple[int, ...]]  # drafted from; other files first
    files: int  # number of other files in draft_context


@dataclass(frozen=True, slots=True)
class Budgets:
    """What the model reads of each part at most, in tokens."""

    prefix: int
    suffix: int
    files: int


@dataclass(frozen=True, slots=True)
class Names:
    """The names of the buffer and its repository in a prompt."""

    path: str  # relative to `root`
    repository: str
    root: str
    known: bool  # False if neither path nor language is known, and `path` is made up


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


# ---- fill-in-the-middle formats


_FILE = Path(__file__).with_name("fim.toml")
# In the names of models that were made of a coder, for edits or for reasoning.
_OTHERWISE = ("zeta", "sweep", "distill", "next-edit", "instinct")
_SLOT = re.compile(r"\{(prefix|suffix|path|text|repository)\}")


@dataclass(frozen=True, slots=True)
class FimFamily:
    """The fill-in-the-middle format of one family of models, from fim.toml."""

    name: str
    source: str  # where its maker published it
    tokens: tuple[str, ...]  # that the vocabulary must have
    prompt: str  # template of the buffer around the cursor
    stop: tuple[str, ...]  # tokens that end the middle, if the vocabulary has them
    quote: str = ""  # the maker's words
    # Parts of model names. Many other models have the tokens and were never trained for them.
    named: tuple[str, ...] = ()
    repository: str = ""  # templates with other files; empty if none were published
    file: str = ""
    prompt_with_files: str = ""
    before: str = ""  # around the whole prompt
    after: str = ""
    path_alone: bool = False  # prompt_with_files also for a file without others
    bare_suffix: bool = False  # SentencePiece puts no space of its own before the suffix
    fenced: bool = False  # answers may come in a Markdown fence

    @property
    def reads_files(self) -> bool:
        return bool(self.file)

    @property
    def has_path(self) -> bool:
        """Whether the model reads the path of a file without others."""
        return self.path_alone or "{path}" in self.prompt

    @property
    def markers(self) -> tuple[str, ...]:
        """Every token that a template or a stop may name, the longest first."""
        return tuple(sorted({*self.tokens, *self.stop}, key=lambda token: (-len(token), token)))


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A piece of a filled template."""

    kind: str  # "token" (one of the vocabulary), "text", or "suffix" (encoded apart)
    text: str


@cache
def load_families() -> dict[str, FimFamily]:
    """Return all families by name, in the file's order."""
    families = {}
    for row in tomllib.loads(_FILE.read_text(encoding="utf-8"))["family"]:
        values: dict[str, Any] = {
            name: tuple(v) if isinstance(v, list) else v for name, v in row.items()
        }
        families[row["name"]] = FimFamily(**values)
    return families


def find_family(name: str, vocabulary: Container[str], model: str) -> FimFamily | None:
    """Return the family called `name`, None for "none", the detected one or None for "auto".

    Raises UsageError for an unknown name, and for a family whose tokens the vocabulary lacks.
    """
    families = load_families()
    if name == "none":
        return None
    if name == "auto":
        return detect_family(families.values(), vocabulary, model)
    if name not in families:
        known = ", ".join(["auto", "none", *families])
        raise UsageError(f"no fill-in-the-middle format called {name!r}; there are: {known}")
    check_tokens(name, families[name].tokens, vocabulary, model)
    return families[name]


def check_tokens(name: str, tokens: Sequence[str], vocabulary: Container[str], model: str) -> None:
    """Raise UsageError if the vocabulary lacks a token of the format `name`."""
    missing = [token for token in tokens if token not in vocabulary]
    if missing:
        raise UsageError(
            f"{model} has no token {missing[0]}, so it cannot be asked in the format of {name}; "
            "leave out --fim"
        )


def detect_family(
    families: Iterable[FimFamily], vocabulary: Container[str], model: str
) -> FimFamily | None:
    """Return the family that matches the model's name and vocabulary, None if none does."""
    name = re.sub(r"[\s_]+", "-", model.lower())
    if any(word in name for word in _OTHERWISE):
        return None
    for family in families:
        named = any(part in name for part in family.named)
        if named and all(token in vocabulary for token in family.tokens):
            return family
    return None


def fill(family: FimFamily, template: str, values: Mapping[str, str]) -> list[PromptPart]:
    """The pieces of `template` with its slots filled; neighbouring texts are one piece."""
    marker = re.compile("|".join(re.escape(token) for token in family.markers))
    parts: list[PromptPart] = []

    def add(kind: str, text: str) -> None:
        if kind == "text" and parts and parts[-1].kind == "text":
            parts[-1] = PromptPart("text", parts[-1].text + text)
        elif text or kind == "suffix":
            parts.append(PromptPart(kind, text))

    def add_literal(text: str) -> None:
        at = 0
        for found in marker.finditer(text):
            add("text", text[at : found.start()])
            add("token", found.group())
            at = found.end()
        add("text", text[at:])

    at = 0
    for slot in _SLOT.finditer(template):
        add_literal(template[at : slot.start()])
        kind = "suffix" if slot.group(1) == "suffix" and family.bare_suffix else "text"
        add(kind, values[slot.group(1)])
        at = slot.end()
    add_literal(template[at:])
    return parts


# ---- text to tokens


_CACHED = 512  # texts: windows of the buffer, and pieces of it and of other files
_MAX_HEALED = 64  # characters; a run of spaces may be one long token


class CodeTokens:
    """Encodes source text in parts: nothing added, and no text mistaken for a special token."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        """vocabulary: number of tokens in the weights; a tokenizer may name more."""
        self._backend = tokenizer.backend_tokenizer
        self._vocabulary: dict[str, int] = {
            text: token for text, token in tokenizer.get_vocab().items() if token < vocabulary
        }
        added = {token.content for token in self._backend.get_added_tokens_decoder().values()}
        # Some tokenizers have added tokens for runs of spaces: those may stay what they are.
        self._markers = {text for text in added if len(text) > 1 and not text.isspace()}
        longest_first = sorted(self._markers, key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._byte_level = "Ġ" in self._vocabulary
        self._table: tuple[list[str], list[int]] | None = None
        self._sentinel = len(self._encode("☺"))
        self.opening = [int(token) for token in tokenizer.encode("")]
        self.encode = lru_cache(_CACHED)(self._encode_text)

    def __contains__(self, token: object) -> bool:
        return token in self._vocabulary

    def token(self, text: str) -> int:
        """The id of a token of the vocabulary."""
        return self._vocabulary[text]

    def marker_ids(self, texts: tuple[str, ...]) -> frozenset[int]:
        """The ids of those of `texts` that are markers of this tokenizer, not plain words."""
        known = self._markers.intersection(texts, self._vocabulary)
        return frozenset(self._vocabulary[text] for text in known)

    def encode_bare(self, text: str) -> list[int]:
        """As `encode`, without the space that SentencePiece puts before a text.

        Source: the makers' own encode_infilling, which encodes behind a character and cuts it off.
        """
        return list(self.encode("☺" + text)[self._sentinel :]) if text else []

    def heal(self, text: str) -> tuple[tuple[int, ...], str]:
        """Token healing: the tokens of `text` but for its last, and the text of that one, which
        is to be sampled again.

        The end of a prefix was cut where the cursor is, not where a token ends; the model continues
        badly after a token that it would have chosen otherwise. The text is empty, and nothing is
        taken away, where no longer token begins as the last one does.
        """
        tokens = self.encode(text)
        if len(tokens) < 2 or not self._may_be_longer(tokens[-1], text):
            return tokens, ""
        start = max(0, len(text) - _MAX_HEALED)
        for last in range(len(tokens) - 1, max(0, len(tokens) - 4), -1):
            rest = self._decode(tokens[:last])
            if len(rest) >= start and text.startswith(rest):
                return tokens[:last], text[len(rest) :]
        return tokens, ""

    def _may_be_longer(self, last: int, text: str) -> bool:
        """Whether a token of the vocabulary is longer than `last`, the last of `text`, and begins
        with it. A word and spaces always may be; part of a character is none to ask for."""
        if text[-1].isalnum() or text[-1] == "_" or text[-1].isspace():
            return True
        piece = self.text(last)
        if not piece:
            return False
        texts, _ = self._table or self._make_table()
        after = bisect.bisect_right(texts, piece)
        return after < len(texts) and texts[after].startswith(piece)

    def compatible_tokens(self, text: str) -> tuple[int, ...]:
        """All tokens of whole characters that `text` begins with, or that begin with `text`."""
        texts, ids = self._table or self._make_table()
        spans = [(text, text + "\U0010ffff")]
        spans += [(text[:length], text[:length] + "\0") for length in range(1, len(text))]
        return tuple(
            token
            for first, last in spans
            for token in ids[bisect.bisect_left(texts, first) : bisect.bisect_left(texts, last)]
        )

    def text(self, token: int) -> str:
        """The text of one token as it stands inside a text; empty for a part of a character."""
        piece = self._backend.id_to_token(token)
        return self._piece_text(piece) if piece is not None else ""

    def _encode_text(self, text: str) -> tuple[int, ...]:
        """Tokens of `text` alone. What looks like a marker in it is text: it is encoded in two."""
        tokens: list[int] = []
        at = 0
        for found in self._marker.finditer(text):
            cut = found.start() + 1
            tokens += self._encode(text[at:cut])
            at = cut
        tokens += self._encode(text[at:])
        return tuple(tokens)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids if text else []
        return ids

    def _decode(self, tokens: tuple[int, ...]) -> str:
        return str(self._backend.decode(list(tokens), skip_special_tokens=False))

    def _make_table(self) -> tuple[list[str], list[int]]:
        pairs = [
            (text, token)
            for piece, token in self._vocabulary.items()
            if piece not in self._markers and (text := self._piece_text(piece))
        ]
        pairs.sort()
        self._table = [text for text, _ in pairs], [token for _, token in pairs]
        return self._table

    def _piece_text(self, piece: str) -> str:
        if not self._byte_level:
            return piece.replace("▁", " ")
        try:
            return bytes(_BYTES[character] for character in piece).decode()
        except (KeyError, UnicodeDecodeError):  # not of bytes, or a part of a character
            return ""


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE writes bytes as (Radford et al. 2019): printable ones as
    themselves, the others from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_alphabet()
