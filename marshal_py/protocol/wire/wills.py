"""The last will of a session: the records that a witness sends when the owner's process has died (PROTOCOL.md T19).

A witness is another process on the same machine. While the owner lives, it keeps its will: its session, and in
at-least-once mode how far each claim has come. Once the operating system has told the witness that the process has
ended, it reads what was kept and sends the records that this file makes of it. Nothing here reads a clock, and the fold
knows nothing of wills: a will that comes late, twice or in vain is rejected like any other late record.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto
from typing import Final

from msgspec import Struct

from marshal_py.protocol.wire.records import ClaimState, Leave, Record, ReleasingPartition, clipped

DIED: Final = "died"  # how the reasons of a will's records begin


class Sign(Enum):
    """What a witness may notice about a process."""

    CONNECTION_CLOSED = auto()
    STOPPED = auto()
    ENDED = auto()  # every thread of it, as the operating system says: a pidfd, or NOTE_EXIT of kqueue


def proves_death(sign: Sign) -> bool:
    """Returns whether the will may be sent (T19). A closed connection proves nothing (a daemon closes what it does not
    know), nor does a stop: after SIGCONT a process holds a valid lease for a while."""
    return sign is Sign.ENDED


class LastWill(Struct, frozen=True, array_like=True):
    """What one session keeps for its witness. `version`: the record version that all live sessions of the group
    can read (E8). `interval_ms`: of the session. `claims`: in at-least-once mode, the entries of a heartbeat that would
    be sent now, of all claims. What is kept may be old when it is used. That is harmless: the position of a claim never
    falls, so an old one is lower than the truth, and F6.2 ignores one that is lower than the log's. In at-most-once
    mode a Release gives back exactly what was not handed over (F6.3). Something old cannot say that, so there the will
    is the Leave alone."""

    session: int
    version: int
    interval_ms: int
    claims: tuple[ClaimState, ...] = ()


def records(will: LastWill, how: str) -> Iterator[Record]:
    """Yields a will's records in order: each Release, then the Leave. `how`: how the process ended, for people, or
    ""."""
    for entry in will.claims:
        yield ReleasingPartition(
            will.session,
            entry.epoch,
            entry.position,
            reason=DIED,
            attempts=entry.attempts,
            in_flight=entry.in_flight,
            progress=entry.progress,
        )
    yield Leave(will.session, clipped(f"{DIED}: {how}" if how else DIED))


def died(leave: Leave) -> bool:
    """Returns whether a witness sent this Leave."""
    return leave.reason == DIED or leave.reason.startswith(f"{DIED}: ")
