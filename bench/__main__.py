"""`python -m akunu_py.bench` is `akunu bench`."""

import sys

from akunu_py.cli import entry

entry(["bench", *sys.argv[1:]])
