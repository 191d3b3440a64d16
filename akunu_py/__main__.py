"""Run `akunu` as `python -m akunu_py`."""

from akunu_py.cli import entry

entry()
