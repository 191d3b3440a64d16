"""The thread of a model: what it does while nobody asks for anything."""

from __future__ import annotations

import threading

from akunu_py.decoding.generate.model_thread import Idle, ModelThread


def test_while_no_request_waits_it_is_idle_as_often_as_it_asks_for() -> None:
    log: list[object] = []
    told, rested = threading.Event(), threading.Event()

    def idle(seconds: float) -> float | None:
        log.append("idle")
        if log.count("idle") % 3:
            return 0.0
        rested.set()
        return None

    def serve(request: int) -> None:
        log.append(request)
        told.set()

    thread = ModelThread[int](
        "t", load=lambda: log.append("load"), serve=serve, unload=lambda: None, idle=idle
    )
    thread.start()
    assert rested.wait(60)
    rested.clear()
    assert not thread.wanted
    thread.put(7)
    assert told.wait(60)
    assert rested.wait(60)
    assert thread.close(60)
    assert log == ["load", *["idle"] * 3, 7, *["idle"] * 3]


def test_a_request_ends_the_idle_time_at_once() -> None:
    served = threading.Event()
    thread = ModelThread[int](
        "t",
        load=lambda: None,
        serve=lambda request: served.set(),
        unload=lambda: None,
        idle=lambda seconds: 3600.0,
    )
    thread.start()
    thread.put(1)
    assert served.wait(60)
    assert thread.close(60)


def test_nobody_asks_what_was_read_is_saved_then_the_model_unloaded() -> None:
    log: list[str] = []
    left = [True, True, False, False]

    def save() -> bool:
        log.append("save")
        return left.pop(0)

    idle = Idle(save, lambda: log.append("unload"), unload_s=60.0, watch_s=None)
    first = idle(0.0)
    assert first is not None
    assert first > 0
    assert log == []
    assert idle(first) == 0.0
    assert idle(first) == 0.0
    assert idle(first) == 60.0 - first
    assert log == ["save"] * 3
    assert idle(60.0) is None
    assert log[-1] == "unload"
    assert Idle(lambda: False, watch_s=None)(100.0) is None
    watching = Idle(lambda: False, unload_s=60.0, watch_s=5.0)
    assert [watching(each) for each in (10.0, 58.0, 60.0)] == [5.0, 2.0, None]
