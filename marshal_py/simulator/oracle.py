"""The second fold: PROTOCOL.md's rules once more, slow and plain, to judge the fold that runs in production.

What lives here: the order of all checks, the rules F0 to F10 and the Genesis. It was written from PROTOCOL.md alone and
may import only the standard library, mmh3 and the oracle's own state (`oracle_state`) and decoder (`oracle_wire`): a
misreading shared with `marshal_py.protocol` would be a misreading that no differential test can find.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import mmh3

from marshal_py.simulator.oracle_snapshot import LogState
from marshal_py.simulator.oracle_state import (
    Group,
    Partition,
    Session,
    Topic,
    chain_step,
    group_digest,
    packed,
    text_hash,
    word_hash,
)
from marshal_py.simulator.oracle_wire import (
    HIGHEST_TYPE,
    Envelope,
    Record,
    crc_fits,
    decode_messagepack,
    decode_record,
    parse_envelope,
)

__all__ = ["Group", "Oracle", "OracleStop", "Partition", "Record", "Session", "Topic", "Verdict",
           "decode_messagepack", "route"]  # fmt: skip

# The name that a Genesis gives to the hash of L2. PROTOCOL.md does not spell it; this is the only place that does.
HASH_NAME = "murmur3-x86-32"
PROTOCOL_VERSION = 1
AT_LEAST_ONCE, AT_MOST_ONCE = 1, 2
GRANT_MAX = 1_000_000
BLOCK = 16


class OracleStop(Exception):
    """The log cannot be folded further; the record at `offset` was not consumed."""

    def __init__(self, reason: str, offset: int) -> None:
        super().__init__(f"{reason} at offset {offset}")
        self.reason = reason
        self.offset = offset


class Verdict(NamedTuple):
    outcome: str
    reason: str
    group: str | None
    record: Record | None


GARBAGE = Verdict("ignored", "garbage", None, None)


# ---------------------------------------------------------------------------------------------------------------------
# Rules 1 to 10. Each takes the group, the record's fields, its offset and its body, and returns the reason of the
# rejection, or "" when it accepted and changed the group. No rule changes anything before its last check.


def join(group: Group, fields: dict[str, Any], offset: int, body: bytes) -> str:
    if any(session.join["instance_id"] == fields["instance_id"] for session in group.sessions.values()):
        return "instance"
    if group.mode != 0 and fields["mode"] != group.mode:
        return "mode"
    predecessor = group.sessions.get(fields["predecessor"])
    if predecessor is not None and predecessor.join["client_id"] != fields["client_id"]:
        return "predecessor"
    if predecessor is not None:
        group.end_session(predecessor.id)
    group.sessions[offset] = Session(offset, fields, body, offset)
    group.mode = fields["mode"]
    return ""


def heartbeat(group: Group, fields: dict[str, Any], offset: int, _body: bytes) -> str:
    session = group.sessions.get(fields["session"])
    if session is None:
        return "session"
    holds = any(place[1] >= 0 and part.owner == session.id for place, part in group.partitions.items())
    if not (group.paused and holds):
        session.extended = offset
    session.ready = fields["ready"]
    for entry in fields["claims"]:
        found = group.claim(session.id, entry["epoch"])
        if found is None or found[0][1] < 0:
            continue
        partition = found[1]
        if group.mode == AT_LEAST_ONCE:
            if entry["position"] < partition.position:
                continue
            partition.position = entry["position"]
        partition.lag, partition.in_flight, partition.attempts = entry["lag"], entry["in_flight"], entry["attempts"]
    return ""


def leave(group: Group, fields: dict[str, Any], _offset: int, _body: bytes) -> str:
    if fields["session"] not in group.sessions:
        return "session"
    group.end_session(fields["session"])
    return ""


def evict(group: Group, fields: dict[str, Any], _offset: int, _body: bytes) -> str:
    session = group.sessions.get(fields["session"])
    if session is None:
        return "session"
    if fields["observed"] != session.extended:
        return "observed"
    if fields["waited_ms"] < 2 * session.join["interval_ms"]:
        return "waited"
    group.end_session(session.id)
    return ""


def claiming_partition(group: Group, fields: dict[str, Any], offset: int, _body: bytes) -> str:
    topic, number = fields["topic"], fields["partition"]
    if fields["session"] not in group.sessions:
        return "session"
    if group.paused:
        return "paused"
    # Only the pin has an empty topic (4.2), and it asks for no topology; -1 is below every count (F4.1).
    if topic != "" and not group.below_count(topic, number):
        return "topology"
    partition = group.partitions.get((topic, number), Partition())
    if partition.owner != -1:
        return "held"
    if fields["observed"] != partition.version:
        return "observed"
    if number >= 0 and partition.position == -1:
        if fields["start"] == -1:
            return "start"
        partition.position = fields["start"]
    partition.owner, partition.epoch, partition.version, partition.successor = fields["session"], offset, offset, -1
    group.partitions[topic, number] = partition
    return ""


def claiming_messages(group: Group, fields: dict[str, Any], _offset: int, _body: bytes) -> str:
    if fields["session"] not in group.sessions:
        return "session"
    found = group.claim(fields["session"], fields["epoch"])
    if found is None or found[0][1] < 0:
        return "claim"
    if group.mode != AT_MOST_ONCE:
        return "mode"
    if group.paused:
        return "paused"
    if fields["from"] != found[1].position:
        return "from"
    if not fields["from"] <= fields["start"] < fields["to"] or fields["to"] - fields["start"] > GRANT_MAX:
        return "range"
    found[1].position = fields["to"]
    return ""


def releasing_partition(group: Group, fields: dict[str, Any], offset: int, _body: bytes) -> str:
    if fields["session"] not in group.sessions:
        return "session"
    found = group.claim(fields["session"], fields["epoch"])
    if found is None:
        return "claim"
    place, partition = found
    if group.mode == AT_LEAST_ONCE and place[1] >= 0:
        partition.position = max(partition.position, fields["position"])
    group.free(partition, fields["successor"])
    partition.version = offset
    return ""


def release_group(group: Group, fields: dict[str, Any], offset: int, _body: bytes) -> str:
    if fields["observed"] != group.pause_change:
        return "observed"
    waited_out = fields["duration_ms"] == 0 and fields["waited_ms"] >= group.pause_duration_ms
    if group.paused and fields["token"] != group.pause_change and not waited_out:
        return "paused"
    group.pause_change, group.pause_duration_ms = offset, fields["duration_ms"]
    return ""


def set_position(group: Group, fields: dict[str, Any], offset: int, _body: bytes) -> str:
    moves = [((move["topic"], move["partition"]), move) for move in fields["moves"]]
    if not group.paused:
        return "paused"
    if fields["token"] != group.pause_change:
        return "token"
    if not moves:
        return "empty"
    if len({place for place, _ in moves}) != len(moves):
        return "repeats"
    # F8.2: each reason is checked for all moves before the next reason is.
    if any(group.partitions.get(place, Partition()).version != move["observed"] for place, move in moves):
        return "observed"
    if not all(group.below_count(*place) for place, _ in moves):
        return "topology"
    if any(group.partitions.get(place, Partition()).owner != -1 for place, _ in moves):
        return "held"
    for place, move in moves:
        partition = group.partitions.setdefault(place, Partition())
        partition.position, partition.version = move["position"], offset
        partition.generation += 1
        partition.lag = partition.in_flight = partition.attempts = 0
    if fields["resume"]:
        group.pause_duration_ms, group.pause_change = 0, offset
    return ""


def forget(partition: Partition, offset: int) -> None:
    """F9.2: the last owner and the successor are not named there, so they stay."""
    partition.position, partition.version = -1, offset
    partition.generation += 1
    partition.lag = partition.in_flight = partition.attempts = 0


def topology(group: Group, fields: dict[str, Any], offset: int, _body: bytes) -> str:
    name, count = fields["topic"], fields["partitions"]
    known = group.topics.get(name)
    if fields["observed"] != (-1 if known is None else known.offset):
        return "observed"
    if known is None:
        group.topics[name] = Topic(count, count, offset)
        return ""
    if count == known.count:
        return "same"
    beyond = [partition for place, partition in group.partitions.items() if place[0] == name and place[1] >= count]
    if count < known.count:
        if not group.pause_held_by(fields["token"]):
            return "token"
        if any(partition.owner != -1 for partition in beyond):
            return "held"
        for partition in beyond:
            forget(partition, offset)
    known.count, known.offset = count, offset
    return ""


def group_config(group: Group, fields: dict[str, Any], offset: int, body: bytes) -> str:
    if fields["observed"] != group.config_offset:
        return "observed"
    if fields["deleted"]:
        if group.sessions:
            return "sessions"
        delete_group(group, offset)
    elif fields["mode"] != 0 and group.mode not in (0, fields["mode"]):
        if not group.pause_held_by(fields["token"]):
            return "token"
        if any(partition.owner != -1 for place, partition in group.partitions.items() if place[1] >= 0):
            return "held"
        for session in list(group.sessions):
            group.end_session(session)
        for place, partition in group.partitions.items():
            if place[1] >= 0:
                partition.generation += 1
        group.mode = fields["mode"]
    elif fields["mode"] != 0:
        group.mode = fields["mode"]
    group.config, group.config_body, group.config_offset = Record("GroupConfig", fields), body, offset
    for live in group.sessions.values():
        live.mark = -1
    return ""


def delete_group(group: Group, offset: int) -> None:
    """F9.5. The mode that a deleting record names is not read: a deleted group has none."""
    for place, partition in group.partitions.items():
        # There are no positions on a whole topic or on the pin, so there is nothing to forget.
        if place[1] >= 0:
            forget(partition, offset)
    group.mode = 0
    if group.paused:
        group.pause_duration_ms, group.pause_change = 0, offset


def step_down(group: Group, fields: dict[str, Any], offset: int, _body: bytes) -> str:
    session = group.sessions.get(fields["session"])
    if session is None:
        return "session"
    if fields["observed"] != session.mark:
        return "observed"
    session.mark = offset
    return ""


def note(_group: Group, _fields: dict[str, Any], _offset: int, _body: bytes) -> str:
    return ""


RULES: dict[str, Callable[[Group, dict[str, Any], int, bytes], str]] = {
    "Join": join, "Heartbeat": heartbeat, "Leave": leave, "Evict": evict, "ClaimingPartition": claiming_partition,
    "ReleasingPartition": releasing_partition, "ClaimingMessages": claiming_messages, "ReleaseGroup": release_group,
    "SetPosition": set_position, "Topology": topology, "GroupConfig": group_config, "StepDown": step_down, "Note": note,
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# The log


def route(group: str, partitions: int) -> int:
    """The log that a group lives in (L2)."""
    return mmh3.hash(group.encode("utf-8"), seed=0, signed=False) % partitions


class Oracle:
    """The world that one log tells, record by record."""

    def __init__(self, log: int = 0, root: bytes | None = None, expect_incarnation: bytes | None = None) -> None:
        self.log = log
        self.next_offset = 0
        self.began_at = 0
        self.incarnation: bytes | None = None
        self.partitions: int | None = None
        self.groups: dict[str, Group] = {}
        self._expected = expect_incarnation
        self._root: dict[str, Any] | None = None
        self._chain = (0, 0)
        self._block: list[bytes | None] = []
        if log > 0:
            if root is None:
                raise ValueError("a log k > 0 cannot be read without the root (L4)")
            # The first valid Genesis of partition 0 is judged there as well as here, by the same rules (L6).
            reader = Oracle(0, None, expect_incarnation)
            verdict = reader.apply(0, root)
            if verdict.outcome != "accepted" or verdict.record is None:
                raise ValueError("the root is no valid Genesis (L3)")
            self._root = verdict.record.fields

    def apply(self, offset: int, value: bytes | None) -> Verdict:
        """The verdict on the next record; OracleStop, with nothing changed, where a reader stops (E3, L6, L8)."""
        if offset != self.next_offset:
            raise OracleStop("gap", offset)
        verdict = self._judge(offset, value)
        self.next_offset += 1
        self._block.append(value)
        if len(self._block) == BLOCK:
            self._chain = (self.next_offset, chain_step(self._chain[1], self.next_offset, self._block))
            self._block = []
        return verdict

    def log_digest(self) -> int:
        """N3 as of now."""
        rows = [packed(5, text_hash(name), group_digest(name, group)) for name, group in self.groups.items()]
        return sum(word_hash(row) for row in rows) % 2**64

    def begin_at(self, snapshot: LogState, chain: int) -> None:
        """N9: goes on from a snapshot, as if all before it had been read. `snapshot`: by `oracle_snapshot`."""
        self.incarnation, self.partitions = snapshot.incarnation, snapshot.partitions
        self.groups = snapshot.groups
        self.began_at = self.next_offset = snapshot.at
        self._chain = (snapshot.at, chain)

    def state_digest(self, group: str) -> int:
        """G3 as of now; 0 for a group without state."""
        return group_digest(group, self.groups[group]) if group in self.groups else 0

    def chain_digest(self) -> tuple[int, int]:
        """The newest checkpoint and its chain digest (G1, G2)."""
        return self._chain

    def _judge(self, offset: int, value: bytes | None) -> Verdict:
        """The order of all checks, at the head of section 5."""
        envelope = parse_envelope(value)
        if envelope is None or value is None:
            return GARBAGE
        if envelope.group == "":
            return self._judge_log_record(offset, value, envelope)
        if self.incarnation is None or self.partitions is None or not crc_fits(value, self.incarnation):
            return GARBAGE
        if envelope.version != 1:
            raise OracleStop("envelope", offset)
        if route(envelope.group, self.partitions) != self.log:
            return Verdict("ignored", "misrouted", envelope.group, None)
        return self._judge_group_record(offset, envelope)

    def _judge_log_record(self, offset: int, value: bytes, envelope: Envelope) -> Verdict:
        """Genesis and Snapshot, the only ones under an empty group id (E2)."""
        if envelope.type not in (0, HIGHEST_TYPE):
            return GARBAGE
        try:
            record = decode_record(envelope.type, envelope.body)
        except ValueError:
            return GARBAGE
        is_genesis = record.type == "Genesis"
        named = record.fields["incarnation"] if is_genesis else record.fields["genesis"]["incarnation"]
        if not crc_fits(value, named):
            return GARBAGE
        held = self._root["incarnation"] if self._root is not None else self.incarnation
        foreign = envelope.version != 1 or envelope.record_version != 1
        if not is_genesis:
            founding = record.fields["chain"] == 0 and record.fields["at"] > self.began_at
            if founding and held is not None and not foreign:
                raise OracleStop("founding", offset)  # N13, of whatever incarnation
            if named != self.incarnation:
                return GARBAGE
        if foreign and held in (None, named):
            raise OracleStop("envelope", offset)
        if not is_genesis:
            return Verdict("accepted", "", None, record)
        return self._judge_genesis(offset, record)

    def _judge_genesis(self, offset: int, record: Record) -> Verdict:
        # L5 for what comes after the one that counts, L4 for what does not equal the root.
        if self.incarnation is not None or (self._root is not None and record.fields != self._root):
            return Verdict("ignored", "genesis", None, record)
        if self._expected not in (None, record.fields["incarnation"]):
            raise OracleStop("recreated", offset)
        if record.fields["hash"] != HASH_NAME:
            raise OracleStop("hash", offset)
        if record.fields["protocol"] > PROTOCOL_VERSION:
            raise OracleStop("protocol", offset)
        self.incarnation, self.partitions = record.fields["incarnation"], record.fields["partitions"]
        return Verdict("accepted", "", None, record)

    def _judge_group_record(self, offset: int, envelope: Envelope) -> Verdict:
        name = envelope.group
        group = self.groups.get(name, Group())
        if group.opaque_at == -1 and (envelope.record_version > 1 or envelope.type > HIGHEST_TYPE):
            # The group is opaque from here on, so it has a state, also if nothing was accepted yet (E5).
            group.opaque_at = offset
            self.groups[name] = group
        if group.opaque_at != -1:
            return Verdict("ignored", "opaque", name, None)
        # A version of 0 (E5), or a Genesis or Snapshot under a group id (E2).
        if envelope.record_version == 0 or envelope.type in (0, HIGHEST_TYPE):
            return Verdict("rejected", "malformed", name, None)
        try:
            record = decode_record(envelope.type, envelope.body)
        except ValueError:
            return Verdict("rejected", "malformed", name, None)
        if group.deleted and record.type not in ("GroupConfig", "Note"):
            return Verdict("rejected", "deleted", name, record)
        reason = RULES[record.type](group, record.fields, offset, envelope.body)
        if reason:
            return Verdict("rejected", reason, name, record)
        # A Note changes nothing (F10.1), so it does not bring a group into being either.
        if record.type != "Note":
            self.groups[name] = group
        return Verdict("accepted", "", name, record)
