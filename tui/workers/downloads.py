"""Model downloads in the background; messages report their progress and end."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from textual.message import Message

from akunu_py.errors import AkunuError, Cancelled
from akunu_py.models.store import model_store
from akunu_py.models.store.progress import Progress

_INTERVAL_S = 0.1


@dataclass
class DownloadUpdate(Message):
    """The progress of the download of `name` changed."""

    name: str


@dataclass
class DownloadEnded(Message):
    """The download of `name` ended; stopped by the user if no result and no error."""

    name: str
    model: str = ""  # the stored model
    drafter: str = ""  # the stored drafter of the model `name`
    error: str = ""


@dataclass(slots=True)
class Download:
    name: str
    is_drafter: bool = False  # of the drafter of the model `name`
    fraction: float = 0.0  # of the bytes, from 0 to 1; never decreases
    progress: Progress = field(default_factory=lambda: Progress("starting"))
    stopped: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread = field(init=False)


class Downloads:
    """All running downloads, one per model or its drafter, each in its own thread."""

    def __init__(self, post: Callable[[Message], object]) -> None:
        self._post = post  # called from the downloads' threads
        self.running: dict[str, Download] = {}
        self.failed: dict[str, str] = {}  # error of the last attempt, by model
        self.rate: float | None = None  # bytes/s of the last download

    def start(self, name: str, *, is_drafter: bool = False) -> bool:
        """Start a download of a model or its drafter. Return False if one already runs."""
        if name in self.running:
            return False
        self.failed.pop(name, None)
        download = self.running[name] = Download(name, is_drafter)
        # A daemon: network reads cannot be interrupted, and downloads can be resumed.
        download.thread = threading.Thread(
            target=self._run, args=(download,), name=f"pull {name}", daemon=True
        )
        download.thread.start()
        return True

    def stop(self, name: str) -> None:
        """Stop a download soon; it can be resumed if the source supports it."""
        if name in self.running:
            self.running[name].stopped.set()

    def close(self, timeout: float) -> bool:
        """Stop all downloads. Return False if one still runs after `timeout` seconds."""
        running = list(self.running.values())
        for download in running:
            download.stopped.set()
        end = time.monotonic() + timeout
        for download in running:
            download.thread.join(max(0.0, end - time.monotonic()))
        return not any(each.thread.is_alive() for each in running)

    def _run(self, download: Download) -> None:
        posted = 0.0

        def report(progress: Progress) -> None:
            nonlocal posted
            if download.stopped.is_set():
                raise Cancelled
            new_phase = progress.phase != download.progress.phase
            download.progress = progress
            download.fraction = max(download.fraction, progress.share)
            if progress.phase == "download" and progress.rate and not progress.stalled:
                self.rate = progress.rate
            if new_phase or time.monotonic() - posted >= _INTERVAL_S:
                posted = time.monotonic()
                self._post(DownloadUpdate(download.name))

        ended = DownloadEnded(download.name)
        try:
            from akunu_py.models.pull.pull import pull, pull_drafter  # slow: network libraries

            if download.is_drafter:
                model = model_store.get(download.name)
                ended.drafter = pull_drafter(model, report).name
            else:
                ended.model = pull(download.name, report).name
        except Cancelled:
            pass
        except AkunuError as error:
            ended.error = str(error)
        except Exception as error:  # noqa: BLE001 - a bug must not look like a stalled download
            ended.error = f"cannot download {download.name}: {type(error).__name__}: {error}"
        finally:
            self.running.pop(download.name, None)
            if ended.error:
                self.failed[download.name] = ended.error
            self._post(ended)
