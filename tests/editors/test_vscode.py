"""The VS Code extension in node, and in a window of code-server.

The window is skipped unless AKUNU_VSCODE names a folder that `.ci/vscode FOLDER` makes.
"""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from akunu_py.engine.engine import Engine
from akunu_py.version import __version__
from tests.support.command import AKUNU, until
from tests.support.editor_helper import write_helper
from tests.support.paths import EDITORS, ROOT
from tests.support.serving import at_a_socket, served

DIRECTORY = EDITORS / "vscode" / "extension"
RUN = ROOT / "tests" / "support" / "vscode_run.js"
HELPER = [*AKUNU, "complete"]
CODE = "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n"

needs_node = pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")
HERE: dict[str, Any] = {"text": CODE, "line": 4, "character": 0}


def node(code: str, *arguments: object) -> Any:
    """Run JavaScript; return the JSON that it prints."""
    command = ["node", "-e", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return json.loads(done.stdout)


def answers(command: list[str], *requested: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the answers to VS Code; the requests are sent at the same time."""
    done = subprocess.run(
        ["node", RUN, DIRECTORY / "extension.js", *command],
        input="\n".join(map(json.dumps, requested)),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


@needs_node
def test_the_starter_completes_and_superseded_requests_show_nothing(
    loaded_starter: Engine,
) -> None:
    """`akunu complete` uses a server of this process."""
    word = {"start": {"line": 4, "character": 0}, "end": {"line": 4, "character": 2}}
    chosen = {"range": word, "text": "    return"}
    cancelled = HERE | {"cancel": 1}
    half = "re\n# \U0001f600\ud83d"  # half a character
    menu = HERE | {"text": CODE + half, "character": 2, "chosen": chosen}
    with served(loaded_starter.path, "starter") as model, at_a_socket(model.app) as url:
        command = [*HELPER, "--fim", "none", "--server", url]  # a warning would import mlx-lm
        found = answers(command, HERE, cancelled, menu)
    items = [[item["insertText"] for item in answer["items"]] for answer in found]
    assert sorted(items) == [[], [], ["    return a - b"]]
    (item,) = found[-1]["items"]  # the last one superseded the others
    assert item["range"] == word
    assert [answer["warnings"] for answer in found] == [[], [], []]


# Loads, writes a first line, and the rest once that is accepted.
SLOW_HELPER = """
if "accepted" in request:
    seen.append(f"accepted {request['accepted']}")
    if len(seen) == 1:
        request["id"] = 1
        say(text="\\n  one\\ntwo")
elif request.get("max_tokens") == 0:
    seen.append(request["prefix"])
elif not request.get("cancel") and request["prefix"].endswith("read?"):
    say(text="|".join(seen))
elif not request.get("cancel"):
    say(status="loading")
    for delta in ("\\n  o", "ne\\n", "two"):
        say(delta=delta)
"""


@needs_node
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_the_first_line_is_shown_while_the_rest_is_written(newline: str, tmp_path: Path) -> None:
    """And the editor asks again when that is there; loading is shown meanwhile."""
    command = write_helper(tmp_path, SLOW_HELPER.replace(r"\n", repr(newline)[1:-1]))
    read = {"text": CODE + "read?", "line": 4, "character": 5, "after": True}
    *found, reported = answers(command, HERE | {"whole": True, "accept": True}, read)
    items = [[item["insertText"] for item in answer["items"]] for answer in found]
    first = f"{newline}  one"
    assert items == [[first], [f"{first}{newline}two"]]  # without a request to the helper
    assert reported["items"][0]["insertText"] == "accepted 1|accepted 1"
    assert found[0]["status"] == "akunu: the model is being loaded"
    actions = [name.removeprefix("editor.action.inlineSuggest.") for name in found[-1]["again"]]
    assert actions == ["hide", "trigger"]  # VS Code keeps a shown item


@needs_node
def test_a_request_by_hand_has_alternatives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By key, others come only when the key is pressed again, and nothing comes by itself."""
    others = "[str(each) for each in range(request.get('alternatives', 0))]"
    command = write_helper(tmp_path, f"say(text='first', alternatives={others})")
    by_itself = HERE | {"after": True}
    by_hand = by_itself | {"byHand": True}
    for trigger, expected in (
        ("auto", [["first", "0", "1"], ["first"], ["first", "0", "1"]]),
        ("key", [["first"], [], ["first", "0", "1"]]),
    ):
        monkeypatch.setenv("TRIGGER", trigger)
        found = answers(command, by_hand, by_itself, by_hand)
        assert [[item["insertText"] for item in answer["items"]] for answer in found] == expected
    place = {"line": 4, "character": 0}
    chosen = {"range": {"start": place, "end": place}, "text": "x"}  # in the suggestion menu
    (next_to_menu,) = answers(command, by_hand | {"chosen": chosen})
    assert next_to_menu["items"] == []


@needs_node
def test_changed_places_are_prefilled_except_in_disabled_languages(tmp_path: Path) -> None:
    command = write_helper(tmp_path, SLOW_HELPER)
    unchanged = {"text": CODE + "x", "line": 1, "character": 4, "rest": True}
    rests = {"text": CODE, "line": 1, "character": 4, "rest": True, "edited": True}
    requested = {"text": CODE + "read?", "line": 4, "character": 5}
    found = answers(command, unchanged, rests, requested | {"language": "markdown"}, requested)
    items = [[item["insertText"] for item in answer["items"]] for answer in found]
    assert items == [[], ["def add(a, b):\n    "]]


@needs_node
def test_requests_have_the_files_of_other_tabs_and_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tabs that were never shown are read from disk; of a large file, a part. So is the file that
    defines a name at the cursor, also after the language server failed at another name."""
    files = "[(each['path'], each['text']) for each in request['files']]"
    command = write_helper(tmp_path, f"say(text=json.dumps([request['root'], {files}]))")
    small, large = tmp_path / "small.py", tmp_path / "large.py"
    small.write_text("small = 1\n")
    large.write_text("large = 1\n" * 20_000)
    monkeypatch.setenv("TABS", f"{small}:{large}:{tmp_path}/missing.py")
    (tmp_path / "area.py").write_text("def area(): ...\n")
    monkeypatch.setenv("DEFINES", str(tmp_path / "area.py"))
    here = {"text": CODE + "broken(area(", "line": 4, "character": 12}
    requested = (here | {"rest": True}, here, here | {"after": True})
    found = answers(command, *requested)
    root, files = json.loads(found[-1]["items"][0]["insertText"])
    assert root == "/tmp"
    paths = [str(tmp_path / "area.py"), str(small), str(large)]
    assert [path for path, _ in files] == paths  # a language server knows the first
    assert files[1][1] == "small = 1\n"
    assert len(files[2][1]) == 100_000


@pytest.mark.long
@needs_node
def test_a_failing_helper_is_reported_once() -> None:
    for command, message in (
        (["no-such-program"], "akunu: no-such-program: no such program; install akunu or set"),
        ([*HELPER, "--model", "nonesuch"], "akunu: no model called 'nonesuch'"),
        ([sys.executable, "-c", "print('hello'); input()"], "akunu: not an answer: hello"),
    ):
        found = answers(command, HERE, HERE)
        assert [answer["items"] for answer in found] == [[], []]
        (warning,) = [warning for answer in found for warning in answer["warnings"]]
        assert message in warning


def test_the_manifest() -> None:
    manifest = json.loads((DIRECTORY / "package.json").read_text())
    assert manifest["version"] == __version__
    assert (DIRECTORY / manifest["main"]).exists()
    assert "dependencies" not in manifest  # the directory is all there is to install


@needs_node
def test_the_window_of_a_long_buffer_stays_while_the_user_types() -> None:
    """Otherwise no cached completion could be used beyond it."""
    code = """
      const { windowStart } = require(process.argv[1])
      const starts = []
      for (let offset = 0; offset < 1000000; offset += 7) {
        const start = windowStart(offset, 200000)
        if (start < 0 || offset - start > 200000) throw new Error(`${offset}: ${start}`)
        if (offset > 200000 && offset - start < 100000) throw new Error(`${offset}: ${start}`)
        starts.push(start)
      }
      console.log(new Set(starts).size)
    """
    assert node(code, DIRECTORY / "helper.js") == 9


@needs_node
def test_a_helper_that_ended_comes_back_by_itself(tmp_path: Path) -> None:
    """After kill -9, and when a model that was missing is there; it waits longer each time."""
    command = write_helper(
        tmp_path,
        """
        if not pathlib.Path(sys.argv[1]).exists(): sys.exit('akunu: no model')
        if request['prefix'] == 'die': os.kill(os.getpid(), 9)
        say(text='x')
        """,
    )
    code = """
      const { Helper } = require(process.argv[1])
      const fs = require('node:fs')
      const [python, script, model] = process.argv.slice(2)
      const told = []
      const states = []
      let now = 0
      const helper = new Helper([python, script, model], (m) => told.push(m),
                                (s) => states.push(s), () => now)
      const ask = async (prefix) => (await helper.ask({ prefix }, () => {}))?.text ?? null
      const answers = []
      const run = async () => {
        for (const wait of [0, 0, 999, 1, 1999]) { now += wait; answers.push(await ask('a')) }
        fs.writeFileSync(model, '')
        for (const wait of [0, 1]) { now += wait; answers.push(await ask('a')) }
        answers.push(await ask('die'), await ask('a'))
        now += 1000
        answers.push(await ask('a'))
        helper.dispose()
        console.log(JSON.stringify([answers, told, states]))
      }
      run()
    """
    found, reported, states = node(code, DIRECTORY / "helper.js", *command, tmp_path / "model")
    assert found == [None] * 6 + ["x", None, None, "x"]
    assert reported == ["no model", "it ended with SIGKILL"]
    ends = [*["idle", "failed"] * 2, "ready", "idle", "failed", "ready", "idle"]
    assert states == ends


# In a window of VS Code: code-server in Chromium


TOOLS = os.environ.get("AKUNU_VSCODE", "")
NODE = Path(TOOLS, "node_modules", ".bin", "node")

# Completes lines that are empty, the first line long before the second.
WINDOW_HELPER = """
if "prefix" in request:
    known = request["prefix"].split("\\n")[-1].strip() or request.get("max_tokens") == 0
    if not known:
        say(delta="one two\\n")
        time.sleep(0.3)
    say(text="" if known else "one two\\nthree", finish_reason="stop")
"""
SETTINGS = {
    "chat.disableAIFeatures": True, "security.workspace.trust.enabled": False,
    "telemetry.telemetryLevel": "off", "workbench.startupEditor": "none",
}  # fmt: skip


class Window:
    """A window of VS Code with the extension and a helper."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name in ("user/User", "user/Machine", "workspace"):
            (directory / name).mkdir(parents=True)
        shutil.copytree(DIRECTORY, directory / "extensions" / "akunu.akunu-0.1.0")
        command = write_helper(directory, WINDOW_HELPER)
        # VS Code drops a machine's settings from the user's when it reads them again.
        for name, settings in (("User", SETTINGS), ("Machine", {"akunu.command": command})):
            (directory / "user" / name / "settings.json").write_text(json.dumps(settings))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        script = ROOT / "tests" / "support" / "vscode_browser.js"
        pipe: Any = subprocess.PIPE
        command = [str(NODE), str(script), TOOLS, str(directory), str(port)]
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def do(self, **requested: Any) -> str:
        """Open a file, press keys or type; return the text that is shown."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(requested) + "\n")
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

    def close(self) -> None:
        self._process.communicate(timeout=60)


@pytest.mark.e2e
@pytest.mark.skipif(not TOOLS, reason="AKUNU_VSCODE names no folder")
def test_all_of_a_completion_is_shown_and_accepted_in_parts(tmp_path: Path) -> None:
    """Its first line at first, all of it when the rest is there."""
    tools = Path(TOOLS)
    until(lambda: (tools / "ready").exists() or not tools.exists(), 240)  # CI makes it meanwhile
    if not tools.exists():
        pytest.skip("no VS Code to be had")
    with contextlib.closing(Window(tmp_path)) as window:
        path = window.open("a.txt", "first\nlast")
        window.do(keys=["Control+End", "Enter"])
        window.wait_for(r"last\none two\nthree$")
        window.do(keys=["Control+ArrowRight"])
        window.wait_for(r"last\none two\nthree$")
        window.do(keys=["Tab", "Control+s"])
        until(lambda: path.read_text() == "first\nlast\none two\nthree")
        until(lambda: (tmp_path / "log").read_text().count('"accepted"') == 1)
