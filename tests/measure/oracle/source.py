"""A source file with the findings of a real lexer (Pygments).

The findings: matching brackets, strings and comments, ends of statements and blocks. This judge
knows the languages; the rules of completion do not.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, String, Text

LANGUAGES = {
    ".py": "python",
    ".js": "javascript",
    ".mjs": "javascript",
    ".ts": "typescript",
    ".tsx": "typescript",
    ".java": "java",
    ".kt": "kotlin",
    ".swift": "swift",
    ".c": "c",
    ".cc": "cpp",
    ".cpp": "cpp",
    ".hpp": "cpp",
    ".cs": "csharp",
    ".go": "go",
    ".rs": "rust",
    ".rb": "ruby",
    ".php": "php",
    ".lua": "lua",
    ".pm": "perl",
    ".pl": "perl",
    ".sh": "bash",
    ".bash": "bash",
    ".sql": "postgresql",
    ".html": "html",
    ".css": "css",
    ".scss": "scss",
    ".yml": "yaml",
    ".yaml": "yaml",
}
_PAIRS = {")": "(", "]": "[", "}": "{"}
_CLOSING = re.compile(r"[)\]}]|</|(?:end|fi|done|esac)\b")
_DECORATOR = re.compile(r"\s*(?:@[\w.:]+\s*(?:\(.*\))?|#!?\[.*\]|\[[A-Z].*\])\s*", re.DOTALL)
_MIDDLE = re.compile(r"(?:except|finally|catch|rescue|ensure)\b")
_GOES_ON = re.compile(
    r"[{}.?:+*|&]|-[^-]|->|=|\)|\]|(?:else|elif|elsif|elseif|except|finally|catch|rescue|ensure|when|while|until"
    r"|and|or|from|where|case|default|order|group|having|limit|join|left|inner|on|set|values|as|returns|language"
    r"|union|throws|implements|extends|then|do|in|is|with|using|end)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Source:
    """A source file and its lexical structure."""

    path: str
    language: str
    text: str
    partner: dict[int, int]  # position of the matching bracket, outside strings and comments
    spans: list[tuple[int, int]]  # strings and comments as (start, end), in order

    def line_start(self, at: int) -> int:
        return self.text.rfind("\n", 0, at) + 1

    def line_end(self, at: int) -> int:
        end = self.text.find("\n", at)
        return len(self.text) if end < 0 else end

    def line(self, at: int) -> str:
        return self.text[self.line_start(at) : self.line_end(at)]

    def width(self, at: int) -> int:
        line = self.line(at)
        return len(line[: len(line) - len(line.lstrip())].expandtabs())

    def span(self, at: int) -> tuple[int, int] | None:
        """Return the string or comment around `at`, if any."""
        index = bisect_right(self.spans, (at, -1)) - 1
        if index >= 0 and self.spans[index][0] < at < self.spans[index][1]:
            return self.spans[index]
        return None

    def spans_near(self, at: int) -> list[tuple[int, int]]:
        index = bisect_right(self.spans, (at, -1))
        return self.spans[index : index + 1]

    def balanced(self, start: int, end: int, *, may_close: bool = False) -> bool:
        """Return True if the range closes all its brackets and cuts no string.

        may_close: allow it to close earlier brackets.
        """
        if self.span(start) != self.span(end) and (self.span(end) or not may_close):
            return False
        partners = [self.partner[at] for at in range(start, end) if at in self.partner]
        return all((may_close or start <= partner) and partner < end for partner in partners)

    def statement_end(self, at: int) -> int:
        """Return the end of the line of `at` with all the brackets and strings it opens."""
        start, end = self.line_start(at), self.line_end(at)
        while True:
            closes = [self.partner[each] for each in range(start, end) if each in self.partner]
            ends = [self.line_end(each) for each in closes if each >= end]
            if (span := self.span(end)) and span[0] >= start:
                ends.append(self.line_end(span[1]))
            if self.text[:end].endswith("\\") and not self.span(end):
                ends.append(self.line_end(end + 1))
            if not ends or max(ends) <= end:
                return end
            end = max(ends)

    def next_line(self, end: int) -> int | None:
        """Return the start of the next non-empty line after `end`, None for the last line."""
        found = re.compile(r"\n[^\S\n]*(?=\S)").search(self.text, end)
        return found.start() + 1 if found else None

    def block_end(self, at: int) -> int:
        """Return the end of the statement of `at` with its block.

        Includes the closing line, and for `try` the handlers.
        """
        base = self.width(at)
        end = self.statement_end(at)
        first = self.line_start(at) + len(self.line(at)) - len(self.line(at).lstrip())
        if any(span[0] == first for span in self.spans_near(first)):
            return end  # a comment
        while _DECORATOR.fullmatch(self.text, self.line_start(at), end):
            below = self.next_line(end)
            if below is None or self.width(below) != base or self.text[end:below].count("\n") > 1:
                return end
            at, end = below, self.statement_end(below)
        tries = re.match(r"\s*(?:try|begin)\b", self.line(at))
        while (below := self.next_line(end)) is not None:
            content = self.line(below).lstrip()
            deeper = self.width(below) > base
            closes = self.width(below) == base and _CLOSING.match(content)
            middle = self.width(below) == base and tries and _MIDDLE.match(content)
            brace = self.width(below) == base and content.startswith("{")
            brace = brace and end == self.line_end(at) and below == end + 1
            if not (deeper or middle or brace):
                opens = closes and end > self.line_end(at) and content[0] not in ")]}"
                return self.statement_end(below) if opens else end
            end = self.statement_end(below)
        return end

    def widest_end(self, at: int) -> int:
        """Return the end of the statement of `at`, including branches such as `else`."""
        end = self.block_end(at)
        while (below := self.next_line(end)) is not None:
            gap = self.text[end:below].count("\n") > 1
            unfinished = re.search(r"[,=+\\|&]\s*$", self.line(end))
            if self.width(below) != self.width(at) or gap:
                return end
            if not (unfinished or may_follow(self.line(below))):
                return end
            end = self.block_end(below)
        return end


def read_source(path: Path) -> Source | None:
    """Return the source, None if the lexer fails or the file is generated."""
    text = path.read_text(encoding="utf-8").replace("\r\n", "\n").replace("\r", "\n")
    language = LANGUAGES[path.suffix]
    spans: list[tuple[int, int]] = []
    partner: dict[int, int] = {}
    open_brackets: list[int] = []
    for at, kind, value in get_lexer_by_name(language).get_tokens_unprocessed(text):
        comment = kind in Comment and kind not in (Comment.Preproc, Comment.PreprocFile)
        comment = comment or (kind is String.Doc and value.lstrip().startswith("//"))
        if comment or kind in String:
            end = at + len(value.rstrip("\n") if comment else value)
            if spans and spans[-1][1] == at and (not comment or kind is Comment.Multiline):
                at = spans.pop()[0]
            elif kind in String.Heredoc and text[at - 1 : at] == "\n":
                at -= 1  # include the newline before its first line
            spans.append((at, end))
            continue
        if kind in Text:  # of a page
            continue
        for offset, character in enumerate(value):
            if character in "([{":
                open_brackets.append(at + offset)
            elif character in _PAIRS:
                if not open_brackets or text[open_brackets[-1]] != _PAIRS[character]:
                    if character == ")" and language == "bash":  # of a case
                        continue
                    return None
                partner[at + offset] = open_brackets[-1]
                partner[open_brackets.pop()] = at + offset
    spans = [(start, start + len(text[start:end].rstrip("\n"))) for start, end in spans]
    return None if open_brackets else Source(str(path), language, text, partner, spans)


def may_follow(line: str) -> bool:
    """Return True if a line may continue a statement above with the same indentation."""
    return bool(_GOES_ON.match(line.lstrip()))
