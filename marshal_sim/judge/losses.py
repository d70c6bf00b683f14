"""The judge of losses in at-most-once mode, S6 and S18.

S6: each granted message is delivered, given back or noted. A grant is an accepted ClaimingMessages. Its owner delivers
each existing offset of [start, to) under that claim, gives it back by its Release, or names it in a Note. The owner is
excused if its process died, or the run ended, before it had read the end of the claim. A Note must also name every
existing offset of [from, start).

S18 judges what the claim after a dead owner's names as unsettled (F4.5), by what the dead owner's handlers did.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from marshal_sim.judge.evidence import Client, Key, Violation
from marshal_sim.judge.facts import FOREVER, NOBODY, ClaimSpan, Grant
from marshal_sim.judge.history import LOST, History
from marshal_sim.judge.model import AT_MOST_ONCE
from marshal_sim.oracle.wire import crc_fits, decode_record, parse_envelope

NOTE = 13  # PROTOCOL.md 4.2
DROPPED = "amo_dropped"  # D3


class Noted(NamedTuple):
    """A Note that names messages which no client will get. `kind` says why, `sent_ms` when it was last
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
        told = [note for note in noted.get((session, grant.key), ()) if note.kind in kinds]
        notes = [note for note in told if note.kind == LOST or note.sent_ms >= grant.sent_ms]
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
            if grant.offset < history.evidence.inherited or history.is_outlived(claim):
                continue
            client = _sender(history, grant)
            skipped = _existing(history, claim, grant.from_, grant.start)
            if skipped:
                yield Suspect(grant, client, skipped, (DROPPED, LOST), "is skipped by a grant")
            missing = [
                offset
                for offset in _existing(history, claim, grant.start, min(grant.to, returned))
                if offset not in anybody
            ]
            if missing and _excused(history, grant, claim, client):  # but from what it passed over
                newest = max(by_client.get(client, ()), default=-1)
                missing = [offset for offset in missing if offset < newest]
            if missing:  # S7 looks whether Kafka has what a Note says that it has deleted
                kinds = (DROPPED,) if history.evidence.firsts is None else (DROPPED, LOST)
                yield Suspect(grant, client, missing, kinds, "is granted, and neither delivered nor given back")


def _existing(history: History, claim: ClaimSpan, first: int, end: int) -> list[int]:
    """Returns the offsets of [first, end) at which the partition of a claim holds messages that it is about."""
    offsets = history.offsets(claim)
    found = offsets[bisect_left(offsets, first) : bisect_left(offsets, end)]
    return [offset for offset in found if not history.is_anew(claim, offset)]


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


def s18_unsettled(history: History) -> Iterator[Violation]:
    """Yields each breach of S18: a heartbeat reports only what handlers have finished; and the claim that follows a
    dead owner's names each message that was granted to it and delivered to nobody, and none that it had reported.

    The second part of that needs exact times: a handler may finish between the making of a heartbeat and its sending.
    Of a cloned machine the first part is not judged: its user's calls begin again (Client.clone), though a handler that
    it had is still at work.
    """
    cloned = {client for _, *both in history.evidence.forks for client in both}
    of_clones: set[tuple[str, int]] = set()  # claims
    ended: dict[tuple[str, int], dict[int, float]] = {}  # claim -> offset -> when the first handler had finished it
    for d in history.evidence.deliveries + history.evidence.other_deliveries:
        of_claim = ended.setdefault((d.group, d.epoch), {})
        if d.client in cloned:
            of_clones.add((d.group, d.epoch))
        of_claim[d.offset] = min(d.end_ms if d.end_ms >= 0 else FOREVER, of_claim.get(d.offset, FOREVER))
    noted = _notes(history)
    for key, claims in history.by_key.items():
        for claim in claims:
            handled = ended.get((key[0], claim.epoch), {})
            notes = noted.get((claim.session, key), ())
            judged = claim.epoch >= history.evidence.inherited and (key[0], claim.epoch) not in of_clones
            judged = judged and not history.is_outlived(claim)
            for step in claim.raised if judged else ():
                for offset in _existing(history, claim, step.before, step.after):
                    late = handled.get(offset, FOREVER) > step.sent_ms + history.slack.stamp_ms
                    if late and not any(note.start <= offset < note.to for note in notes):
                        yield Violation(
                            "S18", step.sent_ms, step.offset, f"{key} {offset} was unfinished when reported as handled"
                        )
        for old, new in pairwise(claims):
            judged = old.mode == AT_MOST_ONCE and old.epoch >= history.evidence.inherited
            judged = judged and not history.is_outlived(old)
            if judged and old.generation == new.generation and old.ended_by in ("Leave", "Evict", "Join"):
                yield from _named(history, old, new, ended.get((key[0], old.epoch), {}), noted)


def _named(
    history: History,
    old: ClaimSpan,
    new: ClaimSpan,
    handled: dict[int, float],
    noted: dict[tuple[int, Key], list[Noted]],
) -> Iterator[Violation]:
    """Yields what is wrong about the range that the verdict on `new` names. `handled`: offset -> when finished, of
    what was delivered under `old`.
    """
    key, (first, to) = old.key, new.unsettled
    notes = noted.get((old.session, key), ())
    for grant in history.grants.get((key[0], old.epoch), ()):
        for offset in _existing(history, old, grant.start, grant.to):
            known = offset in handled or any(note.start <= offset < note.to for note in notes)
            if not known and not first <= offset < to:
                yield Violation(
                    "S18", new.ms, new.epoch, f"{key} {offset} is lost, and {first} to {to} are named as unsettled"
                )
    told = history.sessions[key[0], old.session].heartbeats
    if len(told) != 1 or history.slack.stamp_ms:
        return
    (client, told_ms), *_ = told.items()
    for d in history.deliveries:
        mine = (d.client, d.group, d.epoch) == (client, key[0], old.epoch)
        if mine and 0 <= d.ack_ms < told_ms and first <= d.offset < to:
            yield Violation(
                "S18", new.ms, new.epoch, f"{key} {d.offset} is named as unsettled, and was finished before a heartbeat"
            )
