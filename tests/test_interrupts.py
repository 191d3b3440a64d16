"""An interrupt ends what it is meant to end, also while Python itself gets no turn."""

import signal
import subprocess
import sys

import pytest

from akunu_py.errors import INTERRUPTED

# It is busy without looking at what handlers say, or ends as soon as one ran.
_CODE = """
import ctypes, threading, time
from akunu_py.interrupts import cancel_on_interrupt
interrupts = []
libc = ctypes.CDLL(None)
with cancel_on_interrupt(lambda: interrupts.append(1), 0.2 if {busy} else 60):
    print("ready", flush=True)
    end = time.monotonic() + 60
    while {busy} and time.monotonic() < end:
        libc.usleep(900_000)  # goes on after a signal
    while not interrupts:
        time.sleep(0.01)
[each.join() for each in threading.enumerate() if each.name == "interrupts"]
print("went on", flush=True)
"""


@pytest.mark.parametrize("busy", [True, False])
def test_an_interrupt_waits_for_a_pass_only_so_long(busy: bool) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", _CODE.format(busy=busy)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    rest = child.stdout.read()
    assert (child.wait(60), rest) == ((INTERRUPTED, "") if busy else (0, "went on\n"))


# Another thread gets the signal, while the main thread reads.
_READS = """
import signal, sys, threading, time
from akunu_py.interrupts import interruptible

def interrupt() -> None:
    time.sleep(0.1)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)

try:
    with interruptible(sys.stdin.buffer) as stdin:
        print(stdin.readline(), stdin.read(3), flush=True)
        threading.Thread(target=interrupt).start()
        print(stdin.readline(), flush=True)
except KeyboardInterrupt:
    print("interrupted", signal.set_wakeup_fd(-1), flush=True)
"""


def test_an_interrupt_ends_a_read_whichever_thread_gets_it() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", _READS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("a line\nand")
    child.stdin.flush()
    assert child.stdout.readline() == "b'a line\\n' b'and'\n"
    assert child.stdout.readline() == "interrupted -1\n"
    assert child.wait(60) == 0
