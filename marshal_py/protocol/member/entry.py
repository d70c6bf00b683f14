"""Brings a member into its group: first the group's settings, if it has none, then the Join (PROTOCOL.md A8, T14, T15).

The fold decides: it accepts one first GroupConfig, because each names that the group had no settings, and it rejects a
Join that does not fit them (F1.7). The member sends neither if the fold would reject it, and ends with an error that
says what holds.
"""

from __future__ import annotations

from msgspec.structs import replace

from marshal_py.errors import InvalidOption
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.member.group_settings import check_consumer, check_declared
from marshal_py.protocol.member.member_state import MemberState
from marshal_py.protocol.wire.identity import NONE, Instant
from marshal_py.protocol.wire.records import BY_CHARS_MAX


class Entry:
    """Is the part of a member that acts while it has no session."""

    def __init__(self, member: MemberState) -> None:
        self.member: MemberState = member
        self._created_ms: int | None = None  # when the newest GroupConfig was sent

    def act(self, group: Group | None, now: Instant) -> None:
        """Creates the group's settings if the user brings some and the group has none, then sends a Join.

        A Join has a fresh instance id, and is sent once per interval until one is accepted (T14). If the user wants to
        stop, it sends nothing. It then ends the member when no session of this client is live and no Join that was sent
        may still begin one.
        """
        member, options = self.member, self.member.options
        recent = member.join_sent is not None and now.mono_ms - member.join_sent.mono_ms < options.interval_ms
        if member.leaving:
            if not member.orphaned_sessions and not (recent and member.join_unread):
                member.end(None)
            return
        if recent:
            return
        try:
            self._check(group)
        except InvalidOption as error:
            member.end(error)
            return
        if options.group_config is not None and (group is None or group.config is None):
            if member.retry_due(self._created_ms, now):
                self._created_ms = now.mono_ms
                member.out.send.append(replace(options.group_config, by=options.client_id[:BY_CHARS_MAX]))
            return
        predecessor = NONE
        if options.fast_reclaim and member.join_sent is None and not member.liveness.instances and group is not None:
            mine = [s.id for s in group.sessions.values() if s.join.client_id == options.client_id]
            predecessor = max(mine, default=NONE)  # the user vouches that the process of that session is dead (T15)
        member.join_sent, member.join_unread = now, member.liveness.new_instance(now)
        member.out.send.append(options.join(member.join_unread, predecessor))

    def _check(self, group: Group | None) -> None:
        """Raises InvalidOption if the group is, or has begun to be, what this member may not join."""
        member, options = self.member, self.member.options
        config = None if group is None else group.config
        if options.group_config is not None:
            check_declared(member.name, config, 0 if group is None else group.mode, options.group_config)
        check_consumer(member.name, options.group_config if config is None else config, options)
