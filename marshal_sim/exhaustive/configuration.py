"""The description of a small model: its processes, its partitions and messages, and how far the search goes in it."""

from __future__ import annotations

from typing import Final, NamedTuple

from msgspec.structs import replace

from marshal_py.admin.plans.operation import Operation
from marshal_py.protocol.member.member_state import MemberOptions
from marshal_py.protocol.wire.records import AT_LEAST_ONCE
from marshal_sim.exhaustive.actors import INTERVAL_MS, TOPIC

HANDLER_TIMEOUT_MS: Final = 1_000 * INTERVAL_MS  # so long that D4 and the bound of A3 take no part


def consumer(name: str, mode: int = AT_LEAST_ONCE, **changed: object) -> MemberOptions:
    """Returns a consumer's settings: the defaults, apart from interval, timeouts and `changed`."""
    options = MemberOptions(
        client_id=name,
        mode=mode,
        topics=(TOPIC,),
        interval_ms=INTERVAL_MS,
        handler_timeout_ms=HANDLER_TIMEOUT_MS,
        hand_over_timeout_ms=HANDLER_TIMEOUT_MS,
    )
    return replace(options, **changed) if changed else options


class Role(NamedTuple):
    """The process that may run in a slot: a consumer with `options`, or an admin with the operation
    `plan`.
    """

    name: str
    options: MemberOptions | None = None
    plan: type[Operation] | None = None
    position: int = 0  # the position to which an admin moves the partition
    after: int = -1  # starts only after this slot: the two are interchangeable, so no interleaving is lost


class Bounds(NamedTuple):
    """Says how far the search goes from where it begins. Each field counts over all processes."""

    quanta: int  # thirds of an interval
    records: int  # records by which the log may grow
    in_flight: int = 4  # records on their way at one time
    stops: int = 0  # thirds of an interval during which a process is stopped
    crashes: int = 0
    starts: int = 0  # starts of processes that never ran, or that crashed
    leaves: int = 0
    duplicates: int = 0
    drops: int = 0
    reorders: int = 0  # a producer's second record comes before its first


# The bounds that a packed state counts, in the order in which it holds them.
SPENDINGS: Final = ("stops", "crashes", "starts", "leaves", "duplicates", "drops", "reorders")
UNBOUNDED: Final = Bounds(quanta=200, records=200, in_flight=50, stops=15, crashes=15, starts=15, leaves=15)


class Configuration(NamedTuple):
    """One small model, without the script that leads to where its search begins (configurations.py has
    that).
    """

    name: str
    says: str
    roles: tuple[Role, ...]
    bounds: Bounds
    partitions: int = 1
    messages: int = 2  # messages in each partition when the search begins
    snapshots: bool = False  # a process that starts loads the snapshot of the newest checkpoint, if the log has one
    witnessed: bool = False  # the will of a consumer that crashes comes late, in part, in any order, or never (T19)
    uncounted: frozenset[str] = frozenset()  # invariants that do not hold here; `says` gives the reason
    endings: frozenset[str] = frozenset()  # errors with which a consumer may end here; any other is a violation
