"""Files with secrets, which completions neither complete nor use as context."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from urllib.parse import unquote, urlsplit

from akunu_py.completion.request import CompletionRequest

_SCHEME = re.compile(r"[A-Za-z][\w+.-]+:")  # of a URI; a drive of Windows has one letter


def is_excluded(path: str, patterns: Sequence[str]) -> bool:
    """Return True if a path or URI matches one of the shell patterns, in upper or lower case.

    A pattern without a slash matches file names, one with a slash the end of the path.
    """
    if _SCHEME.match(path):
        path = unquote(urlsplit(path).path)
    path = path.replace("\\", "/").lower()
    name = path.rpartition("/")[2]
    return any(
        fnmatchcase(f"/{path}", f"*/{pattern.lower().lstrip('/')}")
        if "/" in pattern
        else fnmatchcase(name, pattern.lower())
        for pattern in patterns
    )


def without_excluded(request: CompletionRequest, patterns: Sequence[str]) -> CompletionRequest:
    """Return the request without the files and edits whose paths match the patterns."""
    files = tuple(file for file in request.files if not is_excluded(file.path, patterns))
    edits = request.edits
    if edits is not None:
        edits = tuple(edit for edit in edits if not is_excluded(edit.path, patterns))
    if len(files) == len(request.files) and edits == request.edits:
        return request
    return replace(request, files=files, edits=edits)
