"""A third member joins two: how soon does it deliver messages, and how long do the partitions of the others wait?

Contestants: marshal_py; Kafka's groups: eager (range), cooperative-sticky, KIP-848 (`group.protocol=consumer`). All
with their defaults, three processes, 12 partitions, 1,000 messages per second. Brokers by default delay the start of an
empty group by 3 s; the harness switches this off, and no join measured here would meet it.

Measured, per join:
  first message  from the joiner's consumer() or subscribe() call to its first delivery, and from the start of its
                 process (interpreter, imports and connection included) to the same
  moved          per partition that changed its owner: from the last delivery of the old owner to the first of the new
                 one, less the normal spacing of that partition (12 ms)
  stayed         per partition that kept its owner: the longest gap from the call until half a second after the last
                 move, less the normal spacing
  noise          per partition: the longest gap in the steady time before, less the normal spacing; it shows what this
                 machine does without any move
"""

from __future__ import annotations

from dataclasses import asdict

from bench.environment import BenchEnvironment, Result, percentile, ratio, spread
from bench.moves import measured


def run(environment: BenchEnvironment, tiny: bool) -> Result:
    found = measured(environment, tiny)
    ours = found["marshal"]
    rows = [
        [
            kind,
            moves.joins,
            spread(moves.from_call_s),
            ratio(moves.from_call_s, ours.from_call_s),
            spread(moves.from_spawn_s),
            spread(moves.join_moved_ms),
            percentile(moves.join_moved_ms, 0.99),
            len(moves.join_moved_ms) / moves.joins,
            spread(moves.join_stayed_ms),
            spread(moves.join_noise_ms),
            moves.tally["missing"],
            moves.tally["again"],
            moves.tally["delivered"],
        ]
        for kind, moves in found.items()
    ]
    columns = [
        "contestant",
        "joins",
        "first message after the call, s",
        "x marshal",
        "after process start, s",
        "moved: gap, ms",
        "p99, ms",
        "moved of 12",
        "stayed: gap, ms",
        "noise, ms",
        "missing",
        "delivered again",
        "messages",
    ]
    notes = [
        "Goals for marshal: first message <= 0.3 s after the call; moved: median <= 10 ms, p99 <= 50 ms; stayed: no gap"
        " beyond the noise + 10 ms.",
        "Gaps are over the normal spacing of 12 ms. Missing and delivered again count joins and leaves together.",
    ]
    return Result("join", columns, rows, notes, {kind: asdict(moves) for kind, moves in found.items()})
