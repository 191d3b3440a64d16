"""Importing transformers: quicker, and with the same outcome."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import transformers
from transformers.utils import import_utils

MODELS = Path(transformers.__path__[0], "models")


@pytest.mark.long
def test_every_file_exports_what_transformers_finds_in_it() -> None:
    quick = import_utils.fetch__all__
    names = 0
    for path in MODELS.rglob("*.py"):
        content = path.read_text(encoding="utf-8")
        found = quick(content)
        assert found == quick.__wrapped__(content), path
        names += len(found)
    assert names > 1000
    for text in ("", "x = 1\n", "__all__ = ['a']", "x\n__all__ = [\n  'a',\n]\ny", " __all__"):
        assert quick(text) == quick.__wrapped__(text)


def test_a_directory_is_read_once_however_it_is_named() -> None:
    scan, auto = import_utils.create_import_structure_from_path, MODELS / "auto"
    assert scan(auto) is scan(os.fspath(auto)) is scan(os.fspath(auto / "__init__.py"))
