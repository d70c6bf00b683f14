"""Keeps facts of a group that its world leaves out: the author of the running pause, and how the last one ended.

The fold keeps only what it decides by. These facts are shown to people, and tell an admin operation whose pause is
running (M2). Pure; fed with every verdict.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from marshal_py.protocol.fold.rationalizer import Verdict
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.wire.identity import NONE
from marshal_py.protocol.wire.records import GroupConfig, Heartbeat, Record, ReleaseGroup, SetPosition


class Pause(NamedTuple):
    """A pause as its record. `expires_ms`: by its author's clock, since 1970, for people; 0 if unknown."""

    token: int
    by: str
    reason: str
    duration_ms: int
    expires_ms: int


class PauseHistory:
    """Keeps what the log says about the pauses of one group."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pause: Pause | None = None  # the newest, running or not
        self.waited_ms: int = 0  # the greatest wait on it that a member's heartbeat named (T5)
        self.ended_by: str = ""  # who ended it; "" while it runs
        self.waited_out: bool = False  # members ended it after its time, nobody ended it on purpose

    def read(self, verdict: Verdict) -> None:
        """Notes what a record that was just folded says about the group's pauses."""
        if verdict.group != self.name or not verdict.accepted:
            return
        match verdict.record:
            case ReleaseGroup() as record if record.duration_ms:
                self._begin(verdict.offset, record)
            case ReleaseGroup() if self.ended_by:
                pass  # of a run that gives up: the pause was over
            case ReleaseGroup() as record:
                self.ended_by, self.waited_out = record.by or "somebody", record.token == NONE
            case SetPosition(resume=True) as record:
                self.ended_by, self.waited_out = record.by or "somebody", False
            case GroupConfig(deleted=True) as record:
                self.ended_by, self.waited_out = record.by or "somebody", False
            case Heartbeat() as record if record.pause is not None:
                if self.pause is None or record.pause.pause_change == self.pause.token:
                    self.waited_ms = max(self.waited_ms, record.pause.waited_ms)
            case _:
                pass

    def recall(self, group: Group, look_up: Callable[[int], Record | None]) -> None:
        """Notes the running pause of a group read from a later snapshot on. `look_up(offset)`: a record of its log,
        None if deleted."""
        if group.paused and self.running(group) is None:
            record = look_up(group.pause_change)
            if isinstance(record, ReleaseGroup):
                waited_ms = self.waited_ms
                self._begin(group.pause_change, record)
                self.waited_ms = waited_ms

    def _begin(self, offset: int, record: ReleaseGroup) -> None:
        self.pause = Pause(offset, record.by, record.reason, record.duration_ms, record.msg_expire_time_ms)
        self.waited_ms, self.ended_by, self.waited_out = 0, "", False

    def running(self, group: Group) -> Pause | None:
        """Returns the running pause; None if the group is not paused or if the record of the pause was not read."""
        if group.paused and self.pause is not None and self.pause.token == group.pause_change:
            return self.pause
        return None

    def left_s(self, wall_ms: int) -> float:
        """Returns how long the newest pause may still last, in seconds; -1 if the log does not say."""
        if self.pause is None:
            return -1
        if self.pause.expires_ms:
            return max(0, self.pause.expires_ms - wall_ms) / 1000
        return max(0, self.pause.duration_ms - self.waited_ms) / 1000 if self.waited_ms else -1
