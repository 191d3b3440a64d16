"""When to run a request, from the user's typing speed and the time until a first text."""

from __future__ import annotations

_PAUSE_S = 1.5  # a longer pause between two requests ends a rhythm
_NEWEST = 0.3  # weight of the last value in an average
# Clients send a request about this long after a key; a text must come before the next key.
_SHOWN_S = 0.1
_LONGEST_S = 1.0
_BATTERY_S = 0.1
_LOADING_S = 5.0  # a longer latency is that of a model being loaded


class Pace:
    """Delays requests whose text would come after the user's next key. Times are in seconds."""

    def __init__(self) -> None:
        self._last = float("-inf")  # time of the last request
        self._begun: float | None = None  # of the last request that runs and has no text
        self._interval = 0.0  # average between two requests, 0 after a pause
        self._latency = 0.0  # average until the first text

    def delay(self, now: float, *, on_battery: bool = False) -> float:
        """Note a request at `now`; return how long it waits for a newer request."""
        gap, self._last = now - self._last, now
        self._interval = _average(self._interval, gap) if gap < _PAUSE_S else 0.0
        if self._begun is not None:  # its latency is at least its age
            if self._latency < (age := now - self._begun) < _PAUSE_S:
                self._latency = _average(self._latency, age)
            self._begun = None
        least = _BATTERY_S if on_battery else 0.0
        if not self._interval or self._interval > self._latency + _SHOWN_S:
            return least
        return max(least, min(_LONGEST_S, 1.3 * self._interval))

    def begin(self, now: float) -> None:
        """Note that the last request runs."""
        self._begun = now

    def text(self, now: float) -> None:
        """Note the first text of the last request."""
        if self._begun is not None and now - self._begun < _LOADING_S:
            self._latency = _average(self._latency, now - self._begun)
        self._begun = None


def _average(average: float, value: float) -> float:
    return average + _NEWEST * (value - average) if average else value
