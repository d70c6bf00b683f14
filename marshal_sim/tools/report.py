"""The HTML page of one run: sessions, owners of partitions and faults over time, and how long take-overs took.

One file of HTML with its picture inside (SVG): nothing is loaded from elsewhere. The facts come from the auditor's
fold of the raw log, never from the protocol's own state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import pairwise
from typing import Final, NamedTuple

from marshal_sim.cluster.run import Result
from marshal_sim.judge.auditor import judge
from marshal_sim.judge.evidence import Evidence
from marshal_sim.judge.facts import ClaimSpan
from marshal_sim.judge.history import History
from marshal_sim.tools.sweep import TraceEvent

WIDTH: Final = 1_100  # width in px of the part that shows time
LABEL: Final = 170  # width in px of the labels left of that part
ROW: Final = 18
BARS: Final = 24  # number of bars of the histogram
SPAN_INTERVALS: Final = 6.0  # take-overs that took longer share the last bar
STYLE: Final = """body{font:14px system-ui,sans-serif;margin:2em;color:#222;background:#fff}svg{font:11px sans-serif}
h1{font-size:20px}h2{font-size:16px}pre{background:#f4f4f4;padding:.6em}.fault{stroke:#c00}.bad{stroke:#f00}"""


class Span(NamedTuple):
    """A bar in one row of the picture: something that lasted from `from_ms` to `to_ms`."""

    row: str
    from_ms: float
    to_ms: float
    session: int
    text: str


def page(
    result: Result,
    trace: Sequence[TraceEvent],
    logs: Sequence[Evidence],
    again: str,
    takeovers: Sequence[float],
    seeds: str,
) -> str:
    """Returns the HTML page of a run.

    `again` is the command that repeats the run. `takeovers` has how long take-overs took, in intervals, over the runs
    that `seeds` describes.
    """
    end_ms = max([round(result.simulated_hours * 3_600_000), 1])
    histories = [judge(log).history for log in logs]
    spans = [span for history in histories for span in (*_sessions(history, end_ms), *_claims(history, end_ms))]
    title = f"marshal: seed {result.seed}, {result.verdict}"
    found = "".join(f"<li>{escape(v.invariant)} at {v.ms} ms: {escape(v.text)}</li>" for v in result.violations)
    figures = (
        f"{result.scenario.clients} clients, {result.scenario.partitions} partitions, {result.takeovers} "
        f"take-overs, {result.handovers} hand-overs, {result.deliveries} deliveries, {result.faults} faults, "
        f"{end_ms / 1000:.0f} simulated seconds"
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1><p>{figures}</p><ul>{found}</ul>"
        f"<pre>{escape(again)}</pre><h2>Sessions, claims, faults</h2>{_timeline(spans, trace, end_ms, result)}"
        f"<p>Red lines are faults; point at anything to read what it is. A bar's colour is its session's.</p>"
        f"<h2>Take-over times</h2>{_histogram(takeovers)}<p>From the last accepted sign of life of the old owner to "
        f"the claim of the new one, in intervals, of {escape(seeds)}: {len(takeovers)} take-overs.</p></body></html>\n"
    )


def takeover_times(logs: Iterable[Evidence], interval_ms: int) -> list[float]:
    """Returns how long each take-over took, from the owner's last sign of life to the next claim, in intervals."""
    times = []
    for log in logs:
        history = judge(log).history
        for claims in history.by_key.values():
            for old, new in pairwise(claims):
                if old.ended_by == "Evict":
                    signs = history.sessions[old.key[0], old.session].extensions
                    times.append((new.ms - log.appended_ms[signs[-1].offset]) / interval_ms)
    return times


def _sessions(history: History, end_ms: int) -> Iterator[Span]:
    log = history.evidence
    for (group, session), facts in history.sessions.items():
        ended = [
            claim.end
            for claims in history.by_key.values()
            for claim in claims
            if claim.session == session and claim.key[0] == group and claim.ended_by in ("Evict", "Leave")
        ]
        last = min(ended, default=None)
        to_ms = _at(log, last, end_ms) if last is not None else log.appended_ms[facts.extensions[-1].offset]
        row = f"{group}, session {session}"
        yield Span(row, log.appended_ms[session], max(to_ms, log.appended_ms[session]), session, row)


def _claims(history: History, end_ms: int) -> Iterator[Span]:
    for (group, topic, number), claims in sorted(history.by_key.items()):
        for claim in claims:
            text = f"claim {claim.epoch} of session {claim.session}, {_ending(claim)}"
            yield Span(
                f"{group} {topic}:{number}", claim.ms, _at(history.evidence, claim.end, end_ms), claim.session, text
            )


def _ending(claim: ClaimSpan) -> str:
    return f"ended by {claim.ended_by}" if claim.ended_by else "held to the end"


def _at(log: Evidence, offset: int, end_ms: int) -> float:
    return log.appended_ms[offset] if offset < len(log.appended_ms) else end_ms


def _timeline(spans: Sequence[Span], trace: Sequence[TraceEvent], end_ms: int, result: Result) -> str:
    rows = {name: number for number, name in enumerate(dict.fromkeys(span.row for span in spans))}
    height = ROW * (len(rows) + 2)
    parts = [f'<text x="0" y="{ROW * (number + 2) - 5}">{escape(name)}</text>' for name, number in rows.items()]
    for span in spans:
        left, right = _x(span.from_ms, end_ms), _x(span.to_ms, end_ms)
        parts.append(
            _bar(
                left,
                ROW * (rows[span.row] + 1) + 3,
                max(1.0, right - left),
                ROW - 5,
                f"hsl({span.session * 137 % 360},60%,65%)",
                f"{span.from_ms}-{span.to_ms} ms: {span.text}",
            )
        )
    lines = [(event.ms, "fault", event.text) for event in trace if event.what == "fault"]
    lines += [(found.ms, "bad", f"{found.invariant}: {found.text}") for found in result.violations if found.ms >= 0]
    for ms, kind, text in lines:
        at = _x(ms, end_ms)
        parts.append(
            f'<line class="{kind}" x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{height}" stroke-width="1" '
            f'stroke-opacity=".5"><title>{ms} ms: {escape(text)}</title></line>'
        )
    for tenth in range(11):
        ms = end_ms * tenth // 10
        parts.append(f'<text x="{_x(ms, end_ms):.1f}" y="{height + 12}" text-anchor="middle">{ms / 1000:.1f} s</text>')
    return _svg(height + 20, parts)


def _histogram(times: Sequence[float]) -> str:
    counts = [0] * BARS
    for intervals in times:
        counts[min(BARS - 1, max(0, int(intervals / SPAN_INTERVALS * BARS)))] += 1
    tallest, width = max([*counts, 1]), WIDTH / BARS
    parts = []
    for number, amount in enumerate(counts):
        size = 120 * amount / tallest
        from_, to = (SPAN_INTERVALS * edge / BARS for edge in (number, number + 1))
        text = f"{from_:.2f}-{to:.2f} intervals: {amount}"
        parts.append(_bar(LABEL + number * width, 130 - size, width - 2, size, "#69c", text))
        parts.append(f'<text x="{LABEL + number * width:.0f}" y="145">{from_:.2f}</text>')
    return _svg(160, parts)


def _x(ms: float, end_ms: int) -> float:
    return LABEL + WIDTH * min(ms, end_ms) / end_ms


def _bar(x: float, y: float, width: float, height: float, colour: str, text: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}">'
        f"<title>{escape(text)}</title></rect>"
    )


def _svg(height: int, parts: Sequence[str]) -> str:
    return (
        f'<svg width="{LABEL + WIDTH + 40}" height="{height}" xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )
