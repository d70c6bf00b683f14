"""Lanes under random orders of coming, finishing, giving back and moving: in order, one at a time, none lost."""

from __future__ import annotations

import gc
import sys
from collections import defaultdict
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from marshal_py.client.messages.message import claim_of
from marshal_py.client.process import lanes
from marshal_py.client.process.lanes import LaneKey, Lanes
from marshal_py.protocol.wire.identity import TopicPartition

TP = TopicPartition("orders", 0)
KEYS, MESSAGES = 4, 24
MOVES_MAX = 3  # with that of the beginning: where every order is tried


class Raw:
    def __init__(self, value: bytes) -> None:
        self._value = value

    def key(self) -> bytes:
        return b""

    def __len__(self) -> int:
        return len(self._value)


class Claim:
    """Stands for a claim: compared by identity."""

    sealed, tp = False, TP


class World:
    """One partition whose message `n` has the key `n % keys`. A move begins again below everything unfinished."""

    def __init__(self, messages: int = MESSAGES, keys: int = KEYS) -> None:
        self.messages, self.keys, self.moves = messages, keys, 0
        self.lanes, self.claim = Lanes(), Claim()
        self.finished: set[int] = set()
        self.working: list[Any] = []
        self.given_back: list[int] = []
        self.began: dict[int, list[int]] = defaultdict(list)  # by key, under this claim
        self.move()

    def move(self, noticed: bool = True) -> None:
        """The partition goes, and comes back. Handlers that run go on, and count no more.

        `noticed`: what waits is taken away at once. Else it is found later, when it is to begin or others come.
        """
        if noticed:
            old = cast(Any, self.claim)
            old.sealed = True
            for message in self.lanes.take_waiting(old):
                assert message.offset not in self.finished
            held = self.lanes.held.get(old)
            assert held is None or (held.messages, held.size_bytes) == (0, 0)
            self.lanes.forget_claim(old)
        self.claim, self.moves = Claim(), self.moves + 1
        self.coming = [offset for offset in range(self.messages) if offset not in self.finished]
        self.given_back.clear()
        self.began.clear()

    def message(self, offset: int) -> Any:
        return SimpleNamespace(offset=offset, _delivered=SimpleNamespace(claim=self.claim), _raw=Raw(b"x" * offset))

    def step(self, kind: str, which: int) -> None:
        lanes = self.lanes
        if kind == "come" and (self.coming or self.given_back):
            again = self.given_back and (which % 2 or not self.coming)
            offset = self.given_back.pop(which % len(self.given_back)) if again else self.coming.pop(0)
            lanes.add(LaneKey(TP, offset % self.keys), self.message(offset))
        elif kind == "begin":
            message = lanes.next()
            more = which % 4  # a handler of batches has those behind it, too
            while message is not None and self.begins(message, joins=more < which % 4) and more:
                more -= 1
                message = lanes.join(message)
        elif kind == "reopen" and lanes.shut:
            lanes.reopen(list(lanes.shut)[which % len(lanes.shut)])
        elif kind == "move":
            self.move(noticed=which % 2 == 0)
        elif self.working:
            message = self.working[which % len(self.working)]
            ours = message._delivered.claim is self.claim
            lane = self.beside(message)
            message = lane[-1] if kind == "gate" else lane[0]
            self.working.remove(message)
            if kind == "finish":
                self.finished |= {message.offset} if ours else set()
                lanes.done(message)
            elif kind == "gate":
                if ours:
                    self.began[message.offset % self.keys].pop()
                    lanes.put_back(message)
                else:
                    lanes.done(message)
            elif ours:
                for one in lane:  # what is behind it is given back, too
                    lanes.park(one)
                    self.given_back.append(one.offset)
                self.working = [one for one in self.working if one not in lane]
            else:
                lanes.park(message)
                lanes.unpark(message)

    def beside(self, message: Any) -> list[Any]:
        """What works of the lane of a message, by offset."""
        key, claim = message.offset % self.keys, message._delivered.claim
        found = [one for one in self.working if one.offset % self.keys == key and one._delivered.claim is claim]
        return sorted(found, key=lambda one: one.offset)

    def begins(self, message: Any, joins: bool = False) -> bool:
        """Notes that a handler has the message. Returns False if it is of a claim that is over."""
        if message._delivered.claim is not self.claim:
            self.lanes.done(message)
            return False
        key = message.offset % self.keys
        with_it = {one.offset for one in self.beside(message)} if joins else set()
        others = {one.offset % self.keys for one in self.working if one.offset not in with_it}
        assert key not in others, "two of a lane at once"
        over = self.finished | with_it
        first = min(offset for offset in range(key, self.messages, self.keys) if offset not in over)
        assert message.offset == first, "one before it is not finished"
        self.working.append(message)
        self.began[key].append(message.offset)
        return True

    def state(self) -> object:
        """What tells this world from others. Claims that are over are told apart by what they have in the lanes."""
        lanes, claims = self.lanes, {id(self.claim): 0}

        def name(message: Any) -> tuple[int, int]:
            claim = message._delivered.claim
            return message.offset, claims.setdefault(id(claim), len(claims))

        def names(messages: Any) -> tuple[tuple[int, int], ...]:
            return tuple(map(name, messages))

        def lane_of(lane: Any) -> tuple[object, ...]:
            works = () if lane.working is None else names([lane.working])
            return lane.key, works, names(lane.beside), names(lane.parked), names(lane.waiting), lane.queued

        known = tuple(sorted(map(lane_of, lanes.unfinished()), key=str))
        ready = tuple(map(lane_of, lanes.ready))
        shut = tuple((claims.get(id(claim), -1), tuple(map(lane_of, found))) for claim, found in lanes.shut.items())
        rest = frozenset(self.finished), tuple(self.coming), tuple(self.given_back), names(self.working), self.moves
        return known, ready, shut, rest

    def choices(self) -> list[tuple[str, int]]:
        """Returns the steps that differ, of which each schedule takes one after the other."""
        found = [("come", 1)] if self.coming or self.given_back else []
        found += [("come", 0)] if self.coming and self.given_back else []
        found += [("begin", most) for most in (0, 1)] if self.lanes.ready else []
        found += [(kind, at) for at in range(len(self.working)) for kind in ("finish", "give back", "gate")]
        found += [("reopen", at) for at in range(len(self.lanes.shut))]
        return found + ([("move", 0), ("move", 1)] if self.moves < MOVES_MAX else [])

    def check(self) -> None:
        lanes = self.lanes
        found = list(lanes.unfinished())
        assert lanes.working == len(self.working)
        assert lanes.working == sum((lane.working is not None) + len(lane.beside) for lane in found)
        assert lanes.waiting == sum(len(lane.waiting) for lane in found)
        assert lanes.parked == sum(len(lane.parked) for lane in found)
        assert all(list(lane.parked) == sorted(lane.parked, key=lambda one: one.offset) for lane in found)
        sizes = sum(message.offset for lane in found for message in lane.waiting)
        assert sum(held.size_bytes for held in lanes.held.values()) == sizes
        assert sum(held.messages for held in lanes.held.values()) == lanes.waiting + lanes.parked
        ready = [lane for lane in found if lane.waiting and not lane.blocked]
        later = [lane for lanes_of_claim in lanes.shut.values() for lane in lanes_of_claim]
        assert all(lane in lanes.ready or lane in later for lane in ready), "a lane that is ready is never taken"
        claims = [{message._delivered.claim for message in lane.waiting} for lane in found]
        assert all(len(of_lane) <= 1 for of_lane in claims), "messages of a claim that is over wait before others"

    def check_waiting(self) -> None:
        """What they wait for, counted lane by lane."""
        for lists in (False, True):
            counts = dict.fromkeys(("worker", "batch", "lane", "retry", "gate"), 0)
            for lane in (one for one in self.lanes.unfinished() if one.waiting):
                shut = lane.waiting[0]._delivered.claim in self.lanes.shut
                free = "" if lane.blocked else "gate" if shut else "worker"
                before = free or ("lane" if lane.working is not None else "retry")
                counts[before] += 1
                counts["lane" if before == "worker" and not lists else before] += len(lane.waiting) - 1
            assert self.lanes.waiting_for(lists) == counts


KINDS = {"come": 6, "begin": 5, "finish": 3, "give back": 2, "gate": 2, "reopen": 2, "move": 1}


def test_each_lane_is_handled_in_order_and_nothing_is_lost() -> None:
    for seed in range(300):
        dice, world = Random(seed), World()
        steps = [(kind, dice.randrange(8)) for kind in dice.choices(list(KINDS), list(KINDS.values()), k=150)]
        steps += [
            (kind, 0) for _ in range(4 * MESSAGES) for kind in ("come", "reopen", "begin", "finish")
        ]  # then all are finished
        for at, (kind, which) in enumerate(steps):
            try:
                world.step(kind, which)
                world.check()
                if at % 40 == seed % 40:
                    world.check_waiting()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, step {at}") from error
        assert world.finished == set(range(MESSAGES)), f"seed {seed}"


@pytest.mark.parametrize(
    ("messages", "keys", "steps", "schedules"),
    [(3, 2, 10, 1_000_000), pytest.param(4, 2, 14, 100_000_000, marks=pytest.mark.proof)],
)
def test_every_order_of_steps_keeps_each_lane(messages: int, keys: int, steps: int, schedules: int) -> None:
    """Each order of `steps` steps, counted by the states that they pass: two that reach one state go on as one."""

    def world_after(path: tuple[tuple[str, int], ...]) -> World:
        world = World(messages, keys)
        for step in path:
            world.step(*step)
        return world

    start = World(messages, keys)
    paths: dict[object, tuple[tuple[str, int], ...]] = {start.state(): ()}
    counts: dict[object, int] = {start.state(): 1}
    following: dict[object, list[object]] = {}
    for _ in range(steps):
        after: dict[object, int] = defaultdict(int)
        for state, count in counts.items():
            if state not in following:
                following[state] = []
                path = paths[state]
                for step in world_after(path).choices():
                    world = world_after(path)
                    try:
                        world.step(*step)
                        world.check()
                    except AssertionError as error:
                        raise AssertionError(f"after {(*path, step)}") from error
                    found = world.state()
                    paths.setdefault(found, (*path, step))
                    following[state].append(found)
            for found in following[state]:
                after[found] += count
        counts = after
    print(f"{sum(counts.values()):,} schedules of {steps} steps in {len(paths):,} states")
    assert sum(counts.values()) >= schedules


def test_a_lane_that_does_not_wait_for_its_retry_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes.Lane, "blocked", property(lambda lane: lane.working is not None))
    with pytest.raises(AssertionError, match="give back"):
        test_every_order_of_steps_keeps_each_lane(3, 2, 10, 1)


def test_a_partition_that_stays_after_all_goes_on_behind_what_is_tried_again() -> None:
    """Its successor has gone: what waited comes again at once, what is tried again later."""
    world = World()
    first, second = world.message(0), world.message(KEYS)
    for message in (first, second):
        world.lanes.add(LaneKey(TP, 0), message)
    assert world.lanes.next() is first
    world.lanes.park(first)
    assert world.lanes.take_waiting(cast(Any, world.claim)) == [second], "the partition moves"
    world.lanes.add(LaneKey(TP, 0), second)
    assert world.lanes.next() is None
    world.lanes.add(LaneKey(TP, 0), world.message(0))
    assert [message.offset for message in (world.lanes.next(),) if message] == [0]


def test_of_dead_keys_the_newest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "DEAD_KEYS_MAX", 2)
    world = World()
    messages = [world.message(offset) for offset in range(2 * KEYS)]
    for message in messages[:3]:
        world.lanes.add(LaneKey(TP, message.offset % KEYS), message)
        assert world.lanes.next() is message
        world.lanes.mark_dead(message)
        world.lanes.done(message)
    assert list(world.lanes.unfinished()) == [], "no lane is kept"
    assert not any(world.lanes._lanes.values())
    follows = []
    for message in messages[KEYS:]:
        world.lanes.add(LaneKey(TP, message.offset % KEYS), message)
        assert world.lanes.next() is message
        follows.append(world.lanes.follows_dead(message))
        world.lanes.done(message)
    assert follows == [False, True, True, False]


def test_what_is_dropped_holds_up_its_lane_no_more() -> None:
    for parked in (False, True):
        world = World()
        first, second = world.message(0), world.message(KEYS)
        for message in (first, second):
            world.lanes.add(LaneKey(TP, 0), message)
        assert world.lanes.next() is first
        if parked:
            world.lanes.park(first)
            assert world.lanes.all_parked() == [first]
        world.lanes.drop(first)
        world.lanes.drop(first)
        assert (world.lanes.working, world.lanes.parked) == (0, 0)
        assert world.lanes.next() is second


def test_a_lane_goes_on_without_a_handler_that_is_abandoned() -> None:
    world = World()
    old = world.message(0)
    world.lanes.add(LaneKey(TP, 0), old)
    assert world.lanes.next() is old
    assert world.lanes.in_vain() == []
    world.move()
    again = world.message(0)
    world.lanes.add(LaneKey(TP, 0), again)
    assert world.lanes.next() is None, "the handler may still return"
    assert world.lanes.in_vain() == [old]
    world.lanes.abandon(old)
    assert world.lanes.next() is again
    world.lanes.done(old)
    assert [lane.working for lane in world.lanes.unfinished()] == [again], "its late return ends nothing"
    world.lanes.done(again)
    assert list(world.lanes.unfinished()) == []


def steps_of(call: Callable[[], object]) -> int:
    """How many lines Python runs in a call, each turn of a loop counted."""
    steps = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal steps
        steps += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()  # other tests' callbacks of the collector are lines, too
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return steps


def begun(world: World, count: int) -> list[tuple[int, int]]:
    """The partition and the offset of the next messages for handlers."""
    messages = [world.lanes.next() for _ in range(count)]
    return [(claim_of(one).tp.partition, one.offset) for one in messages if one is not None]


def test_the_oldest_of_each_partition_in_turn_is_next() -> None:
    """Else the position of a partition would stand still while handlers work on the backlog of another one."""
    world = World()
    claims = [world.claim, cast(Any, Claim())]
    claims[1].tp = TopicPartition("orders", 1)
    for claim, offsets in ((claims[0], (1, 2, 3, 0)), (claims[1], (7, 8))):
        world.claim = claim
        for offset in offsets:
            world.lanes.add(LaneKey(claim.tp, None, offset), world.message(offset))
    assert begun(world, 6) == [(0, 0), (1, 7), (0, 1), (1, 8), (0, 2), (0, 3)]


def test_what_was_taken_away_costs_a_partition_no_turn() -> None:
    """Else one that is lost with a backlog, and claimed again, waits for as many messages of the others."""
    world = World()
    claims = [world.claim, cast(Any, Claim())]
    claims[1].tp = TopicPartition("orders", 1)
    for claim, offsets in ((claims[0], (1, 2, 3)), (claims[1], (7, 8))):
        world.claim = claim
        for offset in offsets:
            world.lanes.add(LaneKey(claim.tp, None, offset), world.message(offset))
    assert len(world.lanes.take_waiting(claims[0])) == 3
    world.claim = cast(Any, Claim())
    world.lanes.add(LaneKey(TP, None, 4), world.message(4))
    assert begun(world, 3) == [(0, 4), (1, 7), (1, 8)]


def test_what_was_put_back_because_its_gate_was_shut_is_next() -> None:
    world = World()
    for offset in range(4):
        world.lanes.add(LaneKey(TP, None, offset), world.message(offset))
    first = world.lanes.next()
    assert first is not None
    world.lanes.put_back(first)
    assert begun(world, 1) == [], "the gate is shut"
    world.lanes.reopen(world.claim)
    assert begun(world, 4) == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_what_waits_costs_nothing_where_it_is_not_meant() -> None:
    """The Marshal's lock is held meanwhile, so its heartbeats wait, too."""

    def cost(others: int) -> list[int]:
        """With lanes of another partition, and behind a lane that is tried again."""
        world = World()
        elsewhere = cast(Any, Claim())
        elsewhere.tp = TopicPartition("orders", 1)
        for offset in range(4):
            world.lanes.add(LaneKey(TP, offset % 2), world.message(offset))
        first, _ = world.lanes.next(), world.lanes.next()
        assert first is not None
        world.lanes.park(first)
        world.claim = elsewhere
        for offset in range(others):
            world.lanes.add(LaneKey(elsewhere.tp, offset), world.message(offset))
        ours = cast(Any, first)._delivered.claim
        return [
            steps_of(world.lanes.in_vain),
            steps_of(world.lanes.all_parked),
            steps_of(lambda: world.lanes.waiting_for(False)),
            steps_of(lambda: world.lanes.busy_with(TP, 1)),
            steps_of(lambda: world.lanes.take_waiting(ours)),
        ]

    assert cost(10) == cost(1_000)
