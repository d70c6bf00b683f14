"""How many heartbeat intervals something takes, as the fold, members, witnesses and admins all count."""

from __future__ import annotations

from typing import Final

EVICT_INTERVALS: Final = 2  # after so many of its intervals without a sign of life a session may be evicted (F3.2)
TRY_INTERVALS: Final = EVICT_INTERVALS  # how long a witness tries to publish: then others have waited long enough (T4)
