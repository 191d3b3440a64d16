"""`python -m akunu_py.bench` is `akunu bench`."""

import sys

from akunu_py.cli import main

sys.exit(main(["bench", *sys.argv[1:]]))
