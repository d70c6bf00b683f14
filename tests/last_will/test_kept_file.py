"""What a process keeps for its witness survives it, and never says more than the truth."""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import sys

import pytest

from marshal_py.last_will import kept_file
from marshal_py.last_will.kept_file import SLOT_BYTES, KeptFile
from marshal_py.protocol.last_will import LastWill
from marshal_py.protocol.records import PROGRESS_BYTES_MAX, ClaimState

KILLS = 30


def will(position: int, claims: int = 1) -> LastWill:
    return LastWill(7, 1, 2_000, tuple(ClaimState(epoch, position) for epoch in range(claims)))


def test_the_newest_will_is_read() -> None:
    file = KeptFile()
    assert kept_file.read(file.fd) is None
    assert file.keep(None)
    assert kept_file.read(file.fd) is None
    for position in range(5):
        assert file.keep(will(position))
        assert not file.keep(will(position)), "it is kept already"
        assert kept_file.read(file.fd) == will(position)
    file.keep(None)
    assert kept_file.read(file.fd) is None
    file.close()


def test_a_will_that_could_not_be_written_is_written_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError("no memory")

    file = KeptFile()
    file.keep(will(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        with pytest.raises(OSError, match="no memory"):
            file.keep(will(2))
    assert kept_file.read(file.fd) == will(1)
    assert file.keep(will(2))
    assert kept_file.read(file.fd) == will(2)
    file.close()


@pytest.mark.parametrize("cut", [0, 3, 4, 12, 16, 20, 21, 30])
def test_a_torn_slot_leaves_the_one_before(cut: int) -> None:
    """The bytes from `cut` on are those of the write two before."""
    file = KeptFile()
    for position in (10, 11, 12):
        file.keep(will(position))
        old = [os.pread(file.fd, 200, slot * SLOT_BYTES) for slot in (0, 1)]
    file.keep(will(13))
    torn = 4 % 2  # the slot of the fourth write
    new = os.pread(file.fd, 200, torn * SLOT_BYTES)
    os.pwrite(file.fd, new[:cut] + old[torn][cut:].ljust(200 - cut, b"\0"), torn * SLOT_BYTES)
    assert kept_file.read(file.fd) in (will(12), will(13))
    os.pwrite(file.fd, b"\xff" * 200, torn * SLOT_BYTES)
    assert kept_file.read(file.fd) == will(12)
    file.close()


def test_a_will_that_is_too_large_keeps_what_fits() -> None:
    """The Leave frees the other claims."""
    file = KeptFile()
    claims = tuple(ClaimState(epoch, 1, progress=b"\1" * PROGRESS_BYTES_MAX) for epoch in range(20_000))
    file.keep(LastWill(7, 1, 2_000, claims))
    kept = kept_file.read(file.fd)
    assert kept is not None
    assert kept.session == 7
    assert 4_000 < len(kept.claims) < len(claims)
    file.close()


def test_without_memfd_it_is_a_file_without_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    file = KeptFile()
    file.keep(will(3))
    assert kept_file.read(file.fd) == will(3)
    assert os.listdir(str(tmp_path)) == []
    assert os.fstat(file.fd).st_mode & 0o077 == 0
    file.close()


# Keeps ever higher positions. Before each it writes into the file `truth` how far it is.
WRITER = """
import os, struct, sys
from marshal_py.last_will.kept_file import KeptFile
from marshal_py.protocol.last_will import LastWill
from marshal_py.protocol.records import ClaimState
truth, file = int(sys.argv[1]), KeptFile()
os.dup2(file.fd, int(sys.argv[2]))
position = 0
while True:
    position += 1
    os.pwrite(truth, struct.pack(">Q", position), 0)
    file.keep(LastWill(7, 1, 2000, tuple(ClaimState(epoch, position) for epoch in range(1 + position % 500))))
    if position == 10:
        print("ready", flush=True)
"""


def test_killed_at_any_instant_it_never_says_more_than_the_truth() -> None:
    """T19: kills hit writes in the middle; what is read is whole, at most the truth, and at most one write behind."""
    draw = random.Random(19)
    behind = 0
    for _ in range(KILLS):
        truth = os.memfd_create("truth", 0)
        shared = KeptFile()
        # The writer's own kept file takes the place of this descriptor in the writer alone; it is read through /proc.
        os.set_inheritable(truth, True)
        place = os.dup(shared.fd)
        os.set_inheritable(place, True)
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(truth), str(place)], stdout=subprocess.PIPE, pass_fds=(truth, place)
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        kept = os.open(f"/proc/{child.pid}/fd/{place}", os.O_RDWR)
        for _ in range(draw.randrange(200)):
            os.getpid()
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
        (position,) = struct.unpack(">Q", os.pread(truth, 8, 0))
        found = kept_file.read(kept)
        assert found is not None
        positions = {entry.position for entry in found.claims}
        assert len(positions) == 1, "no mixture of two writes"
        at = positions.pop()
        assert position - 1 <= at <= position
        assert len(found.claims) == 1 + at % 500
        behind += at < position
        for fd in (truth, place, kept):
            os.close(fd)
        shared.close()
    print(f"{behind} of {KILLS} kills came before the write was whole")
