"""Type 60 keys at 3 a second in Vim, and count what the helper does for them.

    python -m tests.measure.typing_cost TREE

TREE: a checkout, whose plugin and helper are used, with the starter. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.terminal import Terminal

TYPED = "def summary(counts, limit=10):\n    total = sum(counts.values())\n"[:60]
INTERVAL_S = 1 / 3

# Relays the lines of the editor and of the helper, and logs them with the time.
PROXY = """
import json, subprocess, sys, threading, time
log, counts, tree = open(sys.argv[1], "a", 1), sys.argv[2], sys.argv[3]
command = [sys.executable, sys.argv[4], counts, tree]
helper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tree)
def relay(source, target, way):
    for line in source:
        log.write(json.dumps([time.time(), way, json.loads(line)]) + "\\n")
        target.write(line)
        target.flush()
threading.Thread(target=relay, args=(helper.stdout, sys.stdout.buffer, "out"), daemon=True).start()
relay(sys.stdin.buffer, helper.stdin, "in")
helper.stdin.close()
helper.wait()
"""
# Runs `akunu complete` of a tree, and logs each pass: time, rows, CPU seconds of the process.
COUNTER = """
import sys, time
counts, tree = sys.argv[1:]
sys.path.insert(0, tree)
from akunu_py.cli import main
import akunu_py.decoding.target
from mlx_lm.models.llama import LlamaModel
log, forward = open(counts, "a", 1), LlamaModel.__call__
def count(self, inputs, *rest, **more):
    log.write(f"{time.time()} {inputs.size} {time.process_time()}\\n")
    return forward(self, inputs, *rest, **more)
LlamaModel.__call__ = count
sys.argv = ["akunu", "complete", "--model", "starter", "--no-answer-cache"]
main()
"""


def measure(tree: Path, directory: Path) -> dict[str, Any]:
    lines, passes = directory / "lines", directory / "passes"
    for name, code in (("proxy.py", PROXY), ("counter.py", COUNTER)):
        (directory / name).write_text(code)
    arguments = [directory / "proxy.py", lines, passes, tree, directory / "counter.py"]
    command = ", ".join(f"'{word}'" for word in (sys.executable, *arguments))
    (directory / "vimrc").write_text(
        f"set nocompatible noswapfile viminfo=\nset rtp^={tree}/akunu_py/editors/vim\n"
        f"filetype on\nlet g:akunu_time_ms = 200000\nlet g:akunu_command = [{command}]\n"
    )
    source = Path(__file__).parents[2] / "akunu_py" / "completion" / "acceptance.py"
    (directory / "a.py").write_text(source.read_text()[:3000] + "\n\n")
    terminal = Terminal(directory / "tmux")
    try:
        terminal.type(f"vim -Nu {directory}/vimrc {directory}/a.py", "Enter")
        time.sleep(2)
        terminal.type("G", "o")
        while not (lines.exists() and '"text"' in lines.read_text()):
            time.sleep(0.5)
        time.sleep(6)  # what is made ahead
        start = time.time()
        for number, key in enumerate(TYPED):
            time.sleep(max(0.0, start + number * INTERVAL_S - time.time()))
            terminal.type({"\n": "Enter", " ": "Space"}.get(key, key))
        last = time.time()
        while not has_text(lines, last - INTERVAL_S) and time.time() < last + 60:
            time.sleep(0.1)
        time.sleep(3)
    finally:
        terminal.close()
    return summary(start, last, lines, passes)


def has_text(lines: Path, since: float) -> bool:
    """Whether a request of the last key, or one after it, has a first text."""
    said = [json.loads(line) for line in lines.read_text().splitlines()]
    asked = {it["id"] for at, way, it in said if way == "in" and "prefix" in it and at >= since}
    texts = [it for _, way, it in said if way == "out" and (it.get("delta") or it.get("text"))]
    return any(it.get("id") in asked for it in texts)


def summary(start: float, last: float, lines: Path, passes: Path) -> dict[str, Any]:
    said = [json.loads(line) for line in lines.read_text().splitlines()]
    asked = {it["id"]: at for at, way, it in said if way == "in" and "prefix" in it and at >= start}
    ahead = {it["id"] for _, way, it in said if way == "in" and it.get("max_tokens") == 0}
    first: dict[int, float] = {}
    for at, way, it in said:
        if way == "out" and (it.get("delta") or it.get("text")) and it.get("id") in asked:
            first.setdefault(it["id"], at)
    rows = [[float(each) for each in line.split()] for line in passes.read_text().splitlines()]
    cpu = [row[2] for row in rows if row[0] < start][-1:] + [row[2] for row in rows]
    counted = [row for row in rows if row[0] >= start]
    return {
        "requests": len(asked.keys() - ahead),
        "prefills": len(asked.keys() & ahead),
        "passes": len(counted),
        "rows": int(sum(row[1] for row in counted)),
        "cpu_s": round(cpu[-1] - cpu[0], 2),
        "first_texts": len(first),
        "text_after_last_key_s": [round(at - last, 1) for at in first.values() if at > last][:1],
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(measure(Path(sys.argv[1]).resolve(), Path(directory))))
