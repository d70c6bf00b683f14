"""What a small world is: who lives in it, how it came to where the search begins, and how far the search goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.structs import replace

from marshal_py.admin.operation import Operation
from marshal_py.protocol.ready import MemberOptions
from marshal_py.protocol.records import AT_LEAST_ONCE
from marshal_py.simulator.exhaustive.actors import INTERVAL_MS, TOPIC

if TYPE_CHECKING:
    from marshal_py.simulator.exhaustive.setup_script import SetupScript

HANDLER_TIMEOUT_MS: Final = 1_000 * INTERVAL_MS  # D4 and the bound of A3 take no part: a small world is over before


def consumer(name: str, mode: int = AT_LEAST_ONCE, **changed: object) -> MemberOptions:
    """A consumer's settings, the defaults but for the interval."""
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
    """Who may live in a slot: a consumer with these options, or an admin with this plan."""

    name: str
    options: MemberOptions | None = None
    plan: type[Operation] | None = None
    aim: int = 0  # an admin's wanted position
    after: int = -1  # may start only after this slot: the two are interchangeable, so the order is no loss


class Bounds(NamedTuple):
    """How far the search goes from where it begins. What is counted is counted over all processes."""

    quanta: int  # thirds of an interval
    records: int  # that the log grows by
    in_flight: int = 4  # records on their way at one time
    stops: int = 0  # thirds of an interval in which a process stands still
    crashes: int = 0
    starts: int = 0  # of processes that were not there, or crashed
    leaves: int = 0
    duplicates: int = 0
    drops: int = 0
    reorders: int = 0  # a producer's second record comes before its first


# What is counted over all processes, in the order in which a packed state holds it.
SPENDINGS: Final = ("stops", "crashes", "starts", "leaves", "duplicates", "drops", "reorders")
UNBOUNDED: Final = Bounds(quanta=200, records=200, in_flight=50, stops=15, crashes=15, starts=15, leaves=15)


class Configuration(NamedTuple):
    """One small world."""

    name: str
    says: str
    roles: tuple[Role, ...]
    prologue: Callable[[SetupScript], None]
    bounds: Bounds
    partitions: int = 1
    messages: int = 2  # in each partition, from the beginning on
    snapshots: bool = False  # who starts loads the snapshot of the newest checkpoint, if the log has one
    uncounted: frozenset[str] = frozenset()  # invariants that nobody promises here, with the reason in `says`
    endings: frozenset[str] = frozenset()  # errors with which a consumer may end here; any other is a violation
