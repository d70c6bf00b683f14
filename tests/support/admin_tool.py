"""`marshal` as a process that kills itself (SIGKILL) at a chosen step of an admin operation.

    python -m tests.support.admin_tool tick 3 set-position billing orders --to 0 --yes
    python -m tests.support.admin_tool write 2 ...      dies with its 2nd record handed to the producer, not flushed
    python -m tests.support.admin_tool written 2 ...    dies when its 2nd record is written
    python -m tests.support.admin_tool written SetPosition ...      when its first record of this type is

Probes (Notes) do not count as records.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from marshal_py.admin.plans.operation import Operation, OperationRunner
from marshal_py.cli import main
from marshal_py.protocol.wire.records import Note

FLUSH_TIMEOUT_S = 30.0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_tick(number: int) -> None:
    tick, count = Operation.tick, 0

    def deadly(operation: Operation, now: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            die()
        return tick(operation, now)

    Operation.tick = deadly  # type: ignore[method-assign]


def die_at_record(which: str, written: bool) -> None:
    append, count = OperationRunner._append, 0

    def deadly(runner: OperationRunner, record: Any) -> None:
        nonlocal count
        append(runner, record)
        count += not isinstance(record, Note)
        if which in (str(count), type(record).__name__):
            if written:
                runner._reader.log._producer.flush(FLUSH_TIMEOUT_S)  # type: ignore[attr-defined]
            die()

    OperationRunner._append = deadly  # type: ignore[method-assign]


if __name__ == "__main__":
    how, which = sys.argv.pop(1), sys.argv.pop(1)
    if how == "tick":
        die_at_tick(int(which))
    else:
        die_at_record(which, how == "written")
    main()
