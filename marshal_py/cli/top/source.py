"""Where `marshal top` has its rows from: a thread that refreshes a Watch, and one per change or question.

The picture goes on whatever they wait for. Nothing here draws or decides.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from marshal_py.admin.group import Group
from marshal_py.admin.views.group_info import MemberInfo
from marshal_py.admin.watch import Watch
from marshal_py.cli.options import ReadOptions
from marshal_py.cli.top.picture import GroupTrend, Order, Trends
from marshal_py.errors import MarshalError
from marshal_py.history.lag import WINDOW_MS
from marshal_py.log.observer import Observer

REASON: Final = "marshal top"
RESTS: Final = 11  # times the processor time of a refresh: thousands of partitions cost a twelfth of a core at most
END_S: Final = 2.0  # how long the end waits for a thread that talks to the cluster


class Seen(NamedTuple):
    """A picture. `members`: of the group `opened`. `as_of_ms`: the time that it shows, since 1970. `problem`: why it is
    not newer, or ""."""

    groups: tuple[GroupTrend, ...]
    opened: str
    members: tuple[MemberInfo, ...]
    as_of_ms: int
    problem: str = ""


class Source:
    """Makes pictures: `look` when called, `start` again and again. `at_ms`: of the past; None: now. `seen`: the
    newest."""

    def __init__(self, open_observer: Callable[[], Observer], group: str | None, at_ms: int | None) -> None:
        self.opened: str = group or ""
        self.at_ms: int | None = at_ms
        self._open, self._group = open_observer, group
        self._watch = self._new()
        self.seen = Seen((), "", (), 0)
        self._asked, self._ended = threading.Event(), False
        self._thread: threading.Thread | None = None

    def _new(self) -> Watch:
        self._trends = Trends()
        return Watch(self._open, self._group, in_cluster=self.at_ms is None, believes=True)

    @property
    def observer(self) -> Observer:
        """What has read the log, after `look`."""
        assert self._watch.observer is not None
        return self._watch.observer

    def look(self) -> Seen:
        """Brings the picture up to date. Raises what Watch.refresh raises."""
        at_ms = self.at_ms
        if at_ms is None:
            self._refresh()
        elif at_ms != self.seen.as_of_ms:
            if at_ms < self.seen.as_of_ms:
                self._watch.close()
                self._watch = self._new()
            if at_ms - WINDOW_MS > self._watch.as_of_ms:
                self._refresh(at_ms - WINDOW_MS)
            self._refresh(at_ms)
        opened, watch = self.opened, self._watch
        self.seen = Seen(self._rows, opened, watch.members(opened), watch.as_of_ms if at_ms is None else at_ms)
        return self.seen

    def _refresh(self, at_ms: int | None = None) -> None:
        self._watch.refresh(at_ms)
        self._rows = self._trends.read(self._watch.groups(), self._watch.as_of_ms)

    # --- in a thread of its own, after the first look

    def start(self, interval_s: float, show: Callable[[Seen], None]) -> None:
        """Has a thread call `show` with each new picture."""
        self._thread = threading.Thread(target=self._run, args=(interval_s, show), name="top", daemon=True)
        self._thread.start()

    def ask(self, opened: str, at_ms: int | None) -> None:
        """Asks the thread for the members of a group, or for another time, at once."""
        if (opened, at_ms) != (self.opened, self.at_ms):
            self.opened, self.at_ms = opened, at_ms
            self._asked.set()

    def _run(self, interval_s: float, show: Callable[[Seen], None]) -> None:
        while not self._ended:
            began_s, cpu_s = time.monotonic(), time.thread_time()
            try:
                found = self.look()
            except MarshalError as error:
                found = self.seen._replace(problem=str(error))
            show(found)
            stands = self.at_ms is not None and not found.problem
            rest_s = max(began_s + interval_s - time.monotonic(), RESTS * (time.thread_time() - cpu_s))
            self._asked.wait(None if stands else max(0.0, rest_s))
            self._asked.clear()
        self._watch.close()

    def close(self) -> None:
        """Ends the thread, if there is one, and disconnects. A second call does nothing."""
        if self._ended:
            return
        self._ended = True
        self._asked.set()
        if self._thread is not None:
            self._thread.join(END_S)
        else:
            self._watch.close()


def change(options: ReadOptions, order: Order) -> str:
    """Carries out a change; returns the result in words. Raises MarshalError."""
    group = Group(options.transport(), order.group, options.coordination_topic)
    if order.kind == "pause":
        done = group.pause(reason=REASON)
        return f"group {order.group!r} is paused for {done.duration_s:g} s, token {done.token}"
    if order.kind == "resume":
        ended = group.resume(reason=REASON)
        return f"group {order.group!r} continues" if ended else f"group {order.group!r} was not paused"
    assert order.session is not None
    offset = group.step_down(order.session, REASON)
    return f"session {order.session} is the last candidate for every partition, from offset {offset} on"
