"""Creates a group's settings: a consumer that knows them writes them if the group has none (PROTOCOL.md A8).

The fold accepts one such record, because each names that the group had no settings.
"""

from __future__ import annotations

from msgspec.structs import replace

from marshal_py.protocol.candidacy import Candidacy
from marshal_py.protocol.identity import Instant
from marshal_py.protocol.member_state import MemberState
from marshal_py.protocol.ready import Ready
from marshal_py.protocol.records import BY_CHARS_MAX
from marshal_py.protocol.world import Group


class Creation:
    """Is the part of a member that writes the group's first settings."""

    def __init__(self, member: MemberState) -> None:
        self.member: MemberState = member
        self._sent_ms: int | None = None  # when the newest record was sent, or when the turn of this member comes

    def write(self, group: Group, candidacy: Candidacy, now: Instant, out: Ready) -> None:
        """Writes the settings that the consumer was given, if the group has none.

        A member of rank k first waits k thirds of an interval, so that usually only one member writes.
        """
        settings = self.member.options.group_config
        if settings is None or group.config is not None:
            return
        if self._sent_ms is None:
            self._sent_ms = now.mono_ms + (candidacy.rank(group) - 1) * self.member.third_ms
        if self.member.retry_due(self._sent_ms, now):
            self._sent_ms = now.mono_ms
            by = self.member.options.client_id[:BY_CHARS_MAX]
            out.send.append(replace(settings, observed=group.config_offset, by=by))
