"""How a connection keeps the logs that its consumers live in: the two numbers, and why they are what they are."""

from __future__ import annotations

from typing import Final, NamedTuple

from marshal_py.protocol.keeper import SNAPSHOT_EVERY_RECORDS

HISTORY_KEPT_S: Final = 86_400.0  # a day: long enough to look at what happened last night


class Policy(NamedTuple):
    """PROTOCOL.md N8 and N12. Checked by options.py."""

    snapshot_every_records: int = SNAPSHOT_EVERY_RECORDS
    history_kept_s: float = HISTORY_KEPT_S


DEFAULT_POLICY: Final = Policy()
