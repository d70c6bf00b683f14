"""The judge of readers that must stop, and of readers that must not: S13 and S14.

If the log cannot be trusted (gap, unknown envelope, another incarnation, truncated history), a reader names the error
and neither claims nor delivers from then on. If one group became opaque, only that group stops. Garbage stops no
reader.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from marshal_sim.judge.evidence import Violation
from marshal_sim.judge.facts import FOREVER, NOBODY
from marshal_sim.judge.history import History


class Ending(NamedTuple):
    """Names an offset of a log after which no reader of these groups may continue."""

    groups: frozenset[str]
    offset: int  # FOREVER if the log itself continues
    ms: float
    reason: str


def endings(history: History) -> Iterator[Ending]:
    """Yields where readers must stop: at a record that stops the log, when the topic is deleted, or for opaque groups.

    A group is opaque from the first record on that this library cannot read (E5).
    """
    evidence, everybody = history.evidence, frozenset(history.oracle.groups) | frozenset(history.evidence.groups)
    if history.stopped is not None:
        at = history.stopped.offset
        ms = evidence.read_ms[at] if at < len(evidence.read_ms) else evidence.read_ms[-1]
        yield Ending(everybody, at, ms, str(history.stopped))
    if evidence.gone_ms >= 0:
        yield Ending(everybody, FOREVER, evidence.gone_ms, "the topic was deleted")
    for name, group in history.oracle.groups.items():
        if group.opaque_at != NOBODY:
            yield Ending(frozenset((name,)), group.opaque_at, evidence.read_ms[group.opaque_at], "the group is opaque")


def s13_poison_proof(history: History) -> Iterator[Violation]:
    """Yields each breach of S13: a client stops only for a reason in the log, and never by an unforeseen crash."""
    evidence = history.evidence
    for crash in evidence.crashes:
        yield Violation("S13", crash.ms, -1, f"client {crash.client} ended with {crash.how}")
    for stop in evidence.stops:
        missing = stop.read_to in evidence.gaps or stop.read_to in evidence.compacted
        excused = stop.error in evidence.excused or stop.client in evidence.corrupted
        if stop.read_to >= 0:
            founded = stop.read_to >= (history.stopped.offset if history.stopped is not None else len(evidence.log))
        else:
            founded = any(stop.group in ending.groups for ending in endings(history))
        if not founded and not missing and not excused:
            yield Violation("S13", stop.ms, stop.read_to, f"client {stop.client} stops with {stop.error}")


def s14_fail_closed(history: History) -> Iterator[Violation]:
    """Yields each breach of S14: a client that has stopped does nothing more, and a client that must stop does stop and
    names an error.
    """
    yield from _past_the_end(history)
    yield from _after_the_error(history)
    for client in history.evidence.stale_clients:
        yield Violation("S14", -1, -1, f"client {client} still uses a topic that is gone")
    named = {stop.client for stop in history.evidence.stops}
    for ending in endings(history):
        for reader in history.evidence.present:
            there = reader.since_ms < ending.ms < reader.until_ms and reader.group in ending.groups
            if there and reader.client not in named:
                yield Violation("S14", ending.ms, -1, f"client {reader.client} names no error ({ending.reason})")


def _past_the_end(history: History) -> Iterator[Violation]:
    """Yields violations by clients that fold a record that stops the log, or deliver after it.

    If it is unknown what a client has read, it may deliver for one more interval: then its lease is over.
    """
    interval_ms = max((facts.interval_ms for facts in history.sessions.values()), default=0)
    for ending in endings(history):
        if history.stopped is not None and ending.offset == history.stopped.offset:
            for client, _, read_to, _ in history.evidence.finals:
                if read_to > ending.offset:
                    yield Violation("S14", -1, ending.offset, f"client {client} reads past it ({ending.reason})")
        for d in history.evidence.deliveries:
            late = d.read_to < 0 and d.gate_ms > ending.ms + interval_ms + history.slack.stamp_ms
            if d.group in ending.groups and (late or d.read_to > ending.offset):
                yield Violation(
                    "S14",
                    d.gate_ms,
                    ending.offset,
                    f"client {d.client} delivers {d.key} {d.offset} after its end ({ending.reason})",
                )


def _after_the_error(history: History) -> Iterator[Violation]:
    for stop in history.evidence.stops:
        for d in history.evidence.deliveries + history.evidence.other_deliveries:
            if d.client == stop.client and d.gate_ms > stop.ms and not d.inherited:
                yield Violation(
                    "S14",
                    d.gate_ms,
                    d.epoch,
                    f"client {d.client} delivers {d.key} {d.offset} after it stopped with {stop.error}",
                )
        for offset, sender, sent_ms in history.claimants:
            if sender == stop.client and sent_ms > stop.ms + history.slack.stamp_ms:
                yield Violation("S14", sent_ms, offset, f"client {sender} claims after it stopped with {stop.error}")
