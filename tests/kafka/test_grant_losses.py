"""A consumer in at-most-once mode is killed on Apache Kafka: the survivor names what is lost, and nothing else."""

from __future__ import annotations

import random
from pathlib import Path

from tests.support import grant_losses
from tests.support.kafka import Cluster


def test_the_survivor_names_what_a_kill_loses(kafka: Cluster, tmp_path: Path) -> None:
    """D2, F4.5: in a backlog each missing message lies in a range, and what a range names besides was in hand."""
    verdict = grant_losses.run_case(kafka.bootstrap, tmp_path, "backlog", 20, 1, 0, random.Random(1))
    assert [what for what in verdict.wrong if "named" in what or "times" in what] == []
    (row,) = verdict.rows
    assert row.lost > 0, "nothing was lost, so the test shows nothing"
    assert row.named == row.lost + row.begun
