"""The servers that run on this machine: each has a file, for its user alone, by which the user's
other programs find it, know it again, and may ask."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from akunu_py import paths
from akunu_py.files import read_json, write_atomically
from akunu_py.types import LoadOptions
from akunu_py.version import __version__

_MAX_BYTES = 64 << 10  # of a file


@dataclass(frozen=True, slots=True)
class RunningServer:
    """url: where it answers on this machine. token: lets our own clients in. name, path: of the
    model; weights, kv_bits: how it was asked to be loaded. version: of akunu. process: its id."""

    url: str
    token: str
    name: str
    path: str
    weights: str = "auto"
    kv_bits: int | None = None
    version: str = __version__
    process: int = field(default_factory=os.getpid)

    def has(self, model: Path, options: LoadOptions) -> bool:
        """Whether it has that model loaded as `options` ask for it, but for the context's length.
        Who says what a model may take means a copy of its own."""
        own = replace(LoadOptions(), context=options.context, kv_bits=self.kv_bits)
        same = options.weights in ("auto", self.weights)
        return (
            self.path == str(model.resolve())
            and same
            and replace(options, weights=own.weights) == own
            and self.version == __version__
        )


def own_url(url: str) -> str:
    """Where this machine reaches a server that is bound to all of its addresses."""
    for everywhere, here in (("//0.0.0.0:", "//127.0.0.1:"), ("//[::]:", "//[::1]:")):
        url = url.replace(everywhere, here)
    return url


def proof(token: str, challenge: str) -> str:
    """What only who knows the token can say to a challenge: another program may have its port."""
    return hmac.new(token.encode(), challenge.encode(), hashlib.sha256).hexdigest()


@contextlib.contextmanager
def announced(server: RunningServer, directory: Path | None = None) -> Iterator[None]:
    """Lets others find the server, as long as the block runs. Where no file can be written, they do
    not."""
    directory = directory or paths.servers_dir()
    file = directory / f"{server.url.rpartition(':')[2]}.json"  # who has the port now writes it
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(file, json.dumps(asdict(server)).encode())
    try:
        yield
    finally:
        if _read(file) == server:
            with contextlib.suppress(OSError):
                file.unlink()


def running_servers(directory: Path | None = None) -> list[RunningServer]:
    """Those that have a file. One that was killed has it too, until somebody asks here."""
    found = []
    for file in sorted((directory or paths.servers_dir()).glob("*.json")):
        server = _read(file)
        if server is not None and _runs(server.process):
            found.append(server)
        else:
            with contextlib.suppress(OSError):
                file.unlink()
    return found


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError, TypeError):
        return False
    return True


def _read(file: Path) -> RunningServer | None:
    try:
        return RunningServer(**read_json(file, _MAX_BYTES))
    except (OSError, TypeError, ValueError):
        return None
