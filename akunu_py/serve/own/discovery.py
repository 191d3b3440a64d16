"""Running servers on this machine, and the private files that announce them."""

import contextlib
import hashlib
import hmac
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from akunu_py import paths
from akunu_py.files import read_json, write_atomically
from akunu_py.types import LoadOptions
from akunu_py.version import __version__

_MAX_BYTES = 64 << 10  # of a file


@dataclass(frozen=True, slots=True)
class RunningServer:
    """The contents of a running server's file."""

    url: str  # on this machine
    token: str  # API key of akunu's own clients
    models: dict[str, str]  # directories by name
    weights: str = "auto"
    kv_bits: int | None = None
    version: str = __version__
    process: int = field(default_factory=os.getpid)

    def name_of(self, model: Path, options: LoadOptions) -> str | None:
        """Return the name of a model if the server loads it as in `options`, else None.

        Any context length matches. Options with a memory limit never match.
        """
        expected = LoadOptions(options.weights, self.kv_bits, options.context)
        same = options.weights in ("auto", self.weights) and options == expected
        if not same or self.version != __version__:
            return None
        found = (name for name, path in self.models.items() if path == str(model.resolve()))
        return next(found, None)


def loopback_url(url: str) -> str:
    """Return the URL that this machine uses to reach a server; replaces wildcard addresses."""
    for wildcard, loopback in (("//0.0.0.0:", "//127.0.0.1:"), ("//[::]:", "//[::1]:")):
        url = url.replace(wildcard, loopback)
    return url


def proof(token: str, challenge: str) -> str:
    """Return the answer to a challenge, which proves the knowledge of the token."""
    return hmac.new(token.encode(), challenge.encode(), hashlib.sha256).hexdigest()


@contextlib.contextmanager
def announce(server: RunningServer) -> Iterator[None]:
    """Announce a server to this user's programs while the block runs; ignore write errors."""
    directory = paths.servers_dir()
    file = directory / f"{server.url.rpartition(':')[2]}.json"
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(file, json.dumps(asdict(server)).encode())
    try:
        yield
    finally:
        if _read(file) == server:
            with contextlib.suppress(OSError):
                file.unlink()


def running_servers() -> list[RunningServer]:
    """Return the running servers; delete the files of those that were killed."""
    servers = []
    for file in sorted(paths.servers_dir().glob("*.json")):
        server = _read(file)
        if server is not None and _is_running(server.process):
            servers.append(server)
        else:
            with contextlib.suppress(OSError):
                file.unlink()
    return servers


def _is_running(process: int) -> bool:
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
