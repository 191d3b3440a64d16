"""The command that starts this installation of akunu."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path


def program_words() -> list[str]:
    """Return the command with an absolute path, for programs with another PATH or directory."""
    script = Path(sys.executable).with_name("akunu")
    return [str(script)] if script.exists() else [sys.executable, "-m", "akunu_py"]


def shell_command() -> str:
    """Return the command for the user's shell: "akunu" if that is this installation."""
    program, *more = program_words()
    found = shutil.which("akunu")
    if not more and found is not None and Path(found).samefile(program):
        return "akunu"
    near = os.path.relpath(program)
    return shlex.join([program if near.startswith("..") else near, *more])
