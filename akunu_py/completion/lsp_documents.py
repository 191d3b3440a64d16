"""The documents that the editor has open, as the Language Server Protocol describes their changes.

Owns positions: a line and a column in the code units that were agreed on. A line ends at LF, CRLF
or CR and nowhere else; str.splitlines knows more line ends, and a form feed in a source would
shift everything after it. Refuses to read files: what the editor shows is what counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

_LINE_END = re.compile(r"\r\n|\r|\n")


@dataclass(frozen=True, slots=True)
class Document:
    """One open document. `language` is the editor's name for it, such as "python"."""

    uri: str
    language: str
    text: str

    def offset(self, line: int, character: int, encoding: str) -> int:
        """The index in `text` of a position in units of `encoding` ("utf-8", "utf-16", "utf-32").

        Past the last line it is the end of the text, past the end of a line that line's end, and
        in the middle of a character that character's beginning.
        """
        start = 0
        ends = _LINE_END.finditer(self.text)
        if line:
            before = next(islice(ends, line - 1, None), None)
            if before is None:
                return len(self.text)
            start = before.end()
        end = next(ends, None)
        content = self.text[start : end.start() if end else len(self.text)]
        return start + _characters(content, character, encoding)

    def changed(
        self, text: str, start: tuple[int, int], end: tuple[int, int], encoding: str
    ) -> Document:
        """The document with what is between two positions replaced by `text`."""
        first, last = self.offset(*start, encoding), self.offset(*end, encoding)
        return self.with_text(self.text[:first] + text + self.text[max(first, last) :])

    def with_text(self, text: str) -> Document:
        return Document(self.uri, self.language, well_formed(text))


class Documents:
    """The open documents by URI; the one that was used last comes first."""

    def __init__(self) -> None:
        self._documents: dict[str, Document] = {}

    def put(self, document: Document) -> None:
        """Adds or replaces a document, as the one used last."""
        self._documents.pop(document.uri, None)
        self._documents[document.uri] = document

    def remove(self, uri: str) -> None:
        self._documents.pop(uri, None)

    def use(self, uri: str) -> Document | None:
        """The document, now the one used last, or None where it is not open."""
        document = self._documents.get(uri)
        if document is not None:
            self.put(document)
        return document

    def __iter__(self) -> Iterator[Document]:
        return reversed(self._documents.values())


def well_formed(text: str) -> str:
    """`text` with surrogates that stand alone (JSON can escape them) replaced by U+FFFD, which
    takes as many code units; no tokenizer could read them."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _characters(line: str, units: int, encoding: str) -> int:
    """How many characters of `line` lie wholly within its first `units` code units."""
    if encoding == "utf-32" or line.isascii():
        return min(units, len(line))
    if encoding == "utf-8":
        return len(line.encode()[:units].decode(errors="ignore"))
    return len(line.encode("utf-16-le")[: 2 * units].decode("utf-16-le", errors="ignore"))
