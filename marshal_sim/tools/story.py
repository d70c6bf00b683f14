"""The story of a failing run for a person to read: process, time, record and offset, and the promise that broke.

It chooses among the events of a trace and turns them into lines. It judges nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from marshal_sim.judge.evidence import Violation
from marshal_sim.tools.sweep import TraceEvent

LINES_MAX: Final = 60  # events: what comes before is seldom the reason
PROMISES: Final = {
    "S1": "every reader of the log holds the same state",
    "S2": "a partition has one owner, and only its owner delivers",
    "S3": "nothing is delivered while another session may own the partition",
    "S4": "a store rejects writes that carry an older token",
    "S5": "in at-most-once mode no message is delivered twice",
    "S6": "in at-most-once mode a message is delivered only under a grant of its own session, obtained after the "
    "last fence; losses are noted",
    "S7": "in at-least-once mode no message is lost",
    "S8": "a position never passes a message that its handler has not finished",
    "S9": "a take-over delivers again only what the owner had not reported as finished; a hand-over only what "
    "handlers held beyond their time",
    "S10": "a position decreases only where somebody sets it",
    "S11": "in a pause nothing is claimed and nothing is delivered, and nobody ends it before its time",
    "S12": "an admin's tool reports truthfully whether positions moved",
    "S13": "garbage, records of other groups or logs, or without a needed key change nothing and stop no reader",
    "S14": "a reader that cannot trust the log stops",
    "S15": "a session is evicted only after somebody waited twice its interval without a sign of life",
    "S16": "under one claim a message comes again only after its handler gave it back, and no message is delivered "
    "more often than its limit",
    "S17": "every consumer of a group fits its settings, what is for a group's life stays, and a group is deleted "
    "under no owner",
    "S18": "in at-most-once mode the log names what an owner that died may have lost: all of that, and nothing that it "
    "had reported as handled",
    "S19": "once a flush or a double_ack has said that the log has an ack, the message does not come again",
    "S20": "when a seek has returned, delivery goes on where it was asked to",
    "S21": "nothing is delivered of a partition that the user has paused",
    "S22": "no more messages of a partition are unfinished at once than max_acks_pending says",
    "S23": "a drain releases nothing that a handler has before its time is over",
    "S24": "a handler that reports that it is at work is not given up before its timeout",
    "S25": "nothing is delivered of a partition once the user knows that it will be released",
    "S26": "`process` handles the messages of a lane one after the other, in their order, and gives up none that no "
    "handler had",
    "S27": "what is delivered of a topic that was created again is known to be of the new one, which is read from its "
    "beginning",
    "S28": "callbacks run apart from all else and tell of each claim in order, also where one raises or takes long",
    "S29": "where a partition has lost what was read, nothing is delivered that took its place",
    "S30": "`process` begins with the oldest message of a partition that may begin, and the partitions take turns",
    "V1": "a dead owner's partitions are claimed within twice its interval plus one second",
    "V2": "a released partition is claimed within a third of an interval plus one second",
    "V3": "every partition has an owner, and every message is read",
    "V4": "a partition gets at most three claim records per interval",
    "V5": "a divergence is noticed within one checkpoint and one heartbeat",
    "V6": "an outage of brokers costs no consumer its claims",
    "V7": "in a pause by an admin, every member that is reading releases its partitions within one interval plus "
    "one second",
    "V8": "a hand-over ends within the time that its handlers have, plus one interval and one second",
    "V9": "a partition whose position is beyond its end is parked",
    "V10": "no member asks to be woken again and again",
    "V11": "a clean stop moves each partition once",
    "V12": "consumers with conditions give their partitions back when nothing is pending",
    "V13": "who falls behind on a partition gives up one at a time, keeps one, and leaves it alone for a while",
    "V14": "a session asks for grants at most 30 times per second",
    "V15": "no partition waits for messages of another one that nobody takes",
    "crash": "the protocol code raises no error that it does not name",
}


def story(violation: Violation, trace: Sequence[TraceEvent]) -> Iterator[str]:
    """Yields the lines of the trace up to the violation, with the offending record marked, and the promise that it
    breaks.
    """
    until_ms = violation.ms if violation.ms >= 0 else trace[-1].ms
    return ending_in(violation, [event for event in trace if event.ms <= until_ms], line_of)


def ending_in(violation: Violation, before: Sequence[TraceEvent], line: Callable[[TraceEvent], str]) -> Iterator[str]:
    """Yields a story as `story` does, from the events `before` the violation. `line` formats an event."""
    if len(before) > LINES_MAX:
        yield f"({len(before) - LINES_MAX} events before)"
    for event in before[-LINES_MAX:]:
        guilty = event.what == "record" and event.offset == violation.offset >= 0
        yield f"{'>' if guilty else ' '} {line(event)}"
    where = f"offset {violation.offset}" if violation.offset >= 0 else "no record alone"
    yield f"{violation.invariant} ({PROMISES.get(violation.invariant, 'a promise')}) is broken, {where}:"
    yield f"  {violation.text}"


def line_of(event: TraceEvent) -> str:
    at = f"@{event.offset}" if event.what == "record" else ""
    return f"{event.ms:>9} ms  {event.who:<10} {at:<6} {event.verdict or event.what:<9} {event.text}"
