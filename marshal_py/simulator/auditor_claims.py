"""Each delivery under its claim: S2, S3, S4 and S11 of invariants.md, one function each, over the facts of one log.

Where the journal says how much of the log a client had read, that decides what it may know; elsewhere the moments at
which records were sent do, with the slack that the judge was given.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator

from marshal_py.simulator.auditor_evidence import Delivery, Key, Violation
from marshal_py.simulator.auditor_facts import Tenure
from marshal_py.simulator.auditor_history import History

TOKEN = re.compile(r"([0-9a-f]{32})-([0-9a-f]{16})")  # incarnation, epoch


def tenure_of(history: History, d: Delivery) -> Tenure | None:
    """The claim that a delivery names, if it is one of this partition."""
    tenure = history.tenures.get((d.group, d.epoch))
    return tenure if tenure is not None and tenure.key == d.key else None


def successor_of(history: History, tenure: Tenure) -> Tenure | None:
    """The next claim of the same partition by another session."""
    tenures = history.by_key[tenure.key]
    after = bisect_right(tenures, tenure.epoch, key=lambda t: t.epoch)
    return next((later for later in tenures[after:] if later.session != tenure.session), None)


def is_late(history: History, d: Delivery, tenure: Tenure) -> bool:
    """Whether another session claimed between the gate and the call (X3), or one whose caller vouched for it (X12)."""
    successor = successor_of(history, tenure)
    return (
        successor is not None and successor.ms < d.begin_ms and (d.gate_ms <= successor.ms or tenure.ended_by == "Join")
    )


def s2_one_owner(history: History) -> Iterator[Violation]:
    """A delivery names a claim of its partition, its client's own, which is live in what that client has read."""
    for d in history.deliveries:
        tenure, what = tenure_of(history, d), f"client {d.client} delivers {d.key} {d.offset}"
        if tenure is None or (d.read_to >= 0 and not d.epoch < d.read_to <= tenure.end):
            yield Violation("S2", d.gate_ms, d.epoch, f"{what}, not its own")
            continue
        life = history.lives[d.group, tenure.session]
        if d.instance not in (life.instance, life.client_id):
            yield Violation("S2", d.gate_ms, d.epoch, f"{what} under a claim of {life.client_id}, another instance")
        if tenure.sent_ms > d.gate_ms + history.slack.stamp_ms:
            yield Violation("S2", d.gate_ms, d.epoch, f"{what} before it claimed it")


def s3_lease(history: History) -> Iterator[Violation]:
    """Nothing is delivered when another session may own the partition: after its claim, past the fence, let go."""
    slack = history.slack
    for d in history.deliveries:
        tenure, what = tenure_of(history, d), f"client {d.client} delivers {d.key} {d.offset}"
        if tenure is None:
            continue
        life, successor = history.lives[d.group, tenure.session], successor_of(history, tenure)
        if successor is not None and is_late(history, d, tenure):
            history.counted["X12" if tenure.ended_by == "Join" else "S3"] += 1
        elif successor is not None and successor.ms < d.gate_ms:
            yield Violation("S3", d.gate_ms, successor.epoch, f"{what}, owned by another since {successor.ms:g}")
        sent_ms = min(tenure.released.get(d.client, d.gate_ms), life.left.get(d.client, d.gate_ms))  # T16
        if d.gate_ms > sent_ms + slack.stamp_ms:
            yield Violation("S3", d.gate_ms, tenure.end, f"{what}, having let go of it")
        extended_ms = life.extended_ms(d.read_to, d.gate_ms + slack.stamp_ms)  # T8
        limit_ms = life.interval_ms * (1_000_000 + slack.drift_ppm) // 1_000_000 + slack.wait_ms
        if d.gate_ms - extended_ms > limit_ms:
            waited_ms = d.gate_ms - extended_ms
            yield Violation("S3", d.gate_ms, -1, f"{what} {waited_ms:g} ms after its last extension was sent")


def s4_fencing(history: History) -> Iterator[Violation]:
    """A store that keeps the greatest token, replayed: it refuses nothing that a client could know to be over."""
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
            tenure = tenure_of(history, d)
            late = tenure is not None and is_late(history, d, tenure)
            if not late and greatest.begin_ms <= d.gate_ms:
                yield Violation(
                    "S4",
                    d.begin_ms,
                    d.epoch,
                    f"client {d.client} writes {d.key} {d.offset} by epoch "
                    f"{d.epoch}, after a write by {greatest.epoch} that was there at its gate",
                )


def s11_pause(history: History) -> Iterator[Violation]:
    """Nothing is delivered in a pause that was read. (Of whom nobody knows what it had read, the lease ends: S3.)"""
    for d in history.deliveries:
        for start, end in history.pauses.get(d.group, ()):
            if start < d.read_to <= end:
                yield Violation("S11", d.gate_ms, start, f"client {d.client} delivers {d.key} {d.offset} in a pause")
