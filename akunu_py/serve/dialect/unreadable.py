"""Parts of messages that a text model cannot read, as one line of text each.

Clients keep such parts in their history, so refusing one would fail all later requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from akunu_py.text import on_one_line

_KINDS = {  # names of a part's type or media type, by their content
    "image": "image",
    "audio": "audio",
    "video": "video",
    "document": "document",
    "pdf": "document",
    "file": "file",
}
_MAX_NAME = 100  # characters of a name or type
# Fields with the content, its name, and the field that contains both, in all dialects.
_DATA = ("data", "url", "image_url", "file_data", "input_audio", "video_url")
_NAMES = ("title", "filename", "name")


def describe(part: Mapping[str, Any]) -> str:
    """Return a line in place of a part, such as "[image, 84 kB: this model reads text only]"."""
    type_name = str(part.get("type", ""))
    kind = next((kind for text, kind in _KINDS.items() if text in type_name), type_name)
    inner = [part, *(each for each in part.values() if isinstance(each, Mapping))]
    name = next((str(each[key]) for each in inner for key in _NAMES if each.get(key)), "")
    sizes = [_size(each[key]) for each in inner for key in _DATA if isinstance(each.get(key), str)]
    size = f"{max(1, round(sizes[0] / 1000)):,} kB" if any(sizes[:1]) else ""
    named = [kind or "part", f"{name}"] if name else [kind or "part"]
    text = " ".join(on_one_line(each)[:_MAX_NAME] for each in named)
    return f"[{', '.join(filter(None, (text, size)))}: this model reads text only]"


def _size(data: str) -> int:
    """Return the number of bytes in base64 `data`; 0 if it is a URL."""
    head, comma, encoded = data.rpartition(",")
    if comma and not head.startswith("data:"):
        return 0
    return 0 if "://" in encoded[:20] else len(encoded) * 3 // 4 - encoded[-2:].count("=")
