"""The models of the store and of the catalog, to use or to fetch while the chat goes on."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.style import Style
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from akunu_py import paths
from akunu_py.decoding.generate.model_thread import release_streams
from akunu_py.errors import AkunuError
from akunu_py.models import catalog
from akunu_py.models.catalog import CatalogEntry, Machine, describe_speed, recommend
from akunu_py.models.store import store
from akunu_py.text import displayable, human_duration, human_size
from akunu_py.tui.screens.dialog import DIALOG_STYLE, ListDialog
from akunu_py.tui.workers.downloads import Download, DownloadEnded, DownloadMoved, Downloads

# What the hub calls a repository; a revision may follow.
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", re.ASCII)
_HEADINGS = {True: "On this machine", False: "To fetch"}
_NAME, _SIZE, _MEMORY, _STATE = 22, 8, 13, 13  # columns, with two between them; the last at least
_BAR = 8
_USUAL_RATE = 100e6 / 8  # bytes a second, where nothing was fetched yet: 100 Mbit/s

Fits = Literal["fits", "too large", "unknown"]


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A model. size: bytes on disk or to fetch. memory: bytes that it takes with 8,192 tokens of
    context, 0 where unknown. damaged: what is wrong with its files, "" for nothing known.
    tokens_per_s: an estimate, 0 where there is none."""

    name: str
    title: str
    description: str
    size: int
    memory: int
    context: int
    licence: str
    is_stored: bool
    fits: Fits = "unknown"
    damaged: str = ""
    tokens_per_s: float = 0.0

    @property
    def facts(self) -> str:
        """Licence, context and size in one line."""
        parts = [
            self.licence,
            f"{self.context:,} tokens of context" if self.context else "",
            f"{human_size(self.size)} {'on disk' if self.is_stored else 'to fetch'}"
            if self.size
            else "",
            describe_speed(self.tokens_per_s) if self.tokens_per_s else "",
        ]
        return " · ".join(part for part in parts if part)


class ModelsScreen(ListDialog[str]):
    """The list of models. The result is the name of the one to use, None for no change.

    current: the one in use. Downloads go on when the screen is left.
    """

    CSS_PATH = [DIALOG_STYLE, "models.tcss"]  # noqa: RUF012 - declared so there
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,ctrl+j", "move(1)", "Next model", show=False),
        Binding("up,ctrl+k", "move(-1)", "Model before", show=False),
        Binding("pagedown", "move(8)", "Further down", show=False),
        Binding("pageup", "move(-8)", "Further up", show=False),
        Binding("ctrl+x", "stop", "Stop the download", priority=True),
    ]
    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "models--mark",
        "models--muted",
        "models--good",
        "models--bad",
        "models--heading",
    }

    def __init__(self, current: str, downloads: Downloads, memory: int | None = None) -> None:
        super().__init__()
        self._current = current
        self._downloads = downloads
        self._memory = memory
        self._rows: list[ModelRow] = []
        self._shown: dict[str, ModelRow] = {}
        self._asked = ""  # the model of which fetching it was asked for once
        self._machine: Machine | None = None

    def compose(self) -> ComposeResult:
        with self.frame("Models", "Enter use or fetch · Ctrl+X stop a download · Esc close"):
            yield Input(placeholder="Find a model, or owner/repository on the hub", compact=True)
            yield OptionList(compact=True)
            with Vertical(id="about"):
                yield Static(id="title")
                yield Static(id="facts")
                yield Static(id="description")

    def on_mount(self) -> None:
        super().on_mount()
        self._rows = model_rows(self._memory, self._machine)
        if self._memory is None:
            self.run_worker(self._measure())

    def on_resize(self) -> None:
        # Once sizes and styles are known: the columns depend on both.
        self.call_after_refresh(self._show)

    async def _measure(self) -> None:
        """Finds out in the background which models fit, and how fast they will be."""
        self._memory, self._machine = await asyncio.to_thread(look_at_machine)
        self._reload()

    # Keys

    def action_stop(self) -> None:
        if row := self._chosen():
            self._downloads.stop(row.name)

    @on(Input.Changed)
    def _filter(self) -> None:
        self._show()

    @on(Input.Submitted)
    @on(OptionList.OptionSelected)
    def _take(self, event: Input.Submitted | OptionList.OptionSelected) -> None:
        event.stop()
        row = self._chosen()
        if row is None or row.name in self._downloads.all:
            return
        if row.is_stored and not row.damaged:
            self.dismiss(row.name)
        elif self._asked != row.name:
            self._asked = row.name
            self._describe()
        else:
            self._asked = ""
            self._downloads.start(row.name)
            self._show()

    # Messages of the downloads, passed on by the app

    def download_moved(self, message: DownloadMoved) -> None:
        """Draws the progress."""
        if message.name in self._shown:
            row = self._shown[message.name]
            self.rows.replace_option_prompt(row.name, self._line(row))
            self._describe()

    def download_ended(self, message: DownloadEnded) -> None:
        """Shows the new model, or the error."""
        chosen = self._chosen()
        self._reload()
        if message.model and chosen and chosen.name == message.name:
            self._choose(message.model)

    # Drawing

    def _reload(self) -> None:
        self._rows = model_rows(self._memory, self._machine)
        self._show()

    def _show(self) -> None:
        """Draws the rows that match the words, under headings; the chosen one stays chosen."""
        chosen = self._chosen()
        words = self.query_one(Input).value.strip()
        rows = matching(self._rows, words)
        if _REPOSITORY.fullmatch(words):
            rows.append(ModelRow(words, words, "From the Hugging Face hub.", 0, 0, 0, "", False))
        self._shown = {row.name: row for row in rows}
        models = self.rows
        models.clear_options()
        heading = self.get_visual_style("models--heading", partial=True)
        for is_stored in (True, False):
            part = [row for row in rows if row.is_stored is is_stored]
            if part:
                models.add_option(
                    Option(Content.styled(_HEADINGS[is_stored], heading), disabled=True)
                )
                models.add_options(Option(self._line(row), id=row.name) for row in part)
        if not rows:
            models.add_option(Option("No model of that name.", disabled=True))
        self._choose(chosen.name if chosen else self._current)

    def _line(self, row: ModelRow) -> Content:
        """Mark, name, size, memory and state, each in a column of its own."""
        muted = self.get_visual_style("models--muted", partial=True)
        mark = self.get_visual_style("models--mark", partial=True)
        whole = self.rows.scrollable_content_region.width
        room = whole - _STATE - 2
        width = min(_NAME, room - 2)
        name = Content(displayable(row.name)).truncate(width, ellipsis=True)
        columns: list[tuple[str, Style]] = []
        download = self._downloads.all.get(row.name)
        if download and not download.progress.total:
            room = 0  # why it waits needs more room than a bar
        if room >= width + _SIZE + 4:
            columns.append((f"  {human_size(row.size) if row.size else '':>{_SIZE}}", muted))
        if room >= width + _SIZE + _MEMORY + 6:
            needs = f"needs {human_size(row.memory)}" if row.memory else ""
            columns.append((f"  {needs:<{_MEMORY}}", muted))
        before = Content.assemble(
            ("● " if row.name == self._current else "  ", mark),
            name.pad_right(max(0, width - name.cell_length)),
            *columns,
            "  ",
        )
        state = self._state(row).truncate(max(1, whole - before.cell_length), ellipsis=True)
        return Content.assemble(before, state)

    def _state(self, row: ModelRow) -> Content:
        good = self.get_visual_style("models--good", partial=True)
        bad = self.get_visual_style("models--bad", partial=True)
        if download := self._downloads.all.get(row.name):
            return Content.styled(displayable(_progress(download)), good)
        if row.name in self._downloads.failed:
            return Content.styled("✗ failed", bad)
        if row.damaged:
            return Content.styled("damaged", bad)
        if row.name == self._current and row.is_stored:
            return Content.styled("in use", good)
        if row.fits == "too large":
            return Content.styled("✗ too large", bad)
        return Content.styled("✓ fits", good) if row.fits == "fits" else Content("")

    @on(OptionList.OptionHighlighted)
    def _describe(self) -> None:
        row = self._chosen()
        if row is None:
            self._asked = ""
            for name in ("#title", "#facts", "#description"):
                self.query_one(name, Static).update("")
            return
        if row.name != self._asked:
            self._asked = ""
        about, asks = row.description, row.name == self._asked
        if download := self._downloads.all.get(row.name):
            about = download.progress.describe()
        elif asks:
            about = question(row, self._downloads.rate)
        elif error := self._downloads.failed.get(row.name):
            about = f"{error}. Enter tries again."
        elif row.damaged:
            about = f"Damaged: {row.damaged}. Enter fetches it again."
        self.query_one("#about").set_class(asks, "-asks")
        self.query_one("#title", Static).update(Content(displayable(row.title)))
        self.query_one("#facts", Static).update(Content(displayable(row.facts)))
        self.query_one("#description", Static).update(Content(displayable(about)))

    def _chosen(self) -> ModelRow | None:
        return self._shown.get(self.chosen_id)

    def _choose(self, name: str) -> None:
        models = self.rows
        names = [option.id for option in models.options]
        places = [index for index, option in enumerate(models.options) if not option.disabled]
        if name in names:
            models.highlighted = names.index(name)
        elif places:
            models.highlighted = places[0]
        self._describe()


def _progress(download: Download) -> str:
    if not download.progress.total:
        return f"{download.progress.phase} …"
    done = round(download.share * _BAR)
    return f"{'━' * done}{'╌' * (_BAR - done)} {download.share:4.0%}"


def question(row: ModelRow, rate: float | None) -> str:
    """What to know before fetching a model: its size, the space there is, and the time it takes.

    rate: bytes a second of the last download, None where there was none.
    """
    if not row.size:
        return "Fetch it? Its size is not known before. Enter again fetches it."
    parts = [f"Fetch {human_size(row.size)}?"]
    free = free_space()
    if free is not None:
        enough = "are free" if free > row.size else "are free, which is not enough"
        parts.append(f"{human_size(free)} {enough};")
    speed = "at the speed of the last download" if rate else "at 100 Mbit/s"
    parts.append(f"about {human_duration(row.size / (rate or _USUAL_RATE))} {speed}.")
    if row.fits == "too large":
        parts.append(f"It needs {human_size(row.memory)} of memory, too much for this machine.")
    return " ".join([*parts, "Enter again fetches it."])


def free_space() -> int | None:
    """Bytes free where models are kept; None where nobody can tell."""
    directory = paths.models_dir()
    there = next((path for path in (directory, *directory.parents) if path.exists()), directory)
    try:
        return shutil.disk_usage(there).free
    except OSError:
        return None


def look_at_machine() -> tuple[int, Machine]:
    """Bytes that a model may take now, and what the machine can at all. Imports MLX, so call it
    in another thread."""
    from akunu_py.decoding import device

    try:
        return device.available_memory(), device.machine()
    finally:
        release_streams()


def model_rows(memory: int | None, machine: Machine | None = None) -> list[ModelRow]:
    """All models: the stored ones by name, then those of the catalog, the fitting ones first.

    memory: bytes that a model may take; None where that is not known yet. machine: to estimate
    speeds. A store that cannot be
    read counts as empty: loading a model reports what is wrong with it.
    """
    entries = catalog.load_catalog()
    try:
        stored = store.list_models()
    except AkunuError:
        stored = []
    here = [_stored_row(model, entries.get(model.name), memory) for model in stored]
    names = {row.name for row in here}
    more = [_catalog_row(entry, memory) for entry in entries.values() if entry.name not in names]
    rows = [*here, *sorted(more, key=lambda row: row.fits == "too large")]
    if machine is None:
        return rows
    return [
        replace(row, tokens_per_s=machine.tokens_per_s(entries[row.name]))
        if row.name in entries
        else row
        for row in rows
    ]


def better_model(current: str) -> ModelRow | None:
    """The model for chat that this machine should have instead of the catalog's `current`.

    It fits the machine, whatever runs there now, and is fast enough by the estimate. A stored one
    comes before any that would have to be fetched. None where `current` is the best, or is not in
    the catalog: the user chose it. Imports MLX.
    """
    entries = catalog.load_catalog()
    if current not in entries:
        return None
    grade = entries[current].grade
    _, machine = look_at_machine()
    rows = {row.name: row for row in model_rows(machine.memory, machine)}
    here = [
        name
        for name, row in rows.items()
        if row.is_stored
        and not row.damaged
        and name in entries
        and "chat" in entries[name].purpose
        and entries[name].grade > grade
        and machine.suits(entries[name])
    ]
    if here:
        return rows[max(here, key=lambda name: entries[name].grade)]
    best = recommend(machine.memory, machine.suits)[0].entry
    return rows[best.name] if best is not None and best.grade > grade else None


def matching(rows: Iterable[ModelRow], words: str) -> list[ModelRow]:
    """The rows in which all of `words` occur, whatever their case."""
    wanted = words.lower().split()
    return [
        row
        for row in rows
        if all(word in f"{row.name} {row.title} {row.description}".lower() for word in wanted)
    ]


def _stored_row(
    model: store.StoredModel, entry: CatalogEntry | None, memory: int | None
) -> ModelRow:
    return ModelRow(
        name=model.name,
        title=entry.title if entry else model.name,
        description=entry.description if entry else model.source,
        size=model.size,
        memory=entry.memory_8k if entry else 0,
        context=model.context_length,
        licence=model.licence,
        is_stored=True,
        fits=_fits(entry, memory),
        damaged=model.damaged,
    )


def _catalog_row(entry: CatalogEntry, memory: int | None) -> ModelRow:
    return ModelRow(
        name=entry.name,
        title=entry.title,
        description=entry.description,
        size=entry.download_bytes,
        memory=entry.memory_8k,
        context=entry.context,
        licence=entry.licence,
        is_stored=False,
        fits=_fits(entry, memory),
    )


def _fits(entry: CatalogEntry | None, memory: int | None) -> Fits:
    if entry is None or memory is None:
        return "unknown"
    return "fits" if entry.fits(memory) else "too large"
