"""The system is kept awake for as long as there is work, and no longer."""

from __future__ import annotations

from akunu_py.decoding.generate.model_host import SleepBlocker


def test_long_work_is_told_to_the_system_and_its_end_too() -> None:
    now = [0.0]
    awake = SleepBlocker(("sleep", "600"), lambda: now[0])
    for seconds in (0, 4, 5, 60):
        now[0] = seconds
        awake.keep_awake()
        assert awake.is_active == (seconds >= 5)
    process = awake._process
    awake.allow_sleep()
    assert process is not None
    assert process.poll() is not None
    assert not awake.is_active
    now[0] = 100
    awake.keep_awake()
    assert not awake.is_active  # it begins anew
    awake.allow_sleep()


def test_a_system_without_the_command_is_left_alone() -> None:
    now = [0.0]
    awake = SleepBlocker(("/no/such/caffeinate",), lambda: now[0])
    for seconds in (0, 60, 120):
        now[0] = seconds
        awake.keep_awake()
        assert not awake.is_active
    awake.allow_sleep()
