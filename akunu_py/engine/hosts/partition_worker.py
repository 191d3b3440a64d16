"""The program of a worker rank: `python -m akunu_py.engine.hosts.partition_worker JSON`.

It runs until its stdin ends, reads rank 0's messages there, and sends a heartbeat every second.
Only rank 0 handles interrupts.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from akunu_py.errors import describe
from akunu_py.interrupts import exit_without_teardown

_HEARTBEAT_INTERVAL = 1.0  # seconds


class _Connection:
    def __init__(self) -> None:
        self._inbox: SimpleQueue[dict[str, Any]] = SimpleQueue()
        for target in (self._listen, self._send_heartbeats):
            threading.Thread(target=target, daemon=True).start()

    def send(self, **message: Any) -> None:
        _write(f"@akunu {json.dumps(message)}")

    def wait_for(self, key: str) -> Any:
        while key not in (message := self._inbox.get()):
            pass
        return message[key]

    def _listen(self) -> None:
        try:
            with open(0, "rb", closefd=False) as stream:
                for line in stream:
                    self._inbox.put(json.loads(line))
        finally:
            exit_without_teardown(0)

    def _send_heartbeats(self) -> None:
        while True:
            _write(".")
            time.sleep(_HEARTBEAT_INTERVAL)


def _write(line: str) -> None:
    try:
        os.write(1, f"{line}\n".encode())  # one call, so that lines of two threads stay whole
    except OSError:
        exit_without_teardown(0)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not os.isatty(0):  # not over ssh: rank 0 handles signals to the process group
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    connection = _Connection()
    try:
        _run_worker(connection, json.loads(sys.argv[1]))
    except BaseException as error:  # noqa: BLE001 - reported before exiting
        print(describe(error), file=sys.stderr, flush=True)
        exit_without_teardown(1)


def _run_worker(connection: _Connection, arguments: dict[str, Any]) -> None:
    # Import before the first message, so that all ranks connect at the same time.
    import mlx.core as mx

    from akunu_py.engine.hosts.partition import connect, keep_partition
    from akunu_py.engine.hosts.passes import PartitionRunner
    from akunu_py.engine.hosts.process import host_fingerprint
    from akunu_py.engine.model import wired
    from akunu_py.engine.model.load_plan import make_plan, needs
    from akunu_py.models.load.mlx_loader import open_directory
    from akunu_py.models.store import model_store
    from akunu_py.types import LoadOptions

    stored = model_store.resolve(arguments["model"])
    connection.send(fingerprint=host_fingerprint(stored))
    connection.wait_for("connect")
    group = connect(arguments["backend"], [os.getppid()])
    for name in arguments["files"]:  # made by mlx.launch for this process
        Path(os.environ[name]).unlink(missing_ok=True)
    opened, options = open_directory(stored.path), LoadOptions(**arguments["options"])
    model = opened.model
    stand_ins, holds, itemsize = keep_partition(model, arguments["split"], group, options.weights)
    own = needs(opened, itemsize=itemsize)
    plan = make_plan(stored.name, opened, own, options, partitioned=True)
    connection.send(holds=holds, context=plan.context_length)
    connection.wait_for("read")
    mx.eval(model.parameters())
    wired.wire(model, plan.wire, [model], plan.fit.estimate.working)

    def receive(length: int) -> list[int]:
        total = mx.distributed.all_sum(mx.zeros(length, mx.int32), group=group)
        return [int(each) for each in total.tolist()]

    runner = PartitionRunner(model, stand_ins, receive)
    connection.send(ready=True)
    while True:
        connection.wait_for("wake")
        runner.run_until_idle()


if __name__ == "__main__":
    main()
