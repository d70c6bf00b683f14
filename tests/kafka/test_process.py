"""`Consumer.process` on Apache Kafka: the order per key while members join, leave, are killed and frozen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import key_order
from tests.support.kafka import Cluster


@pytest.mark.proof
def test_the_order_per_key_survives_every_change(kafka: Cluster, tmp_path: Path) -> None:
    """Three processes of 16 workers; two joins, crashes, step-downs, drops, stops and freezes in turn."""
    assert key_order.run(kafka.bootstrap, tmp_path, 24_000, 12, pending=1, workers=16, seed=2) == 0
