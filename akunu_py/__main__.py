"""`python -m akunu_py` is `akunu`."""

from akunu_py.cli import entry

entry()
