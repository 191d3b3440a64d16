"""Stop rules: where a completion ends (docs/complete.md).

The rules use the cursor position, indentation, brackets and the text after the cursor. They hold
for most languages and need no parser for each.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from akunu_py.completion.brackets import OpenBrackets, overlap, width
from akunu_py.completion.completion_request import CompletionRequest
from akunu_py.completion.syntax import syntax_of

_LONGEST = 20_000  # maximum characters of the cursor's line, and of each side for other rules
_LEADING_LINES = 2  # maximum empty lines before the first line of code
_CLOSING_WORDS = ("end", "fi", "done", "esac")
_CLOSING = re.compile(rf"[)\]}}]|</|/?>|;;|\{{%-? ?end|(?:{'|'.join(_CLOSING_WORDS)})\b")
_OPENING = re.compile(
    r"(?:[:({\[]|:\s*[|>][-+0-9]*|[=-]>|\b(?:then|do(?:\s*\|[^|]*\|)?|else|begin|in|AS))\s*(?:#.*|//.*)?$"
)
# A statement that opens a block, recognized by its first word.
_HEADER = re.compile(
    r"\s*(?:(?:local|return|export|default|public|private|protected|internal|static|abstract|final"
    r"|sealed|partial|async|open|[\w.]+ *=)\s+)*(?:(?:class|struct|interface|enum|namespace|trait"
    r"|impl|module|def|if|unless|while|until|for|case|switch|begin|elsif|when)\b|function\b[^;{]*\)\s*$"
    r"|[\w-]+\(\)\s*$|[^\s()|]+(?:\s*\|\s*[^\s()|]+)*\)\s*$"
    r"|sub\s+[\w:]+\s*$|=(?:head\d|item|over|begin|for)\b)"
)
# A tag at the end of its line, or an unfinished one; void elements open no block.
_TAG = re.compile(
    r"\s*<(?:[^\n]*<)?"
    r"(?!(?:area|base|br|col|embed|hr|img|input|link|meta|source|track|wbr)\b[^<>\n]*>)"
    r"[A-Za-z][\w.:-]*(?:\s[^<>\n]*+)?(?:(?<!/)>)?\s*$"
)
_DIRECTIVE = re.compile(r"\s*#[ \t]*(?:if|ifn?def|elif|else)\b")  # of a preprocessor
# The end of a line that continues on the next one.
_UNFINISHED = re.compile(r"(?:[,\\=+|]|&&|(?<![-+])-|\b(?:and|or|not|in))\s*$")
_DECORATOR = re.compile(
    r"(?:\s*(?:@(?!file:)[\w.:]+(?:[ \t]*\((?:[^()]|\([^()]*\))*\))?|#!?\[[^\n]*\]|\[[A-Z][^\n]*\])"
    r"[ \t]*(?:\n|$))+"
)
_ALLMAN = re.compile(r"\n[ \t]*\{[ \t]*\n")  # a brace alone in its line
# Keywords that continue a statement after its block, at the statement's indentation.
_TRY = re.compile(r"\s*(?:try|begin)\b")
_MIDDLE_WORDS = ("except", "finally", "catch", "rescue", "ensure")
_MIDDLE = re.compile(rf"(?:{'|'.join(_MIDDLE_WORDS)})\b|\{{%-? ?(?:el|empty)")
# A template's tag alone in its line, which may open a block.
_TEMPLATE_TAG = re.compile(r"\s*\{%-? ?(?!end)[^%\n]*%\}\s*$")
_TEMPLATE_WORDS = [
    f"{{%{gap}{word}" for gap in ("", " ", "-", "- ") for word in ("end", "el", "empty")
]
# The start of a line that continues the line above: a brace, a method, a pipe; in SQL, a clause.
_FOLLOWING = re.compile(r"\{(?![%{#])|\.|\?\.|\|>|&&|\|\|")
_SQL_WORDS = tuple(
    re.findall(
        r"\w+",
        "select from where and or join left right inner outer full cross on using group order "
        "having limit offset union except intersect values set returning returns as begin with "
        "insert update delete when language",
    )
)
_SQL_STATEMENTS = ("select", "insert", "update", "delete", "with", "begin")
_SQL = re.compile(
    r"\s*(?!from\b.*\bimport\b)(?:select|insert\s+into|update\s+\w+|delete\s+from|create|alter"
    r"|with\s+\w+\s+as|from\s+\w+(?:\s+\w+)?|where)\b(?![^\n]*[=({:]\s*$)",
    re.IGNORECASE,
)
_AUTO_CLOSED = re.compile(r"(?:[)\]};,>\s]|\"\"\"|\'\'\'|\*/|</[\w.:-]+>)+")

_COMMENT_LINE = re.compile(r"\s*(?:#|//|--(?=[\s-]|\[\[)|/\*|\*)")
# A comment that announces the next line, but no directive of a preprocessor.
_ANNOUNCEMENT = re.compile(r"\s*(?:#+|//+|--+)[ \t]+\S")
_COMMENT_LINES = 12  # maximum comment lines below the cursor that a repeating model may skip
_COMPARED = 6  # lines below the cursor that are compared with the output
_MARKDOWN = (".md", ".markdown", ".mdx", ".qmd", ".rmd")
_FENCE_OPENING = re.compile(r"```[\w+#.-]*[ \t]*\n")
_PARTIAL_FENCE = re.compile(r"`{1,3}|```[\w+#.-]*[ \t]*")
_FENCE_CLOSING = "\n```"


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a completion that is final."""

    text: str
    done: bool = False  # the completion is complete
    full: bool = False  # max_lines ended it


class CompletionStops:
    """Finds the end of one completion, independent of the pieces in which the text arrives.

    `cut` of a beginning always returns a beginning of what `cut` of the whole text returns.
    """

    def __init__(self, request: CompletionRequest) -> None:
        prefix, suffix = request.prefix, request.suffix
        self._before = prefix[max(prefix.rfind("\n") + 1, len(prefix) - _LONGEST) :]
        rest, _, below = suffix.partition("\n")
        self._rest_of_line = rest.rstrip()  # after the cursor
        self._next_lines = _next_lines(below)
        around = prefix[-_LONGEST:] + "\n" + below[:_LONGEST]
        self._around = Counter(line.rstrip() for line in around.split("\n"))
        self._allman = bool(_ALLMAN.search(prefix[-_LONGEST:]) or _ALLMAN.search(suffix[:_LONGEST]))
        self._max_lines = request.max_lines
        syntax = syntax_of(request.path, request.language, prefix)
        self._is_c = syntax.comment == "//"
        self._brackets = OpenBrackets(prefix, suffix, syntax)
        self._repetition = RepetitionStops(prefix, suffix)

    def cut(self, text: str, *, final: bool = False) -> Cut:
        """Return the final part of `text`, the output so far. final: no more output follows."""
        end = self._repetition.find(text, final=final)
        cut = self._cut(text[: end.at], final=final or end.is_loop)
        return replace(cut, done=True) if end.is_loop else cut

    def _cut(self, text: str, *, final: bool) -> Cut:
        """Cut a text without repetitions."""
        end = self._brackets.first_excess(text, ended=final)
        if end is not None:
            return self._cut_lines(text[: self._end_before_rest(text, end)], final=True, done=True)
        if not final:
            # A letter after a quote may show that the quoted text is none.
            ends = [self._brackets.first_excess(more) for more in (text, text + "a")]
            text = text[: min((end for end in ends if end is not None), default=len(text))]
            text = text[: len(text) - self._brackets.undecided(text)]
        return self._cut_lines(text, final=final, done=False)

    def _cut_lines(self, text: str, *, final: bool, done: bool) -> Cut:
        """Cut after the last line that belongs to the completion. final: no text follows."""
        lines = text.split("\n")
        if self._rest_of_line and self._fills(lines):
            return self._cut_filling(lines, final, done)
        if self._rest_of_line:
            return self._cut_one_line(lines, final, done)
        numbers = (number for number, line in enumerate(lines) if line.strip())
        announced = _ANNOUNCEMENT.match(self._before) and not lines[0].strip()
        announced = announced and not self._is_directive(self._before)
        in_line = self._before.strip() and not announced
        first = 0 if in_line else next(numbers, None)  # the first non-empty line
        if first is None or first > _LEADING_LINES:
            return Cut("", done or final or len(lines) > _LEADING_LINES + 1)
        if announced and (first > 1 or width(lines[first]) != width(self._before)):
            return Cut("", True)
        kept = lines[:first]
        base = width(self._before + lines[0] if first == 0 else lines[first])
        block = base if base and not self._before.strip() else None
        for number in range(first, len(lines)):
            line, whole = lines[number], number < len(lines) - 1 or final
            if number > first:
                continues = self._continues(kept, first, line, whole, base, block)
                if not continues:
                    return Cut(_trimmed(kept), done or continues is False)
            repeats = self._repeats([self._before + lines[0], *lines[1:]], number, final, done)
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
        """Return True if several lines belong between the cursor and the closing bracket."""
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
        """Cut the text between the cursor and the closing bracket after it."""
        base = width(self._before)
        prose = self._brackets.ends_long(self._rest_of_line)
        kept = [lines[0]]
        for number in range(1, len(lines)):
            line, last = lines[number], number == len(lines) - 1
            if last and not line.strip():
                break
            if not prose and line.strip() and self._brackets.depth("\n".join(kept)) <= 0:
                if not "".join(kept).strip() and self._brackets.between_braces:
                    base = min(base, width(line) - 1)  # the brace may be deeper than its block
                if width(line) <= base:
                    alone = number == 1 and kept[0].strip()
                    return Cut(_trimmed(kept) if alone else "\n".join([*kept, ""]), True)
            if number > 1 and not (line.strip() or kept[-1].strip()):
                return Cut("\n".join([*kept, ""]), True)
            kept.append(line)
            if 0 < self._max_lines <= len(kept) and (final or not last):
                return Cut(_trimmed(kept), done or not last, full=not last)
        if done or final:  # keeps the line break before the text after the cursor
            kept += lines[len(kept) :]
            return Cut("\n".join(kept) if "".join(kept).strip() else "", done)
        return Cut(self._before_rest(_trimmed(kept)))

    def _cut_one_line(self, lines: Sequence[str], final: bool, done: bool) -> Cut:
        """Return the end of the cursor's line, without a repeat of the text after the cursor.

        final: the text is complete. done: the value for `Cut.done`. Both are set if `lines` has
        several lines.
        """
        line = lines[0]
        if len(lines) > 1:
            line, final, done = line.rstrip(), True, True
        if not final:
            return Cut(self._before_rest(line))
        shorter = line[: len(line) - len(self._rest_of_line)]
        if line.endswith(self._rest_of_line):
            rest, imbalance = self._rest_of_line, self._brackets.imbalance
            line = shorter if imbalance(shorter + rest) <= imbalance(line + rest) else line
        return Cut(line, done)

    def _before_rest(self, text: str) -> str:
        """Return `text` without an end that may repeat the text after the cursor."""
        parts = text, text.rstrip()
        return text[: min(len(part) - overlap(part, self._rest_of_line) for part in parts)].rstrip()

    def _end_before_rest(self, text: str, end: int) -> int:
        """Return where to cut `text` if its bracket at `end` already stands after the cursor."""
        kept, rest = text[: end + 1], self._rest_of_line
        lengths = [n for n in range(min(len(kept), len(rest)), 0, -1) if kept.endswith(rest[:n])]
        imbalance = self._brackets.imbalance
        return end + 1 - min(lengths, key=lambda n: imbalance(kept[:-n] + rest), default=1)

    def _continues(
        self, kept: list[str], first: int, line: str, whole: bool, base: int, block: int | None
    ) -> bool | None:
        """Return True if `line` belongs to the completion, None if it is too short to decide.

        base: indentation of the first line. block: the same if the cursor's line was empty, so
        that lines with this indentation belong to the completion; else None.
        """
        if self._brackets.depth("\n".join(kept)) > 0 or self._decorates(kept, first):
            return True
        statement = self._before + kept[0] if first == 0 else kept[first]
        last = next((each for each in reversed(kept[first + 1 :]) if each.strip()), statement)
        gap = len(kept) > first + 1 and not kept[-1].strip()
        content, indented = line.strip(), width(line)
        unfinished = _UNFINISHED.search(last) and not (gap or _COMMENT_LINE.match(last))
        unfinished = unfinished or last.endswith("\\")
        outer = not (last.endswith("\\") or self._brackets.outermost or indented > base)
        in_block = block is not None or self._opens(kept, first)
        in_block = in_block or any(width(each) > base for each in kept[first + 1 :] if each.strip())
        broke_line = first == 0 and not kept[0].strip()  # the model started with a line break
        sql = bool(_SQL.match(statement)) and not last.rstrip().endswith(";")
        allman = self._allman and not statement.rstrip().endswith((";", "}", "{", ",", ":"))
        alone = not (in_block or broke_line or sql)
        may_open = alone and allman and last is statement
        closing = bool(_CLOSING.match(content))
        words = [*_CLOSING_WORDS, *_MIDDLE_WORDS, "else", "</", "?.", "|>", "&&", "||", "/>", ";;"]
        words += [*_TEMPLATE_WORDS, *(_SQL_WORDS if sql else ())]
        word = re.split(r"\W", content.lower(), maxsplit=1)[0]
        new = gap and word in _SQL_STATEMENTS and not re.search(r"(?i)\bas\s*$", last)
        later = False if whole else None
        rules = (  # the first that applies decides
            (unfinished and not outer, True if content else later),
            (may_open and content, content[:1] == "{" and indented == base),
            (alone, later if may_open else False),
            (not content, (in_block or sql) and not gap if whole else None),
            (indented > base or indented == block, True),
            (not whole and any(each.startswith(content.lower()) for each in words), None),
            (block is not None, closing),
            (indented != base, False),
            (in_block and (closing or _MIDDLE.match(content)), True),
            (_TRY.match(statement) and content.startswith("else"), True),
            (_FOLLOWING.match(content), not (gap or last.rstrip().endswith((";", "}")))),
            (sql and word in _SQL_WORDS, not new),
        )
        return next((belongs for applies, belongs in rules if applies), False)

    def _decorates(self, kept: Sequence[str], first: int) -> bool:
        """Return True if all lines so far are decorators, which belong to the next statement."""
        text = "\n".join(kept[first:])
        return bool(_DECORATOR.fullmatch(self._before + text if first == 0 else text))

    def _is_directive(self, line: str) -> bool:
        return self._is_c and bool(_DIRECTIVE.match(line))

    def _opens(self, kept: list[str], first: int) -> bool:
        text = ""
        for number, line in enumerate(kept[first:], start=first):
            if _DECORATOR.fullmatch(line if number else self._before + line):
                continue
            text += line
            start = (self._before if first == 0 else "") + text
            if _OPENING.search(start) or _TAG.fullmatch(start) or _HEADER.match(start):
                return True
            if _TEMPLATE_TAG.match(start) or self._is_directive(start):
                return True
            if self._brackets.depth(text) <= 0:
                return False
            text += "\n"
        return False

    def _closed_all(self, kept: list[str], line: str, base: int, block: int | None) -> bool:
        """Return True if `line` closes the block and ends the completion."""
        closing = _CLOSING.match(line.strip())
        open_end = _OPENING.search(line) or (_UNFINISHED.search(line) and line.strip()[-1] != ",")
        if not closing or closing.group() == ">" or open_end:
            return False
        if self._brackets.depth("\n".join(kept)) > 0:
            return False
        if block is not None:
            return width(line) < base
        start = next((each for each in [self._before + kept[0], *kept[1:]] if each.strip()), "")
        return width(line) == base and not (_TRY.match(start) and line.strip()[0] == "}")

    def _repeats(self, lines: Sequence[str], number: int, final: bool, ended: bool) -> bool | None:
        """Return True if line `number` repeats the next line of the buffer, None if undecided."""
        line = lines[number].rstrip()
        unchanged = number == 0 and line == self._before.rstrip()
        if not line or unchanged:
            return False
        numbers = [n for n in range(number, len(lines)) if lines[n].strip()]
        whole = numbers[-1] < len(lines) - 1 or final
        for expected in self._next_lines:
            found = self._matches([lines[n] for n in numbers], whole, expected)
            if found is None and final:  # ended: by an excess closing bracket
                found = ended or self._is_common(expected[0])
            if found is not False:
                return found
        return False

    def _matches(self, output: Sequence[str], whole: bool, below: Sequence[str]) -> bool | None:
        """Return True if `output` repeats enough lines of `below`, None if it is too short.

        whole: the last line of `output` is complete.
        """
        for index, (line, expected) in enumerate(zip(output, below, strict=False)):
            last = index == len(output) - 1
            if line.rstrip() != expected:
                return None if last and not whole and expected.startswith(line) else False
            if last and not whole:
                return None
            distinct = index or (_is_distinct(expected) and not self._is_common(expected))
            if distinct and not _DECORATOR.match(expected):
                return True
        return True if len(below) <= len(output) else None

    def _is_common(self, line: str) -> bool:
        """Return True if a line with words occurs around the cursor more than once."""
        return _is_distinct(line) and self._around[line] > 1


def _next_lines(below: str) -> list[list[str]]:
    """Return the first lines of `below`, the text under the cursor, as a model may repeat them.

    If they begin with a comment, a model may also leave it out; then there are several results.
    """
    lines = [line.rstrip() for line in below[:_LONGEST].split("\n") if line.strip()]
    code = next((n for n, line in enumerate(lines) if not _COMMENT_LINE.match(line)), len(lines))
    starts = {0, code - 1, code} if 0 < code <= _COMMENT_LINES else {0}
    return [lines[start : start + _COMPARED] for start in sorted(starts) if start < len(lines)]


def _is_distinct(line: str) -> bool:
    """Return True if `line` alone, repeated, proves a repetition: it has words, opens nothing."""
    return bool(re.search(r"\w", line)) and not (_OPENING.search(line) or _DECORATOR.match(line))


def _trimmed(lines: list[str]) -> str:
    return "\n".join(lines).rstrip()


def is_markdown(path: str, language: str) -> bool:
    """Return True for a Markdown file, whose text may contain fences."""
    return path.lower().endswith(_MARKDOWN) or language.lower() == "markdown"


def strip_fence(text: str, *, final: bool) -> tuple[str, bool]:
    """Return `text` without a Markdown fence around it, and True if the fence is closed.

    final: no more output follows. Until then, a partial fence at the end is held back.
    """
    opening = _FENCE_OPENING.match(text)
    if opening is None:
        partial = _PARTIAL_FENCE.fullmatch(text) and (text.startswith("```") or not final)
        return ("" if partial else text), False
    code, closing, _ = text[opening.end() :].partition(_FENCE_CLOSING)
    if closing or final:
        return code, bool(closing)
    return code[: len(code) - overlap(code, _FENCE_CLOSING[:-1])], False


# ---- loops and echoes: where a model repeats itself, or the lines above the cursor


_LOOP_REPEATS = 5  # equal lines, or equal groups of lines, that are a loop
_MAX_GROUP = 4  # lines of a repeated group
_MAX_PERIOD = 32  # characters of a text that is repeated within a line
_LOOP_LENGTH = 64  # minimum characters of a loop within a line
_CHARACTER_LOOP_LENGTH = 100  # the same, if a single character is repeated
_LOOP_PERIODS = 6  # minimum repeats of a loop within a line
_KEPT_LENGTH = 12  # minimum characters of a repetition that stay in the output
_CONTEXT_LENGTH = 2000  # characters around the cursor in which the user may repeat the same text
_MAX_ECHO = 6  # lines above the cursor that are compared with the output
_WORDS = re.compile(r"\w.*\w")
_REPEATED = re.compile(r"(\S.{0,31}?)\1{2,}")
_CONFLICT = re.compile(r"(?m)^(?:<{7}|>{7}|\|{7})(?=[ \n])")
_CONFLICT_AT_END = re.compile(r"(?m)^[<>|]{1,7}\Z")


@dataclass(frozen=True, slots=True)
class RepetitionEnd:
    """Where to end a text."""

    at: int
    is_loop: bool = False  # False: the text after `at` may still become a loop


class RepetitionStops:
    """Finds loops and echoes in the output at one cursor position."""

    def __init__(self, prefix: str, suffix: str) -> None:
        self._before = prefix[prefix.rfind("\n") + 1 :]
        self._context = f"{prefix[-_CONTEXT_LENGTH:]}\n{suffix[:_CONTEXT_LENGTH]}"
        above = prefix[: len(prefix) - len(self._before)][-_CONTEXT_LENGTH:]
        lines = [line.rstrip() for line in above.split("\n") if line.strip()]
        self._above = lines[-_MAX_ECHO:]
        self._has_conflict = bool(_CONFLICT.search(prefix[-20_000:]))

    def find(self, text: str, *, final: bool) -> RepetitionEnd:
        """Return where the output `text` begins to repeat. final: no more output follows."""
        ends = [
            self._echo(text, final=final),
            self._line_loop(text, final=final),
            self._inline_loop(text, final=final),
            self._conflict(text, final=final),
        ]
        loops = [end for end in ends if end.is_loop]
        return min(loops or ends, key=lambda end: end.at)

    def _echo(self, text: str, *, final: bool) -> RepetitionEnd:
        """Find the lines above the cursor at the start of the output."""
        none = RepetitionEnd(len(text))
        if self._before.strip():
            return none
        start = len(text) - len(text.lstrip("\n"))
        output = text[start:] if start else self._before + text
        lines = [line.rstrip() for line in output.split("\n")]
        whole = len(lines) if final else len(lines) - 1
        for size in range(1, len(self._above) + 1):
            above = self._above[-size:]
            if not self._is_distinct(above):
                continue
            if whole >= size and lines[:size] == above:
                return RepetitionEnd(0, is_loop=True)
            begins = whole < size and lines[:whole] == above[:whole]
            if begins and not final and above[whole].startswith(lines[whole]):
                none = RepetitionEnd(0)
        return none

    def _is_distinct(self, lines: Sequence[str]) -> bool:
        """Return True if the lines have words, open no block and occur only once."""
        if not any(len(line.strip()) >= 8 and _WORDS.search(line) for line in lines):
            return False
        last = lines[-1].rstrip()
        if last.endswith((":", "{", "(", "[", ",", "do", "then")):
            return False
        return f"\n{self._context}".count("\n" + "\n".join(lines)) == 1

    def _line_loop(self, text: str, *, final: bool) -> RepetitionEnd:
        """Find the same line, or the same few lines, five times."""
        lines = (self._before + text).split("\n")
        whole = len(lines) if final else len(lines) - 1
        places = accumulate((len(line) + 1 for line in lines), initial=-len(self._before))
        starts = [max(0, at) for at in places]  # of the lines in the output
        alike = [0] * (_MAX_GROUP + 1)  # by size: lines in a row that equal those `size` before
        pending = len(lines)
        for number in range(1, len(lines)):
            for size in range(1, min(_MAX_GROUP, number) + 1):
                one, other = lines[number - size].rstrip(), lines[number]
                complete = number < whole
                same = other.rstrip() == one if complete else one.startswith(other.rstrip())
                alike[size] = alike[size] + 1 if same else 0
                first = number + 1 - alike[size]
                if not alike[size] or not any(map(_WORDS.search, lines[first - size : first])):
                    continue
                if complete and alike[size] >= (_LOOP_REPEATS - 1) * size:
                    return RepetitionEnd(starts[first], is_loop=True)
                if number == len(lines) - 1 and not final:
                    pending = min(pending, first)
        return RepetitionEnd(min(starts[pending], len(text)))

    def _inline_loop(self, text: str, *, final: bool) -> RepetitionEnd:
        lines = text.split("\n")
        at = 0
        for number, line in enumerate(lines):
            if _REPEATED.search(line):
                end = self._inline_loop_end(line)
                if end.is_loop or (number == len(lines) - 1 and not final):
                    return RepetitionEnd(at + end.at, end.is_loop)
            at += len(line) + 1
        return RepetitionEnd(len(text))

    def _inline_loop_end(self, line: str) -> RepetitionEnd:
        """Return where to end `line`. Only at its end counts a repetition that is no loop."""
        pending = len(line)
        for period in range(1, min(_MAX_PERIOD, len(line) // 3) + 1):
            least = max(3 * period, _KEPT_LENGTH)
            loop = _CHARACTER_LOOP_LENGTH if period == 1 else _LOOP_LENGTH
            loop = max(loop, _LOOP_PERIODS * period)
            for found in re.finditer(rf"(.{{{period}}})\1{{2,}}", line):
                start, end = found.span()
                while end < len(line) and line[end] == line[end - period]:
                    end += 1
                if end - start < least or self._may_repeat(found[1]):
                    continue
                if end - start >= loop:
                    return RepetitionEnd(start + least, is_loop=True)
                if end == len(line):
                    pending = min(start + least, pending)
        return RepetitionEnd(pending)

    def _may_repeat(self, part: str) -> bool:
        """Return True if `part` may be repeated: punctuation, or a text that the user repeats."""
        shorter = part in (2 * part)[1:-1]  # it repeats a shorter text
        return shorter or not re.search(r"\w", part) or 3 * part in self._context

    def _conflict(self, text: str, *, final: bool) -> RepetitionEnd:
        lines, cursor = self._before + text, len(self._before)
        if not self._has_conflict:
            if found := _CONFLICT.search(lines, cursor):
                return RepetitionEnd(found.start() - cursor, is_loop=True)
            found = _CONFLICT_AT_END.search(lines, cursor)
            if found and (not final or len(found.group()) == 7):
                return RepetitionEnd(found.start() - cursor, is_loop=final)
        return RepetitionEnd(len(text))
