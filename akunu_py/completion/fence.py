"""The Markdown fence that a model which was trained to chat may put around its code.

Owns taking it off while the answer is still being said. Which models do so is data (`fenced` of a
fill-in-the-middle family); where fences are what is written, in Markdown, nothing is taken off.
"""

from __future__ import annotations

import re

_MARKDOWN = (".md", ".markdown", ".mdx", ".qmd", ".rmd")
_OPENING = re.compile(r"```[\w+#.-]*[ \t]*\n")
_MAY_OPEN = re.compile(r"`{1,3}|```[\w+#.-]*[ \t]*")  # so far
_CLOSING = "\n```"


def is_markdown(path: str, language: str) -> bool:
    """Whether fences belong to what is written in the file `path`."""
    return path.lower().endswith(_MARKDOWN) or language.lower() == "markdown"


def unfenced(text: str, *, final: bool) -> tuple[str, bool]:
    """(the code of the answer `text`, whether its fence was closed, so that nothing follows).

    final: nothing more will come. Until then what may turn out to be of a fence is held back; what
    was given once stays.
    """
    opening = _OPENING.match(text)
    if opening is None:
        begun = _MAY_OPEN.fullmatch(text) and (text.startswith("```") or not final)
        return ("" if begun else text), False
    code, closing, _ = text[opening.end() :].partition(_CLOSING)
    if closing or final:
        return code, bool(closing)
    held = next(n for n in range(len(_CLOSING) - 1, -1, -1) if code.endswith(_CLOSING[:n]))
    return code[: len(code) - held], False
