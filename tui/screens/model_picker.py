"""The models of the store and the catalog, to use or to download during a chat."""

import asyncio
import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from akunu_py import paths
from akunu_py.engine.host import release_streams
from akunu_py.errors import AkunuError
from akunu_py.models import catalog
from akunu_py.models.catalog import CatalogEntry
from akunu_py.models.catalog.recommend import Machine, describe_speed
from akunu_py.models.load.model_files import head_files
from akunu_py.models.store import model_store
from akunu_py.models.store.directories import free_space
from akunu_py.text import displayable, human_duration, human_size
from akunu_py.tui.screens.dialog import DIALOG_STYLE, ListDialog
from akunu_py.tui.workers.downloads import Download, DownloadEnded, Downloads, DownloadUpdate

# A repository on the hub, with an optional revision.
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", re.ASCII)
_HEADINGS = {True: "On this machine", False: "To download"}
_NAME, _SIZE, _SPEED, _STATE = 22, 8, 8, 13  # column widths, with gaps of two; _STATE is minimal
_GOOD_FOR = {"chat": "chat", "code": "code", "fim": "completion", "thinking": "thinking"}
_BAR = 8
_DEFAULT_RATE = 100e6 / 8  # bytes/s before the first download: 100 Mbit/s


@dataclass(frozen=True, slots=True)
class ModelRow:
    name: str
    title: str
    description: str
    size: int = 0  # bytes on disk or to download, 0 if unknown
    context: int = 0  # tokens, 0 if unknown
    license: str = ""
    is_stored: bool = False
    is_too_large: bool = False  # for this machine
    damaged: str = ""  # what is wrong with the files
    tokens_per_s: float = 0.0  # estimated, 0 if unknown
    good_for: str = ""
    drafter: str = ""  # in addition to n-grams
    offered: str = ""  # a drafter to download, its size, and the gain that others measured

    @property
    def facts(self) -> str:
        where = "on disk" if self.is_stored else "download"
        parts = (
            self.license,
            f"{self.context:,} tokens of context" if self.context else "",
            f"{human_size(self.size)} {where}" if self.size else "",
            describe_speed(self.tokens_per_s) if self.tokens_per_s else "",
            self.drafter,
        )
        return " · ".join(filter(None, parts))

    @property
    def is_usable(self) -> bool:
        return self.is_stored and not self.damaged


class ModelsScreen(ListDialog[str]):
    """The list of models. The result is the model to use, None for no change."""

    CSS_PATH = [DIALOG_STYLE, "model_picker.tcss"]  # noqa: RUF012 - as in Textual
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+g", "get_drafter", "Download the drafter", priority=True),
        Binding("ctrl+x", "stop", "Stop the download", priority=True),
    ]
    COMPONENT_CLASSES: ClassVar[set[str]] = {
        f"models--{name}" for name in ("mark", "muted", "good", "bad", "heading")
    }

    heading = "Models"
    keys = "Enter use or download · Ctrl+G drafter · Ctrl+X stop · Esc close"
    placeholder = "Search models, or enter owner/repository"
    none_found = "No matching model."

    def __init__(self, current: str, downloads: Downloads, memory_limit: int | None) -> None:
        super().__init__()
        self.preferred = current  # the model in use
        self._downloads = downloads
        self._memory: int | None = None  # bytes available to a model, None until measured
        self._memory_limit = memory_limit  # bytes set by the user, in place of the measured ones
        self._rows: list[ModelRow] = []
        self._visible_rows: dict[str, ModelRow] = {}
        self._confirming = ("", "")  # the model whose download awaits confirmation, and the key
        self._machine: Machine | None = None

    def compose_list(self) -> ComposeResult:
        yield from super().compose_list()
        with Vertical(id="about"):
            yield Static(id="title")
            yield Static(id="facts")
            yield Static(id="description")

    def on_mount(self) -> None:
        self._rows = model_rows(self._memory, self._machine)
        self.run_worker(self._measure())

    def on_resize(self) -> None:
        self.call_after_refresh(self.draw)  # The columns depend on the final size.

    async def _measure(self) -> None:
        available, self._machine = await asyncio.to_thread(probe_machine)
        self._memory = available if self._memory_limit is None else self._memory_limit
        self._rows = model_rows(self._memory, self._machine)
        self.draw()

    # Keys

    def action_stop(self) -> None:
        if row := self._chosen():
            self._downloads.stop(row.name)

    def action_get_drafter(self) -> None:
        row = self._chosen()
        if row is not None and row.is_usable and row.offered:
            self._download(row, "Ctrl+G")

    def choose(self) -> None:
        row = self._chosen()
        if row is not None and row.is_usable:
            self.dismiss(row.name)
        elif row is not None:
            self._download(row, "Enter")

    def _download(self, row: ModelRow, key: str) -> None:
        if row.name in self._downloads.running:
            return
        if self._confirming == (row.name, key):
            self._confirming = ("", "")
            self._downloads.start(row.name, is_drafter=key == "Ctrl+G")
            self.draw()
        else:
            self._confirming = (row.name, key)
            self._describe()

    # Messages of the downloads, forwarded by the app

    def show_download_update(self, message: DownloadUpdate) -> None:
        if message.name in self._visible_rows:
            row = self._visible_rows[message.name]
            self.rows.replace_option_prompt(row.name, self._line(row))
            self._describe()

    def show_download_ended(self, message: DownloadEnded) -> None:
        self._rows = model_rows(self._memory, self._machine)
        self.draw(message.model if self.highlighted_id == message.name else "")

    # Drawing

    def options(self) -> Sequence[Option]:
        """Return the matching rows under headings, and keep the rows."""
        words = self.words.lower().split()
        about = ((row, f"{row.name} {row.title} {row.description}".lower()) for row in self._rows)
        rows = [row for row, text in about if all(word in text for word in words)]
        if _REPOSITORY.fullmatch(name := self.words.strip()):
            rows.append(ModelRow(name, name, "From the Hugging Face hub."))
        self._visible_rows = {row.name: row for row in rows}
        options = []
        for is_stored, heading in _HEADINGS.items():
            if part := [row for row in rows if row.is_stored is is_stored]:
                title = self._columns(heading, ("size", "tokens/s"), Content("good for"))
                title = title.stylize_before(".models--heading")
                options.append(Option(title, disabled=True))
                options += [Option(self._line(row), id=row.name) for row in part]
        return options

    def draw(self, highlight: str = "") -> None:
        super().draw(highlight)
        self._describe()

    def _line(self, row: ModelRow) -> Content:
        download = self._downloads.running.get(row.name)
        size = human_size(row.size) if row.size else ""
        rate = row.tokens_per_s
        speed = f"{round(rate, -1 if rate >= 20 else 0):.0f}" if rate >= 0.5 else "<1" * bool(rate)
        # The reason for waiting is longer than a bar.
        columns = () if download and not download.progress.total else (size, speed)
        mark = Content.styled("● " if row.name == self.preferred else "  ", ".models--mark")
        return mark + self._columns(displayable(row.name), columns, self._state(row), 2)

    def _columns(self, name: str, texts: Sequence[str], last: Content, indent: int = 0) -> Content:
        """Return columns at the width of the list; those that do not fit are left out."""
        whole = self.rows.scrollable_content_region.width - indent
        name_width = max(1, min(_NAME + 2, whole + indent - _STATE - 2) - indent)
        shown = Content(name).truncate(name_width, ellipsis=True, pad=True)
        for text, width in zip(texts, (_SIZE, _SPEED), strict=False):
            if whole - shown.cell_length - width - 2 >= _STATE + 2:
                shown += Content.styled(f"  {text:>{width}}", ".models--muted")
        room = max(1, whole - shown.cell_length - 2)
        return Content.assemble(shown, "  ", last.truncate(room, ellipsis=True))

    def _state(self, row: ModelRow) -> Content:
        good, bad = ".models--good", ".models--bad"
        if download := self._downloads.running.get(row.name):
            return Content.styled(displayable(_progress(download)), good)
        if row.name in self._downloads.failed:
            return Content.styled("✗ failed", bad)
        if row.damaged:
            return Content.styled("damaged", bad)
        if row.name == self.preferred and row.is_stored:
            return Content("in use")
        return Content.styled("✗ too large", bad) if row.is_too_large else Content(row.good_for)

    @on(OptionList.OptionHighlighted)
    def _describe(self) -> None:
        row = self._chosen()
        if row is None or row.name != self._confirming[0]:
            self._confirming = ("", "")
        title = facts = about = ""
        if row is not None:
            title, facts, about = row.title, row.facts, self._description(row)
            self.query_one("#about").set_class(any(self._confirming), "-asks")
        for name, text in (("#title", title), ("#facts", facts), ("#description", about)):
            self.query_one(name, Static).update(Content(displayable(text)))

    def _description(self, row: ModelRow) -> str:
        if download := self._downloads.running.get(row.name):
            return download.progress.describe()
        if self._confirming[1] == "Ctrl+G":
            return f"Download the drafter {row.offered}? Press Ctrl+G again to download."
        if any(self._confirming):
            return _question(row, self._downloads.rate)
        if error := self._downloads.failed.get(row.name):
            return f"{error}. Press {'Ctrl+G' if row.is_usable else 'Enter'} to try again."
        if row.damaged:
            return f"Damaged: {row.damaged}. Press Enter to download it again."
        if not row.offered:
            return row.description
        key = "Ctrl+G downloads" if row.is_stored else "After the download, Ctrl+G adds"
        return f"{row.description} {key} the drafter {row.offered}."

    def _chosen(self) -> ModelRow | None:
        return self._visible_rows.get(self.highlighted_id)


def _progress(download: Download) -> str:
    if not download.progress.total:
        return f"{download.progress.phase} …"
    done = round(download.fraction * _BAR)
    return f"{'━' * done}{'╌' * (_BAR - done)} {download.fraction:4.0%}"


def _question(row: ModelRow, rate: float | None) -> str:
    if not row.size:
        return "Download it? Its size is unknown. Press Enter again to download."
    parts = [f"Download {human_size(row.size)}?"]
    with contextlib.suppress(OSError):
        _, free = free_space(paths.models_dir())
        enough = "free" if free > row.size else "free, which is not enough"
        parts.append(f"{human_size(free)} {enough};")
    speed = "at the speed of the last download" if rate else "at 100 Mbit/s"
    parts.append(f"about {human_duration(row.size / (rate or _DEFAULT_RATE))} {speed}.")
    if row.is_too_large:
        parts.append("It needs too much memory for this machine.")
    return " ".join([*parts, "Press Enter again to download."])


def probe_machine() -> tuple[int, Machine]:
    """Return bytes available to a model, and the machine. Imports MLX: use a thread."""
    from akunu_py.engine.model import device

    try:
        return device.available_memory(), device.machine()
    finally:
        release_streams()


def model_rows(memory: int | None, machine: Machine | None = None) -> list[ModelRow]:
    """Return all models: stored ones by name, then the catalog's, fitting ones first.

    memory: bytes available to a model, None if unknown. machine: for speed estimates.
    """
    entries = catalog.load_catalog()
    stored: list[model_store.StoredModel] = []
    with contextlib.suppress(AkunuError):  # loading a model reports the problem
        stored = [model for model in model_store.all_models() if not model.kind]
    here = [_stored_row(model, entries.get(model.name), memory, machine) for model in stored]
    names = {row.name for row in here}
    others = (entry for name, entry in entries.items() if name not in names)
    more = [_catalog_row(entry, memory, machine) for entry in others]
    return [*here, *sorted(more, key=lambda row: row.is_too_large)]


def _stored_row(
    model: model_store.StoredModel,
    entry: CatalogEntry | None,
    memory: int | None,
    machine: Machine | None,
) -> ModelRow:
    if entry is None:
        row = ModelRow(model.name, model.name, model.source)
    else:
        row = _catalog_row(entry, memory, machine)
    offer = None if model.drafter else catalog.find_repository(model.repository)
    return replace(
        row,
        size=model.size,
        context=model.context_length,
        license=model.license,
        is_stored=True,
        damaged=model.damaged,
        drafter=model.drafter or ("MTP heads draft" if head_files(model.path) else ""),
        offered=offer.drafter_facts if offer else "",
    )


def _catalog_row(entry: CatalogEntry, memory: int | None, machine: Machine | None) -> ModelRow:
    return ModelRow(
        entry.name,
        entry.title,
        entry.description,
        entry.download_bytes,
        entry.context,
        entry.license,
        is_too_large=memory is not None and not entry.fits(memory),
        tokens_per_s=machine.tokens_per_s(entry) if machine else 0.0,
        good_for=", ".join(_GOOD_FOR[each] for each in entry.purpose if each in _GOOD_FOR),
        offered=entry.drafter_facts,
    )
