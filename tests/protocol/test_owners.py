"""Successive owners of one partition in at-least-once mode: what each reports, and what the next one concludes.

A plain model: offsets with holes between them, sets of what is finished, a count of deliveries per offset. Each owner
begins with what a log would say (F2.3, F4.5, F6.2), fetches, delivers in order, finishes in any order, sends
heartbeats, and dies or releases.
"""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import example, given, settings
from hypothesis import strategies as st

from marshal_py.protocol.claims import AtLeastOnce, OffsetRun
from marshal_py.protocol.wire.records import PROGRESS_BYTES_MAX


class Reported(NamedTuple):
    """What the log holds of the partition, and what the model knows of it."""

    position: int
    attempts: int
    in_flight: int
    progress: bytes
    finished: frozenset[int]  # what is told as finished
    least: dict[int, int]  # offset -> how often it was delivered, as far as owners told that
    most: dict[int, int]  # the same, with one more for each owner that died on the message at the position

    def message(self, existing: list[int]) -> int | None:
        """The message at the position: the lowest that exists and was not told as finished."""
        return next((o for o in existing if o >= self.position and o not in self.finished), None)


class Owner:
    """One claim, from its acceptance to its end."""

    def __init__(self, existing: list[int], log: Reported, finished: set[int]) -> None:
        self.existing, self.log, self.begun = existing, log, log
        self.finished = finished  # by anybody, told or not
        self.tracker = AtLeastOnce(log.position, log.attempts, log.in_flight, log.progress)
        assert self.tracker.position() >= log.position
        self.cursor = self.tracker.position()
        self.runs: list[OffsetRun] = []
        self.delivered: list[tuple[int, OffsetRun, int]] = []
        self.mine: set[int] = set()
        self._died(log.attempts + 1, log.in_flight, log.progress)

    def _died(self, attempts: int, in_flight: int, progress: bytes) -> None:
        """F4.5: the log counts one delivery more from the claim on."""
        most, at = dict(self.log.most), self.log.message(self.existing)
        if at is not None:
            most[at] = most.get(at, 0) + 1
        self.log = self.log._replace(attempts=attempts, in_flight=in_flight, progress=progress, most=most)

    def fetch(self, count: int) -> None:
        found = [offset for offset in self.existing if offset >= self.cursor][:count]
        if not found:
            return
        self.cursor = found[-1] + 1
        chunk = range(found[0], self.cursor) if len(found) == self.cursor - found[0] else found
        fresh, run = self.tracker.admit(chunk)
        assert set(found) - set(fresh) <= self.finished, "it passes over what nobody has finished"
        assert not set(fresh) & self.begun.finished, "it is handed what an earlier owner told as finished"
        if run is not None and (not self.runs or self.runs[-1] is not run):
            self.runs.append(run)

    def deliver(self, count: int) -> None:
        for run in self.runs:
            while count and run.delivered < len(run.offsets):
                offset = run.offsets[run.delivered]
                before = self.tracker.delivery_count(offset) - 1
                assert self.begun.least.get(offset, 0) <= before <= self.begun.most.get(offset, 0), f"of {offset}"
                self.delivered.append((offset, run, run.deliver(1, 0)))
                count -= 1

    def finish(self, which: int) -> None:
        if self.delivered:
            offset, run, index = self.delivered[which % len(self.delivered)]
            run.finish(index)
            self.finished.add(offset)
            self.mine.add(offset)

    def report(self, *, release: bool = False) -> Reported:
        """A heartbeat (T11) or a Release (F6.2)."""
        tracker = self.tracker
        position, progress = tracker.position(), tracker.progress()
        assert len(progress) <= PROGRESS_BYTES_MAX
        assert position >= self.log.position, "the position fell"
        left = [offset for offset in self.existing if offset not in self.finished]
        assert not left or position <= left[0], "it skipped something"
        least, most = dict(self.begun.least), dict(self.begun.most)
        for offset, _, _ in self.delivered:
            least[offset], most[offset] = least.get(offset, 0) + 1, most.get(offset, 0) + 1
        finished = self.begun.finished | self.mine
        reported = Reported(
            position,
            tracker.deliveries() if release else tracker.attempts(),
            tracker.in_flight,
            progress,
            finished,
            least,
            most,
        )
        at = reported.message(self.existing)
        if not release and at is not None and at not in {offset for offset, _, _ in self.delivered}:
            most[at] = most.get(at, 0) + 1
        self.log = reported
        if not (finished - {o for o in finished if o < position}) and len(self.existing) == self.existing[-1] + 1:
            again = [offset for offset, count in least.items() if count > 1 and offset > position]
            before = [o for o, count in self.begun.most.items() if count and o > position]
            assert progress == b"" or again or before, "bytes that say nothing"
        return reported

    def die(self) -> Reported:
        """The log holds what it told last; the message at the position there may have been delivered since."""
        at = self.log.message(self.existing)
        least, most = dict(self.log.least), dict(self.log.most)
        if at is not None and at in {offset for offset, _, _ in self.delivered}:
            least[at] = self.begun.least.get(at, 0) + 1
            most[at] = max(most.get(at, 0), least[at])
        return self.log._replace(least=least, most=most)


OFFSETS = st.lists(st.sampled_from((0, 0, 0, 1, 2, 5)), min_size=1, max_size=40)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("fetch"), st.integers(1, 8)),
        st.tuples(st.just("deliver"), st.integers(1, 8)),
        st.tuples(st.just("finish"), st.integers(0, 40)),
        st.tuples(st.just("beat"), st.just(0)),
    ),
    max_size=30,
)
LIVES = st.lists(st.tuples(STEPS, st.booleans()), min_size=2, max_size=6)


@settings(max_examples=500)
@given(OFFSETS, LIVES)
@example([0, 2], [([("fetch", 1), ("deliver", 1)], False), ([("fetch", 1), ("deliver", 1)], False)])
def test_owners_one_after_another(holes: list[int], lives: list[tuple[list[tuple[str, int]], bool]]) -> None:
    """D1, D11: nothing that exists is skipped, nothing that was told as finished is delivered again, the position
    never falls, and each delivery has its number: exact after releases, one more for each owner that died on it."""
    existing, at = [], 0
    for hole in holes:
        at += hole
        existing.append(at)
        at += 1
    log, finished = Reported(0, 0, 0, b"", frozenset(), {}, {}), set[int]()
    for steps, releases in lives:
        owner = Owner(existing, log, finished)
        for what, number in steps:
            match what:
                case "fetch":
                    owner.fetch(number)
                case "deliver":
                    owner.deliver(number)
                case "finish":
                    owner.finish(number)
                case _:
                    owner.report()
        log = owner.report(release=True) if releases else owner.die()
    last = Owner(existing, log, finished)
    last.fetch(len(existing))
    last.deliver(len(existing))
    for which in range(len(existing)):
        last.finish(which)
    last.report()
    assert finished == set(existing), "everything is finished in the end"
    assert last.tracker.position() == existing[-1] + 1
    assert last.tracker.progress() == b""
