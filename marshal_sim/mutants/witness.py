"""Planted bugs of a witness: when it publishes a last will, and which (PROTOCOL.md T19).

mutants.py alone calls this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from msgspec.structs import replace

from marshal_py.protocol.claims import AtLeastOnce, Claim
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.wire import records
from marshal_py.protocol.wire.records import AT_LEAST_ONCE, LastWill, Sign
from marshal_sim.cluster.client import Client
from marshal_sim.cluster.witness import Witness

Patch = tuple[Any, str, Any]


def closed() -> list[Patch]:
    def proves_death(sign: Sign) -> bool:
        return sign is not Sign.STOPPED

    return [(records, "proves_death", proves_death)]


def stopped() -> list[Patch]:
    def proves_death(sign: Sign) -> bool:
        return sign is not Sign.CONNECTION_CLOSED

    return [(records, "proves_death", proves_death)]


def above() -> list[Patch]:
    honest = Member.last_will

    def delivered_to(self: Member) -> LastWill | None:
        """Keeps as position the offset after the newest message that a handler has got."""
        will = honest(self)
        if will is None:
            return None
        claims = []
        for entry in will.claims:
            tracker = self.claims[entry.epoch].tracker
            assert isinstance(tracker, AtLeastOnce)
            claims.append(replace(entry, position=max(entry.position, tracker.handed_to()), progress=b""))
        return replace(will, claims=tuple(claims))

    return [(Member, "last_will", delivered_to)]


def early() -> list[Patch]:
    notice, will = Witness.notice, Witness.will
    read: dict[Client, LastWill | None] = {}

    def remembers(self: Witness, sign: Sign) -> None:
        """Reads the will at the first sign of any kind."""
        read.setdefault(self.client, will(self))
        notice(self, sign)

    def remembered(self: Witness) -> LastWill | None:
        return read[self.client]

    return [(Witness, "notice", remembers), (Witness, "will", remembered)]


def newer() -> list[Patch]:
    started: dict[str, Client] = {}
    keep, will = Client.keep_will, Witness.will

    def kept(self: Client, every_ms: int) -> None:
        keep(self, every_ms)
        started[self.name] = self

    def newest(self: Witness) -> LastWill | None:
        """Returns the will of the process that was started last under this client id."""
        return started[self.name].kept if self.name in started else will(self)

    return [(Client, "keep_will", kept), (Witness, "will", newest)]


def unnoted() -> list[Patch]:
    honest, settle = Member.last_will, Claim.settle

    def without_acks(self: Member) -> LastWill | None:
        Claim.settle = lambda claim: None  # type: ignore[assignment, method-assign]
        try:
            return honest(self)
        finally:
            Claim.settle = settle  # type: ignore[method-assign]

    return [(Member, "last_will", without_acks)]


# Name, what it does wrong, the bug, and the faults and the other options that make it likely to show.
PLANTED: Final[tuple[tuple[str, str, Callable[[], list[Patch]], tuple[str, ...], dict[str, Any]], ...]] = (
    (
        "T19A",
        "a will is executed when the connection closes, and the process lives",
        closed,
        ("witness", "lag", "delay"),
        {},
    ),
    ("T19B", "a will is executed for a stopped process", stopped, ("witness", "lag"), {}),
    (
        "T19C",
        "a will names a position above the lowest unfinished message",
        above,
        ("witness", "slow_handler"),
        {"mode": AT_LEAST_ONCE},
    ),
    (
        "T19D",
        "a will is read while the process still runs, and executed when it is dead",
        early,
        ("witness",),
        {"mode": AT_LEAST_ONCE, "clients": 2},
    ),
    (
        "T19E",
        "a will is executed for a newer session of the same client",
        newer,
        ("witness", "lag", "stop", "delay"),
        {"clients": 2, "rate": 40},
    ),
    (
        "T19F",
        "a will does not name what was acked since the member's last step",
        unnoted,
        ("witness",),
        {"mode": AT_LEAST_ONCE},
    ),
)
