"""A page in headless Chromium, by the DevTools protocol over pipes."""

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--remote-debugging-pipe", "--no-first-run", "--disable-background-networking"),
)
_KEYS = {"Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, "")}  # code, text


class Page:
    """A page; each method returns once Chromium has done it."""

    def __init__(self, commands: int, replies: int) -> None:
        """commands, replies: the file descriptors of the pipes."""
        self._commands, self._replies, self._number = commands, replies, 0
        self._received, self._session = b"", ""
        self.events: list[dict[str, Any]] = []  # of the page
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (reply := self._receive()).get("id") != self._number:
            self.events.append(reply)
        assert "error" not in reply, reply
        return dict(reply["result"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            data = os.read(self._replies, 1 << 16)
            assert data, "Chromium ended"
            self._received += data
        message, _, self._received = self._received.partition(b"\0")
        return dict(json.loads(message))

    def go(self, url: str) -> None:
        """Open an address, and wait until it is loaded."""
        self.send("Page.navigate", url=url)
        while self.events[-1].get("method") != "Page.loadEventFired":
            self.events.append(self._receive())

    def show(self, width: int, height: int, scheme: str) -> None:
        """Set the size of the window, and the preferred color scheme."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def run(self, code: str) -> Any:
        """Return the value of an expression, or of its promise."""
        found = self.send(
            "Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        check = f"() => {{ if ({condition}) done(); else requestAnimationFrame(check); }}"
        self.run(f"new Promise((done) => {{ const check = {check}; check(); }})")

    def press(self, key: str, *, shift: bool = False, until: str = "true") -> None:
        """Press a key, and wait until an expression is true."""
        code, text = _KEYS[key]
        pressed = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        pressed["modifiers"] = 8 if shift else 0
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **pressed)
        self.send("Input.dispatchKeyEvent", type="keyUp", **pressed)
        self.wait(until)

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def picture(self, file: Path) -> None:
        """Write a screenshot."""
        file.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """Start Chromium and yield an empty page. profile: an empty folder."""
    assert CHROMIUM is not None
    (ours, commands), (replies, theirs) = os.pipe()[::-1], os.pipe()
    # The child finds the pipes at 3 and 4.
    command = f'exec 3<&{commands} 4>&{theirs}; exec "$@"'
    words = ["bash", "-c", command, "-", CHROMIUM, *_FLAGS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        words, pass_fds=(commands, theirs), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    os.close(commands)
    os.close(theirs)
    try:
        yield Page(ours, replies)
    finally:
        os.close(ours)
        process.terminate()
        process.wait(30)
        os.close(replies)
