"""The judge of what handlers answer, S16: what they gave back, what they ended, and the limit of deliveries (D14, D15).

Whether a position passes a message that was given back, or whose dead letter is not written, is judged by S7 and S8.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from marshal_sim.judge.claims import claim_of
from marshal_sim.judge.evidence import Client, Delivery, Violation
from marshal_sim.judge.facts import ClaimSpan
from marshal_sim.judge.history import History
from marshal_sim.judge.model import AT_LEAST_ONCE


def s16_answers(history: History) -> Iterator[Violation]:
    """Yields each breach of S16: under one claim a message comes again only if its handler gave it back, and not before
    its delay is over; and no delivery has a number above the limit.

    A streaming query writes no dead letters, so it has no limit (D15 is about owners that have one).
    """
    newest: dict[tuple[str, int, int, Client], list[Delivery]] = {}
    most = history.evidence.deliveries_max
    for d in history.deliveries:
        claim = claim_of(history, d)
        if claim is None or claim.mode != AT_LEAST_ONCE:
            continue
        earlier = newest.setdefault((d.group, d.epoch, d.offset, d.client), [])
        what = f"{d.key} {d.offset} comes again under claim {d.epoch}"
        if earlier and earlier[-1].again_ms < 0:
            yield Violation("S16", d.begin_ms, d.epoch, f"{what}, and its handler has not given it back")
        elif earlier and d.begin_ms < _due_ms(history, earlier[-1]):
            yield Violation(
                "S16", d.begin_ms, d.epoch, f"{what} before {earlier[-1].again_ms:g}, when its delay is over"
            )
        earlier.append(d)
        number = len(earlier) + (claim.attempts if _counts(history, claim, d) else 0)
        if most is not None and number > most and d.client not in history.evidence.queries:
            yield Violation("S16", d.begin_ms, d.epoch, f"{d.key} {d.offset} is delivered, at least for time {number}")


def _due_ms(history: History, given_back: Delivery) -> float:
    delay_ms = given_back.again_ms - given_back.end_ms
    return given_back.again_ms - delay_ms * history.slack.drift_ppm / 1_000_000 - history.slack.wait_ms


def _counts(history: History, claim: ClaimSpan, d: Delivery) -> bool:
    """Returns whether the deliveries that the log had counted at the claim's position were those of this message.

    They were not if the message was produced later: then an owner may have seen the partition end there (D11).
    """
    produced_ms = history.evidence.produced_ms.get(((d.topic, d.partition), d.offset), 0)
    return d.offset == _first(history, claim) and produced_ms <= claim.ms


def _first(history: History, claim: ClaimSpan) -> int:
    """Returns the offset of the message at the position of a claim: the first one that exists there; -1 for none."""
    offsets = history.offsets(claim)
    at = bisect_left(offsets, claim.position)
    return offsets[at] if at < len(offsets) else -1
