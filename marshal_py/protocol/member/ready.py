"""The values between a member and its driver: MemberOptions go in, a Ready with duties comes out of each tick.

The driver carries out the fields of a Ready in their order: first it stops fetching, then it sends, then all the rest.
So delivery has stopped before a Release leaves the process (PROTOCOL.md T16).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from msgspec import Struct, field

from marshal_py.errors import MarshalError
from marshal_py.protocol.claims.claim import Claim
from marshal_py.protocol.fold.policies import DEFAULT_POLICY
from marshal_py.protocol.member.advisory import Advisory
from marshal_py.protocol.wire.codec import RECORD_VERSION
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import AT_LEAST_ONCE, GroupConfig, Join, Record

SENT_AT_ONCE: Final = 2_000  # claims at most, and as many releases, in one tick, so that they delay no heartbeat


class MemberOptions(Struct, frozen=True, kw_only=True):
    """Holds the options of one member. Times are in ms; bounds are those of the Join record."""

    client_id: str
    mode: int = AT_LEAST_ONCE
    topics: tuple[str, ...] = ()
    interval_ms: int = 2_000
    member: str = ""
    capacity: int = 1
    claims_max: int = 0
    rank: int = 0
    priority: int = 0
    priority_group: str = ""
    min_pending: int = 0  # under the policy overflow; 0: no such condition (A12)
    min_ack_pending: int = 0
    policy: str = DEFAULT_POLICY
    group_config: GroupConfig | None = None  # written if the group has no settings (A8)
    handler_timeout_ms: int = 300_000
    hand_over_timeout_ms: int = 30_000  # how long a successor waits for handlers (A3)
    release_behind_ms: int = 0  # how long it may fall behind on a partition; 0: for ever (D16)
    fast_reclaim: bool = False
    deliver_late: bool = False
    on_topic_recreated: str = "fail"  # or "earliest"; used if the group's settings do not say (D10)
    reads_version: int = RECORD_VERSION
    witness: str = ""  # who ends the session if this process dies (T19)
    library: str = ""

    def join(self, instance_id: bytes, predecessor: int) -> Join:
        """Returns a Join of this member."""
        return Join(
            self.client_id,
            instance_id,
            self.mode,
            self.interval_ms,
            self.topics,
            predecessor,
            self.member,
            self.capacity,
            self.claims_max,
            self.rank,
            self.priority,
            self.priority_group,
            self.min_pending,
            self.min_ack_pending,
            self.reads_version,
            self.library,
            self.witness,
        )


class Wanted(NamedTuple):
    """Names a partition for which the driver must look up its end, and where reading starts (D5).

    `earliest`: the partition was added to its topic later, so reading starts at its beginning. `end_only`: the log
    has its position, so only the end is looked up (A12).
    """

    tp: TopicPartition
    earliest: bool
    end_only: bool = False


class Ready(Struct):
    """Lists what the driver must do after a tick, in the order of the fields."""

    # (claim, why): drop its buffer, stop fetching, report why
    lost: list[tuple[Claim, str]] = field(default_factory=list)
    stop_prefetch: list[TopicPartition] = field(default_factory=list)  # stop fetching ahead: another member gets it
    send: list[Record] = field(default_factory=list)  # to the group's log, in this order
    claimed: list[Claim] = field(default_factory=list)  # fetch from the claim's position, report it
    revoking: list[Claim] = field(default_factory=list)  # report that they will be released; `Claim.reason` says why
    # fetch ahead from this offset, do not deliver (A3)
    start_prefetch: list[tuple[TopicPartition, int]] = field(default_factory=list)
    resolve: list[Wanted] = field(default_factory=list)  # look up, then call `start_resolved`
    mirror: dict[TopicPartition, int] = field(default_factory=dict)  # commit to Kafka, best effort (D7)
    look_at_topics: bool = False  # ask for the cluster's topics now: a pattern matches one that the log has (A13)
    refold: int = NONE  # fold the log again up to this checkpoint, then call `refolded` (G6)
    advisories: list[Advisory] = field(default_factory=list)
    ended: bool = False  # the member is done; `Member.error` says why, None after a clean stop
    error: MarshalError | None = None
