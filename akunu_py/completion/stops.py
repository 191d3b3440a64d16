"""Stop rules: where a completion ends, from the text around the cursor.

The rules use the cursor position, indentation, brackets and the text after the cursor. They hold
for most languages and need no parser for each.

    after the cursor               the completion is
    -----------------              -----------------
    more code on the line          the rest of this line
    only closing brackets          everything up to them
    nothing, partial line          this line, and the block that it opens
    nothing, comment               this line, or the statement that it announces
    nothing, indented              the lines with this indentation or a deeper one
    nothing, at the margin         one statement and its block
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile

from akunu_py.completion.repetition import RepetitionStops

_LONGEST = 20_000  # maximum characters of the cursor's line, and of each side for other rules
_LEADING_LINES = 2  # maximum empty lines before the first line of code
_CLOSING_WORDS = ("end", "fi", "done", "esac")
_CLOSING = re.compile(rf"[)\]}}]|</|/?>|;;|(?:{'|'.join(_CLOSING_WORDS)})\b")
_OPENING = re.compile(
    r"(?:[:({\[]|:\s*[|>][-+0-9]*|[=-]>|\b(?:then|do(?:\s*\|[^|]*\|)?|else|begin|in|AS))\s*(?:#.*|//.*)?$"
)
# A statement that opens a block, recognized by its first word.
_HEADER = re.compile(
    r"\s*(?:(?:local|return|export|default|public|private|protected|internal|static|abstract|final"
    r"|sealed|partial|async|open|[\w.]+ *=)\s+)*(?:(?:class|struct|interface|enum|namespace|trait"
    r"|impl|module|def|if|unless|while|until|for|case|switch|begin|elsif|when)\b|function\b[^;{]*\)\s*$"
    r"|[\w-]+\(\)\s*$|[^\s()]+(?:\s*\|\s*[^\s()]+)*\)\s*$"
    r"|sub\s+[\w:]+\s*$|=(?:head\d|item|over|begin|for)\b)"
)
# A tag at the end of its line, or an unfinished one; void elements open no block.
_TAG = re.compile(
    r"\s*<(?:[^\n]*<)?"
    r"(?!(?:area|base|br|col|embed|hr|img|input|link|meta|source|track|wbr)\b[^\n]*>)"
    r"[A-Za-z][\w.:-]*(?:\s[^<>\n]*)?(?:(?<!/)>)?\s*$"
)
# The end of a line that continues on the next one.
_UNFINISHED = re.compile(r"(?:[,\\=+|]|&&|(?<![-+])-|\b(?:and|or|not|in))\s*$")
_DECORATOR = re.compile(
    r"(?:\s*(?:@[\w.:]+[ \t]*(?:\((?:[^()]|\([^()]*\))*\))?|#!?\[[^\n]*\]|\[[A-Z][^\n]*\])"
    r"[ \t]*(?:\n|$))+"
)
_ALLMAN = re.compile(r"\n[ \t]*\{[ \t]*\n")  # a brace alone in its line
# Keywords that continue a statement after its block, at the statement's indentation.
_TRY = re.compile(r"\s*(?:try|begin)\b")
_MIDDLE_WORDS = ("except", "finally", "catch", "rescue", "ensure")
_MIDDLE = re.compile(rf"(?:{'|'.join(_MIDDLE_WORDS)})\b")
# The start of a line that continues the line above: a brace, a method, a pipe; in SQL, a clause.
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

    def __init__(self, prefix: str, suffix: str, max_lines: int = 0) -> None:
        """prefix, suffix: text around the cursor. max_lines: 0 for no limit besides the rules."""
        self._before = prefix[max(prefix.rfind("\n") + 1, len(prefix) - _LONGEST) :]
        rest, _, below = suffix.partition("\n")
        self._rest_of_line = rest.rstrip()  # after the cursor
        self._next_lines = _next_lines(below)
        around = prefix[-_LONGEST:] + "\n" + below[:_LONGEST]
        self._around = Counter(line.rstrip() for line in around.split("\n"))
        self._allman = bool(_ALLMAN.search(prefix[-_LONGEST:]) or _ALLMAN.search(suffix[:_LONGEST]))
        self._max_lines = max_lines
        self._brackets = OpenBrackets(prefix, suffix)
        self._repetition = RepetitionStops(prefix, suffix)

    def cut(self, text: str, *, final: bool = False) -> Cut:
        """Return the final part of `text`, the output so far. final: no more output follows."""
        end = self._repetition.find(text, final=final)
        cut = self._cut(text[: end.at], final=end.is_loop or (final and end.at == len(text)))
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
                if width(line) <= max(0, base):
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
        text = _trimmed(kept)
        return Cut(text[: self._held_from(text)].rstrip())

    def _cut_one_line(self, lines: Sequence[str], final: bool, done: bool) -> Cut:
        """Cut the rest of the cursor's line, without the text already after the cursor."""
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
        """Return where an end of `text` starts that may repeat the text after the cursor."""
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
        if unfinished and (last.endswith("\\") or self._brackets.outermost or indented > base):
            return True if content else None if not whole else False
        in_block = block is not None or self._opens(kept, first)
        in_block = in_block or any(width(each) > base for each in kept[first + 1 :] if each.strip())
        broke_line = first == 0 and not kept[0].strip()  # the model started with a line break
        sql = bool(_SQL.match(statement)) and not last.rstrip().endswith(";")
        if not (in_block or broke_line or sql):
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
        """Return True if all lines so far are decorators, which belong to the next statement."""
        text = "\n".join(kept[first:])
        return bool(_DECORATOR.fullmatch(self._before + text if first == 0 else text))

    def _opens_below(self, statement: str, line: str, whole: bool, base: int) -> bool | None:
        """Return True if `line` is the opening brace of `statement` in Allman style."""
        if not self._allman or statement.rstrip().endswith((";", "}", "{", ",", ":")):
            return False
        content = line.strip()
        return (content[0] == "{" and width(line) == base) if content else False if whole else None

    def _opens(self, kept: list[str], first: int) -> bool:
        """Return True if the first statement of the completion opens a block."""
        text = ""
        for number, line in enumerate(kept[first:], start=first):
            if _DECORATOR.fullmatch(line if number else self._before + line):
                continue
            text += line
            start = (self._before if first == 0 else "") + text
            if _OPENING.search(start) or _TAG.fullmatch(start) or _HEADER.match(start):
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
    lengths = range(len(_FENCE_CLOSING) - 1, -1, -1)
    held_back = next(n for n in lengths if code.endswith(_FENCE_CLOSING[:n]))
    return code[: len(code) - held_back], False


# ---- brackets around the cursor


_SCANNED = 40_000  # characters before the cursor; half as many after it
_STATEMENT = 40  # maximum lines of a statement
_PAIRS = {"(": ")", "[": "]", "{": "}"}
_OPENERS = {closer: opener for opener, closer in _PAIRS.items()}
_LONG = {'"""': '"""', "'''": "'''", "/*": "*/", "<!--": "-->", "--[[": "]]"}
_QUOTES = "\"'`"
_COMMENT = "#"  # any comment that ends with its line

# A string ends in its line. A quote inside or before a word is an apostrophe or a lifetime. A very
# long string counts as code, because the search for its end takes too long. A regular expression
# stands where no division can. #name {, #fff; and #define are no comments. -- before a quote ends
# the options of a command. A here-document starts after <<WORD.
_STRINGS = {
    '"': r"\"(?:\\.|[^\"\\\n]){0,1000}+",
    "'": r"(?<!\w)'(?:\\.|[^'\\\n]){0,1000}+",
    "`": r"`[^`\n]{0,1000}+",
    "/": r"(?:(?<=[(,=:!&|?;~])|(?<=[(,=:!&|?;~] )|(?<=return ))/(?![/*\s,)])"
    r"(?:\\.|\[(?:\\.|[^\]\\\n]){0,300}+(?:\]|\Z)|[^/\\\[\n]){0,300}+",
}
_ENDS = {'"': '"', "'": r"'(?!\w)", "`": "`", "/": "/"}
_OTHER = (
    r"\"\"\"|(?<!')'''(?!')|(?<![^\s(){},;\[\]=])/\*|<!--|--\[\["
    r"|(?<![^\s(=])<<[-~<]?([\"']?)[A-Z_]\w*\1(?=\W|\Z)"
    r"|(?<!\S)(?://(?! *\$|=)|--(?!\S| *[\"'$])"
    r"|#(?![\[{(]|[\w-]+(?: ?[{(,.:>]|\))|[0-9a-fA-F]{3,8}[;,)]"
    r"|(?:define|if|ifn?def|el(?:if|se)|endif|include|undef|pragma|error|(?:end)?region)\b))[^\n]*"
    r"|(?<!\S):-?[()]|\\[()\[\]{}]|[()\[\]{}]"
)
_CLOSED = re.compile("|".join([_OTHER, *(_STRINGS[kind] + _ENDS[kind] for kind in _STRINGS)]))
_MAY_CLOSE = re.compile(
    "|".join([_OTHER, *(rf"{_STRINGS[kind]}(?:{_ENDS[kind]}|\\?\Z)" for kind in _STRINGS)])
)
# The rest of a string, without its opening quote.
_REST = {kind: re.compile(_STRINGS[kind].partition(kind)[2] + _ENDS[kind]) for kind in _QUOTES}
_LABEL = re.compile(r"[ \t]*[^\s|;]+(?:[ \t]*\|[ \t]*[^\s|;]+)*")  # `a | b)`, `1)`
_LEADING = re.compile(r"[)\]}]|\"\"\"|'''|\*/")
_TOP_LINE = re.compile(r"\n(?=[^\s)\]}])")


@dataclass(frozen=True, slots=True)
class Bracket:
    """A bracket in a text."""

    at: int
    kind: str  # the opening bracket
    opens: bool  # False for the closing bracket


@dataclass(slots=True)
class OpenBracket:
    """A bracket that is open at the cursor."""

    kind: str
    at: int  # in the cursor's line, -1 if above
    width: int  # the indentation of its line
    line: int = 0  # where its line starts
    closed: bool = False  # by the text after the cursor

    @property
    def on_line(self) -> bool:
        """Return True if the bracket was opened in the cursor's line."""
        return self.at >= 0


class OpenBrackets:
    """The brackets that are open between `prefix` and `suffix`.

    Brackets in strings, comments and regular expressions do not count. Triple quotes and comment
    delimiters count as brackets. After the cursor, a closing bracket counts in the rest of its
    line, or as the first character of a line with the indentation of the opening line.
    """

    def __init__(self, prefix: str, suffix: str) -> None:
        window = prefix[-_SCANNED:]
        top = _TOP_LINE.search(window) if len(window) < len(prefix) else None
        if top is not None:
            window = window[top.end() :]
        # Without a line in the first column, text before the window may have opened brackets.
        self._unseen = len(window) < len(prefix) and top is None and "\n" in window
        start = window.rfind("\n") + 1
        above, self._before = window[:start], window[start:]
        found, self._above_inside = scan(above)
        self._above = []
        for each in _match(found)[0]:
            line = above.rfind("\n", 0, each.at) + 1
            self._above.append(OpenBracket(each.kind, -1, width(above[line:]), line))
        self._closed_at: set[int] = set()  # positions of brackets closed after the cursor
        found, self.inside = scan(self._before, self._above_inside, ended=False)
        self._open = self._add(self._above, found)
        if self.inside in _STRINGS:
            self._open.append(OpenBracket(self.inside, self._before.rfind(self.inside), 0, 10**9))
        self._mark_closed(suffix)
        self._closed_at = {each.at for each in self._open if each.on_line and each.closed}

    def first_excess(self, text: str, *, ended: bool = True) -> int | None:
        """Return the position of the first closing bracket too many in `text`, None for none.

        ended: the last line is complete. If not, brackets after an open quote do not count,
        because the quote may still be closed.
        """
        stack = list(self._above)
        for bracket in self._scan(text, ended=ended):
            if bracket.opens:
                closed = bracket.at in self._closed_at
                stack.append(OpenBracket(bracket.kind, bracket.at, 0, 0, closed))
                continue
            at = _closes([each.kind for each in stack], bracket.kind)
            behind = bracket.at + len(closer_of(bracket.kind)) - len(self._before)
            if behind > 0:
                label = bracket.kind == "(" and self._is_label(text, bracket.at)
                if stack[at].closed if at is not None else not (label or self._unseen):
                    return max(0, bracket.at - len(self._before))
            del stack[len(stack) if at is None else at :]
        return None

    def depth(self, text: str, *, closed: bool = False) -> int:
        """Count the brackets open after `text`. closed: also count any closed after the cursor."""
        stack = self._add([], self._scan(text))
        return sum(each.kind not in _STRINGS and (closed or not each.closed) for each in stack)

    def imbalance(self, text: str) -> int:
        """Count the unmatched brackets of the cursor's line followed by `text`."""
        found = self._scan(text)
        if self.inside:  # the cursor is in a comment or a string, so brackets inside it count
            line = self._before + text
            found = [
                Bracket(at, _OPENERS.get(each, each), each in _PAIRS)
                for at, each in enumerate(line)
                if each in _PAIRS or each in _OPENERS
            ]
        unmatched, excess, dropped = _match(found)
        return len(unmatched) + len(excess) + dropped

    def ends_long(self, rest: str) -> bool:
        """Return True if `rest` starts with the end of the string or comment at the cursor."""
        return is_long(self.inside) and rest.lstrip().startswith(closer_of(self.inside))

    @property
    def between_braces(self) -> bool:
        """Return True if the last open bracket is a brace of the cursor's line."""
        return bool(self._open) and self._open[-1].on_line and self._open[-1].kind == "{"

    @property
    def outermost(self) -> bool:
        """Return True if the lines above leave no bracket open."""
        return not self._above

    def undecided(self, text: str) -> int:
        """Count the last characters of `text` that may be part of a closing delimiter."""
        closers = [_LONG[each.kind] for each in self._open if each.closed and each.kind in _LONG]
        return max(
            (n for closer in closers for n in range(len(closer)) if text.endswith(closer[:n])),
            default=0,
        )

    def _scan(self, text: str, *, ended: bool = True) -> list[Bracket]:
        """Return the brackets of the cursor's line followed by `text`."""
        cursor = len(self._before)
        return scan(self._before + text, self._above_inside, ended=ended, cursor=cursor)[0]

    def _add(self, stack: Sequence[OpenBracket], found: Sequence[Bracket]) -> list[OpenBracket]:
        """Return the brackets of `stack` that are open after `found`, of the cursor's line."""
        stack = list(stack)
        for bracket in found:
            if bracket.opens:
                closed = bracket.at in self._closed_at
                stack.append(
                    OpenBracket(bracket.kind, bracket.at, width(self._before), 10**9, closed)
                )
            elif (at := _closes([each.kind for each in stack], bracket.kind)) is not None:
                del stack[at:]
        return stack

    def _is_label(self, text: str, at: int) -> bool:
        """Return True if the line before `at` is a case label or a list number."""
        line = (self._before + text)[:at].rpartition("\n")[2]
        return bool(_LABEL.fullmatch(line))

    def _mark_closed(self, suffix: str) -> None:
        """Mark the brackets that `suffix` closes."""
        inside = self.inside
        rest, _, below = suffix[: _SCANNED // 2].partition("\n")
        if is_long(inside):
            closed = _is_closed_in(suffix, inside)
        else:
            closed = inside in _STRINGS and len(re.findall(rf"(?<!\\){inside}", rest)) % 2 == 1
        inside = self._mark_on_line(rest, below, inside if closed or inside == _COMMENT else "")
        self._mark_below(below, inside if is_long(inside) else "")

    def _mark_on_line(self, rest: str, below: str, inside: str) -> str:
        """Mark brackets that the rest of the line closes; return the end state of `scan`."""
        deeper = takewhile(lambda line: width(line) > width(self._before), below.split("\n"))
        statement = "\n".join([rest, *islice(deeper, _STATEMENT)])
        opened = sum(each.on_line and each.kind in _PAIRS for each in self._open)
        all_closed = len(_match(scan(statement, inside)[0])[1]) >= opened
        found, after = scan(rest, inside)
        for kind in _match(found)[1]:
            free = [each for each in self._open if each.kind == kind and not each.closed]
            on_line = [each for each in free if each.on_line]
            if free:  # the outermost of the line, but the innermost if the lines below close all
                (on_line[0] if on_line and not all_closed else free[-1]).closed = True
        return after

    def _mark_below(self, below: str, inside: str) -> None:
        """Mark brackets that the lines below close at the indentation of the opening line.

        Several opening lines may match: the last one does if all brackets are closed, else the
        first, because the last one is new.
        """
        lowest, closing = 10**6, True  # least indentation so far; its lines all close brackets
        unmatched = Counter(each.kind for each in self._open if not each.closed)
        excess = Counter(_match(scan(below, inside)[0])[1])
        all_closed = {kind for kind in unmatched if excess[kind] >= unmatched[kind]}
        hidden = _hidden(below, inside)
        at = 0
        for line in below.split("\n"):
            start, at = at, at + len(line) + 1
            content = line.strip()
            if not content or any(first < start <= last for first, last in hidden):
                continue
            depth = width(line)
            if depth > lowest or (depth == lowest and not closing):
                continue
            closing = bool(_LEADING.match(content))
            lowest = depth
            while found := _LEADING.match(content):
                kind = _OPENERS.get(found.group(), {"*/": "/*"}.get(found.group(), found.group()))
                free = [
                    each
                    for each in self._open
                    if each.kind == kind and each.width == depth and not each.closed
                ]
                if free:
                    choose = max if kind in all_closed else min
                    choose(free, key=lambda each: each.line).closed = True
                content = content[found.end() :].lstrip()
            if not depth and not closing:
                break


def scan(
    text: str, inside: str = "", *, ended: bool = True, cursor: int = -1
) -> tuple[list[Bracket], str]:
    """Return the brackets of `text` in order, and the state at its end.

    The state is a quote, the delimiter of a long string or comment, "#" for a comment, or "".
    inside: the state at the start. ended: as in `OpenBrackets.first_excess`. cursor: the quotes
    around this position count as brackets.
    """
    found: list[Bracket] = []
    at = 0
    if inside == _COMMENT:
        at = text.find("\n")
        if at < 0:
            return found, inside
    elif is_long(inside):
        end = _find_end(text, inside, 0)
        if end is None:
            return found, inside
        found.append(Bracket(end[0], inside, False))
        at = end[1]
    elif inside in _REST and (closed := _REST[inside].match(text)):
        found.append(Bracket(closed.end() - 1, inside, False))
        at = closed.end()
    return _scan_code(text, at, found, ended, cursor)


def _scan_code(
    text: str, at: int, found: list[Bracket], ended: bool, cursor: int
) -> tuple[list[Bracket], str]:
    """Add the brackets of `text` from `at` on to `found`; return it, and what the text ends inside.

    That is a quote, a comment or a here-document, or "" for code. ended: no more text follows.
    cursor: a string around this place counts as a pair of brackets.
    """
    pattern = _CLOSED if ended else _MAY_CLOSE
    inside, here = "", ""  # here: the start of a here-document, whose text starts on the next line
    line_end = len(text)
    while True:
        token = pattern.search(text, at, line_end)
        if token is None:
            if not here:
                return found, inside
            end = _find_end(text, here, line_end)
            if end is None:
                return found, here
            found.append(Bracket(end[0], here, False))
            at, here, line_end = end[1], "", len(text)
            continue
        start, at, kind = token.start(), token.end(), token.group()
        if kind in _PAIRS:
            found.append(Bracket(start, kind, True))
        elif kind in _OPENERS:
            found.append(Bracket(start, _OPENERS[kind], False))
        elif kind.startswith("<<"):
            found.append(Bracket(start, kind, True))
            here, line_end = kind, text.find("\n", at)
            if line_end < 0:
                return found, kind
        elif kind in _LONG:
            found.append(Bracket(start, kind, True))
            end = _find_end(text, kind, at)
            if end is None:
                return found, kind
            found.append(Bracket(end[0], kind, False))
            at = end[1]
        elif kind[0] in _QUOTES and _CLOSED.match(text, start):
            if kind[0] == "'" and at == len(text) and not ended:
                inside = kind[0]  # may still be an apostrophe
            elif start < cursor < at:
                found += Bracket(start, kind[0], True), Bracket(at - 1, kind[0], False)
        elif at == len(text):
            if kind[0] not in _STRINGS or kind.startswith("//"):
                inside = _COMMENT if kind[0] not in ":\\" else ""
            elif not ended:
                inside = kind[0] if kind[0] in _QUOTES else ""


def is_long(kind: str) -> bool:
    """Return True if `kind` opens a string, comment or here-document of several lines."""
    return kind in _LONG or kind.startswith("<<")


def closer_of(kind: str) -> str:
    """Return the closing delimiter; for a here-document its word."""
    return _PAIRS.get(kind) or _LONG.get(kind) or kind.strip("<-~\"'")


def _find_end(text: str, kind: str, at: int) -> tuple[int, int] | None:
    """Return the span of the first closing delimiter of `kind` after `at`."""
    if kind.startswith("<<"):
        found = re.compile(rf"(?m)^[ \t]*{closer_of(kind)}\b").search(text, at)
        return found.span() if found else None
    start = text.find(_LONG[kind], at)
    return None if start < 0 else (start, start + len(_LONG[kind]))


def _is_closed_in(suffix: str, kind: str) -> bool:
    """Return True if `suffix` closes `kind` before it opens another one."""
    closer = closer_of(kind)
    if closer == kind:
        return suffix.count(kind) % 2 == 1
    end = _find_end(suffix, kind, 0)
    return end is not None and not 0 <= suffix.find(kind) < end[0]


def _match(found: Sequence[Bracket]) -> tuple[list[Bracket], list[str], int]:
    """Return the open brackets, the kinds of excess closing ones, and the number skipped.

    A closing bracket skips the brackets that are open inside its pair.
    """
    unmatched: list[Bracket] = []
    excess, dropped = [], 0
    for bracket in found:
        if bracket.opens:
            unmatched.append(bracket)
        elif (at := _closes([each.kind for each in unmatched], bracket.kind)) is not None:
            dropped += len(unmatched) - at - 1
            del unmatched[at:]
        else:
            excess.append(bracket.kind)
    return unmatched, excess, dropped


def _hidden(text: str, inside: str) -> list[tuple[int, int]]:
    """Return the spans of `text` in strings or comments of several lines."""
    found = [each for each in scan(text, inside)[0] if is_long(each.kind)]
    spans, start = [], -1 if inside else None
    for each in found:
        if each.opens:
            start = each.at
        elif start is not None:
            line = text.rfind("\n", 0, each.at) + 1  # a line that starts with the end is outside
            begins = not text[line : each.at].strip()
            spans.append((start, line - 1 if begins else each.at))
            start = None
    return spans


def width(line: str) -> int:
    """Return the indentation of a line in columns; a tab stop is every 8 columns."""
    return len("".join(takewhile(str.isspace, line.partition("\n")[0])).expandtabs())


def _closes(stack: list[str], kind: str) -> int | None:
    """Return the index of the match of a closing bracket, not outside a brace or long string."""
    for at in range(len(stack) - 1, -1, -1):
        if stack[at] == kind:
            return at
        if stack[at] == "{" or is_long(stack[at]):
            return None
    return None
