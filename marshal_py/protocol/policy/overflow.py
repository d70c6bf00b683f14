"""Policy `overflow`: consumers with conditions get a share while much is pending (PROTOCOL.md A12).

A session is conditioned if its Join names a `min_pending` or a `min_ack_pending`. Each judges its own conditions
(protocol/member/overflow.py). The others learn of it from the log: the session has fetched a partition ahead, or owns
one.
"""

from __future__ import annotations

from collections.abc import Sequence

from marshal_py.protocol.fold.world import Group, Session
from marshal_py.protocol.policy import balanced
from marshal_py.protocol.policy.candidates import candidates_by_session, has_room
from marshal_py.protocol.policy.partitioned import Line
from marshal_py.protocol.wire.identity import NONE, TopicPartition


def conditioned(session: Session) -> bool:
    return session.join.min_pending > 0 or session.join.min_ack_pending > 0


def helps(session: Session) -> bool:
    """Returns whether the log shows that the conditions of a session are met."""
    return session.held > 0 or bool(session.ready)


def served(group: Group, order: Sequence[int], helping: frozenset[int]) -> list[int]:
    """Returns which sessions of `order` are given partitions: those without conditions, and those of `helping`.

    While anybody helps, sessions without conditions that are idle for the failover time get none.
    """
    failover_ms = group.config.failover_ms if group.config is not None else 0
    found = []
    for sid in order:
        session = group.sessions[sid]
        away = bool(helping) and 0 < failover_ms <= session.idle_ms
        if sid in helping or not (away or conditioned(session)):
            found.append(sid)
    return found


def lines(group: Group, order: Sequence[int]) -> dict[TopicPartition, Line]:
    """Returns who may claim each partition: first who should own it, then the others that consume the topic.

    `order`: the sessions that are given partitions. They share as under `balanced`, but of places of one height those
    of sessions without conditions come first. A partition that nobody owns is first left to those that the log shows
    and that have room, because they do not know of others.
    """
    candidates = candidates_by_session(group, order)
    for sid, candidate in candidates.items():
        candidate.conditioned = conditioned(group.sessions[sid])
    shown = [sid for sid in order if not conditioned(group.sessions[sid]) or helps(group.sessions[sid])]
    others = [sid for sid in order if sid not in shown]
    able = [*(sid for sid in shown if has_room(group.sessions[sid])), *others]
    found: dict[tuple[str, int, bool], Line] = {}
    lines: dict[TopicPartition, Line] = {}
    for tp, first in balanced.share(group, candidates).items():
        known = group.partitions.get(tp)
        free = known is None or known.owner == NONE
        key = tp.topic, first, free
        if key not in found:
            rest = [sid for sid in (able if free else order) if sid != first and tp.topic in candidates[sid].topics]
            at = sum(sid not in others for sid in rest) if free and first in others else 0
            found[key] = [*rest[:at], first, *rest[at:]]
        lines[tp] = found[key]
    return lines
