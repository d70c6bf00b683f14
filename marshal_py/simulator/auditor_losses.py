"""The judge of losses in at-most-once mode, reported as S6: each granted message is delivered, given back or noted.

A grant is an accepted ClaimingMessages. Its owner delivers each existing offset of [start, to) under that claim, gives
it back by its Release, or names it in a Note. The owner is excused if its process died, or the run ended, before it had
read the end of the claim. A Note must also name every existing offset of [from, start).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from marshal_py.simulator.auditor_evidence import Client, Key, Violation
from marshal_py.simulator.auditor_facts import NOBODY, ClaimSpan, Grant
from marshal_py.simulator.auditor_history import LOST, History
from marshal_py.simulator.oracle_wire import crc_fits, decode_record, parse_envelope

NOTE = 13  # PROTOCOL.md 4.2
DROPPED = "amo_dropped"  # D3


class Noted(NamedTuple):
    """Describes a Note that names messages which no client will get. `kind` says why, `sent_ms` when it was last
    sent.
    """

    kind: str
    start: int
    to: int
    sent_ms: float  # when it was last sent


class Suspect(NamedTuple):
    """Names messages of one grant that no client got. `kinds`: the kinds of Notes that may name them."""

    grant: Grant
    client: Client
    offsets: list[int]
    kinds: tuple[str, ...]  # the kinds of Notes that may name them
    fate: str


def s6_losses(history: History) -> Iterator[Violation]:
    """Yields each breach of S6 by a grant whose messages were lost in silence. Grants of a dump are left out.

    The processes that obtained the grants of a dump were not observed.
    """
    suspects = list(_suspects(history))
    noted = _notes(history) if suspects else {}
    for grant, client, offsets, kinds, fate in suspects:
        session = history.claims[grant.key[0], grant.epoch].session
        notes = [
            note for note in noted.get((session, grant.key), ()) if note.kind in kinds and note.sent_ms >= grant.sent_ms
        ]
        lost = [offset for offset in offsets if not any(note.start <= offset < note.to for note in notes)]
        if lost:
            yield Violation(
                "S6",
                history.evidence.appended_ms[grant.offset],
                grant.offset,
                f"{grant.key} {lost[0]} {fate}, and client {client} names it in no Note ({len(lost)} such "
                f"messages in this grant)",
            )


def _suspects(history: History) -> Iterator[Suspect]:
    """Yields messages that were neither delivered nor given back, by clients that could have named them in a Note."""
    delivered: dict[tuple[str, int], dict[Client, set[int]]] = {}  # claim -> client -> offsets
    for d in history.deliveries:
        delivered.setdefault((d.group, d.epoch), {}).setdefault(d.client, set()).add(d.offset)
    for place, grants in history.grants.items():
        claim, by_client = history.claims[place], delivered.get(place, {})
        anybody: set[int] = set().union(*by_client.values())
        returned = 2**63 if claim.given_back is None else claim.given_back
        for grant in grants:
            if grant.offset < history.evidence.inherited:
                continue
            client = _sender(history, grant)
            skipped = _existing(history, grant.key, grant.from_, grant.start)
            if skipped:
                yield Suspect(grant, client, skipped, (DROPPED, LOST), "is skipped by a grant")
            missing = [
                offset
                for offset in _existing(history, grant.key, grant.start, min(grant.to, returned))
                if offset not in anybody
            ]
            if missing and _excused(history, grant, claim, client):  # but from what it passed over
                newest = max(by_client.get(client, ()), default=-1)
                missing = [offset for offset in missing if offset < newest]
            if missing:
                yield Suspect(grant, client, missing, (DROPPED,), "is granted, and neither delivered nor given back")


def _existing(history: History, key: Key, first: int, end: int) -> list[int]:
    """Returns the offsets of [first, end) at which the partition holds messages."""
    offsets = history.evidence.topics.get((key[1], key[2]), [])
    return offsets[bisect_left(offsets, first) : bisect_left(offsets, end)]


def _sender(history: History, grant: Grant) -> Client:
    value = history.evidence.log[grant.offset]
    sender = history.evidence.sent[value][2] if value in history.evidence.sent else NOBODY
    return history.claims[grant.key[0], grant.epoch].client_id if sender is None else sender


def _excused(history: History, grant: Grant, claim: ClaimSpan, client: Client) -> bool:
    """Returns True if the client never learned that the grant's claim is over, or could do nothing when it learned
    it.
    """
    acted_to = history.evidence.acted_to.get(client, len(history.evidence.log))
    restarts = history.evidence.restarts.get(client, ())
    return claim.end >= acted_to or any(grant.sent_ms <= ms and grant.offset >= read_to for ms, read_to in restarts)


def _notes(history: History) -> dict[tuple[int, Key], list[Noted]]:
    """Returns the Notes about lost messages, by session and partition. Notes that never reached the log are
    included.
    """
    found: dict[tuple[int, Key], list[Noted]] = {}
    incarnation = history.oracle.incarnation or b""
    for value, (_, sent_ms, _) in history.evidence.sent.items():
        envelope = parse_envelope(value)
        if envelope is None or envelope.type != NOTE or not crc_fits(value, incarnation):
            continue
        fields = decode_record(envelope.type, envelope.body).fields
        if fields["kind"] in (DROPPED, LOST):
            place = (fields["session"], (envelope.group, fields["topic"], fields["partition"]))
            found.setdefault(place, []).append(Noted(fields["kind"], fields["from"], fields["to"], sent_ms))
    return found
