"""The extension in VS Code itself: code-server in Chromium, which `.ci/vscode FOLDER` provides.

Skipped unless AKUNU_VSCODE names that folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import EDITORS, ROOT

TOOLS = os.environ.get("AKUNU_VSCODE", "")
NODE = Path(TOOLS, "node_modules", ".bin", "node")

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        not (TOOLS and NODE.exists() and shutil.which("chromium")),
        reason="AKUNU_VSCODE is not a folder that .ci/vscode made",
    ),
]

# Logs every line; completes lines that are empty, the first line long before the second.
HELPER = """
import json, pathlib, sys, time
with pathlib.Path(sys.argv[0]).with_name("log").open("a", buffering=1) as log:
    for line in sys.stdin:
        log.write(line)
        asked = json.loads(line)
        if "prefix" in asked:
            known = asked["prefix"].split("\\n")[-1].strip() or asked.get("max_tokens") == 0
            if not known:
                print(json.dumps({"id": asked["id"], "delta": "one two\\n"}), flush=True)
                time.sleep(0.3)
            said = {"text": "" if known else "one two\\nthree", "finish_reason": "stop"}
            print(json.dumps({"id": asked["id"]} | said), flush=True)
"""
SETTINGS = {
    "chat.disableAIFeatures": True,
    "security.workspace.trust.enabled": False,
    "telemetry.telemetryLevel": "off",
    "workbench.startupEditor": "none",
}


class Window:
    """A window of VS Code with the extension and a helper."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name in ("user/User", "user/Machine", "extensions", "workspace"):
            (directory / name).mkdir(parents=True)
        extension = directory / "extensions" / "akunu.akunu-0.1.0"
        shutil.copytree(EDITORS / "vscode" / "extension", extension)
        (directory / "helper.py").write_text(HELPER)
        (directory / "log").touch()
        command = [sys.executable, str(directory / "helper.py")]
        # VS Code drops a machine's settings from the user's when it reads them again.
        for name, settings in (("User", SETTINGS), ("Machine", {"akunu.command": command})):
            (directory / "user" / name / "settings.json").write_text(json.dumps(settings))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        script = ROOT / "tests" / "support" / "vscode_browser.js"
        self._process = subprocess.Popen(
            [NODE, script, TOOLS, directory, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def do(self, **asked: Any) -> str:
        """Open a file, press keys or type; return the text that is shown."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return str(json.loads(self._process.stdout.readline())["text"])

    def open(self, name: str, text: str) -> Path:
        path = self.directory / "workspace" / name
        path.write_text(text)
        self.do(open=str(path))
        self.wait_for(re.escape(text.splitlines()[0]))
        return path

    def wait_for(self, pattern: str, seconds: float = 60) -> None:
        """Wait until `pattern` matches all the text that is shown, up to spaces at the ends."""
        end = time.monotonic() + seconds
        while not re.search(pattern, text := self.do().rstrip()):
            if time.monotonic() > end:
                self.do(picture=str(self.directory / "window.png"))
                raise AssertionError(f"no {pattern!r} in the editor:\n{text}")
            time.sleep(0.05)

    def lines(self) -> list[dict[str, Any]]:
        """The lines that the helper got so far."""
        log = self.directory / "log"
        return [json.loads(line) for line in log.read_text().splitlines()]

    def close(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Window]:
    window = Window(tmp_path_factory.mktemp("vscode"))
    yield window
    window.close()


def test_all_of_a_completion_is_shown_and_accepted_in_parts(window: Window) -> None:
    """Its first line at first, all of it when the rest is there; parts are counted."""
    path = window.open("a.txt", "first\nlast")
    window.do(keys=["Control+End", "Enter"])
    window.wait_for(r"last\none two\nthree$")
    window.do(keys=["Control+ArrowRight"])
    window.wait_for(r"last\none two\nthree$")
    window.do(keys=["Tab", "Control+s"])
    window.wait_for(r"last\none two\nthree$")
    end = time.monotonic() + 60
    while path.read_text() != "first\nlast\none two\nthree":
        assert time.monotonic() < end
        time.sleep(0.05)
    counted = [line["characters"] for line in window.lines() if "accepted" in line]
    assert counted == [len("one"), len(" two\nthree")]


def test_nothing_is_read_ahead_before_a_change(window: Window) -> None:
    """Requests have the root."""
    before = len(window.lines())
    window.open("b.txt", "".join(f"line {n}\n" for n in range(200)) + "end")
    for _ in range(3):
        window.do(keys=["PageDown"])
        time.sleep(0.6)  # the cursor rests
    assert window.lines()[before:] == []
    window.do(keys=["Control+End", "Enter"])
    window.wait_for(r"end\none two\nthree$")
    assert window.lines()[-1]["root"] == str(window.directory / "workspace")
