"""The prompt for a cursor position in a buffer, and the draft context.

Text that exceeds the budgets becomes draft context, which costs no pass. All parts change as little
as possible from keystroke to keystroke, so that the cache and the drafting tables stay valid.
"""

from __future__ import annotations

import bisect
import os
import re
import tomllib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any
from zlib import crc32

from akunu_py.completion.completion_request import CompleteOptions
from akunu_py.completion.syntax import syntax_of
from akunu_py.errors import UsageError

_CHARACTERS_PER_TOKEN = 4  # typical of code
_LONGEST = 8  # maximum characters per token
_PATH = 200  # maximum characters of a path in the prompt, from its end
_VERSION_CONTROL = (".git", ".hg", ".svn", ".jj")
_DRAFT_CONTEXT = 60_000  # characters of the buffer on each side of the cursor, and of other files
_PIECE = 1000  # minimum characters of a piece
_ENDS = 4  # one in so many lines without indentation starts a piece
_TOP_LINE = re.compile(r"(?<=\n)[^\s\n][^\n]*")


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt tokens for a cursor position, and the draft context."""

    tokens: list[int]
    ahead: int  # number of tokens before the buffer
    healed: str  # the end of the prefix, which the model samples again
    draft_context: list[tuple[int, ...]]  # other files first


@dataclass(frozen=True, slots=True)
class Names:
    """The names of the buffer and its repository in a prompt."""

    path: str  # relative to `root`
    repository: str
    root: str
    known: bool  # False if path and language are unknown, and `path` is invented


def make_prompt(
    code: CodeTokens,
    family: FimFamily | None,
    options: CompleteOptions,
    prefix: str,
    suffix: str,
    names: Names,
    files: Sequence[tuple[str, str]] = (),
    related: Sequence[tuple[str, str]] = (),
) -> Prompt:
    """Return the prompt for the cursor between `prefix` and `suffix` in a file.

    family: None to continue the prefix. options: budgets for the text around the cursor. files:
    (path, text) of the draft context, nearest first. related: their pieces for the prompt, if the
    family supports files.
    """
    start = window_before(code, prefix, options.prefix_tokens)
    end = window_after(code, suffix, options.suffix_tokens) if family else 0
    others = _limit([text for _, text in files], _DRAFT_CONTEXT)[::-1]
    around = prefix[max(0, start - _DRAFT_CONTEXT) : start], suffix[end : end + _DRAFT_CONTEXT]
    draft_context = encode_pieces(code, [*others, *around])
    before = prefix[start:]
    shown = family and (  # the format has the path
        family.path_alone or "{path}" in family.prompt or (related and family.file)
    )
    if names.known and not shown:
        before = comment_line(names.path) + before
    if family is None:
        begun, healed = code.heal(before)
        return Prompt([*code.opening, *begun], 0, healed, draft_context)
    template, ahead = family.prompt, fill(family, family.before, {})
    pieces = related if family.file else ()
    if pieces or (family.path_alone and names.known):
        template = family.prompt_with_files
        ahead += fill(family, family.repository, {"repository": names.repository})
        for path, text in pieces:
            ahead += fill(family, family.file, {"path": path, "text": text})
    values = {"prefix": before, "suffix": suffix[:end], "path": names.path}
    tokens = code.encode_parts(
        [*ahead, *fill(family, template, values), *fill(family, family.after, {})]
    )
    return Prompt(tokens, len(code.encode_parts(ahead)), "", draft_context)


def window_before(code: CodeTokens, text: str, budget: int) -> int:
    """Return where the prompt's part of `text` starts, so that it has at most `budget` tokens.

    That is the first start of a line after a multiple of `budget` characters. It moves only when
    about a quarter of the budget was typed, because each move needs a new prefill.
    """
    if budget < 1 or not text:
        return len(text)

    def start(step: int) -> int:
        at = min(step * budget, len(text))
        line = text.find("\n", at - 1) + 1 if at else 0
        return line if 0 < line < len(text) and line - at < 2 * budget else at

    def fits(step: int) -> bool:
        return len(code.encode(text[start(step) :])) <= budget

    step = max(0, -(-(len(text) - _CHARACTERS_PER_TOKEN * budget) // budget))
    while not fits(step):
        if step * budget >= len(text):
            return len(text)
        step += 1
    while step > 0 and fits(step - 1):
        step -= 1
    return start(step)


def window_after(code: CodeTokens, text: str, budget: int) -> int:
    """Return where the prompt's part of `text` ends, at most `budget` tokens, at a line's end."""
    if budget < 1:
        return 0
    room = min(len(text), _LONGEST * budget)
    while (tokens := len(code.encode(text[:room]))) > budget:
        room = max(1, min(room - 1, room * budget // tokens))
    line = text.rfind("\n", 0, room) + 1
    end = room if room == len(text) or line < room // 2 else line
    while end and len(code.encode(text[:end])) > budget:  # the last token may have split
        end -= 1
    return end


def comment_line(path: str) -> str:
    """Return a comment with the path, in the language of its suffix; "" if unknown."""
    opening, _, closing = syntax_of(path).comment.partition(" ")
    return f"{opening} {path} {closing}".rstrip() + "\n" if opening else ""


def _limit(texts: Sequence[str], room: int) -> list[str]:
    """Return `texts`, cut off after `room` characters in total."""
    found = []
    for text in texts:
        found.append(text[:room])
        room -= len(found[-1])
    return found


def encode_pieces(code: CodeTokens, texts: Sequence[str]) -> list[tuple[int, ...]]:
    """Encode `texts` in content-defined pieces, of which an edit changes only one."""
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


def name_files(path: str, language: str, root: str) -> Names:
    """Return the names of the buffer and its repository.

    root: as in `project_root`. Without one, it is the directory of an absolute path.
    """
    directory = os.path.dirname(path.replace("\\", "/"))
    root = project_root(path, root) or (directory if os.path.isabs(path) else "")
    repository = os.path.basename((root or directory).replace("\\", "/").rstrip("/")) or "project"
    name = relative(path, root) if path else f"untitled{f'.{language}' if language else ''}"
    return Names(name, repository, root, known=bool(path or language))


def relative(path: str, root: str) -> str:
    """Return the end of `path`, relative to `root` if `root` contains it."""
    path, root = path.replace("\\", "/"), root.replace("\\", "/").rstrip("/")
    if root and path.startswith(f"{root}/"):
        path = path[len(root) + 1 :]
    return path[-_PATH:]


def project_root(path: str, root: str) -> str:
    """Return `root`; for a path outside of it, that path's directory under version control."""
    elsewhere = os.path.isabs(path) and not path.startswith(f"{root.rstrip('/')}/")
    return root if root and not elsewhere else find_root(path) or root


@lru_cache(256)
def find_root(path: str) -> str:
    """Return the nearest directory above `path` under version control, "" for none."""
    if not os.path.isabs(path):
        return ""
    for directory in Path(path).parents:
        if any((directory / marker).exists() for marker in _VERSION_CONTROL):
            return str(directory)
    return ""


# ---- fill-in-the-middle formats


# In the names of models derived from a coder, for edits or for reasoning.
_NO_FIM = ("zeta", "sweep", "distill", "next-edit", "instinct")
_SLOT = r"\{(?:prefix|suffix|path|text|repository)\}"


@dataclass(frozen=True, slots=True)
class FimFamily:
    """The fill-in-the-middle format of one family of models, from fim.toml."""

    name: str
    source: str  # the publication of its maker
    tokens: Sequence[str]  # required in the vocabulary
    prompt: str  # template of the buffer around the cursor
    stop: Sequence[str]  # tokens that end the middle, if the vocabulary has them
    quote: str = ""  # from the source
    named: Sequence[str] = ()  # parts of model names; other models may have the tokens untrained
    repository: str = ""  # templates with other files; empty if none were published
    file: str = ""
    prompt_with_files: str = ""
    before: str = ""  # around the whole prompt
    after: str = ""
    path_alone: bool = False  # use prompt_with_files also for a file without others
    bare_suffix: bool = False  # encode the suffix without SentencePiece's leading space
    fenced: bool = False  # answers may have a Markdown fence

    @property
    def markers(self) -> Sequence[str]:
        """Return the tokens in templates and stops, the longest first."""
        return sorted({*self.tokens, *self.stop}, key=len, reverse=True)


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A piece of a filled template."""

    kind: str  # "token" (of the vocabulary), "text", or "suffix" (encoded separately)
    text: str


@cache
def load_families() -> dict[str, FimFamily]:
    """Return all families by name, in the file's order."""
    text = Path(__file__).with_name("fim.toml").read_text(encoding="utf-8")
    return {row["name"]: FimFamily(**row) for row in tomllib.loads(text)["family"]}


def find_family(name: str, vocabulary: Container[str], model: str) -> FimFamily | None:
    """Return the family called `name`, None for "none", the detected one or None for "auto".

    Raises UsageError for an unknown name, and for a family whose tokens the vocabulary lacks.
    """
    families = load_families()
    if name == "none":
        return None
    if name == "auto":
        lower = re.sub(r"[\s_]+", "-", model.lower())
        if any(word in lower for word in _NO_FIM):
            return None
        for family in families.values():
            named = any(part in lower for part in family.named)
            if named and all(token in vocabulary for token in family.tokens):
                return family
        return None
    if name not in families:
        known = ", ".join(["auto", "none", *families])
        raise UsageError(f"unknown fill-in-the-middle format {name!r}; formats: {known}")
    if missing := [token for token in families[name].tokens if token not in vocabulary]:
        raise UsageError(
            f"{model} has no token {missing[0]}, which the format {name} needs; omit --fim"
        )
    return families[name]


def fill(family: FimFamily, template: str, values: Mapping[str, str]) -> list[PromptPart]:
    """Return the pieces of `template` with filled slots."""
    markers = family.markers
    pieces = re.split(rf"({'|'.join(map(re.escape, markers))}|{_SLOT})", template)
    parts = []
    for number, piece in enumerate(pieces):
        if number % 2 == 0:
            parts.append(PromptPart("text", piece))
        elif piece in markers:
            parts.append(PromptPart("token", piece))
        else:
            kind = "suffix" if piece == "{suffix}" and family.bare_suffix else "text"
            parts.append(PromptPart(kind, values[piece[1:-1]]))
    return parts


# ---- text to tokens


_CACHED = 512  # texts: windows of the buffer, and pieces of it and of other files
_MAX_HEALED = 64  # characters of a token; a run of spaces may be long


class CodeTokens:
    """Encodes source text without added tokens; special tokens in the text count as text."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        """vocabulary: number of tokens in the weights; a tokenizer may have more."""
        self._backend = tokenizer.backend_tokenizer
        self._vocabulary: dict[str, int] = {
            text: token for text, token in tokenizer.get_vocab().items() if token < vocabulary
        }
        added = {token.content for token in self._backend.get_added_tokens_decoder().values()}
        # Added tokens for runs of spaces count as text.
        self._markers = {text for text in added if len(text) > 1 and not text.isspace()}
        longest_first = sorted(self._markers, key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        from tokenizers.decoders import ByteLevel  # helpers answer editors before they import it

        self._byte_level = ByteLevel() if "Ġ" in self._vocabulary else None
        self._sentinel = len(self._encode("☺"))
        self.opening = [int(token) for token in tokenizer.encode("")]
        self.encode = lru_cache(_CACHED)(self._encode_text)

    def __contains__(self, token: object) -> bool:
        return token in self._vocabulary

    def token(self, text: str) -> int:
        """Return the id of a token of the vocabulary."""
        return self._vocabulary[text]

    def marker_ids(self, texts: Sequence[str]) -> frozenset[int]:
        """Return the ids of the `texts` that are special tokens of this tokenizer."""
        known = self._markers.intersection(texts, self._vocabulary)
        return frozenset(self._vocabulary[text] for text in known)

    def encode_parts(self, parts: Sequence[PromptPart]) -> list[int]:
        """Return a whole prompt. A marker outside the vocabulary counts as text."""
        tokens, text = list(self.opening), ""
        for part in parts:
            if part.kind == "text" or (part.kind == "token" and part.text not in self):
                text += part.text  # neighboring texts are encoded together
                continue
            tokens += self.encode(text)
            text = ""
            bare = part.kind == "suffix"
            tokens += self.encode_bare(part.text) if bare else [self.token(part.text)]
        return [*tokens, *self.encode(text)]

    def encode_bare(self, text: str) -> list[int]:
        """Encode without SentencePiece's leading space (Code Llama's `encode_infilling`)."""
        return list(self.encode("☺" + text)[self._sentinel :]) if text else []

    def heal(self, text: str) -> tuple[tuple[int, ...], str]:
        """Token healing: return the tokens of `text` without the last, and the last one's text.

        The cursor may split a token, and models continue badly after a token that they would not
        choose. If no longer token starts like the last one, all tokens are returned, and "".
        """
        tokens = self.encode(text)
        if len(tokens) < 2 or not self._may_be_longer(tokens[-1], text):
            return tokens, ""
        start = max(0, len(text) - _MAX_HEALED)
        for last in range(len(tokens) - 1, max(0, len(tokens) - 4), -1):
            rest = str(self._backend.decode(tokens[:last], skip_special_tokens=False))
            if len(rest) >= start and text.startswith(rest):
                return tokens[:last], text[len(rest) :]
        return tokens, ""

    def _may_be_longer(self, last: int, text: str) -> bool:
        """Return True if a longer token may start with `last`, the last token of `text`."""
        if text[-1].isalnum() or text[-1] == "_" or text[-1].isspace():
            return True
        piece = self.text(last)
        if not piece:  # a part of a character
            return False
        texts, _ = self._table
        after = bisect.bisect_right(texts, piece)
        return after < len(texts) and texts[after].startswith(piece)

    def compatible_tokens(self, text: str) -> tuple[int, ...]:
        """Return the tokens that `text` starts with, or that start with `text`."""
        texts, ids = self._table
        spans = [(text, text + "\U0010ffff")]
        spans += [(text[:length], text[:length] + "\0") for length in range(1, len(text))]
        return tuple(
            token
            for first, last in spans
            for token in ids[bisect.bisect_left(texts, first) : bisect.bisect_left(texts, last)]
        )

    def text(self, token: int) -> str:
        """Return the text of a token inside a text, "" for a part of a character."""
        piece = self._backend.id_to_token(token)
        return self._piece_text(piece) if piece is not None else ""

    def _encode_text(self, text: str) -> tuple[int, ...]:
        """Return the tokens of `text`; markers are encoded in two parts, to stay text."""
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

    @cached_property
    def _table(self) -> tuple[list[str], list[int]]:
        """The texts of all tokens except markers, sorted, and the tokens' ids."""
        pairs = [
            (text, token)
            for piece, token in self._vocabulary.items()
            if piece not in self._markers and (text := self._piece_text(piece))
        ]
        pairs.sort()
        return [text for text, _ in pairs], [token for _, token in pairs]

    def _piece_text(self, piece: str) -> str:
        if self._byte_level is None:
            return piece.replace("▁", " ")
        text = self._byte_level.decode([piece])
        return "" if "\ufffd" in text else text  # a part of a character
