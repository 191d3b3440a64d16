"""Record the requests of a real client: `python -m tests.serve.record CLIENT MODEL [ARGUMENT ...]`.

Serves a model of the store on loopback; "random" is one of random weights with a long context.
With arguments, `akunu launch CLIENT` runs the client with them. Without, start the client by hand;
Enter ends the recording. Writes `requests/CLIENT.json.gz`. Fails if a request failed, or a client
with a real model.
"""

import gzip
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from akunu_py.models.store import model_store
from tests.support.serving import at_a_socket, served, write_long_model

_KEPT_HEADERS = ("content-type", "accept", "user-agent", "anthropic-version", "anthropic-beta")
_LONGEST = 200  # characters of a text; longer ones are cut
_KEPT = 60  # characters of a text that is cut
_IDS = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{32,}")


class Recorder:
    """ASGI middleware that keeps POST requests without their long texts."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._ids: dict[str, str] = {}
        self.requests: list[dict[str, Any]] = []
        self.errors: list[str] = []  # replies to requests that failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        data = b""

        async def watched() -> MutableMapping[str, Any]:
            nonlocal data
            message = await receive()
            data += message.get("body", b"")
            return message

        async def checked(message: MutableMapping[str, Any]) -> None:
            if message.get("status", 0) >= 400:
                self.errors.append(f"{scope['path']}: status {message['status']}")
            await send(message)

        await self._app(scope, watched, checked)
        if scope["type"] == "http" and scope["method"] == "POST":
            headers = {name.decode(): value.decode() for name, value in scope["headers"]}
            kept = {name: headers[name] for name in _KEPT_HEADERS if name in headers}
            body = self._plain(json.loads(data))
            self.requests.append({"path": scope["path"], "headers": kept, "body": body})

    def _plain(self, value: Any) -> Any:
        """Return a body with numbered ids, without paths of this machine and long texts."""
        if isinstance(value, dict):
            return {name: self._plain(each) for name, each in value.items()}
        if isinstance(value, list):
            return [self._plain(each) for each in value]
        if not isinstance(value, str):
            return value
        value = _IDS.sub(self._numbered, value)
        value = value.replace(str(Path.cwd()), "/project").replace(str(Path.home()), "/home")
        if len(value) <= _LONGEST:
            return value
        digest = hashlib.sha256(value.encode()).hexdigest()[:8]  # shows changes between requests
        return f"{value[:_KEPT]} [{len(value)} characters, {digest}]"

    def _numbered(self, match: re.Match[str]) -> str:
        """Return an id of the same form, with the number of its first appearance."""
        number = self._ids.setdefault(match[0], str(len(self._ids) + 1))
        return re.sub("[0-9a-f]", "0", match[0])[: -len(number)] + number


def main(client: str, model: str, *arguments: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        if model == "random":
            path = write_long_model(Path(folder) / model, model_store.resolve("starter").path)
        else:
            path = model_store.resolve(model).path
        with served(path, model) as server:
            recorder, code = Recorder(server.app), 0
            server.model.service()  # loads the model, so that the launched client gets its context
            with at_a_socket(recorder) as url:
                if arguments:
                    port = url.rpartition(":")[2]
                    launch = ["-m", "akunu_py", "launch", client, "--port", port, "--"]
                    code = subprocess.run([sys.executable, *launch, *arguments]).returncode
                else:
                    input(f"{client} may use {url}; Enter ends the recording. ")
    data = json.dumps(recorder.requests, ensure_ascii=False).encode()
    file = Path(__file__).with_name("requests") / f"{client}.json.gz"
    file.write_bytes(gzip.compress(data, mtime=0))
    print(f"{client}: {len(recorder.requests)} requests", *recorder.errors, sep="\n")
    failed = bool(recorder.errors or not recorder.requests)
    # Some clients fail because an answer of random words has no end.
    return int(failed) if model == "random" else code or int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
