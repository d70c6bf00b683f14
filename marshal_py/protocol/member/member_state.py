"""What the parts of one member share: its world, session, claims and output, and small methods that change them.

member.py puts the parts together, and each part changes the state through these methods or by plain assignment. Nothing
here decides what the member claims (rebalance.py), and nothing here reads a record (member.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from msgspec import Struct, field

from marshal_py.errors import Diverged, MarshalError
from marshal_py.protocol.claims import AtMostOnce, Claim, ClaimPhase, PoisonGuard, will_entry
from marshal_py.protocol.fold.policies import DEFAULT_POLICY, policy_of
from marshal_py.protocol.fold.world import CHECKPOINT_OFFSETS, CHECKPOINTS_KEPT, FOLD_VERSION, Group, World
from marshal_py.protocol.member.advisory import Advisory, AdvisoryKind
from marshal_py.protocol.time import HEARTBEATS_PER_INTERVAL, FailureDetector, Liveness
from marshal_py.protocol.wire import records
from marshal_py.protocol.wire.codec import READS_VERSION, RECORD_VERSION
from marshal_py.protocol.wire.identity import NONE, PIN, Instant, TopicPartition
from marshal_py.protocol.wire.records import (
    AT_LEAST_ONCE,
    Checkpoint,
    GroupConfig,
    Join,
    LastWill,
    Note,
    Record,
    clipped,
)

# --- The values between a member and its driver: MemberOptions go in, a Ready with duties comes out of each tick.
#
# The driver carries out the fields of a Ready in their order: first it stops fetching, then it sends, then all the
# rest. So delivery has stopped before a Release leaves the process (PROTOCOL.md T16).

SENT_AT_ONCE: Final = 2_000  # claims at most, and as many releases, in one tick, so that they delay no heartbeat


class MemberOptions(Struct, frozen=True, kw_only=True):
    """The options of one member. Times are in ms; bounds are those of the Join record."""

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
    on_topic_recreated: str = "fail"  # or "earliest"; used if the group's settings do not say (D10)
    reads_version: int = READS_VERSION
    writes_version: int = RECORD_VERSION  # if all live sessions can read it
    witness: str = ""  # who ends the session if this process dies (T19)
    library: str = ""

    def join(self, instance_id: bytes, predecessor: int) -> Join:
        """Returns a Join of this member. Fields of the same name are the options'."""
        fields = {name: getattr(self, name) for name in Join.__struct_fields__ if hasattr(self, name)}
        return Join(instance_id=instance_id, predecessor=predecessor, **fields)


class Wanted(NamedTuple):
    """A partition whose end, and start of reading, the driver must look up (D5). `earliest`: it was added to its topic
    later. `end_only`: the log has its position (A12)."""

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


MIRROR_MS: Final = 5_000  # how often accepted positions go to Kafka's committed offsets: its own auto-commit interval


class MemberState:
    """The state of one client in one group."""

    def __init__(self, world: World, group: str, options: MemberOptions, draw: Callable[[int], bytes]) -> None:
        self.world = world
        self.name = group
        self.options = options
        self.third_ms: int = options.interval_ms // HEARTBEATS_PER_INTERVAL
        self.liveness: Liveness = Liveness(options.interval_ms, draw)
        self.detector: FailureDetector = FailureDetector(options.interval_ms)
        self.poison_guard: PoisonGuard = PoisonGuard(options.interval_ms)
        self.session = NONE
        self.claims: dict[int, Claim] = {}  # by epoch; none of them GONE
        self.gone_topics: frozenset[str] = frozenset()  # matched by patterns; the cluster does not have them (A13)
        self.orphaned_sessions: dict[int, int] = {}  # sessions of older own Joins -> when the Leave was sent (T14)
        self.ended: bool = False
        self.error: MarshalError | None = None
        self.fenced = True
        self.leaving = ""  # the reason of the Leave, once the user wants to stop; else ""
        self.stop_prepared = False  # the user will stop soon: successors may fetch ahead first (A6)
        self.asked: bool | None = None  # whether the user asked for messages since the last heartbeat; None: unknown
        self._idle_from_ms = 0  # monotonic: about when the user asked last
        self.asked_ms: int | None = None  # monotonic: when the user asked last; None: unknown
        self.handler_stuck: bool = False  # whether a handler had a message for too long since the user asked last (D4)
        self.urgent = False  # the next heartbeat must not wait for its third of an interval
        self.tick_requested: bool = False  # the next tick must not wait for the deadline
        self.quiescent_until_ms: int = 0  # monotonic; before this a tick may skip most of its work (member.py)
        self.out: Ready = Ready()  # what the next tick returns
        self.join_sent: Instant | None = None
        self.join_unread = b""  # instance id of the newest own Join, until that is read
        self.leave_sent_ms: int | None = None
        self.grants_dropped: int = 0
        self.grants_lost: int = 0
        self.late_acks = 0
        self.take_overs = 0  # claims of partitions whose owner was evicted
        self.round_trip_ms: int = NONE  # from sending to reading, of the last own heartbeat that was read back
        self._mirrored: dict[TopicPartition, int] = {}
        self._mirror_due_ms = 0
        world.watched.add(group)

    # --- the world as this client sees it

    @property
    def group(self) -> Group | None:
        return self.world.groups.get(self.name)

    @property
    def writes_version(self) -> int:
        """Returns the record version that this client writes now: the newest that all live sessions can read (E8)."""
        return self.world.writes_version(self.name, self.options.writes_version)

    @property
    def pin(self) -> int:
        """Returns the epoch of this member's pin, as far as it has read; NONE if it has none (A11)."""
        group = self.group
        known = None if group is None else group.partitions.get(PIN)
        return known.epoch if known is not None and known.owner == self.session else NONE

    @property
    def paused(self) -> bool:
        group = self.group
        return group is not None and group.paused

    def last_will(self) -> LastWill | None:
        """Returns what this member keeps for its witness (T19); None if it has no session that could be ended."""
        if self.session == NONE or self.ended:
            return None
        self.settle_acks()
        entries = (will_entry(claim) for claim in self.claims.values())
        claims = tuple(entry for entry in entries if entry is not None)
        return LastWill(self.session, self.writes_version, self.options.interval_ms, claims)

    # --- methods that change the state

    def settle_acks(self) -> None:
        """Notes the acks that came without the lock (T16). A driver whose handlers ack so calls it before `tick`."""
        for claim in self.claims.values():
            claim.settle()

    def idle_ms(self, now: Instant) -> int:
        """Returns for how long the user has asked for no message, as heartbeats tell it (A11, A12); 0 where no group
        needs it or the driver does not say."""
        group = self.group
        config = None if group is None else group.config
        if self.asked is None or config is None or not (policy_of(config).pins or config.failover_ms):
            return 0
        if self.asked:
            self.asked, self._idle_from_ms = False, now.mono_ms
        return max(0, now.mono_ms - self._idle_from_ms)

    def user_asked(self, mono_ms: int) -> None:
        """The user asks for messages, so the program does not hang (D4)."""
        self.asked, self.asked_ms = True, mono_ms
        if self.handler_stuck:
            self.handler_stuck = False
            self.request_tick()

    def hangs(self, mono_ms: int) -> bool:
        """Returns whether the program hangs as a whole: a handler is stuck, and the user has not asked either (D4)."""
        return self.handler_stuck and self.asked_ms is not None and mono_ms >= self._hangs_at(self.asked_ms)

    def hangs_from(self, mono_ms: int) -> int | None:
        """Returns when the program will count as hanging if the user does not ask; None if it does or cannot."""
        if not self.handler_stuck or self.asked_ms is None or self.hangs(mono_ms):
            return None
        return self._hangs_at(self.asked_ms)

    def _hangs_at(self, asked_ms: int) -> int:
        return asked_ms + self.options.handler_timeout_ms

    def request_tick(self) -> None:
        """Asks for a tick soon, and makes it a whole one, which a change needs."""
        self.tick_requested = True
        self.quiescent_until_ms = 0

    def retry_due(self, sent_ms: int | None, now: Instant) -> bool:
        """Returns whether to send a record that was last sent at `sent_ms` (None: never): at least a third of an
        interval ago (T17)."""
        return sent_ms is None or now.mono_ms - sent_ms >= self.third_ms

    @property
    def continues_recreated_topics(self) -> bool:
        """Returns whether the group continues without an admin when a topic was deleted and created again (D10)."""
        group = self.group
        configured = group.config.on_topic_recreated if group is not None and group.config is not None else ""
        return (configured or self.options.on_topic_recreated) == "earliest"

    def park(self, epoch: int, reason: str, detail: str, now: Instant) -> None:
        """Stops a claim whose Release then parks the partition (D6, D13). Handlers may finish for an interval.
        `reason`: an error's name (records.py); `detail`: what the driver saw, for people."""
        claim = self.claims.get(epoch)
        if claim is not None and not claim.sealed and not claim.parking:
            claim.park(reason, clipped(detail), now.mono_ms + self.options.interval_ms)
            self.request_tick()

    def end(self, error: MarshalError | None) -> None:
        """Ends the member: its lease ends, all claims are lost, nothing is sent. `error`: None for a clean stop."""
        if self.ended:
            return
        self.ended = self.out.ended = True
        self.error = self.out.error = error
        for claim in list(self.claims.values()):
            self.lose(claim, "stopped" if error is None else type(error).__name__)
        self.liveness.lease.end()

    def lose(self, claim: Claim, reason: str, kind: AdvisoryKind = "lost", at: int = NONE) -> None:
        """Ends a claim and advises the user why. `kind`: "released" or "lost". `at`: the record that ended it, or
        NONE."""
        if kind != "released":  # a Release gives back what was not handed over (F6.3)
            self.drop_grants(claim)
        claim.seal(ClaimPhase.GONE)
        claim.seek_to = NONE
        self._finish(claim, ended_in_log=at != NONE)
        self.out.lost.append((claim, reason))
        position = claim.released_position if kind == "released" else NONE
        if kind == "released" and claim.parking:
            kind, reason = "parked", self._parked_text(claim)
        self.advise(kind, claim.tp, epoch=claim.epoch, offset=position, text=reason, at=at)
        group = self.group
        if group is not None and reason != "session ended" and not claim.parking:
            self._mirror(group, claim.tp)

    def _finish(self, claim: Claim, *, ended_in_log: bool) -> None:
        """Forgets a claim that is GONE. `ended_in_log`: whether the newest record that was read has ended it."""
        known = self.group.partitions.get(claim.tp) if ended_in_log and self.group is not None else None
        if ended_in_log:
            claim.final = (NONE, b"") if known is None else (known.position, known.progress)
        self.poison_guard.end(claim)
        if claim in self.out.claimed:  # it began and ended between two ticks: the user learns neither
            self.out.claimed.remove(claim)
            claim.told = False
        del self.claims[claim.epoch]

    def replace(self, claim: Claim) -> None:
        """Ends a claim that a new one of this member has replaced, without an advisory."""
        claim.seal(ClaimPhase.GONE)
        self._finish(claim, ended_in_log=True)
        self.out.lost.append((claim, claim.reason))

    def seek(self, tp: TopicPartition, position: int, now: Instant) -> Claim | None:
        """Begins to move the position of an open claim, in at-least-once mode (T20), and returns it, or None. Nothing
        more of it is delivered, its acks come too late, and a new claim follows."""
        claim = next((c for c in self.claims.values() if c.tp == tp and c.phase is ClaimPhase.OPEN), None)
        if claim is not None:
            claim.seek(position, now.mono_ms)
            self.request_tick()
        return claim

    def _parked_text(self, claim: Claim) -> str:
        """Returns why nobody may claim the partition now, and who ends that: an admin or the group itself (D10)."""
        if claim.parking == records.RECREATED and self.continues_recreated_topics:
            return f"{claim.parking}: the group continues at the beginning of the new topic by itself"
        return records.parked_text(self.name, claim.tp, claim.parking, claim.reason)

    def drop_grants(self, claim: Claim) -> None:
        """Drops the granted messages of a claim that were not handed over, and reports how many (D3)."""
        if isinstance(claim.tracker, AtMostOnce):
            first = claim.tracker.next_granted()
            lost = claim.tracker.drop()
            if lost:
                self.grants_dropped += lost
                # From the first on, because two grants may lie apart: between them are offsets without a message.
                self.note("amo_dropped", claim.tp, first, claim.tracker.delivered_to, epoch=claim.epoch)

    def advise(
        self,
        kind: AdvisoryKind,
        tp: TopicPartition | None = None,
        *,
        epoch: int = NONE,
        offset: int = NONE,
        to: int = NONE,
        text: str = "",
        at: int = NONE,
        session: int | None = None,
    ) -> None:
        """Queues an advisory; KINDS says what `offset`, `to`, `text` mean. `at`: the record that caused it; `session`:
        None for the member's own."""
        topic, partition = tp if tp is not None else ("", NONE)
        self.out.advisories.append(
            Advisory(
                kind,
                self.name,
                self.options.client_id,
                topic,
                partition,
                epoch,
                offset,
                to,
                text,
                self.session if session is None else session,
                self.world.log,
                at,
            )
        )

    def note(
        self,
        kind: AdvisoryKind,
        tp: TopicPartition | None = None,
        from_: int = NONE,
        to: int = NONE,
        text: str = "",
        epoch: int = NONE,
    ) -> None:
        """Writes a Note with the next tick, for what no other record implies, and advises the user. The fields are as
        of `advise`."""
        if self.session != NONE and not self.ended:
            topic, partition = tp if tp is not None else ("", NONE)
            self.out.send.append(Note(self.session, kind, topic, partition, from_, to, clipped(text)))
        self.advise(kind, tp, epoch=epoch, offset=from_, to=to, text=text)

    def mirror_positions(self, group: Group, now: Instant) -> None:
        """Has the driver commit positions that the log has accepted as offsets in Kafka, every MIRROR_MS (D7)."""
        if now.mono_ms < self._mirror_due_ms:
            return
        self._mirror_due_ms = now.mono_ms + MIRROR_MS
        for claim in self.claims.values():
            if not claim.parking:  # a position of the old topic means nothing in the recreated one
                self._mirror(group, claim.tp)

    def _mirror(self, group: Group, tp: TopicPartition) -> None:
        position = group.partitions[tp].position
        if tp.topic in self.gone_topics:
            return  # Kafka would refuse the commit
        if tp.partition >= 0 and position != NONE and self._mirrored.get(tp) != position:
            self._mirrored[tp] = position
            self.out.mirror[tp] = position

    def not_mirrored(self, refused: Mapping[TopicPartition, int]) -> None:
        """The driver calls this after a commit that Kafka refused: what this member owns is mirrored again (D7)."""
        for tp, position in refused.items():
            if self._mirrored.get(tp) == position:
                del self._mirrored[tp]

    def overtaken(self, committed: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """After a commit: returns positions, of partitions that this member lost, to commit now, because the commit may
        have overwritten a new owner's (D7)."""
        group, found = self.group, {}
        owned = {claim.tp for claim in self.claims.values()}  # an owner commits what is accepted later with its ticks
        for tp, position in committed.items():
            known = group.partitions.get(tp) if group is not None and tp not in owned else None
            if known is not None and not known.parked and known.position not in (NONE, position):
                found[tp] = known.position
        return found


# --- What a member does when another member's digest of the same log differs from its own (PROTOCOL.md G5 to G8).
#
# Such a digest is an accusation: one of the two is broken, and neither knows which. So the member asks its driver
# to read the log again and fold it once more. If the result differs from its own state, this member is the broken
# one and ends. It asks and judges; the driver reads.


OUTVOTED_BY = 2  # clients; in a group of three, one broken client stops itself alone (G8)
AGREED_KEPT = 3  # client ids that agreed last: OUTVOTED_BY of them and the accuser itself
NAME_CHARACTERS = 50  # of at most 4 bytes each: the text of a Note is bounded (records.TEXT_BYTES_MAX)
WHOLE_GROUP = TopicPartition("", NONE)


class Accusation(NamedTuple):
    """A digest of another session that differs from this member's own."""

    client_id: str
    digest: Checkpoint


class DivergenceCheck:
    """Compares the digests of other members with those of this member, and judges who is broken if they differ.

    Invariants:
      1  `active` is true exactly while an accusation is neither settled nor dismissed; meanwhile nothing is claimed
      2  a session that was found to be the broken one is ignored from then on
    """

    def __init__(self, member: MemberState) -> None:
        self.member = member
        self.accusations: dict[int, Accusation] = {}  # session -> its newest accusation
        self.confirmed: bool = False  # folding again gave the same state
        self._since_ms = 0
        self._first: Checkpoint | None = None  # the digest of the first accusation
        self._agrees: dict[str, bool] = {}  # client id -> whether its last digest agreed, since the first accusation
        # client id -> checkpoint of the last digest that agreed, for the clients that agreed last
        self._agreed: dict[str, int] = {}
        self._asked_ms: dict[int, int] = {}  # by live session: when it last made this member ask for a fold
        self._dismissed: set[int] = set()  # live sessions that were found to be broken

    @property
    def active(self) -> bool:
        return bool(self.accusations)

    # --- reading

    def compare(self, session: int, digest: Checkpoint, now: Instant) -> None:
        """Compares the digest of another session's accepted heartbeat with this member's own (G5)."""
        member = self.member
        held = member.world.digests_at(member.name, digest.at)
        if held is None or digest.fold != FOLD_VERSION:
            return
        group = member.group
        assert group is not None  # its heartbeat was accepted, so there is a group
        client_id = group.sessions[session].join.client_id
        if client_id == member.options.client_id:
            return  # usually the same process, which shares this world
        if held == (digest.state, digest.chain):
            self._agree(client_id, digest.at)
        elif session not in self._dismissed:
            self._forget_gone(group)
            if self._outvotes(client_id, digest.at):
                self._dismissed.add(session)
            else:
                self._accuse(session, Accusation(client_id, digest), now)

    def _agree(self, client_id: str, at: int) -> None:
        if self.accusations:
            self._agrees[client_id] = True
        self._agreed.pop(client_id, None)
        self._agreed[client_id] = at
        if len(self._agreed) > AGREED_KEPT:
            del self._agreed[next(iter(self._agreed))]

    def _outvotes(self, client_id: str, at: int) -> bool:
        """Returns whether two other clients agree with this member as of checkpoint `at`, so that `client_id` is broken
        (G6)."""
        if self.accusations:
            return False  # a check is running
        return sum(other != client_id and agreed_at >= at for other, agreed_at in self._agreed.items()) >= OUTVOTED_BY

    def _forget_gone(self, group: Group) -> None:
        self._dismissed &= group.sessions.keys()
        for gone in self._asked_ms.keys() - group.sessions.keys():
            del self._asked_ms[gone]

    def _accuse(self, session: int, accusation: Accusation, now: Instant) -> None:
        member, at = self.member, accusation.digest.at
        if not self.accusations:
            self._since_ms, self._first, self._agrees, self.confirmed = now.mono_ms, accusation.digest, {}, False
        if session not in self.accusations:
            who = accusation.client_id[:NAME_CHARACTERS]
            member.note("diverged", WHOLE_GROUP, at, NONE, f"{who} folds to another state")
        self.accusations[session] = accusation
        self._agrees[accusation.client_id] = False
        asked_ms = self._asked_ms.get(session)
        if asked_ms is None or now.mono_ms - asked_ms >= member.options.interval_ms:
            self._asked_ms[session] = now.mono_ms
            member.out.refold = max(at, member.out.refold)

    # --- judging

    def refolded(self, at: int, again: World | None, now: Instant) -> None:
        """Ends this member if the second fold, `again` at offset `at` (None if it failed), differs from its state
        (G7)."""
        member = self.member
        if again is None:
            self._asked_ms.clear()  # the next accusation asks again
            return
        first = first_difference(member.world, again, member.name, at)
        if first == NONE:
            self.confirmed = True
        else:
            self._end(first, again, "folded once more from the same bytes, it comes to another state")
        member.request_tick()

    def _end(self, at: int, again: World, reason: str) -> None:
        member = self.member
        held, found = member.world.digests_at(member.name, at), again.digests_at(member.name, at)
        assert held is not None
        assert found is not None
        which = 0 if held[0] != found[0] else 1  # the state differs, or only the bytes that led to it
        member.end(Diverged(member.name, member.world.log, at, held[which], found[which], reason))

    def settle(self, group: Group, now: Instant) -> None:
        """At ticks, after an equal second fold (G8): another client's agreement ends all accusations, an accuser's end
        its own; two accusing clients and none that agrees end the member."""
        for gone in [session for session in self.accusations if session not in group.sessions]:
            del self.accusations[gone]
        if not self.accusations or not self.confirmed:
            return
        if any(self._agrees.values()):
            self._dismissed.update(self.accusations)
            self.accusations.clear()
            return
        against = {accusation.client_id for accusation in self.accusations.values()}
        # After an interval every live member has sent a digest.
        if len(against) >= OUTVOTED_BY and now.mono_ms - self._since_ms >= self.member.options.interval_ms:
            member, first = self.member, self._first
            assert first is not None
            held = member.world.digests_at(member.name, first.at) or (0, 0)
            names = ", ".join(sorted(against)[:OUTVOTED_BY])
            member.end(
                Diverged(
                    member.name,
                    member.world.log,
                    first.at,
                    held[0],
                    first.state,
                    f"{names} fold to another state, and nobody to its own",
                )
            )


def first_difference(held: World, again: World, group: str, upto: int) -> int:
    """Returns the first checkpoint up to `upto` at which digests that both worlds keep differ, or -1."""
    least = max(CHECKPOINT_OFFSETS, upto - CHECKPOINTS_KEPT * CHECKPOINT_OFFSETS)
    for at in range(least, upto + 1, CHECKPOINT_OFFSETS):
        mine, theirs = held.digests_at(group, at), again.digests_at(group, at)
        if mine is not None and theirs is not None and mine != theirs:
            return at
    return NONE
