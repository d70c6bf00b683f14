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
from marshal_py.protocol.wire.records import PROGRESS_BYTES_MAX, ClaimState, LastWill

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


# Forks a process per line that it reads, and says when that has ended. The process keeps ever higher positions, and
# writes before each into the file `truth` how far it is.
WRITERS = """
import os, struct, sys
from marshal_py.last_will.kept_file import KeptFile
from marshal_py.protocol.wire.records import LastWill
from marshal_py.protocol.wire.records import ClaimState
truth, place = int(sys.argv[1]), int(sys.argv[2])
for _ in sys.stdin:
    if (pid := os.fork()):
        os.waitpid(pid, 0)
        print("ended", flush=True)
        continue
    file = KeptFile()
    os.dup2(file.fd, place)
    position = 0
    while True:
        position += 1
        os.pwrite(truth, struct.pack(">Q", position), 0)
        file.keep(LastWill(7, 1, 2000, tuple(ClaimState(epoch, position) for epoch in range(1 + position % 500))))
        if position == 10:
            print(os.getpid(), flush=True)
"""


def test_killed_at_any_instant_it_never_says_more_than_the_truth() -> None:
    """T19: kills hit writes in the middle; what is read is whole, at most the truth, and at most one write behind."""
    draw = random.Random(19)
    behind = 0
    truth, shared = os.memfd_create("truth", 0), KeptFile()
    # A writer's own kept file takes the place of this descriptor in the writer alone; it is read through /proc.
    place = os.dup(shared.fd)
    with subprocess.Popen(
        [sys.executable, "-c", WRITERS, str(truth), str(place)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(truth, place),
        start_new_session=True,
    ) as writers:
        assert writers.stdin is not None
        assert writers.stdout is not None
        try:
            for _ in range(KILLS):
                writers.stdin.write(b"\n")
                writers.stdin.flush()
                writer = int(writers.stdout.readline())
                kept = os.open(f"/proc/{writer}/fd/{place}", os.O_RDWR)
                for _ in range(draw.randrange(200)):
                    os.getpid()
                os.kill(writer, signal.SIGKILL)
                assert writers.stdout.readline() == b"ended\n"
                (position,) = struct.unpack(">Q", os.pread(truth, 8, 0))
                found = kept_file.read(kept)
                os.close(kept)
                assert found is not None
                positions = {entry.position for entry in found.claims}
                assert len(positions) == 1, "no mixture of two writes"
                at = positions.pop()
                assert position - 1 <= at <= position
                assert len(found.claims) == 1 + at % 500
                behind += at < position
        finally:
            os.killpg(writers.pid, signal.SIGKILL)  # a writer, too, that a failed assertion has left
    for fd in (truth, place):
        os.close(fd)
    shared.close()
    print(f"{behind} of {KILLS} kills came before the write was whole")
