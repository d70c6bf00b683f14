"""The judge of deliveries and their claims: S2, S3, S4 and S11, one function each, over the facts of one log.

What a client may know is decided by how much of the log it had read, if the journal says that. If it does not, the
times at which records were sent decide, with the slack that the judge was given.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator

from marshal_sim.judge.evidence import Delivery, Key, Violation
from marshal_sim.judge.facts import ClaimSpan
from marshal_sim.judge.history import History

COVERED = ("topic", "pinned")  # policies under which one claim stands above others
TOKEN = re.compile(r"([0-9a-f]{32})-([0-9a-f]{16})")  # incarnation, epoch


def claim_of(history: History, d: Delivery) -> ClaimSpan | None:
    """Returns the claim that a delivery names by its epoch; None if there is none, or if it is of another partition."""
    claim = history.claims.get((d.group, d.epoch))
    return claim if claim is not None and claim.key == d.key else None


def successor_of(history: History, claim: ClaimSpan) -> ClaimSpan | None:
    """Returns the next claim of the same partition by another session, or None."""
    claims = history.by_key[claim.key]
    after = bisect_right(claims, claim.epoch, key=lambda t: t.epoch)
    return next((later for later in claims[after:] if later.session != claim.session), None)


def is_late(history: History, d: Delivery, claim: ClaimSpan) -> bool:
    """Returns True if a claim by another session came between `may_deliver` and the call of the handler (X3), or if
    that claim came because a user vouched that the owner was dead (X12).
    """
    successor = successor_of(history, claim)
    return (
        successor is not None and successor.ms < d.begin_ms and (d.gate_ms <= successor.ms or claim.ended_by == "Join")
    )


def _latest_gate_ms(history: History, d: Delivery) -> float:
    """Returns until when the library may have allowed it. Journals of real queries know when at the earliest: when the
    sink had the batch before.
    """
    return d.begin_ms if d.client in history.evidence.queries and d.read_to < 0 else d.gate_ms


def s2_one_owner(history: History) -> Iterator[Violation]:
    """Yields each breach of S2: a delivery names its client's own claim of the partition, which is live in what the
    client has read. So is the claim that covers it, if the group's policy demands one.
    """
    for d in history.deliveries:
        claim, what = claim_of(history, d), f"client {d.client} delivers {d.key} {d.offset}"
        if claim is None or (d.read_to >= 0 and not d.epoch < d.read_to <= claim.end):
            yield Violation("S2", d.gate_ms, d.epoch, f"{what}, not its own")
            continue
        if not _covered(history, d, claim):
            yield Violation("S2", d.gate_ms, d.epoch, f"{what}, without the claim that covers it")
        facts = history.sessions[d.group, claim.session]
        if d.instance not in (facts.instance, facts.client_id):
            yield Violation("S2", d.gate_ms, d.epoch, f"{what} under a claim of {facts.client_id}, another instance")
        if claim.sent_ms > _latest_gate_ms(history, d) + history.slack.stamp_ms:
            yield Violation("S2", d.gate_ms, d.epoch, f"{what} before it claimed it")


def _covered(history: History, d: Delivery, claim: ClaimSpan) -> bool:
    """Returns whether the session of a delivery owned the claim that its group's policy demands above it (A9, A11)."""
    if claim.policy not in COVERED or d.read_to < 0:
        return True
    covers = history.by_key.get((d.group, d.topic if claim.policy == "topic" else "", -1), ())
    return any(cover.session == claim.session and cover.epoch < d.read_to <= cover.end for cover in covers)


def s3_lease(history: History) -> Iterator[Violation]:
    """Yields each breach of S3: a client delivers nothing after another session's claim, after its own release, or
    after its lease has ended.
    """
    slack = history.slack
    for d in history.deliveries:
        claim, what = claim_of(history, d), f"client {d.client} delivers {d.key} {d.offset}"
        if claim is None:
            continue
        facts, successor = history.sessions[d.group, claim.session], successor_of(history, claim)
        if successor is not None and is_late(history, d, claim):
            history.counted["X12" if claim.ended_by == "Join" else "S3"] += 1
        elif successor is not None and successor.ms < d.gate_ms:
            yield Violation("S3", d.gate_ms, successor.epoch, f"{what}, owned by another since {successor.ms:g}")
        sent_ms = min(claim.released.get(d.client, d.gate_ms), facts.left.get(d.client, d.gate_ms))  # T16
        if d.gate_ms > sent_ms + slack.stamp_ms:
            yield Violation("S3", d.gate_ms, claim.end, f"{what}, after it released the partition")
        extended_ms = facts.extended_ms(d.read_to, _latest_gate_ms(history, d) + slack.stamp_ms)  # T8
        limit_ms = facts.interval_ms * (1_000_000 + slack.drift_ppm) // 1_000_000 + slack.wait_ms
        if d.gate_ms - extended_ms > limit_ms:
            waited_ms = d.gate_ms - extended_ms
            yield Violation("S3", d.gate_ms, -1, f"{what} {waited_ms:g} ms after its last extension was sent")


def s4_fencing(history: History) -> Iterator[Violation]:
    """Yields each breach of S4: a store that keeps the greatest token rejects only writes by clients that cannot know
    yet that they lost a claim.
    """
    newest: dict[Key, Delivery] = {}  # the first delivery with the greatest token
    incarnation = (history.oracle.incarnation or b"").hex()
    for d in history.deliveries:
        match = TOKEN.fullmatch(d.token)
        if d.token and (match is None or match[1] != incarnation):
            yield Violation("S4", d.begin_ms, -1, f"client {d.client} has the token {d.token}, none of this log")
            continue
        greatest = newest.get(d.key)
        if greatest is None or d.epoch > greatest.epoch:
            newest[d.key] = d
        elif d.epoch < greatest.epoch:
            history.counted["S4"] += 1
            claim = claim_of(history, d)
            late = claim is not None and is_late(history, d, claim)
            if not late and greatest.begin_ms <= d.gate_ms:
                yield Violation(
                    "S4",
                    d.begin_ms,
                    d.epoch,
                    f"client {d.client} writes {d.key} {d.offset} by epoch "
                    f"{d.epoch}, after a write by {greatest.epoch} that was there at its gate",
                )


def s11_pause(history: History) -> Iterator[Violation]:
    """Yields each breach of S11: a client delivers nothing in a pause that it has read. If it is unknown what the
    client has read, S3 judges alone.
    """
    for d in history.deliveries:
        for start, end in history.pauses.get(d.group, ()):
            if start < d.read_to <= end:
                yield Violation("S11", d.gate_ms, start, f"client {d.client} delivers {d.key} {d.offset} in a pause")


def s25_revoked(history: History) -> Iterator[Violation]:
    """Yields each breach of S25: once a consumer has told its user that it will release a partition, it delivers
    nothing more under that claim, unless the reason goes away.
    """
    history.counted["S25"] += sum(map(len, history.evidence.revoking.values()))
    for d in history.deliveries if history.evidence.revoking else ():
        for span in history.evidence.revoking.get((d.client, d.group, d.epoch), ()):
            if span.since_ms < d.gate_ms and (span.until_ms < 0 or d.gate_ms < span.until_ms):
                text = f"client {d.client} delivers {d.key} {d.offset}, which it gives up since {span.since_ms:g}"
                yield Violation("S25", d.gate_ms, d.epoch, text)
