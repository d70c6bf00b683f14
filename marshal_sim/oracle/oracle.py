"""The second fold: PROTOCOL.md's rules once more, slow and plain, to judge the fold that runs in production.

This file has the order of all checks, F0, F10 and the Genesis; `rules.py` has the rules 1 to 9 and 11. The oracle was
written from PROTOCOL.md alone and may import only the standard library, mmh3 and its own files: a misreading that it
shared with `marshal_py.protocol` would be one that no differential test can find.
"""

from typing import Any, NamedTuple

import mmh3

from marshal_sim.oracle.rules import RULES, needs_key, signature, unsigned
from marshal_sim.oracle.snapshot import LogState, refusal
from marshal_sim.oracle.state import (
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
from marshal_sim.oracle.wire import (
    GENESIS_TYPE,
    HASH_NAME,
    HIGHEST_TYPE,
    PROTOCOL_VERSION,
    SIGNED_TYPE,
    SNAPSHOT_TYPE,
    Envelope,
    Record,
    crc_fits,
    decode_messagepack,
    decode_record,
    parse_envelope,
)

__all__ = [
    "HASH_NAME",
    "PROTOCOL_VERSION",
    "RULES",
    "Group",
    "Oracle",
    "OracleStop",
    "Partition",
    "Record",
    "Session",
    "Topic",
    "Verdict",
    "decode_messagepack",
    "route",
]

BLOCK = 16


class OracleStop(Exception):
    """Raised when the log cannot be folded further. The record at `offset` was not consumed."""

    def __init__(self, reason: str, offset: int) -> None:
        super().__init__(f"{reason} at offset {offset}")
        self.reason = reason
        self.offset = offset


class Verdict(NamedTuple):
    outcome: str
    reason: str
    group: str | None
    record: Record | None
    # F5.2: which ranges of an accepted ClaimingMessages were granted, by their place in it, from 0.
    granted: tuple[int, ...] = ()
    # F4.5: what an accepted ClaimingPartition leaves unsettled.
    unsettled: tuple[int, int] | None = None


GARBAGE = Verdict("ignored", "garbage", None, None)


# ---------------------------------------------------------------------------------------------------------------------
# The log


def route(group: str, partitions: int) -> int:
    """Returns the number of the log that a group lives in (L2)."""
    return mmh3.hash(group.encode("utf-8"), seed=0, signed=False) % partitions


class Oracle:
    """The state of one log, folded record by record."""

    def __init__(self, log: int = 0, root: bytes | None = None, expect_incarnation: bytes | None = None) -> None:
        self.log = log
        self.next_offset: int = 0
        self.began_at: int = 0
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
        """Folds the next record and returns the verdict. Where a reader must stop, raises OracleStop and changes
        nothing (E3, L6, L8).
        """
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
        """Returns the digest of the whole log's state now (N3)."""
        rows = [packed(5, text_hash(name), group_digest(name, group)) for name, group in self.groups.items()]
        return sum(word_hash(row) for row in rows) % 2**64

    def begin_at(self, snapshot: LogState, chain: int) -> None:
        """Continues from a snapshot, read by `snapshot.py`, as if everything before it had been folded (N9)."""
        self.incarnation, self.partitions = snapshot.incarnation, snapshot.partitions
        self.groups = snapshot.groups
        self.began_at = self.next_offset = snapshot.at
        self._chain = (snapshot.at, chain)

    def state_digest(self, group: str) -> int:
        """Returns the group's state digest now; 0 for a group without state (G3)."""
        return group_digest(group, self.groups[group]) if group in self.groups else 0

    def chain_digest(self) -> tuple[int, int]:
        """Returns the newest checkpoint and its chain digest (G1, G2)."""
        return self._chain

    def _judge(self, offset: int, value: bytes | None) -> Verdict:
        """Makes all checks in the order that the head of PROTOCOL.md's section 5 gives."""
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
        """Judges a record with an empty group id: only Genesis and Snapshot may have one (E2)."""
        if envelope.type not in (GENESIS_TYPE, SNAPSHOT_TYPE):
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
            founding = record.fields["chain"] == 0 and self.began_at < record.fields["at"] <= offset
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
        reason = refusal(record.fields)
        if reason:
            raise OracleStop(reason, offset)
        self.incarnation, self.partitions = record.fields["incarnation"], record.fields["partitions"]
        return Verdict("accepted", "", None, record)

    def _judge_group_record(self, offset: int, envelope: Envelope) -> Verdict:
        name = envelope.group
        group = self.groups.get(name, Group())
        signed = (envelope.record_version, envelope.type) == (2, SIGNED_TYPE)
        if group.opaque_at == -1 and (envelope.record_version > 2 or (envelope.type > HIGHEST_TYPE and not signed)):
            # The group is opaque from here on, so it has a state, also if nothing was accepted yet (E5).
            group.opaque_at = offset
            self.groups[name] = group
        if group.opaque_at != -1:
            return Verdict("ignored", "opaque", name, None)
        # A version of 0 (E5), or a Genesis or Snapshot under a group id (E2).
        if envelope.record_version == 0 or envelope.type in (GENESIS_TYPE, SNAPSHOT_TYPE):
            return Verdict("rejected", "malformed", name, None)
        try:
            record = decode_record(envelope.type, envelope.body, envelope.record_version)
            carrier, body = (record.fields, record.fields["body"]) if signed else (None, envelope.body)
            if carrier is not None:
                record = decode_record(carrier["kind"], body)
        except (ValueError, KeyError):
            return Verdict("rejected", "malformed", name, None)
        if carrier is not None and not needs_key(record):
            return Verdict("rejected", "malformed", name, None)
        if group.deleted and record.type not in ("GroupConfig", "Note"):
            return Verdict("rejected", "deleted", name, record)
        if carrier is not None:
            assert self.incarnation is not None
            refused = signature(group, name, carrier, self.incarnation)
        else:
            refused = unsigned(group, record)
        reason = refused or RULES[record.type](group, record.fields, offset, body)
        if reason:
            return Verdict("rejected", reason, name, record)
        # A Note changes nothing (F10.1), so it does not bring a group into being either.
        if record.type != "Note":
            self.groups[name] = group
        granted = group.granted if record.type == "ClaimingMessages" else ()
        return Verdict(
            "accepted", "", name, record, granted, group.unsettled if record.type == "ClaimingPartition" else None
        )
