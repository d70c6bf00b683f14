"""How long a connection keeps the history of its coordination logs, and where it saves a broken state."""

from __future__ import annotations

from typing import Final, NamedTuple

from marshal_py.protocol.duties.snapshotter import SNAPSHOT_EVERY_RECORDS

HISTORY_KEPT_S: Final = 86_400.0  # a day: long enough to look at what happened last night


class RetentionPolicy(NamedTuple):
    """Holds the options of `connect` that are about histories. options.py checks them (PROTOCOL.md N8, N12, G7)."""

    snapshot_every_records: int = SNAPSHOT_EVERY_RECORDS
    history_kept_s: float = HISTORY_KEPT_S
    # Where a consumer that ends with Diverged saves its state; "": the system's folder; None: nowhere.
    evidence_dir: str | None = ""
