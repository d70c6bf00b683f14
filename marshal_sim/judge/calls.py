"""The judge of what the calls of a consumer promise: S19 to S24 and S28, one function each.

Each check counts how often it had something to judge (`History.counted`), so that a check that never ran shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from marshal_sim.judge.claims import claim_of
from marshal_sim.judge.evidence import Client, Confirmation, Delivery, Touch, Violation
from marshal_sim.judge.facts import ClaimSpan
from marshal_sim.judge.history import History
from marshal_sim.judge.model import AT_LEAST_ONCE


def s19_confirmed(history: History) -> Iterator[Violation]:
    """Yields each breach of S19: once a flush or a double_ack has said that the log has an ack, no later claim delivers
    the message, unless somebody sets the position.

    A flush that names a partition has said nothing of its acks until then, to this flush or to later ones.
    """
    confirmed: dict[tuple[str, str, int, int], list[tuple[ClaimSpan, str]]] = {}
    acked: dict[tuple[str, Client], list[tuple[Delivery, ClaimSpan]]] = {}
    for d in history.deliveries if history.evidence.confirmations else ():
        claim = claim_of(history, d)
        if claim is not None and claim.mode == AT_LEAST_ONCE and d.ack_ms >= 0 and d.again_ms < 0:
            acked.setdefault((d.group, d.client), []).append((d, claim))
    flushes: dict[tuple[str, Client], list[Confirmation]] = {}
    for one in history.evidence.confirmations:
        if one.lost is None:
            continue
        before = flushes.setdefault((one.group, one.client), [])
        what = "flush" if one.of is None else "double_ack"
        for d, claim in acked.get((one.group, one.client), ()):
            if d is one.of or (one.of is None and d.ack_ms < one.since_ms):
                place = (d.topic, d.partition)
                told = one.of is None and any(
                    place in (flush.lost or ()) and d.ack_ms <= flush.until_ms <= one.since_ms for flush in before
                )
                if place not in one.lost and not told:
                    history.counted["S19"] += 1
                    confirmed.setdefault((*d.key, d.offset), []).append((claim, what))
        if one.of is None:
            before.append(one)
    for d in history.deliveries if confirmed else ():
        later = claim_of(history, d)
        for claim, what in confirmed.get((*d.key, d.offset), ()) if later is not None else ():
            assert later is not None
            if later.epoch > claim.epoch and later.generation == claim.generation and not _set(history, claim, later):
                text = f"{d.key} {d.offset} comes again under claim {later.epoch}, after a {what} under {claim.epoch}"
                yield Violation("S19", d.begin_ms, later.epoch, text)


def _set(history: History, claim: ClaimSpan, later: ClaimSpan) -> bool:
    """Returns whether somebody has set the position of a partition between two of its claims, or begun the later one
    by a seek.
    """
    places = [*history.set_at.get(claim.key, ()), *history.sought.get(claim.key, ())]
    return any(claim.epoch < at <= later.epoch for at in places)


def s20_sought(history: History) -> Iterator[Violation]:
    """Yields each breach of S20: when a seek has returned, its client has read a claim of its own that begins where it
    was asked to; then it delivers nothing under an earlier claim.
    """
    for one in history.evidence.seeks:
        history.counted["S20"] += 1
        at = [offset for offset in history.sought.get(one.key, ()) if offset < one.read_to]
        claims = [history.claims[one.key[0], offset] for offset in at]
        claim = next((claim for claim in reversed(claims) if claim.position == one.position), None)
        what = f"client {one.client} has sought {one.key} to {one.position}"
        if claim is None:
            yield Violation("S20", one.ms, -1, f"{what}, and no claim begins there")
            continue
        for d in history.deliveries:
            if (d.client, d.key) == (one.client, one.key) and d.gate_ms > one.ms and d.epoch < claim.epoch:
                yield Violation("S20", d.gate_ms, d.epoch, f"{what}, and delivers {d.offset} under claim {d.epoch}")


def s21_paused(history: History) -> Iterator[Violation]:
    """Yields each breach of S21: nothing is delivered to a consumer of a partition that its user has paused."""
    of: dict[tuple[Client, object], list[Delivery]] = {}
    for d in history.deliveries if history.evidence.user_pauses else ():
        of.setdefault((d.client, d.key), []).append(d)
    for one in history.evidence.user_pauses:
        history.counted["S21"] += 1
        for d in of.get((one.client, one.key), ()):
            if one.since_ms < d.gate_ms < one.until_ms:
                text = f"client {one.client} gets {one.key} {d.offset}, which its user paused at {one.since_ms:g}"
                yield Violation("S21", d.gate_ms, d.epoch, text)


def s22_window(history: History) -> Iterator[Violation]:
    """Yields each breach of S22: of a partition no more than `max_acks_pending` messages are delivered and unfinished
    at once under one claim. A dead letter ends a message, also one that follows another and comes to no handler again.
    """
    ended = {
        (one.client, one.key, one.epoch, one.offset): one.posted_ms
        for one in history.evidence.letters
        if one.delivery is None and one.posted_ms >= 0
    }
    open_now: dict[tuple[Client, str, int], dict[int, Delivery]] = {}
    for d in history.deliveries:
        most = history.evidence.acks_pending_max.get(d.client)
        if most is None:
            continue
        mine = open_now.setdefault((d.client, d.group, d.epoch), {})
        for offset, other in [*mine.items()]:
            posted_ms = ended.get((other.client, other.key, other.epoch, offset), math.inf)
            if other.again_ms < 0 <= other.end_ms <= d.begin_ms or posted_ms <= d.begin_ms:
                del mine[offset]
        mine[d.offset] = d
        history.counted["S22"] += 1
        if len(mine) > most:
            text = f"client {d.client} has {len(mine)} unfinished messages of {d.key}, and asked for {most} at most"
            yield Violation("S22", d.begin_ms, d.epoch, text)


def s23_drained(history: History) -> Iterator[Violation]:
    """Yields each breach of S23: in at-least-once mode a drain releases a partition when no handler has a message of
    it, or when its time is over.
    """
    of: dict[tuple[Client, str, int], list[Delivery]] = {}
    for d in history.deliveries if history.evidence.drains else ():
        of.setdefault((d.client, d.group, d.epoch), []).append(d)
    for one in history.evidence.drains:
        slack_ms = history.slack.wait_ms + (one.until_ms - one.since_ms) * history.slack.drift_ppm / 1_000_000
        for (client, group, epoch), given in of.items():
            claim = history.claims.get((group, epoch)) if (client, group) == (one.client, one.group) else None
            sent_ms = -1.0 if claim is None else claim.drained.get(client, -1.0)
            if claim is None or claim.mode != AT_LEAST_ONCE or sent_ms < one.since_ms:
                continue
            history.counted["S23"] += 1
            held = [d for d in given if d.begin_ms <= sent_ms and not 0 <= d.end_ms <= sent_ms]
            if held and sent_ms < one.until_ms - slack_ms:
                text = f"client {client} drains, and releases {claim.key}, of which a handler has {held[0].offset}"
                yield Violation("S23", sent_ms, claim.end, text)


def s24_heard(history: History) -> Iterator[Violation]:
    """Yields each breach of S24: an owner gives up a silent handler only when the handler timeout is over since the
    handler has last reported that it is at work.
    """
    touched: dict[tuple[object, int, int], list[Touch]] = {}
    for one in history.evidence.touches:
        touched.setdefault((one.key, one.epoch, one.offset), []).append(one)
    for sent_ms, group, fields in history.stuck if touched else ():
        key = (group, fields["topic"], fields["partition"])
        timeout_ms = history.evidence.handler_intervals * history.sessions[group, fields["session"]].interval_ms
        slack_ms = history.slack.wait_ms + timeout_ms * history.slack.drift_ppm / 1_000_000
        for claim in history.by_key.get(key, ()):
            mine = claim.session == fields["session"]
            for one in touched.get((key, claim.epoch, fields["from"]), ()) if mine else ():
                history.counted["S24"] += one.ms < sent_ms
                if one.ms < sent_ms < one.ms + timeout_ms - slack_ms:
                    text = f"{key} {one.offset} is given up as silent, and its handler was at work at {one.ms:g}"
                    yield Violation("S24", sent_ms, claim.epoch, text)


# What comes before each. A hand-over whose successor goes is over, and may begin again (A3): it is told again.
STAGES: Final = {"claim": (None,), "revoking": ("claim", "revoking"), "lost": ("claim", "revoking")}


def s28_callbacks(history: History) -> Iterator[Violation]:
    """Yields each breach of S28: callbacks run on a thread of their own and tell of each claim in order: that it has
    begun, must end, is lost. In the end the user knows which claims the consumer has.
    """
    evidence = history.evidence
    clones = {clone for _, _, clone in evidence.forks}  # their users were told by the original
    for client in {**evidence.callbacks, **evidence.known_claims}:
        if client in clones:
            continue
        stages: dict[int, str] = {}
        active = False
        for what, epoch, ms, apart in evidence.callbacks.get(client, ()):
            history.counted["S28"] += 1
            called = f"on_{what} of client {client}"
            if not apart:
                yield Violation("S28", ms, epoch, f"{called} runs where heartbeats are sent")
            if what in STAGES:
                if stages.get(epoch) not in STAGES[what]:
                    yield Violation("S28", ms, epoch, f"{called} for {epoch} comes after {stages.get(epoch)}")
                stages[epoch] = what
            elif active == (what == "activated"):
                yield Violation("S28", ms, epoch, f"{called} comes twice")
            else:
                active = not active
        known = evidence.known_claims.get(client)
        told = frozenset(epoch for epoch, stage in stages.items() if stage != "lost")
        if known is not None and (told, active) != (known, bool(known)):
            text = f"client {client} has {sorted(known)}, its user was told of {sorted(told)}, active: {active}"
            yield Violation("S28", -1, -1, text)
