"""A hub on this machine that speaks the few endpoints we use, and misbehaves on demand."""

import hashlib
import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

REPOSITORY = "someone/tiny-model"


@dataclass(frozen=True)
class Fault:
    """A fault of one request."""

    cut: int | None = None  # end the connection after this number of bytes
    status: int = 0  # answer with an error status and `headers`
    headers: dict[str, str] = field(default_factory=dict)
    flip: bool = False  # alter one byte
    pause: float = 0.0  # seconds before every 1,000 bytes
    no_range: bool = False  # ignore the requested range
    short: int = 0  # omit this number of bytes of the file
    longer: int = 0  # append this number of bytes
    together: int = 0  # first wait until the server sends this number of files at once
    raw: Callable[[Any], None] | None = None  # write the whole answer, then end the connection


def answering(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Fault:
    """Return a Fault that answers `body`."""
    sized = {"Content-Length": str(len(body))}

    def write(out: BinaryIO) -> None:
        lines = [
            f"HTTP/1.1 {status} X",
            *(f"{k}: {v}" for k, v in (sized | (headers or {})).items()),
        ]
        out.write("\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n" + body)

    return Fault(raw=write)


class Hub:
    """One repository at one commit. `faults` by file name, or "api": one a request, in order."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.commit = hashlib.sha1(repr(sorted(files)).encode()).hexdigest()
        self.faults: dict[str, deque[Fault]] = defaultdict(deque)
        self.requests: list[tuple[str, str, str]] = []  # file, range, authorisation
        self.listed: list[str] = []  # further names that the listing has
        self.url = ""
        self.repository = REPOSITORY
        self.elsewhere = ""  # where large files lie, another name of this server
        self.rate = 0.0  # bytes a second of each connection, 0: no limit
        self.sending = 0  # files at this moment
        self.most_sending = 0
        self.xet: dict[str, str] = {}  # the hashes of files that Xet's storage has
        self.xet_storage = ""  # a URL

    def requested(self, name: str) -> list[str]:
        """Return the requested ranges of a file, "" for the whole file."""
        return [wanted for file, wanted, _ in self.requests if file == name]

    def listing(self) -> dict[str, Any]:
        siblings = [_described(name, content) for name, content in self.files.items()]
        siblings += [{"rfilename": name, "size": 1, "blobId": "0" * 40} for name in self.listed]
        return {
            "id": self.repository, "sha": self.commit, "siblings": siblings, "tags": [],
            "downloads": 0, "cardData": {"license": "mit"},
        }  # fmt: skip


def _described(name: str, content: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    described: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": blob}
    if name.endswith(".safetensors"):
        digest = hashlib.sha256(content).hexdigest()
        described["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 134}
    return described


def _in_tree(described: dict[str, Any]) -> dict[str, Any]:
    """Return the file's entry in a listing of a tree."""
    tree = {"type": "file", "path": described["rfilename"], "oid": described["blobId"]}
    if lfs := described.get("lfs"):
        tree["lfs"] = {"oid": lfs["sha256"], "size": lfs["size"], "pointerSize": 134}
    return tree | {"size": described["size"]}


@contextmanager
def running(files: dict[str, bytes]) -> Iterator[Hub]:
    """Run the hub until the end of the block."""
    hub = Hub(files)

    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    served: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        hub = self.served
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if redirected := parts[0] == "cdn":
            parts = parts[1:]
        name = "/".join(parts[:2]) if parts[0] == "api" else "/".join(parts[4:])
        name = "api" if name == "api/models" else name
        wanted = self.headers.get("Range", "")
        hub.requests.append((name, wanted, self.headers.get("Authorization", "")))
        faults = hub.faults[name]
        fault = faults.popleft() if faults else Fault()
        if fault.raw:
            fault.raw(self.wfile)
            self.close_connection = True
        elif fault.status:
            self._answer(fault.status, b"{}", fault.headers)
        elif name == "api":
            self._api(parts)
        elif "/".join(parts[:2]) != hub.repository or name not in hub.files:
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        elif hub.elsewhere and name.endswith(".safetensors") and not redirected:
            self._answer(302, b"", {"Location": f"{hub.elsewhere}/cdn{self.path}"})
        else:
            self._file(hub.files[name], wanted, fault)

    def do_HEAD(self) -> None:
        """Answer the request that precedes the download of a large file."""
        hub = self.served
        name = self.path.rpartition("/")[2]
        if hub.faults[name] and (fault := hub.faults[name][0]).status:
            hub.requests.append((name, "", self.headers.get("Authorization", "")))
            hub.faults[name].popleft()
            self._begin(fault.status, fault.headers, 0)
            return
        described = _described(name, hub.files[name])
        digest = described.get("lfs", {}).get("sha256") or described["blobId"]
        about = {"X-Repo-Commit": hub.commit, "ETag": f'"{digest}"'}
        if name in hub.xet:
            route = f"{hub.url}/api/models/{hub.repository}/xet-read-token/{hub.commit}"
            about |= {"X-Xet-Hash": hub.xet[name], "X-Xet-Refresh-Route": route}
        self._begin(200, about, described["size"])

    def _api(self, parts: list[str]) -> None:
        hub = self.served
        if "/".join(parts[2:4]) != hub.repository:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif len(parts) > 4 and parts[4] == "xet-read-token":
            token = {"X-Xet-Access-Token": "token", "X-Xet-Token-Expiration": "99999999999"}
            self._answer(200, b"{}", token | {"X-Xet-Cas-Url": hub.xet_storage})
        elif len(parts) > 4 and parts[4] == "tree":
            tree = [_in_tree(sibling) for sibling in hub.listing()["siblings"]]
            self._answer(200, json.dumps(tree).encode(), {})
        elif len(parts) > 4 and parts[5] not in ("main", hub.commit):
            self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        else:
            self._answer(200, json.dumps(hub.listing()).encode(), {})

    def _file(self, content: bytes, wanted: str, fault: Fault) -> None:
        if fault.flip:
            content = content[:-1] + bytes([content[-1] ^ 1])
        content = content[: len(content) - fault.short] + b"x" * fault.longer
        start = 0
        headers = {}
        if wanted and not fault.no_range:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        body = content[start:]
        self._begin(206 if headers else 200, headers, len(body))
        sent = body if fault.cut is None else body[: fault.cut]
        hub = self.served
        step = 1000 if fault.pause else max(1, int(hub.rate / 50)) if hub.rate else 1 << 18
        hub.sending += 1
        hub.most_sending = max(hub.most_sending, hub.sending)
        while hub.most_sending < fault.together:
            time.sleep(0.01)
        started, rate = time.monotonic(), hub.rate
        for at in range(0, len(sent), step):
            early = started + at / rate - time.monotonic() if rate else 0
            time.sleep(max(fault.pause, early, 0))
            self.wfile.write(sent[at : at + step])
            self.wfile.flush()
        hub.sending -= 1
        if fault.cut is not None:
            self.close_connection = True

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self._begin(status, headers, len(body))
        self.wfile.write(body)

    def _begin(self, status: int, headers: dict[str, str], length: int) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(key, value)
        self.end_headers()

    def handle(self) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the client disconnected
            super().handle()

    def log_message(self, *_: Any) -> None:
        pass
