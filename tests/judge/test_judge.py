"""The judge itself: a clean run is clean, and for each kind of violation a planted one is found. Needs no broker.

The runs are written by hand: bytes from tests/support/wire.py, times and deliveries as a perfect recorder and perfect
workers would have written them. A plant is one small change to such a run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from marshal_sim.judge.evidence import ToolReport
from marshal_sim.oracle import oracle, rules
from marshal_sim.oracle.oracle import Oracle
from marshal_sim.oracle.snapshot import FOLD_VERSION
from tests.support import wire
from tests.support.evidence import NEVER, Delivery, Dropped, Evidence, Failure, Fault, JournalReader, Life, Record
from tests.support.journal import Journal, Tail
from tests.support.judge import BESIDE, TAKE_OVER, Judgement, judge

MS = 1_000_000
GROUP, TOPIC = "g", "t"
INTERVAL_MS = 1_000
JOIN, HEARTBEAT, LEAVE, EVICT, CLAIM, RELEASE, GRANT, PAUSE, MOVE, TOPOLOGY, NOTE = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 13


class RunBuilder:
    """A run under construction. Times are ms; a record is read by the recorder 2 ms after its send."""

    def __init__(self, mode: int) -> None:
        self.mode = mode
        self.oracle = Oracle()
        self.evidence = Evidence(logs={0: []})
        self.records = self.evidence.logs[0]
        self.checkpoints: dict[int, tuple[int, int]] = {}
        self.write_raw(0, wire.genesis())

    def write_raw(self, ms: int, value: bytes | None) -> int:
        offset = len(self.records)
        self.records.append(Record(offset, value, (ms + 2) * MS, ms * MS))
        self.oracle.apply(offset, value)
        if (offset + 1) % 16 == 0:
            self.checkpoints[offset + 1] = (self.oracle.state_digest(GROUP), self.oracle.chain_digest()[1])
        return offset

    def write(self, ms: int, number: int, *fields: object) -> int:
        return self.write_raw(ms, wire.record(GROUP, number, *fields))

    def join(self, ms: int, client: str) -> int:
        life = Life(client, client, 1, GROUP, "", ms * MS, (ms + 5) * MS)
        self.evidence.lives[client] = life
        return self.write(ms, JOIN, client, client.encode().ljust(16, b"-"), self.mode, INTERVAL_MS, [TOPIC])

    def heartbeat(self, ms: int, session: int, *claims: tuple[int, int]) -> int:
        at = max(self.checkpoints, default=0)
        digest = [at, *self.checkpoints[at], FOLD_VERSION] if at else None
        return self.write(ms, HEARTBEAT, session, ms, [list(claim) for claim in claims], [], None, digest)

    def claim(self, ms: int, session: int, partition: int, observed: int = -1, start: int = 0) -> int:
        return self.write(ms, CLAIM, session, TOPIC, partition, observed, start)

    def deliver(
        self, client: str, epoch: int, partition: int, offset: int, begin_ms: int, end_ms: int = NEVER
    ) -> Delivery:
        token = f"{wire.INCARNATION.hex()}-{epoch:016x}"
        end_ns = end_ms * MS if end_ms < NEVER else NEVER
        delivery = Delivery(
            client,
            token,
            TOPIC,
            partition,
            offset,
            begin_ms * MS,
            begin_ms * MS,
            end_ns,
            end_ns + 1_000 if end_ms < NEVER else NEVER,
        )
        self.evidence.deliveries.append(delivery)
        return delivery

    def fault(self, ms: int, kind: str, who: str = "") -> None:
        self.evidence.faults.append(Fault(ms * MS, kind, who))

    def ends(self, client: str, ms: int, code: int = 0) -> None:
        life = self.evidence.lives[client]
        life.exit_code, life.end_ns = code, ms * MS
        life.beats = [at * MS for at in range(life.start_ns // MS, ms, 200)]

    def settle(self) -> None:
        self.evidence.settled = {0: len(self.records)}

    def judge(self) -> Judgement:
        return judge(self.evidence, takeovers_min=1, deliveries_min=10)

    def invariants(self) -> set[str]:
        return {violation.invariant for violation in self.judge().violations}


@dataclasses.dataclass
class Run:
    """A clean run and the places in it that plants change."""

    builder: RunBuilder
    a: int  # sessions
    b: int
    a0: int  # epochs: a's claim of partition 0, b's of 1, b's of 0 after the eviction
    b1: int
    b0: int
    evicted_at: int


def alo() -> Run:
    """A and b own a partition each; a is killed in the middle of a message; b evicts it and goes on from there."""
    builder = RunBuilder(1)
    a, b = builder.join(100, "a"), builder.join(110, "b")
    builder.write(120, TOPOLOGY, TOPIC, 2, -1)
    a0, b1 = builder.claim(130, a, 0), builder.claim(140, b, 1)
    for offset in range(6):  # a finishes 0 to 5 before its last heartbeat, and 6 begins just before it
        builder.deliver("a", a0, 0, offset, 200 + 50 * offset, 220 + 50 * offset)
    builder.deliver("a", a0, 0, 6, 590)
    builder.heartbeat(400, a, (a0, 3))
    builder.heartbeat(420, b, (b1, 0))
    extended = builder.heartbeat(600, a, (a0, 6))
    builder.deliver("a", a0, 0, 7, 650, 660)  # finished, and nobody knows
    builder.fault(700, "kill", "a")
    builder.ends("a", 700, -9)
    for number in range(30):
        builder.heartbeat(750 + 100 * number, b, (b1, number))
        builder.deliver("b", b1, 1, number, 700 + 100 * number, 710 + 100 * number)
        if number == 20:
            evicted_at = builder.write(2_810, EVICT, a, extended, 2_001)
            b0 = builder.claim(2_815, b, 0, observed=a0)
    for offset in range(6, 12):
        builder.deliver("b", b0, 0, offset, 2_900 + 10 * offset, 2_905 + 10 * offset)
    builder.heartbeat(3_700, b, (b0, 12), (b1, 30))
    builder.settle()
    builder.write(3_900, RELEASE, b, b0, 12)
    builder.write(3_900, RELEASE, b, b1, 30)
    builder.write(3_901, LEAVE, b)
    builder.ends("b", 4_000)
    builder.evidence.topics = {(TOPIC, 0): list(range(12)), (TOPIC, 1): list(range(30))}
    return Run(builder, a, b, a0, b1, b0, evicted_at)


def amo() -> Run:
    """The same at most once: grants of four."""
    builder = RunBuilder(2)
    a, b = builder.join(100, "a"), builder.join(110, "b")
    builder.write(120, TOPOLOGY, TOPIC, 1, -1)
    a0 = builder.claim(130, a, 0)
    builder.write(150, GRANT, a, [[a0, 0, 0, 4]])
    builder.write(160, GRANT, a, [[a0, 4, 4, 8]])
    for offset in range(6):
        builder.deliver("a", a0, 0, offset, 200 + 10 * offset, 205 + 10 * offset)
    extended = builder.heartbeat(400, a)
    builder.fault(500, "kill", "a")
    builder.ends("a", 500, -9)
    for number in range(10):
        builder.heartbeat(420 + 300 * number, b)
    evicted_at = builder.write(3_300, EVICT, a, extended, 2_001)
    b0 = builder.claim(3_310, b, 0, observed=a0)
    builder.write(3_320, GRANT, b, [[b0, 8, 8, 16]])
    for offset in range(8, 16):
        builder.deliver("b", b0, 0, offset, 3_330 + offset, 3_331 + offset)
    builder.settle()
    builder.ends("b", 3_600)
    builder.evidence.topics = {(TOPIC, 0): list(range(16))}
    return Run(builder, a, b, a0, -1, b0, evicted_at)


def test_clean_runs_have_no_violation() -> None:
    for make in (alo, amo):
        found = make().builder.judge()
        assert [str(violation) for violation in found.violations] == []
        assert found.void == ""
        assert found.counters["takeovers"] == 1
    assert alo().builder.judge().counters["redelivered"] == 2


def test_what_a_query_has_finished_and_nobody_acked_may_come_again_after_a_hand_over() -> None:
    run = alo()
    a_message_comes_again_after_a_hand_over(run)
    first = delivery(run, "c", 0, 12)
    run.builder.evidence.lives["c"].checkpoint = "folder"
    assert run.builder.invariants() == {"S9"}  # its ack had returned
    first.ack_ns = NEVER
    assert run.builder.invariants() == set()
    run.builder.evidence.lives["c"].checkpoint = ""
    assert run.builder.invariants() == {"S9"}


def test_a_query_plans_a_batch_at_some_time_between_the_sink_of_the_one_before_and_its_own() -> None:
    run = alo()
    life = run.builder.evidence.lives["b"]
    before_the_claim, late = delivery(run, "b", 1, 0), delivery(run, "b", 1, 29)
    before_the_claim.gate_ns = 0
    assert run.builder.invariants() == {"S2"}
    life.checkpoint = "folder"
    assert run.builder.invariants() == set()
    late.gate_ns = late.begin_ns = 5_000 * MS  # long after its last heartbeat and its release
    assert "S3" in run.builder.invariants()
    late.gate_ns = 3_700 * MS
    assert "S3" not in run.builder.invariants()
    before_the_claim.begin_ns = 0
    assert "S2" in run.builder.invariants()


def test_the_next_run_of_a_query_skips_what_the_one_before_finished() -> None:
    run = alo()
    an_heir_begins_too_late(run)
    again = delivery(run, "a", 0, 6)
    again.end_ns = 690 * MS
    assert run.builder.invariants() == {"S10"}
    for client, checkpoint in (("a", "one"), ("b", "two")):
        run.builder.evidence.lives[client].checkpoint = checkpoint
    assert run.builder.invariants() == {"S10"}
    run.builder.evidence.lives["b"].checkpoint = "one"
    assert run.builder.invariants() == set()


def test_a_run_without_enough_take_overs_or_deliveries_is_void() -> None:
    evidence = alo().builder.evidence
    assert "take-overs" in judge(evidence).void
    assert "deliveries" in judge(evidence, takeovers_min=1).void
    assert not judge(evidence, takeovers_min=1).ok


# ---------------------------------------------------------------------------------------------------------------------
# Plants: each changes a clean run, and its invariant must be named

Plant = Callable[[Run], Any]
ALO_PLANTS: list[tuple[str, str, Plant]] = []
AMO_PLANTS: list[tuple[str, str, Plant]] = []


def plant(invariant: str, mode: list[tuple[str, str, Plant]]) -> Callable[[Plant], Plant]:
    def add(change: Plant) -> Plant:
        mode.append((invariant, change.__name__, change))
        return change

    return add


def delivery(run: Run, client: str, partition: int, offset: int) -> Delivery:
    wanted = (client, partition, offset)
    return next(d for d in run.builder.evidence.deliveries if (d.client, d.partition, d.offset) == wanted)


@plant("S1", ALO_PLANTS)
def a_reader_folds_another_state(run: Run) -> None:
    at, (state, chain) = max(run.builder.checkpoints.items())
    run.builder.write(3_950, HEARTBEAT, run.b, 99, [], [], None, [at, state ^ 1, chain, FOLD_VERSION])


@plant("S1", ALO_PLANTS)
def a_reader_reads_other_bytes(run: Run) -> None:
    at, (state, chain) = max(run.builder.checkpoints.items())
    run.builder.write(3_950, HEARTBEAT, run.b, 99, [], [], None, [at, state, chain ^ 1, FOLD_VERSION])


@plant("V5", ALO_PLANTS)
def a_divergence_goes_unnoticed(run: Run) -> None:
    at, (state, chain) = max(run.builder.checkpoints.items())
    session = run.builder.join(3_940, "c")
    run.builder.write(3_950, HEARTBEAT, session, 1, [], [], None, [at, state ^ 1, chain, FOLD_VERSION])


@plant("S2", ALO_PLANTS)
def a_token_names_no_claim(run: Run) -> None:
    run.builder.deliver("b", run.b0 + 1, 0, 13, 3_800, 3_801)


@plant("S2", ALO_PLANTS)
def a_token_of_another_partition(run: Run) -> None:
    run.builder.deliver("b", run.b1, 0, 13, 3_800, 3_801)


@plant("S2", ALO_PLANTS)
def a_token_of_another_client(run: Run) -> None:
    run.builder.evidence.lives["c"] = Life("c", "c", 3, GROUP, "", 0)
    run.builder.deliver("c", run.b0, 0, 12, 3_800, 3_801)


@plant("S2", ALO_PLANTS)
def a_delivery_before_the_claim(run: Run) -> None:
    run.builder.deliver("b", run.b0, 0, 6, 2_790, 2_795)


@plant("S3", ALO_PLANTS)
def a_delivery_after_somebody_elses_claim_was_read(run: Run) -> None:
    run.builder.deliver("a", run.a0, 0, 8, 2_818, 2_820)


@plant("S3", ALO_PLANTS)
def a_delivery_after_the_lease(run: Run) -> None:
    run.builder.deliver("a", run.a0, 0, 8, 1_620, 1_630)


@plant("S3", ALO_PLANTS)
def a_delivery_after_the_own_release_was_sent(run: Run) -> None:
    run.builder.deliver("b", run.b0, 0, 12, 3_920, 3_930)


@plant("S4", ALO_PLANTS)
def a_token_of_another_incarnation(run: Run) -> None:
    delivery(run, "b", 0, 8).token = f"{wire.OTHER_INCARNATION.hex()}-{run.b0:016x}"


@plant("S4", ALO_PLANTS)
def a_write_with_an_older_token(run: Run) -> None:
    run.builder.deliver("a", run.a0, 0, 8, 3_400, 3_401)


@plant("S7", ALO_PLANTS)
def a_message_nobody_finished(run: Run) -> None:
    run.builder.evidence.deliveries.remove(delivery(run, "a", 0, 2))


@plant("S7", ALO_PLANTS)
def a_message_begun_and_not_finished(run: Run) -> None:
    delivery(run, "b", 0, 9).end_ns = NEVER


@plant("S8", ALO_PLANTS)
def a_message_finished_after_the_position_passed_it(run: Run) -> None:
    delivery(run, "a", 0, 2).end_ns = 450 * MS


@plant("S9", ALO_PLANTS)
def a_message_finished_long_ago_comes_again(run: Run) -> None:
    run.builder.deliver("b", run.b0, 0, 4, 2_850, 2_860)


@plant("S9", ALO_PLANTS)
def a_message_that_was_finished_above_the_position_comes_again(run: Run) -> None:
    """D1: the heartbeats came in order, so the successor knew of 3 to 5 too, although 2 was never acknowledged."""
    delivery(run, "a", 0, 2).ack_ns = NEVER
    run.builder.deliver("b", run.b0, 0, 4, 2_850, 2_860)


@plant("S9", ALO_PLANTS)
def a_message_comes_again_after_a_hand_over(run: Run) -> None:
    released = run.builder.oracle.groups[GROUP].partitions[TOPIC, 0].version
    c = run.builder.join(3_950, "c")
    c0 = run.builder.claim(3_951, c, 0, observed=released)
    run.builder.deliver("c", c0, 0, 12, 3_955, 3_956)
    d = run.builder.join(3_957, "d")
    handed = run.builder.write(3_960, RELEASE, c, c0, 12, d, "hand-over")
    run.builder.deliver("d", run.builder.claim(3_962, d, 0, observed=handed), 0, 12, 3_970, 3_971)


@plant("S10", ALO_PLANTS)
def an_heir_begins_too_late(run: Run) -> None:
    run.builder.evidence.deliveries.remove(delivery(run, "b", 0, 6))


@plant("S10", ALO_PLANTS)
def a_claim_is_delivered_backwards(run: Run) -> None:
    run.builder.deliver("b", run.b0, 0, 7, 3_800, 3_801)


@plant("S12", ALO_PLANTS)
def a_tool_says_moved_and_nothing_did(run: Run) -> None:
    run.builder.evidence.reports.append(ToolReport(GROUP, "admin", "moved", ((TOPIC, 0, 3),)))


@plant("S13", ALO_PLANTS)
def a_process_crashes(run: Run) -> None:
    run.builder.evidence.lives["b"].exit_code = 1


@plant("S13", ALO_PLANTS)
def a_process_gives_a_sound_log_up(run: Run) -> None:
    names = ("LogGap", "CoordinationError", "ClusterError", "MarshalError")
    run.builder.evidence.failures.append(Failure(3_950 * MS, "b", names, "offsets are missing", True))


@plant("S14", ALO_PLANTS)
def a_delivery_after_the_own_error(run: Run) -> None:
    run.builder.evidence.failures.append(Failure(3_000 * MS, "b", ("SessionCloned",), "twice", True))


@plant("S14", ALO_PLANTS)
def nobody_names_an_error_when_the_topic_is_recreated(run: Run) -> None:
    run.builder.fault(3_800, "recreated")


@plant("S14", ALO_PLANTS)
def deliveries_go_on_when_the_log_has_stopped(run: Run) -> None:
    run.builder.fault(1_000, "recreated")
    run.builder.evidence.failures.append(Failure(3_960 * MS, "b", ("TopicRecreated", "CoordinationError"), "", True))


@plant("S14", ALO_PLANTS)
def nobody_minds_an_opaque_group(run: Run) -> None:
    run.builder.write_raw(3_902, wire.record(GROUP, NOTE, -1, "future", record_version=3))


@plant("S14", ALO_PLANTS)
def nobody_minds_an_unknown_envelope(run: Run) -> None:
    value = wire.envelope(GROUP, NOTE, wire.pack([NOTE, -1, "future"]), version=2)
    run.builder.records.append(Record(len(run.builder.records), value, 3_904 * MS, 3_902 * MS))


@plant("S14", ALO_PLANTS)
def nobody_minds_a_gap(run: Run) -> None:
    run.builder.records.append(Record(len(run.builder.records) + 1, b"later", 3_904 * MS, 3_902 * MS))


@plant("S15", ALO_PLANTS)
def an_eviction_without_the_wait(run: Run) -> None:
    record = run.builder.records[run.evicted_at]
    run.builder.records[run.evicted_at] = record._replace(sent_ns=2_500 * MS)


@plant("S16", ALO_PLANTS)
def a_message_comes_again_that_its_handler_still_has(run: Run) -> None:
    run.builder.deliver("b", run.b0, 0, 11, 3_800, 3_801)


@plant("V1", ALO_PLANTS)
def a_dead_owners_partition_stays_alone(run: Run) -> None:
    run.builder.evidence.settled = {0: run.evicted_at + 1}


@plant("V2", ALO_PLANTS)
def a_released_partition_stays_alone(run: Run) -> None:
    run.builder.settle()


@plant("V3", ALO_PLANTS)
def a_partition_is_never_claimed(run: Run) -> None:
    run.builder.evidence.topics[TOPIC, 2] = []


@plant("V3", ALO_PLANTS)
def messages_are_left(run: Run) -> None:
    run.builder.evidence.topics[TOPIC, 0].append(12)


@plant("V4", ALO_PLANTS)
def a_herd_of_claims(run: Run) -> None:
    for ms in range(3_950, 3_957):
        run.builder.claim(ms, run.b, 0)


@plant("V4", ALO_PLANTS)
def a_herd_of_two_members(run: Run) -> None:
    for ms in range(2_000, 2_007):
        run.builder.claim(ms, run.b, 0)


@plant("V7", ALO_PLANTS)
def a_pause_that_an_owner_holds_open(run: Run) -> None:
    """Of a process that ran all the while; the pause lasts for longer than the slack of a slow machine."""
    session = run.builder.join(4_000, "c")
    run.builder.ends("c", 60_000)
    run.builder.claim(4_010, session, 0, observed=run.builder.oracle.groups[GROUP].partitions[TOPIC, 0].version)
    run.builder.write(4_500, PAUSE, -1, -1, 50_000)


@plant("V6", ALO_PLANTS)
def a_live_owner_is_evicted(run: Run) -> None:
    run.builder.evidence.faults.clear()
    run.builder.ends("a", 4_000, 0)


@plant("S5", AMO_PLANTS)
def a_message_twice(run: Run) -> None:
    run.builder.write(3_400, GRANT, run.b, run.b0, 16, 16, 20)
    run.builder.deliver("b", run.b0, 0, 5, 3_410, 3_411)


@plant("S5", AMO_PLANTS)
def the_dead_owners_message_twice(run: Run) -> None:
    again = delivery(run, "a", 0, 5)
    run.builder.evidence.deliveries.append(dataclasses.replace(again, begin_ns=300 * MS, gate_ns=300 * MS))


@plant("S6", AMO_PLANTS)
def a_message_outside_of_every_grant(run: Run) -> None:
    run.builder.deliver("b", run.b0, 0, 16, 3_400, 3_401)


@plant("S6", AMO_PLANTS)
def a_message_inside_the_dead_owners_grant(run: Run) -> None:
    run.builder.deliver("b", run.b0, 0, 7, 3_325, 3_326)


@plant("S6", AMO_PLANTS)
def a_granted_message_that_nobody_gets(run: Run) -> None:
    """By a process that ended cleanly, gave nothing back and wrote no Note."""
    run.builder.write(3_400, GRANT, run.b, [[run.b0, 16, 16, 20]])
    run.builder.write(3_500, RELEASE, run.b, run.b0, -1)
    run.builder.evidence.topics[TOPIC, 0].append(16)


@plant("S6", AMO_PLANTS)
def a_message_before_its_grant_was_sent(run: Run) -> None:
    first = delivery(run, "a", 0, 4)
    first.begin_ns = first.gate_ns = 140 * MS


@plant("S18", AMO_PLANTS)
def an_unfinished_message_is_reported_as_handled(run: Run) -> None:
    delivery(run, "b", 0, 12).end_ns = NEVER
    run.builder.heartbeat(3_550, run.b, (run.b0, 16))


def _cases(make: Callable[[], Run], plants: list[tuple[str, str, Plant]]) -> list[Any]:
    return [pytest.param(make, invariant, change, id=f"{invariant} {name}") for invariant, name, change in plants]


@pytest.mark.parametrize(("make", "invariant", "change"), _cases(alo, ALO_PLANTS) + _cases(amo, AMO_PLANTS))
def test_a_planted_fault_is_found(make: Callable[[], Run], invariant: str, change: Plant) -> None:
    run = make()
    change(run)
    assert invariant in run.builder.invariants()


# ---------------------------------------------------------------------------------------------------------------------
# Plants that no log can show while the oracle follows its rules: here the oracle itself is weakened


def weaken(monkeypatch: pytest.MonkeyPatch, record: str, rule: Callable[..., str]) -> None:
    monkeypatch.setitem(oracle.RULES, record, rule)


def test_two_owners_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    strict = oracle.RULES["ClaimingPartition"]

    def greedy(group: Any, fields: dict[str, Any], offset: int, body: bytes) -> str:
        part = group.partitions.get((fields["topic"], fields["partition"]))
        if part is not None:
            part.owner = -1
        return strict(group, fields, offset, body)

    weaken(monkeypatch, "ClaimingPartition", greedy)
    builder = RunBuilder(1)
    a, b = builder.join(100, "a"), builder.join(110, "b")
    builder.write(120, TOPOLOGY, TOPIC, 1, -1)
    a0 = builder.claim(130, a, 0)
    builder.claim(140, b, 0, observed=a0)
    assert "S2" in builder.invariants()


def test_a_position_that_falls_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(group: Any, fields: dict[str, Any], offset: int, _body: bytes) -> str:
        for entry in fields["claims"]:
            group.claim(fields["session"], entry["epoch"])[1].position = entry["position"]
        group.sessions[fields["session"]].extended = offset
        return ""

    weaken(monkeypatch, "Heartbeat", careless)
    builder = RunBuilder(1)
    a = builder.join(100, "a")
    builder.write(120, TOPOLOGY, TOPIC, 1, -1)
    a0 = builder.claim(130, a, 0)
    builder.heartbeat(200, a, (a0, 5))
    builder.heartbeat(300, a, (a0, 4))
    assert "S10" in builder.invariants()


@pytest.mark.parametrize("record", ["ClaimingPartition", "ClaimingMessages"])
def test_a_claim_in_a_pause_is_found(monkeypatch: pytest.MonkeyPatch, record: str) -> None:
    strict = oracle.RULES[record]

    def restless(group: Any, fields: dict[str, Any], offset: int, body: bytes) -> str:
        duration, group.pause_duration_ms = group.pause_duration_ms, 0
        reason = strict(group, fields, offset, body)
        group.pause_duration_ms = duration
        return reason

    weaken(monkeypatch, record, restless)
    builder = RunBuilder(2)
    a = builder.join(100, "a")
    builder.write(120, TOPOLOGY, TOPIC, 2, -1)
    a0 = builder.claim(130, a, 0)
    builder.write(140, PAUSE, -1, -1, 60_000)
    if record == "ClaimingPartition":
        builder.claim(150, a, 1)
    else:
        builder.write(150, GRANT, a, [[a0, 0, 0, 4]])
    assert "S11" in builder.invariants()


def test_deliveries_in_a_pause_end_with_the_lease() -> None:
    """In a pause a heartbeat of an owner extends nothing, so the fence falls whatever it sends."""
    builder = RunBuilder(1)
    a = builder.join(100, "a")
    builder.write(120, TOPOLOGY, TOPIC, 1, -1)
    a0 = builder.claim(130, a, 0)
    builder.write(200, PAUSE, -1, -1, 60_000)
    for ms in range(300, 1_500, 300):
        builder.heartbeat(ms, a, (a0, 0))
    builder.deliver("a", a0, 0, 0, 1_000, 1_010)
    assert builder.invariants() == {"V7"}, "it never lets go"
    builder.deliver("a", a0, 0, 1, 1_200, 1_210)
    assert builder.invariants() == {"S3", "V7"}


def test_a_move_that_was_denied_or_did_not_arrive_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def moved(position: int) -> RunBuilder:
        builder = RunBuilder(1)
        a = builder.join(100, "a")
        builder.write(120, TOPOLOGY, TOPIC, 1, -1)
        token = builder.write(130, PAUSE, -1, -1, 60_000)
        builder.write(140, MOVE, token, [[TOPIC, 0, -1, position]], True, "admin")
        builder.claim(150, a, 0, observed=builder.oracle.groups[GROUP].partitions[TOPIC, 0].version)
        return builder

    builder = moved(7)
    builder.evidence.reports = [ToolReport(GROUP, "admin", "moved", ((TOPIC, 0, 7),))]
    assert builder.invariants() == set()
    builder.evidence.reports = [ToolReport(GROUP, "admin", "not moved", ((TOPIC, 0, 7),))]
    assert "S12" in builder.invariants()
    builder.evidence.reports = [ToolReport(GROUP, "admin", "moved", ((TOPIC, 0, 8),))]
    assert "S12" in builder.invariants()


def test_a_rejected_record_that_changes_something_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    strict = oracle.RULES["Evict"]

    def leaky(group: Any, fields: dict[str, Any], offset: int, body: bytes) -> str:
        reason = strict(group, fields, offset, body)
        if reason == "observed":
            group.sessions[fields["session"]].extended = offset
        return reason

    weaken(monkeypatch, "Evict", leaky)
    builder = RunBuilder(1)
    a = builder.join(100, "a")
    builder.evidence.forged.add((0, builder.write(200, EVICT, a, 0, 2_000)))
    assert "S13" in builder.invariants()


def test_a_consumer_that_does_not_fit_the_settings_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "fits", lambda *_: True)
    builder = RunBuilder(1)
    builder.write(100, JOIN, "a", b"a".ljust(16, b"-"), 1, INTERVAL_MS, [TOPIC], -1, "member-of-no-policy")
    assert builder.invariants() == {"S17"}


def test_each_invariant_of_processes_has_a_plant() -> None:
    """Those that docs/guarantees.md names for processes; S11 and S17 need a weakened oracle, in the tests above."""
    planted = {invariant for invariant, *_ in ALO_PLANTS + AMO_PLANTS}
    weakened = {"S11", "S17"}
    assert planted | weakened >= {f"S{number}" for number in range(1, 19)} | {f"V{number}" for number in range(4, 8)}


# ---------------------------------------------------------------------------------------------------------------------
# What is counted, not judged


def test_a_stop_between_gate_and_call_is_counted() -> None:
    run = alo()
    late = run.builder.deliver("a", run.a0, 0, 8, 2_990, 2_991)
    late.gate_ns = 900 * MS
    found = run.builder.judge()
    assert found.violations == []
    assert found.counters["late_calls"] == 1
    assert found.counters["stale_writes"] == 1


@pytest.mark.parametrize(("end_ms", "found"), [(3_200, set()), (3_400, {"S6"})])
def test_a_stop_that_could_not_read_the_log_may_leave_what_was_granted_to_the_note_of_the_next_owner(
    end_ms: int, found: set[str]
) -> None:
    """Its session is evicted at 3,300. Until then its Releases were rejected: they did not know of its newest grant."""
    run = amo()
    run.builder.evidence.faults.clear()
    run.builder.ends("a", end_ms, 0)
    assert run.builder.invariants() & {"S6"} == found


@pytest.mark.parametrize(("first", "found"), [(16, set()), (18, {"S6"})])
def test_what_a_process_was_told_of_a_grant_counts_although_its_note_is_not_in_the_log(
    first: int, found: set[str]
) -> None:
    """D3: it is fenced by an outage, which the Note did not survive."""
    run = amo()
    run.builder.write(3_400, GRANT, run.b, [[run.b0, 16, 16, 20]])
    run.builder.write(3_500, RELEASE, run.b, run.b0, -1)
    run.builder.evidence.topics[TOPIC, 0].append(16)
    run.builder.evidence.dropped.append(Dropped(3_450 * MS, "b", TOPIC, 0, run.b0, first, 20))
    assert run.builder.invariants() & {"S6"} == found


def test_an_owner_that_got_no_time_is_counted() -> None:
    run = alo()
    run.builder.evidence.faults.clear()
    run.builder.ends("a", 4_000, 0)
    life = run.builder.evidence.lives["a"]
    life.beats = [ns for ns in life.beats if not 700 * MS < ns < 2_000 * MS]
    found = run.builder.judge()
    assert found.violations == []
    assert found.counters["starved"] == 1


@pytest.mark.parametrize(
    ("faults", "plain", "beside"),
    [
        ([(500, "link", ""), (599, "link_whole", "")], [2_360], []),  # "a" was last heard of at 600
        ([(650, "link", ""), (690, "link_whole", "")], [], [2_270]),
        ([(650, "broker_kill", "1"), (650, "link", ""), (2_000, "link_whole", "")], [], [960]),
        ([(650, "link", ""), (2_000, "link_whole", ""), (2_700, "stop", "b"), (2_900, "cont", "b")], [], [60]),
        ([(650, "stop", "c"), (2_000, "cont", "c")], [2_360], []),
    ],
)
def test_a_take_over_beside_another_fault_counts_from_its_end(
    faults: list[tuple[int, str, str]], plain: list[int], beside: list[int]
) -> None:
    builder = alo().builder
    for ms, kind, who in faults:
        builder.fault(ms, kind, who)
    found = builder.judge().latencies_ms
    assert (found[TAKE_OVER], found[BESIDE]) == (plain, beside)


@pytest.mark.parametrize(
    ("asked", "joined_ns", "found"), [(True, NEVER, []), (False, NEVER, ["S13"]), (True, 1, ["S13"])]
)
def test_only_who_was_asked_to_stop_before_it_could_may_end_by_sigterm(
    asked: bool, joined_ns: int, found: list[str]
) -> None:
    builder = alo().builder
    builder.evidence.lives["c"] = Life("c", "c", 3, GROUP, "", 3_000 * MS, joined_ns, exit_code=-15, end_ns=3_300 * MS)
    if asked:
        builder.fault(3_200, "term", "c")
    assert [violation.invariant for violation in builder.judge().violations if violation.invariant == "S13"] == found


@pytest.mark.parametrize(("since_ms", "found"), [(None, {"S9"}), (580, set()), (583, {"S9"})])
def test_a_heartbeat_needs_to_say_what_was_acked_before_it_was_written(since_ms: int | None, found: set[str]) -> None:
    run = alo()
    late = delivery(run, "a", 0, 6)
    late.begin_ns, late.gate_ns, late.end_ns, late.ack_ns = 550 * MS, 550 * MS, 560 * MS, 570 * MS
    (beat,) = (record.value for record in run.builder.records if record.sent_ns == 600 * MS)
    assert beat is not None
    if since_ms is not None:
        run.builder.evidence.told[beat] = since_ms * MS
    assert run.builder.invariants() == found


def test_a_lost_range_excuses_what_it_names() -> None:
    run = alo()
    run.builder.evidence.deliveries.remove(delivery(run, "a", 0, 2))
    run.builder.write(3_950, NOTE, run.a, "offset_lost", TOPIC, 0, 2, 3)
    assert run.builder.judge().violations == []


def test_unsound_logs_excuse_a_named_end() -> None:
    run = alo()
    run.builder.evidence.settled = {}
    run.builder.fault(3_990, "recreated")
    run.builder.evidence.failures.append(Failure(3_995 * MS, "b", ("TopicRecreated", "CoordinationError"), "", True))
    assert run.builder.judge().violations == []


# ---------------------------------------------------------------------------------------------------------------------
# Journals


def test_a_journal_is_read_back_without_its_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    journal = Journal(path)
    place = {"tok": "x", "t": TOPIC, "p": 0, "o": [1, 2]}
    journal.write("start", name="w", pid=1, client="w-1", group=GROUP, delivery="at_least_once")
    journal.write("begin", gate=5, **place)
    journal.write("end", **{**place, "o": [2]})
    with path.open("ab") as file:
        file.write(b'{"e":"end","ns"')
    tail, diary = Tail(path), JournalReader(Evidence())
    diary.take("w", tail.read())
    first, second = diary.evidence.deliveries
    assert (first.offset, first.gate_ns, first.end_ns) == (1, 5, NEVER)
    assert second.begin_ns <= second.end_ns < NEVER
    assert tail.read() == []
    with path.open("ab") as file:
        file.write(b':7,"tok":"x","t":"t","p":0,"o":[1]}\n')
    diary.take("w", tail.read())
    assert first.end_ns == 7
