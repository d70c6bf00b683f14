"""One of three members stops cleanly: how long do its partitions wait, and how long those of the others?

Contestants: marshal_py (as on SIGTERM); Kafka's groups (`close()`): eager (range),
cooperative-sticky, KIP-848 (`group.protocol=consumer`). All with their defaults, three processes, 12 partitions,
1,000 messages per second.

Measured, per stop:
  its     per partition of the leaving member: from its last delivery to the first of the successor, less the normal
          spacing (12 ms)
  others  per other partition: the longest gap from the request to stop until half a second after the last move, less
          the normal spacing
  noise   per partition: the longest gap in the steady time before, less the normal spacing
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
            moves.leaves,
            spread(moves.leave_its_ms),
            percentile(moves.leave_its_ms, 0.99),
            ratio(moves.leave_its_ms, ours.leave_its_ms),
            spread(moves.leave_others_ms),
            percentile(moves.leave_others_ms, 0.99),
            spread(moves.leave_noise_ms),
            moves.tally["missing"],
            moves.tally["again"],
            moves.tally["delivered"],
        ]
        for kind, moves in found.items()
    ]
    columns = [
        "contestant",
        "stops",
        "its partitions: gap, ms",
        "p99, ms",
        "x marshal",
        "others: gap, ms",
        "p99, ms",
        "noise, ms",
        "missing",
        "delivered again",
        "messages",
    ]
    notes = [
        "Goals for marshal: its partitions: median <= 10 ms, p99 <= 50 ms; others: no gap beyond the noise + 10 ms.",
        "Gaps are over the normal spacing of 12 ms. Missing and delivered again count joins and leaves together.",
    ]
    return Result("leave", columns, rows, notes, {kind: asdict(moves) for kind, moves in found.items()})
