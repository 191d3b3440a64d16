"""Where a completion ends: at the end of its line or its block, and before what is there already.

The rules look at text alone: the place of the cursor, indentation, brackets, and what follows. They
know no language beyond that: a rule that holds for most is better here than a parser for each.

    behind the cursor              the completion is
    -----------------              -----------------
    more code on the line          the rest of this line
    only what closes there         all up to it
    nothing, line begun            this line, and the block that it opens, if it does
    nothing, indented              the lines indented as deep, up to a shallower one
    nothing, at the margin         one statement, and its block
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from akunu_py.completion.brackets import OpenBrackets, width

_LONGEST = 20_000  # characters of the cursor's line that are looked at
_LEADING_LINES = 2  # empty lines before the first that is not
_CLOSING_WORDS = ("end", "fi", "done", "esac")
_CLOSING = re.compile(rf"[)\]}}]|</|/?>|;;|(?:{'|'.join(_CLOSING_WORDS)})\b")
_OPENING = re.compile(
    r"(?:[:({\[]|:\s*[|>][-+0-9]*|[=-]>|\b(?:then|do(?:\s*\|[^|]*\|)?|else|begin|in|AS))\s*(?:#.*|//.*)?$"
)
# What opens a block of deeper lines and says so by its first word alone.
_HEADER = re.compile(
    r"\s*(?:(?:local|return|export|default|public|private|protected|internal|static|abstract|final"
    r"|sealed|partial|async|open|[\w.]+ *=)\s+)*(?:(?:class|struct|interface|enum|namespace|trait"
    r"|impl|module|def|if|unless|while|until|for|case|switch|begin|elsif|when)\b|function\b[^;{]*\)\s*$"
    r"|[\w-]+\(\)\s*$|[^\s()]+(?:\s*\|\s*[^\s()]+)*\)\s*$"
    r"|sub\s+[\w:]+\s*$|=(?:head\d|item|over|begin|for)\b)"
)
# A tag that ends its line, or does not end in it; those without content open nothing.
_TAG = re.compile(
    r"\s*<(?:[^\n]*<)?"
    r"(?!(?:area|base|br|col|embed|hr|img|input|link|meta|source|track|wbr)\b[^\n]*>)"
    r"[A-Za-z][\w.:-]*(?:\s[^<>\n]*)?(?:(?<!/)>)?\s*$"
)
# What the next line goes on with.
_UNFINISHED = re.compile(r"(?:[,\\=+|]|&&|(?<![-+])-|\b(?:and|or|not|in))\s*$")
_DECORATOR = re.compile(
    r"(?:\s*(?:@[\w.:]+[ \t]*(?:\((?:[^()]|\([^()]*\))*\))?|#!?\[[^\n]*\]|\[[A-Z][^\n]*\])"
    r"[ \t]*(?:\n|$))+"
)
_ALLMAN = re.compile(r"\n[ \t]*\{[ \t]*\n")  # a brace alone in its line
# What goes on with a statement that had its block, at its own indentation.
_TRY = re.compile(r"\s*(?:try|begin)\b")
_MIDDLE_WORDS = ("except", "finally", "catch", "rescue", "ensure")
_MIDDLE = re.compile(rf"(?:{'|'.join(_MIDDLE_WORDS)})\b")
# What goes on with a line that was left: a brace, a method, a pipe; in SQL, a clause.
_FOLLOWING = re.compile(r"[{.]|\?\.|\|>|&&|\|\|")
_SQL_WORDS = tuple(
    re.findall(
        r"\w+",
        "select from where and or join left right inner outer full cross on using group order "
        "having limit offset union except intersect values set returning returns as begin with "
        "insert update delete when language",
    )
)
_SQL = re.compile(
    r"\s*(?!from\b.*\bimport\b)(?:select|insert\s+into|update\s+\w+|delete\s+from|create|alter"
    r"|with\s+\w+\s+as|from\s+\w+(?:\s+\w+)?|where)\b(?![^\n]*[=({:]\s*$)",
    re.IGNORECASE,
)
_AUTO_CLOSED = re.compile(r"(?:[)\]};,>\s]|\"\"\"|\'\'\'|\*/|</[\w.:-]+>)+")

_COMMENT = re.compile(r"\s*(?:#|//|--(?=[\s-]|\[\[)|/\*|\*)")
_COMMENT_LINES = 12  # behind the cursor that a model may leave out, to repeat what is behind them
_COMPARED = 6  # lines behind the cursor, to know them again
_MARKDOWN = (".md", ".markdown", ".mdx", ".qmd", ".rmd")
_FENCE_OPENING = re.compile(r"```[\w+#.-]*[ \t]*\n")
_FENCE_MAY_OPEN = re.compile(r"`{1,3}|```[\w+#.-]*[ \t]*")  # so far
_FENCE_CLOSING = "\n```"


@dataclass(frozen=True, slots=True)
class Cut:
    """text: what of a completion is certain to stay. done: whether nothing can follow. full:
    whether max_lines is why."""

    text: str
    done: bool = False
    full: bool = False


class CompletionStops:
    """The end of one completion. It depends on the text, not on the pieces that it came in: what
    `cut` makes of a beginning is a beginning of what it makes of the whole."""

    def __init__(self, prefix: str, suffix: str, max_lines: int = 0) -> None:
        """prefix, suffix: around the cursor. max_lines: 0 for as many as the rules allow."""
        self._begun = prefix[max(prefix.rfind("\n") + 1, len(prefix) - _LONGEST) :]
        rest, _, below = suffix.partition("\n")
        self._rest_of_line = rest.rstrip()  # behind the cursor
        self._next_lines = _next_lines(below)
        around = prefix[-_LONGEST:] + "\n" + below[:_LONGEST]
        self._around = Counter(line.rstrip() for line in around.split("\n"))
        self._allman = bool(_ALLMAN.search(prefix[-_LONGEST:]) or _ALLMAN.search(suffix[:_LONGEST]))
        self._max_lines = max_lines
        self._brackets = OpenBrackets(prefix, suffix)

    def cut(self, text: str, *, final: bool = False) -> Cut:
        """What stays of `text`, the completion so far; with `final` nothing more will come."""
        end = self._brackets.first_excess(text, ended=final)
        if end is not None:
            return self._cut_lines(text[: self._end_before_rest(text, end)], final=True, done=True)
        if not final:
            # What is in quotes now may turn out not to be: a letter behind a quote shows it.
            ends = [self._brackets.first_excess(more) for more in (text, text + "a")]
            text = text[: min((end for end in ends if end is not None), default=len(text))]
            text = text[: len(text) - self._brackets.undecided(text)]
        return self._cut_lines(text, final=final, done=False)

    def _cut_lines(self, text: str, *, final: bool, done: bool) -> Cut:
        lines = text.split("\n")
        if self._rest_of_line and self._fills(lines):
            return self._cut_filling(lines, final, done)
        if self._rest_of_line:
            return self._cut_one_line(lines, final, done)
        first = self._first_line(lines)
        if first is None or first > _LEADING_LINES:
            return Cut("", done or final or len(lines) > _LEADING_LINES + 1)
        kept = lines[:first]
        base = width(self._begun + lines[0] if first == 0 else lines[first])
        block = base if base and not self._begun.strip() else None
        for number in range(first, len(lines)):
            line, whole = lines[number], number < len(lines) - 1 or final
            if number > first:
                continues = self._continues(kept, first, line, whole, base, block)
                if not continues:
                    return Cut(_trimmed(kept), done or continues is False)
            repeats = self._repeats([self._begun + lines[0], *lines[1:]], number, final, done)
            if repeats is not False:
                return Cut(_trimmed(kept), done or repeats is True)
            kept.append(line)
            if whole and 0 < self._max_lines <= len(kept):
                more = number < len(lines) - 1
                return Cut(_trimmed(kept), done or more, full=more)
            if whole and number > first and self._closed_all(kept, line, base, block):
                return Cut(_trimmed(kept), True)
        return Cut(_trimmed(kept), done)

    def _fills(self, lines: Sequence[str]) -> bool:
        """Whether more than a line belongs between the cursor and what closes behind it."""
        if len(lines) == 1 or not _AUTO_CLOSED.fullmatch(self._rest_of_line):
            return False
        first = lines[0].rstrip()
        rest, brackets = self._rest_of_line, self._brackets
        if not first or brackets.ends_long(rest):
            return True
        braces = brackets.between_braces and rest.lstrip().startswith("}")
        opens = first[-1] in "([{" or _UNFINISHED.search(first)
        return bool(braces or (opens and not first.endswith(rest)))

    def _cut_filling(self, lines: Sequence[str], final: bool, done: bool) -> Cut:
        """What goes between the cursor and what closes behind it, up to the line break before."""
        base = width(self._begun)
        prose = self._brackets.ends_long(self._rest_of_line)
        kept = [lines[0]]
        for number in range(1, len(lines)):
            line, last = lines[number], number == len(lines) - 1
            if last and not line.strip():
                break
            if not prose and line.strip() and self._brackets.depth("\n".join(kept)) <= 0:
                if not "".join(kept).strip() and self._brackets.between_braces:
                    base = min(base, width(line) - 1)  # the brace may be deeper than its block
                if width(line) <= max(0, base):
                    alone = number == 1 and kept[0].strip()
                    return Cut(_trimmed(kept) if alone else "\n".join([*kept, ""]), True)
            if number > 1 and not (line.strip() or kept[-1].strip()):
                return Cut("\n".join([*kept, ""]), True)
            kept.append(line)
            if 0 < self._max_lines <= len(kept) and (final or not last):
                return Cut(_trimmed(kept), done or not last, full=not last)
        if done or final:  # the rest behind the cursor begins a line of its own, if it is to
            kept += lines[len(kept) :]
            return Cut("\n".join(kept) if "".join(kept).strip() else "", done)
        text = _trimmed(kept)
        return Cut(text[: self._held_from(text)].rstrip())

    def _cut_one_line(self, lines: Sequence[str], final: bool, done: bool) -> Cut:
        """The rest of the cursor's line, without what stands behind the cursor already."""
        line = lines[0]
        if len(lines) > 1:
            line, final, done = line.rstrip(), True, True
        if not final:
            return Cut(line[: self._held_from(line)].rstrip())
        shorter = line[: len(line) - len(self._rest_of_line)]
        if line.endswith(self._rest_of_line):
            rest, imbalance = self._rest_of_line, self._brackets.imbalance
            line = shorter if imbalance(shorter + rest) <= imbalance(line + rest) else line
        return Cut(line, done)

    def _held_from(self, text: str) -> int:
        """Where the end of `text` begins that may turn out to be what stands behind the cursor, or
        spaces, which may end the line."""
        return min(
            (
                len(part) - length
                for part in (text, text.rstrip())
                for length in range(1, min(len(part), len(self._rest_of_line)) + 1)
                if part.endswith(self._rest_of_line[:length])
            ),
            default=len(text),
        )

    def _end_before_rest(self, text: str, end: int) -> int:
        """Where to cut `text` whose bracket at `end` stands behind the cursor already: there, or
        before all of what leads up to it behind the cursor too."""
        kept, rest = text[: end + 1], self._rest_of_line
        lengths = [n for n in range(min(len(kept), len(rest)), 0, -1) if kept.endswith(rest[:n])]
        imbalance = self._brackets.imbalance
        return end + 1 - min(lengths, key=lambda n: imbalance(kept[:-n] + rest), default=1)

    def _first_line(self, lines: Sequence[str]) -> int | None:
        """The number of the first line that is not empty: the cursor's own, if it is begun."""
        if self._begun.strip():
            return 0
        return next((number for number, line in enumerate(lines) if line.strip()), None)

    def _continues(
        self, kept: list[str], first: int, line: str, whole: bool, base: int, block: int | None
    ) -> bool | None:
        """Whether `line` belongs to the completion too; None where it is too short to tell.

        base: how deep the first line is indented. block: the same where the cursor's line was
        empty, so that its neighbours belong to it.
        """
        if self._brackets.depth("\n".join(kept)) > 0 or self._decorates(kept, first):
            return True
        statement = self._begun + kept[0] if first == 0 else kept[first]
        last = next((each for each in reversed(kept[first + 1 :]) if each.strip()), statement)
        gap = len(kept) > first + 1 and not kept[-1].strip()
        content, indented = line.strip(), width(line)
        unfinished = _UNFINISHED.search(last) and not (gap or _COMMENT.match(last))
        if unfinished and (last.endswith("\\") or self._brackets.outermost or indented > base):
            return True if content else None if not whole else False
        in_block = block is not None or self._opens(kept, first)
        in_block = in_block or any(width(each) > base for each in kept[first + 1 :] if each.strip())
        left = first == 0 and not kept[0].strip()  # the first thing the model did
        sql = bool(_SQL.match(statement)) and not last.rstrip().endswith(";")
        if not (in_block or left or sql):
            return self._opens_below(statement, line, whole, base) if last is statement else False
        if not content:
            return (in_block and not gap) if whole else None
        if indented > base or indented == block:
            return True
        words = [*_CLOSING_WORDS, *_MIDDLE_WORDS, "else", "</", "?.", "|>", "&&", "||", "/>", ";;"]
        words += _SQL_WORDS if sql else ()
        if not whole and any(word.startswith(content.lower()) for word in words):
            return None
        if block is not None or indented != base:
            return block is not None and bool(_CLOSING.match(content))
        if in_block and (_CLOSING.match(content) or _MIDDLE.match(content)):
            return True
        if _TRY.match(statement) and content.startswith("else"):
            return True
        if _FOLLOWING.match(content):
            return not gap and not last.rstrip().endswith((";", "}"))
        return sql and re.split(r"\W", content.lower(), maxsplit=1)[0] in _SQL_WORDS

    def _decorates(self, kept: Sequence[str], first: int) -> bool:
        """Whether all so far are decorators or attributes, which belong to what follows."""
        text = "\n".join(kept[first:])
        return bool(_DECORATOR.fullmatch(self._begun + text if first == 0 else text))

    def _opens_below(self, statement: str, line: str, whole: bool, base: int) -> bool | None:
        """Whether `line` is the brace of `statement`, in a file that puts them there."""
        if not self._allman or statement.rstrip().endswith((";", "}", "{", ",", ":")):
            return False
        content = line.strip()
        return (content[0] == "{" and width(line) == base) if content else False if whole else None

    def _opens(self, kept: list[str], first: int) -> bool:
        """Whether the statement that the completion begins with opens a block."""
        text = ""
        for number, line in enumerate(kept[first:], start=first):
            if _DECORATOR.fullmatch(line if number else self._begun + line):  # what follows counts
                continue
            text += line
            begun = (self._begun if first == 0 else "") + text
            if _OPENING.search(begun) or _TAG.fullmatch(begun) or _HEADER.match(begun):
                return True
            if self._brackets.depth(text) <= 0:
                return False
            text += "\n"
        return False

    def _closed_all(self, kept: list[str], line: str, base: int, block: int | None) -> bool:
        """Whether `line` closes the block, so that nothing behind it belongs to it."""
        closing = _CLOSING.match(line.strip())
        open_end = _OPENING.search(line) or (_UNFINISHED.search(line) and line.strip()[-1] != ",")
        if (
            not closing
            or closing.group() == ">"
            or open_end
            or self._brackets.depth("\n".join(kept)) > 0
        ):
            return False
        if block is not None:
            return width(line) < base
        begun = next((each for each in [self._begun + kept[0], *kept[1:]] if each.strip()), "")
        return width(line) == base and not (_TRY.match(begun) and line.strip()[0] == "}")

    def _repeats(self, lines: Sequence[str], number: int, final: bool, ended: bool) -> bool | None:
        """Whether line `number` is the next of the buffer; None where it may yet turn out to be.
        ended: whether a bracket that is closed behind the cursor ended the lines."""
        line = lines[number].rstrip()
        same = number == 0 and line == self._begun.rstrip()  # nothing was added to it
        if not line or same:
            return False
        said = [n for n in range(number, len(lines)) if lines[n].strip()]
        for there in self._next_lines:
            found = self._agrees(
                [lines[n] for n in said], said[-1] < len(lines) - 1 or final, there
            )
            if found is None and final:
                found = ended or self._idiom(there[0])
            if found is not False:
                return found
        return False

    def _agrees(self, said: Sequence[str], whole: bool, there: Sequence[str]) -> bool | None:
        """Whether `said` begins with the lines `there`, as far as is needed to know them again;
        None where too little was said. whole: whether the last line said is."""
        for index, (line, expected) in enumerate(zip(said, there, strict=False)):
            last = index == len(said) - 1
            if line.rstrip() != expected:
                return None if last and not whole and expected.startswith(line) else False
            if last and not whole:
                return None
            known = index or (_tells(expected) and not self._idiom(expected))
            if known and not _DECORATOR.match(expected):
                return True
        return True if len(there) <= len(said) else None

    def _idiom(self, line: str) -> bool:
        """Whether a line of words stands around the cursor more than once."""
        return _tells(line) and self._around[line] > 1


def _next_lines(below: str) -> list[list[str]]:
    """The next lines of the buffer that are not empty; where they begin with a comment, also those
    from its end on, and from behind it."""
    lines = [line.rstrip() for line in below[:_LONGEST].split("\n") if line.strip()]
    code = next((n for n, line in enumerate(lines) if not _COMMENT.match(line)), len(lines))
    starts = {0, code - 1, code} if 0 < code <= _COMMENT_LINES else {0}
    return [lines[start : start + _COMPARED] for start in sorted(starts) if start < len(lines)]


def _tells(line: str) -> bool:
    """Whether one such line is enough to know it again. Where it has no word, opens something or
    decorates what is below, that must be the same too."""
    return bool(re.search(r"\w", line)) and not (_OPENING.search(line) or _DECORATOR.match(line))


def _trimmed(lines: list[str]) -> str:
    return "\n".join(lines).rstrip()


def is_markdown(path: str, language: str) -> bool:
    """Whether fences belong to what is written in the file `path`."""
    return path.lower().endswith(_MARKDOWN) or language.lower() == "markdown"


def strip_fence(text: str, *, final: bool) -> tuple[str, bool]:
    """(`text` without the Markdown fence that a chat model may put around its code, whether that
    was closed, so that nothing follows).

    final: nothing more will come. Until then what may turn out to be of a fence is held back; what
    was returned once stays.
    """
    opening = _FENCE_OPENING.match(text)
    if opening is None:
        begun = _FENCE_MAY_OPEN.fullmatch(text) and (text.startswith("```") or not final)
        return ("" if begun else text), False
    code, closing, _ = text[opening.end() :].partition(_FENCE_CLOSING)
    if closing or final:
        return code, bool(closing)
    lengths = range(len(_FENCE_CLOSING) - 1, -1, -1)
    held_back = next(n for n in lengths if code.endswith(_FENCE_CLOSING[:n]))
    return code[: len(code) - held_back], False
