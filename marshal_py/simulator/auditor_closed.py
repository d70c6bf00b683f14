"""The judge of readers that must stop, and of readers that must not: S13 and S14 of invariants.md.

Where the log cannot be trusted (gap, unknown envelope, another incarnation, truncated history) a reader names the error
and neither claims nor delivers from then on; a group that became opaque stops alone; garbage stops nobody.
"""

from __future__ import annotations

from collections.abc import Iterator

from marshal_py.simulator.auditor_evidence import Violation
from marshal_py.simulator.auditor_history import History


def fail_closed(history: History) -> Iterator[Violation]:
    yield from _past_the_end(history)
    yield from _stopped(history)
    yield from _opaque(history)
    for client in history.evidence.astray:
        yield Violation("S14", -1, -1, f"client {client} goes on with a topic that is gone")


def _past_the_end(history: History) -> Iterator[Violation]:
    """S14: nobody folds a record that stops the log."""
    if history.stopped is None:
        return
    for client, _, read_to, _ in history.evidence.finals:
        if read_to > history.stopped.offset:
            yield Violation("S14", -1, history.stopped.offset, f"client {client} reads past it ({history.stopped})")
    for d in history.evidence.deliveries:
        if d.read_to > history.stopped.offset:
            yield Violation("S14", d.gate_ms, history.stopped.offset, f"client {d.client} delivers {d.key} {d.offset} "
                                                                      f"after {history.stopped}")  # fmt: skip


def _stopped(history: History) -> Iterator[Violation]:
    """S13: nobody stops without a reason in the log. S14: who stopped does nothing any more."""
    ended_at = history.stopped.offset if history.stopped is not None else len(history.evidence.log)
    for stop in history.evidence.stops:
        missing = stop.read_to in history.evidence.gaps or stop.read_to in history.evidence.compacted
        excused = stop.error in history.evidence.excused or stop.client in history.evidence.corrupted
        if stop.read_to < ended_at and not missing and not excused:
            yield Violation("S13", stop.ms, stop.read_to, f"client {stop.client} stops with {stop.error}")
        for d in history.evidence.deliveries + history.evidence.strays:
            if d.client == stop.client and d.gate_ms > stop.ms and not d.inherited:
                yield Violation("S14", d.gate_ms, d.epoch, f"client {d.client} delivers {d.key} {d.offset} after it "
                                                           f"stopped with {stop.error}")  # fmt: skip
        for offset, sender, sent_ms in history.claimants:
            if sender == stop.client and sent_ms > stop.ms:
                yield Violation("S14", sent_ms, offset, f"client {sender} claims after it stopped with {stop.error}")


def _opaque(history: History) -> Iterator[Violation]:
    """S14: a newer record version or an unknown type ends that group alone (E5)."""
    for d in history.evidence.deliveries:
        group = history.oracle.groups.get(d.group)
        if group is not None and 0 <= group.opaque_at < d.read_to:
            yield Violation("S14", d.gate_ms, group.opaque_at, f"client {d.client} delivers {d.key} {d.offset} in a "
                                                               f"group that it cannot read")  # fmt: skip
