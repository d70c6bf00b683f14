"""How a connection keeps the logs that its consumers live in: two numbers, and why they are what they are; a folder."""

from __future__ import annotations

from typing import Final, NamedTuple

from marshal_py.protocol.snapshotter import SNAPSHOT_EVERY_RECORDS

HISTORY_KEPT_S: Final = 86_400.0  # a day: long enough to look at what happened last night


class RetentionPolicy(NamedTuple):
    """PROTOCOL.md N8, N12 and G7. Checked by options.py."""

    snapshot_every_records: int = SNAPSHOT_EVERY_RECORDS
    history_kept_s: float = HISTORY_KEPT_S
    evidence_dir: str = ""  # where a state that is found to be broken is kept; "" is the system's for temporary files


DEFAULT_POLICY: Final = RetentionPolicy()
