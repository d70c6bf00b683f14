"""What an observer of groups knows beyond their states: signs of life, pauses, handlers without an answer, the cluster.

`state`, `lag` and `doctor` pass each record that they read in, and get the Facts by which protocol/member/waiting.py
says why nobody consumes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from marshal_py.admin.views import overview
from marshal_py.admin.views.overview import Stopped
from marshal_py.admin.views.pause_history import PauseHistory
from marshal_py.client.observer import Judged, Observer
from marshal_py.history.unanswered import Unanswered
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.member.waiting import Facts
from marshal_py.protocol.wire.identity import TopicPartition


class Looking:
    """Collects what the records tell, while its owner reads them by an observer."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._pauses: dict[str, PauseHistory] = {}
        self._unanswered: dict[int, Unanswered] = {}  # by log
        self._first_ms: dict[int, int] = {}  # by log: timestamp of the first record that was read

    def read(self, judged: Judged) -> None:
        record, verdict = judged
        self._first_ms.setdefault(record.log, record.timestamp_ms)
        if verdict.group:
            self._pauses.setdefault(verdict.group, PauseHistory(verdict.group)).read(verdict)
        group = self._observer.worlds[record.log].groups.get(verdict.group)
        self._unanswered.setdefault(record.log, Unanswered()).read(group, verdict, record.timestamp_ms)

    def pause_history(self, log: int, group: Group) -> PauseHistory:
        """Returns what the log says about the group's pause, also if that is older than what was read."""
        found = self._pauses.setdefault(group.name, PauseHistory(group.name))
        found.recall(group, partial(self._observer.look_up, log))
        return found

    def facts(
        self,
        log: int,
        group: Group,
        now_ms: int,
        stopped: Iterable[Stopped],
        gone: Iterable[str] = (),
        ends: Mapping[TopicPartition, int] | None = None,
    ) -> Facts:
        """Returns what is known of a group. `now_ms`: ms since 1970. `stopped`: what nobody consumes until an admin
        acts. `gone`: its topics that the cluster does not have. `ends`: end offsets, as far as they are known.
        """
        pause = overview.pause(group, self.pause_history(log, group), now_ms)
        lags = [(ends or {}).get(tp, at) - at for tp, at in overview.positions(group).items()]
        # Who has given no sign of life in all that is kept is silent since that begins.
        signs = dict.fromkeys(group.sessions, self._first_ms.get(log, now_ms)) | self._observer.signs_of(log)
        unanswered = self._unanswered[log].since(group) if log in self._unanswered else {}
        return Facts(
            now_ms,
            "" if pause is None else overview.paused(pause),
            tuple(one.standstill() for one in stopped),
            tuple(gone),
            sum(lag for lag in lags if lag > 0),
            overview.silence(group, signs, now_ms),
            unanswered,
        )
