"""Where `marshal top` has its rows from: an outage in its thread, and moving in the past."""

from __future__ import annotations

from queue import Queue

from marshal_py.cli.top.source import Seen, Source
from marshal_py.protocol.wire.records import ClaimState, Heartbeat
from marshal_py.transport.clock import SystemClock
from tests.support.written_log import WrittenLog

DEADLINE_S = 60.0


def minute_ago_ms() -> int:
    return SystemClock().now().wall_ms - 60_000


def test_an_outage_keeps_the_picture_and_says_why() -> None:
    log = WrittenLog(minute_ago_ms())
    log.own("billing", "billing-1", "orders", 2)
    source, pictures = Source(log.observer, None, None), Queue[Seen]()
    first = source.look()
    source.start(0.01, pictures.put)
    assert pictures.get(timeout=DEADLINE_S).problem == ""
    log.broker.down = True
    while not (stale := pictures.get(timeout=DEADLINE_S)).problem:
        pass
    assert [one.group for one in stale.groups] == [one.group for one in first.groups] == ["billing"]
    log.broker.down = False
    while pictures.get(timeout=DEADLINE_S).problem:
        pass
    source.ask("billing", None)
    while not (opened := pictures.get(timeout=DEADLINE_S)).members:
        pass
    assert (opened.opened, opened.members[0].client_id) == ("billing", "billing-1")
    source.close()


def test_the_past_goes_forward_and_back() -> None:
    log = WrittenLog(minute_ago_ms())
    session, epochs = log.own("billing", "billing-1", "orders", 1)
    for sequence in range(1, 6):
        log.now_ms += 30_000
        log.write(Heartbeat(session, sequence, (ClaimState(epochs[0], 10 * sequence, 100 - 20 * sequence),)), "billing")
    source = Source(log.observer, None, log.now_ms)
    for back_ms, position, lag, per_second in ((0, 50, 0, -0.7), (120_000, 10, 80, None), (60_000, 30, 40, -0.7)):
        source.at_ms = log.now_ms - back_ms
        (billing,) = source.look().groups
        found = billing.partitions[0].position, billing.lag, billing.lag_per_second
        assert (source.seen.as_of_ms, *found) == (source.at_ms, position, lag, per_second)
