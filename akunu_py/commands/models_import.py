"""`akunu models import`: makes a directory or a GGUF file on this machine a model of the store."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from akunu_py.commands.progress import progress_bar
from akunu_py.models.local_import import import_model
from akunu_py.text import human_size


def run(args: argparse.Namespace) -> int:
    with progress_bar() as progress:
        model = import_model(Path(args.path), name=args.name, bits=args.quantize, progress=progress)
    print(f"{model.name} is ready ({human_size(model.size)}): {model.path}", file=sys.stderr)
    return 0
