"""The judge of what became of each message: S5 to S10, S27 and S29, one function each.

losses.py judges messages that were granted and never delivered.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise, takewhile
from typing import Final

from marshal_sim.judge.claims import claim_of
from marshal_sim.judge.evidence import Client, Delivery, Heard, Key, LostTail, Violation
from marshal_sim.judge.facts import FOREVER, NOBODY, ClaimSpan
from marshal_sim.judge.history import History
from marshal_sim.judge.model import AT_LEAST_ONCE, AT_MOST_ONCE

BELIEVED_MS: Final = 10_000  # D10: after so long a client believes the cluster in spite of the log


def _at_most_once(history: History) -> Iterator[tuple[Delivery, ClaimSpan]]:
    for d in history.deliveries:
        claim = claim_of(history, d)
        if claim is not None and claim.mode == AT_MOST_ONCE:
            yield d, claim


def _by_epoch(deliveries: list[Delivery]) -> dict[tuple[str, int], list[Delivery]]:
    found: dict[tuple[str, int], list[Delivery]] = {}
    for d in deliveries:
        found.setdefault((d.group, d.epoch), []).append(d)
    return found


def s5_once(history: History) -> Iterator[Violation]:
    """Yields each breach of S5: in at-most-once mode, no offset is delivered twice in one generation of its position.

    A cloned machine still holds the grants that the original obtained before the cloning. Deliveries by these are
    counted, but are no violations.
    """
    seen: dict[tuple[Key, int, int], Delivery] = {}
    for d, claim in _at_most_once(history):
        known = seen.setdefault((d.key, claim.generation, d.offset), d)
        if known is d:
            continue
        before = history.claims[known.group, known.epoch]
        one_ms = _separated_ms(history, known.client, d.client) if d.client != known.client else -1
        inside = [grant for grant in history.grants.get((d.group, d.epoch), ()) if grant.start <= d.offset < grant.to]
        if (_given_back(known, before) and _cloned_owner(history, known, before)) or (
            inside and inside[0].sent_ms <= one_ms
        ):
            history.counted["S5"] += 1
        else:
            yield Violation(
                "S5", d.begin_ms, d.epoch, f"{d.key} {d.offset} is delivered twice, by {known.client} and {d.client}"
            )


def s6_granted(history: History) -> Iterator[Violation]:
    """Yields each breach of S6: in at-most-once mode, each delivery lies in one grant of its claim. The client got that
    grant before the delivery, and after its last fence.
    """
    for d, claim in _at_most_once(history):
        what = f"{d.key} {d.offset}"
        inside = [grant for grant in history.grants.get((d.group, d.epoch), ()) if grant.start <= d.offset < grant.to]
        if len(inside) != 1:
            yield Violation("S6", d.begin_ms, d.epoch, f"{what} lies in {len(inside)} grants")
        elif inside[0].sent_ms > d.gate_ms + history.slack.stamp_ms or 0 <= d.read_to <= inside[0].offset:
            yield Violation("S6", d.begin_ms, inside[0].offset, f"{what} is delivered before it was granted")
        elif any(
            inside[0].offset < read_to and fenced_ms < d.gate_ms
            for fenced_ms, read_to in history.evidence.fences.get(d.client, ())
        ):
            yield Violation(
                "S6", d.begin_ms, d.epoch, f"client {d.client} delivers {what} by a grant of before its fence (D3)"
            )
        if _given_back(d, claim) and not _cloned_owner(history, d, claim):
            yield Violation("S6", d.begin_ms, claim.end, f"{what} was handed over, and given back")


def _given_back(d: Delivery, claim: ClaimSpan) -> bool:
    return claim.given_back is not None and d.offset >= claim.given_back


def _cloned_owner(history: History, d: Delivery, claim: ClaimSpan) -> bool:
    """Returns True if one copy of a cloned machine gave back what the other copy delivers by a grant from before the
    cloning.

    Neither copy can know that the other exists.
    """
    grants = history.grants.get((d.group, d.epoch), ())
    sent_ms = next((g.sent_ms for g in grants if g.start <= d.offset < g.to), FOREVER)
    return d.client != claim.released_by[0] and sent_ms <= _separated_ms(history, d.client, claim.released_by[0])


def _separated_ms(history: History, a: Client, b: Client) -> float:
    """Returns the time (ms) when the memories of two clients parted by cloning; -1 if the clients never shared one."""
    parents = {clone: (original, ms) for ms, original, clone in history.evidence.forks}

    def line(client: Client) -> dict[Client, float]:
        since: dict[Client, float] = {client: FOREVER}
        while client in parents:
            client, ms = parents[client][0], min(parents[client][1], since[client])
            since[client] = ms
        return since

    mine, other = line(a), line(b)
    return max((min(mine[c], other[c]) for c in mine if c in other), default=-1)


def is_lost(history: History, key: Key, offset: int) -> bool:
    """Returns True if a Note says that Kafka had deleted the message before the group read it (D6)."""
    return any(start <= offset < to for start, to in history.lost_ranges.get(key, ()))


def ended_ms(history: History) -> dict[tuple[Key, int, int], float]:
    """Returns when the first handler was done with each message, by partition, generation and offset.

    This includes handlers of clients that have not noticed yet that the topic was recreated, because the log accepts
    the records of such clients. A handler that gave its message back was not done with it (D14); a message whose dead
    letter is written needs no handler (D15).
    """
    ended: dict[tuple[Key, int, int], float] = {}
    for d in history.evidence.deliveries + history.evidence.other_deliveries:
        claim = claim_of(history, d)
        if claim is not None and d.end_ms >= 0 and d.again_ms < 0:
            place = (d.key, claim.generation, d.offset)
            ended[place] = min(d.end_ms, ended.get(place, d.end_ms))
    for letter in history.evidence.letters:
        claim = history.claims.get((letter.key[0], letter.epoch))
        if claim is not None and letter.written_ms >= 0:
            place = (letter.key, claim.generation, letter.offset)
            ended[place] = min(letter.written_ms, ended.get(place, letter.written_ms))
    return ended


def _passed(history: History) -> Iterator[tuple[int, float, Key, int, float | None]]:
    """Yields one tuple for each message that a record moved a position over, unless its topic was gone by then.

    It has the record's offset and sending time, the message's partition and offset, and when a handler had finished the
    message (None: never).
    """
    ended = ended_ms(history)
    for step in history.advances:
        key, offsets = step.claim.key, history.offsets(step.claim)
        if history.is_gone(step.claim, step.sent_ms):
            continue
        for offset in offsets[bisect_left(offsets, step.before) : bisect_left(offsets, step.after)]:
            if history.is_anew(step.claim, offset):
                continue
            yield step.offset, step.sent_ms, key, offset, ended.get((key, step.claim.generation, offset))


def s7_never_lost(history: History) -> Iterator[Violation]:
    """Yields each breach of S7: in at-least-once mode, an accepted position is only moved over messages that handlers
    have finished.
    """
    for record, sent_ms, key, offset, end_ms in _passed(history):
        if end_ms is None and not is_lost(history, key, offset):
            yield Violation("S7", sent_ms, record, f"{key} {offset} is skipped")
    if history.evidence.firsts is None:
        return
    for key, ranges in history.lost_ranges.items():
        for start, to in ranges:
            if to > history.evidence.firsts.get((key[1], key[2]), 0):
                yield Violation("S7", -1, -1, f"{key} {start} to {to} are noted as deleted, and Kafka has them")


def s8_heartbeat_honest(history: History) -> Iterator[Violation]:
    """Yields each breach of S8: a record that moves a position over a message was sent after a handler had finished
    that message.
    """
    for record, sent_ms, key, offset, end_ms in _passed(history):
        if end_ms is not None and end_ms > sent_ms + history.slack.stamp_ms:
            yield Violation("S8", sent_ms, record, f"{key} {offset} was unfinished when reported")


def s9_redelivery(history: History) -> Iterator[Violation]:
    """Yields each breach of S9: in at-least-once mode, a message reported as finished is not delivered again.

    After a hand-over only messages that handlers held for too long may be delivered again.
    """
    by_epoch = _by_epoch(history.deliveries)
    inherited = _by_epoch([d for d in history.evidence.deliveries if d.inherited])
    for key, claims in history.by_key.items():
        for claim in claims:
            for d in by_epoch.get((key[0], claim.epoch), ()) if claim.finished else ():
                if any(start <= d.offset < to for start, to in claim.finished):
                    yield Violation(
                        "S9",
                        d.begin_ms,
                        claim.epoch,
                        f"{key} {d.offset} comes again, and its owner was told that it is finished",
                    )
        for old, new in pairwise(claims):
            if old.mode == AT_LEAST_ONCE and old.generation == new.generation:
                begun, again = by_epoch.get((key[0], old.epoch), []), by_epoch.get((key[0], new.epoch), [])
                if old.handed_over:
                    yield from _repeated(_in_time(history, begun, old), again, old)
                begun = begun + inherited.get((key[0], old.epoch), [])
                if old.ended_by == "Evict":
                    told = history.sessions[old.key[0], old.session].heartbeats
                    yield from _told(history, old, told, begun, again)
                client = old.released_by[0]
                if old.died and client in history.evidence.kept:
                    yield from _told(history, old, {client: history.evidence.kept[client]}, begun, again)


def _in_time(history: History, begun: list[Delivery], old: ClaimSpan) -> list[Delivery]:
    """Returns `begun` without the messages whose handlers took longer than a hand-over waits for them (A3)."""
    wait_ms = history.evidence.hand_over_intervals * history.sessions[old.key[0], old.session].interval_ms
    over_ms = old.released_by[1] - wait_ms + wait_ms * history.slack.drift_ppm // 1_000_000 + history.slack.wait_ms
    queries = history.evidence.queries
    # What was given back is the next owner's (D14), and so is what a query's sink has before Spark's commit is known,
    # of which journals of real queries say nothing.
    done = [d for d in begun if d.again_ms < 0 and (d.ack_ms >= 0 or d.read_to >= 0 or d.client not in queries)]
    return [d for d in done if 0 <= d.end_ms <= old.released_by[1] or d.gate_ms > over_ms]


def _repeated(begun: list[Delivery], again: list[Delivery], old: ClaimSpan) -> Iterator[Violation]:
    """Yields a violation for each message that comes again after its owner finished it and then handed over (A3)."""
    handled = {d.offset for d in begun if d.client == old.released_by[0]}
    for d in again:
        if d.offset in handled:
            yield Violation("S9", d.begin_ms, old.end, f"{d.key} {d.offset} comes again after a hand-over")


def _told(
    history: History, old: ClaimSpan, reported: dict[Client, float], begun: list[Delivery], again: list[Delivery]
) -> Iterator[Violation]:
    """Yields a violation for each message that is delivered again although the old owner had reported it acked.

    `reported`: by client, when it sent its last heartbeat; if its witness released the claim, when it last kept its
    will.
    """
    for client, sent_ms in reported.items():
        before = {d.offset: d for d in begun if d.client == client and d.begin_ms <= sent_ms}
        # A clone may have released the claim because a handler hung in the original, though not in the clone.
        still_open = {
            offset
            for offset, d in before.items()
            if d.inherited or d.ack_ms < 0 or d.ack_ms >= sent_ms - history.slack.stamp_ms
        }
        # A clone does not finish what the original gave back before, nor a dead letter what no handler got.
        waits = {d.offset for d in begun if d.client != client and d.again_ms >= 0}
        waits |= {one.offset for one in history.evidence.letters if (one.key, one.epoch) == (old.key, old.epoch)}
        low = min(still_open | (waits - before.keys()), default=FOREVER)
        for d in again:
            told = d.offset < low or (old.in_order and d.offset not in still_open)  # above it: D1
            if d.offset in before and told:
                yield Violation("S9", d.begin_ms, old.end, f"{d.key} {d.offset}, finished in time, comes again")


def _told_later(history: History, begun: Delivery, offset: int) -> bool:
    """Returns True if `begun.client` is a streaming query, which finished this message under an earlier claim."""
    checkpoints = history.evidence.queries
    return begun.client in checkpoints and any(
        d.offset == offset
        and d.key == begun.key
        and checkpoints.get(d.client) == checkpoints[begun.client]
        and 0 <= d.end_ms <= begun.begin_ms
        for d in history.deliveries
    )


def s10_position(history: History) -> Iterator[Violation]:
    """Yields each breach of S10: a claim delivers in order; in at-least-once mode it begins at its position, without a
    gap.

    Only deliveries are judged here. model.py judges the positions in the log, answers.py what was
    given back and comes again.
    """
    clones = {clone for _, _, clone in history.evidence.forks}
    back = {(d.group, d.epoch, d.offset) for d in history.evidence.deliveries if d.again_ms >= 0}
    posted = {(letter.key[0], letter.epoch, letter.offset) for letter in history.evidence.letters}
    for (group, epoch), given in _by_epoch(history.deliveries).items():
        claim = history.claims.get((group, epoch))
        newest: dict[Client, int] = {}
        for d in given:
            if claim is None or claim.key != d.key or d.client in history.evidence.lanes:
                continue  # of a `process`: S26
            key, before = d.key, newest.get(d.client, NOBODY)
            if d.offset <= before and (group, epoch, d.offset) in back:
                continue
            if d.offset <= max(before, claim.position - 1):
                yield Violation(
                    "S10",
                    d.begin_ms,
                    epoch,
                    f"{key} {d.offset} is delivered by claim {epoch}, which began at {claim.position}, after {before}",
                )
            elif before == NOBODY and d.client not in clones and claim.mode == AT_LEAST_ONCE:
                offsets = history.offsets(claim)
                skipped = offsets[bisect_left(offsets, claim.position) : bisect_left(offsets, d.offset)]
                if not history.is_gone(claim, d.begin_ms) and not all(
                    is_lost(history, key, offset)
                    or history.is_anew(claim, offset)
                    or any(a <= offset < b for a, b in claim.finished)
                    or _told_later(history, d, offset)
                    or (group, epoch, offset) in posted
                    for offset in skipped
                ):
                    yield Violation(
                        "S10",
                        d.begin_ms,
                        epoch,
                        f"client {d.client} begins {key} at {d.offset}, its claim at {claim.position}",
                    )
            newest[d.client] = max(before, d.offset)


def s27_renewed(history: History) -> Iterator[Violation]:
    """Yields each breach of S27: under a claim of a topic nothing is delivered of the one that was deleted before it,
    nor of the next one once the client has heard of it; and a topic that is new in the log is read from its beginning.

    A client may hear an id that is not the newest, because brokers lag behind: the last one that it has heard counts,
    but for one that the log has replaced, for a while.
    """
    evidence = history.evidence
    for d in history.deliveries if evidence.former else ():
        claim, ids = claim_of(history, d), evidence.ids.get(d.topic, [])
        if claim is None or claim.topic_id not in ids:
            continue
        history.counted["S27"] += 1
        mine, what = ids.index(claim.topic_id), f"client {d.client} delivers {d.key} {d.offset}"
        if d.life < mine:
            text = f"{what} of {ids[d.life]}, and claims {claim.topic_id}"
            yield Violation("S27", d.begin_ms, d.epoch, text)
        heard = evidence.heard.get((d.client, d.topic), [])
        at = bisect_left(heard, d.gate_ms, key=lambda one: one.ms)
        if at and ids.index(heard[at - 1].id) > mine and not _replaced(history, d, heard[:at]):
            yield Violation("S27", d.begin_ms, d.epoch, f"{what}, and has heard that {claim.topic_id} is gone")
    for (group, topic), at_offsets in history.renewed.items():
        for key, claims in history.by_key.items():
            for at in at_offsets if key[:2] == (group, topic) and key[2] >= 0 else ():
                first = next((claim for claim in claims if claim.epoch > at), None)
                later = [*history.set_at.get(key, ()), *history.sought.get(key, ())]
                if first is None or any(at < moved <= first.epoch for moved in later):
                    continue
                begins = _first_of(history, first)
                if first.position > begins:
                    text = f"{key} is new in the log, begins at {begins}, and is claimed at {first.position}"
                    yield Violation("S27", first.ms, first.epoch, text)


def s29_truncated(history: History) -> Iterator[Violation]:
    """Yields each breach of S29: under a claim whose owner has read messages that the partition has lost since, or has
    been told that they are lost or its position beyond the end, nothing is delivered that was written afterwards.

    Nobody can see it where a partition has grown over the position of an owner that had read nothing of it yet.
    """
    evidence = history.evidence
    for (group, epoch), given in _by_epoch(history.deliveries).items() if evidence.lost or evidence.refusals else ():
        claim = history.claims.get((group, epoch))
        tails = [] if claim is None else history.lost_tails(claim)
        read: set[tuple[Client, LostTail]] = set()
        for d in given:
            told = evidence.refusals.get((d.client, group, epoch))
            later = [tail for tail in tails if d.leader_epoch >= tail.leader_epoch]
            history.counted["S29"] += bool(tails or told)
            if any((d.client, tail) in read for tail in later):
                text = f"client {d.client} delivers {d.key} {d.offset}, and has read of it what is lost"
                yield Violation("S29", d.begin_ms, epoch, text)
            elif (
                told is not None and d.gate_ms > told.ms and (d.life, d.leader_epoch) >= (told.life, told.leader_epoch)
            ):
                text = f"client {d.client} delivers {d.key} {d.offset}, and was told that its position is lost"
                yield Violation("S29", d.begin_ms, epoch, text)
            read |= {(d.client, tail) for tail in tails if tail not in later and d.offset >= tail.end}


def _replaced(history: History, d: Delivery, heard: Sequence[Heard]) -> bool:
    """Returns whether the log has replaced the id that the client of `d` heard last, and the client need not believe
    the cluster yet, which has told no other id since (D10)."""
    replaced_ms = history.replaced.get((d.group, d.topic, heard[-1].id))
    claim = claim_of(history, d)
    if replaced_ms is None or claim is None:
        return False
    told = list(takewhile(lambda one: one.id == heard[-1].id, reversed(heard)))
    wait_ms = BELIEVED_MS + 2 * history.sessions[d.group, claim.session].interval_ms
    return d.gate_ms - max(replaced_ms, told[-1].ms) <= wait_ms


def _first_of(history: History, claim: ClaimSpan) -> int:
    """Returns the lowest offset that Kafka has, or had in the end, of the partition of a claim."""
    _, topic, number = claim.key
    former = history.evidence.former.get((topic, claim.topic_id))
    return (history.evidence.firsts or {}).get((topic, number), 0) if former is None else former.firsts.get(number, 0)
