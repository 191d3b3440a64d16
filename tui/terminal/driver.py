"""The terminal's driver: Textual's own, which also bears to be stopped by somebody else.

Textual takes every SIGCONT for the end of a suspension that it began itself (Ctrl+Z). After a
SIGSTOP, of which no program is told, it would read the terminal twice, keep raw mode for what was
there before, and never end. Refuses everything else.
"""

from __future__ import annotations

from textual.drivers.linux_driver import LinuxDriver


class ChatDriver(LinuxDriver):
    """For Linux and Macs alike."""

    _is_suspended = False

    def suspend_application_mode(self) -> None:
        super().suspend_application_mode()
        self._is_suspended = True

    def resume_application_mode(self) -> None:
        if not self._is_suspended:
            self.suspend_application_mode()
        self._is_suspended = False
        super().resume_application_mode()
        self._app.call_later(self._app.refresh, layout=True)  # the terminal's page is a new one
