"""Copies positions to Kafka's committed offsets, so that the usual tools show the lag (D7). That may fail.

It tells refusals that last from those that pass: a coordinator that moves or starts refuses for some seconds; the next
copy then succeeds, and nobody needs to know.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Final

from marshal_py.client.connection.background_worker import Ask, TaskSteps
from marshal_py.client.connection.context import Context
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.wire.identity import Instant, TopicPartition

COMMITS_MAX: Final = 10  # of one copy; an owner that moves on faster copies its position again by itself
LASTS_MS: Final = 30_000  # six copies in a row; a coordinator that moves is there again within some seconds


class PositionCopies:
    """Copies the positions of one consumer."""

    def __init__(self, context: Context, member: Member, report: Callable[[str], None]) -> None:
        """`report`: is called with the lock held, with why Kafka has refused all copies for LASTS_MS."""
        self._context, self._member, self._report = context, member, report
        self._wanted: dict[TopicPartition, int] = {}
        self._refusals = Refusals()

    def add(self, positions: Mapping[TopicPartition, int]) -> None:
        """Takes what the next `copy` will copy. Called with the lock held."""
        self._wanted |= positions

    def copy(self, absent: Collection[str]) -> TaskSteps:
        """Copies what was added. Called on the worker thread, without the lock.

        A new owner may have committed before, while this thread waited: then the newer position is copied again.
        `absent`: topics that the cluster does not have; a refusal because of them is none.
        """
        context = self._context
        with context.lock:
            positions, self._wanted = self._wanted, {}
        for _ in range(COMMITS_MAX):
            if not positions:
                return
            refused: str = yield Ask(partial(context.admin.commit, self._member.name, positions))
            told = ""
            if not refused or not {tp.topic for tp in positions} & set(absent):
                told = self._refusals.answered(refused, context.clock.now())
            with context.outbox, context.lock:
                if told:
                    self._report(told)
                if refused:
                    self._member.not_mirrored(positions)
                    return
                positions = self._member.overtaken(positions)


class Refusals:
    """Collects the answers of Kafka to copies. Pure."""

    def __init__(self) -> None:
        self._since: Instant | None = None  # of the first refusal after which no copy has succeeded
        self._told = ""

    def answered(self, refused: str, now: Instant) -> str:
        """Takes the answer to a copy: why Kafka refused it, or "". Returns what to report of a refusal, "" if nothing.

        Once per reason, when Kafka has refused every copy for LASTS_MS.
        """
        if not refused:
            self._since, self._told = None, ""
            return ""
        if self._since is None:
            self._since = now
        if refused == self._told or now.mono_ms - self._since.mono_ms < LASTS_MS:
            return ""
        self._told = refused
        since = datetime.fromtimestamp(self._since.wall_ms / 1000, UTC).isoformat(timespec="seconds")
        return f"{refused}; no copy has succeeded since {since}"
