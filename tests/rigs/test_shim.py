"""The clock and the disk of a broker, as a process sees them that the shim is loaded into."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.rigs.shim import Shim
from tests.rigs.torture import HOUR_S

PROGRAM = """
import sys, time
for line in sys.stdin:
    try:
        open(sys.argv[1], "wb", buffering=0).write(b"x")
        code = 0
    except OSError as error:
        code = error.errno
    print(time.time(), time.monotonic(), code, flush=True)
"""


@pytest.mark.proof  # it needs a C compiler
def test_a_running_process_sees_another_time_and_a_full_disk(tmp_path: Path) -> None:
    shim = Shim(tmp_path / "shim", [1, 2])
    with subprocess.Popen(
        [sys.executable, "-S", "-c", PROGRAM, str(tmp_path / "file")],
        env={**os.environ, **shim.environment(2)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:

        def seen() -> tuple[int, int, int]:
            """How many hours its two clocks are ahead, and the code of its error."""
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            wall, monotonic, code = process.stdout.readline().split()
            hours = [
                round((float(at) - now) / HOUR_S) for at, now in ((wall, time.time()), (monotonic, time.monotonic()))
            ]
            return hours[0], hours[1], int(code)

        assert seen() == (0, 0, 0)
        shim.set_clock(2, HOUR_S)
        assert seen() == (1, 0, 0)
        shim.set_full(2, True)
        assert seen() == (1, 0, errno.ENOSPC)
        shim.set_clock(2, -HOUR_S)
        shim.set_clock(1, HOUR_S)
        assert seen() == (-1, 0, errno.ENOSPC)
        shim.set_full(2, False)
        shim.set_clock(2, 0)
        assert seen() == (0, 0, 0)


def test_a_machine_without_a_compiler_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="need a C compiler"):
        Shim(tmp_path / "shim", [1])
