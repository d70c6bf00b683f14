"""When `consume` asks for more, and for how much: the counts, without a cluster and without a clock."""

from __future__ import annotations

import pytest

from marshal_py.client.receiving import Refill
from marshal_py.client.values.requests import ConsumeRequest, check_consume
from marshal_py.errors import InvalidOption

EXPIRES_MS = 30_000


def test_a_request_fills_the_buffer() -> None:
    """ADR-37: "For each pull request, batch or max_bytes value should be calculated so that the pull request will fill
    the buffer." """
    refill = Refill(1_000, 500, EXPIRES_MS)
    assert refill.request(0, 0) == 1_000
    refill.came(1_000)
    assert refill.request(499, 0) == 501


def test_a_request_is_due_at_the_threshold() -> None:
    """ADR-37: "Whenever a threshold is reached, a new request to CONSUMER.MSG.NEXT should be published."
    ADR-37: "1. Verify whether a new pull request needs to be sent:"
    ADR-37: "pending messages count reaches threshold"
    """
    refill = Refill(1_000, 500, EXPIRES_MS)
    assert refill.request(501, 0) == 0
    assert refill.request(500, 0) == 500
    assert refill.before_threshold(500) == 500
    assert Refill(10, 5, EXPIRES_MS).before_threshold(5) == 1


def test_what_was_asked_for_is_pending_until_it_is_delivered() -> None:
    """ADR-37: "Pending messages and bytes count should be updated when: - A new pull request is published - add a value
    of request.batch_size to the pending messages count and the value of request.max_bytes to the pending byte count."
    ADR-37: "A new user message is processed - subtract 1 from pending messages count and subtract message size from
    pending byte count."
    ADR-37: "2. If yes, publish a new pull request and add request's batch and max_bytes to pending messages and bytes
    counters."
    ADR-37: "if message is a user message, handle it (return or execute callback) and subtract 1 message from pending
    message count and message size from pending bytes count and go to #1"
    """
    refill = Refill(10, 5, EXPIRES_MS)
    refill.request(0, 0)
    assert refill.pending(0) == 10
    refill.came(4)  # all four are buffered
    assert refill.pending(4) == 10
    assert refill.pending(3) == 9  # one is delivered
    assert refill.request(3, 0) == 0
    refill.came(6)
    assert refill.request(5, 0) == 5


def test_what_has_not_come_when_the_request_expires_is_not_pending() -> None:
    """ADR-37: "A pull request termination status is received containing Nats-Pending-Messages and Nats-Pending-Bytes
    headers, subtract the value of Nats-Pending-Messages header from pending messages count and subtract the value of
    Nats-Pending-Bytes from pending bytes count."
    ADR-37: "8. Subtract the values from pending messages count and pending bytes count respectively."
    ADR-37: "expires: number - amount of time to wait for a single pull request to expire"
    ADR-37: "6. Verify error type: - if message contains Nats-Pending-Messages and Nats-Pending-Bytes headers, go to #7"
    """
    refill = Refill(10, 5, EXPIRES_MS)
    refill.request(0, 0)
    refill.came(4)
    assert refill.request(4, EXPIRES_MS - 1) == 0
    assert refill.request(4, EXPIRES_MS) == 6
    refill.give_up()
    assert refill.pending(4) == 4


def test_a_request_that_is_complete_is_not_pending() -> None:
    """Its messages have come; or another one would not fit into what is left of its bytes.

    ADR-37: "409 Batch-Completed"
    """
    refill = Refill(10, 5, EXPIRES_MS)
    assert refill.request(0, 0) == 10
    refill.came(10)
    assert (refill.to_come, refill.pending(0)) == (0, 0)
    assert refill.request(0, 1) == 10
    refill.came(7)
    refill.give_up()
    assert refill.pending(4) == 4
    assert refill.request(4, 2) == 6


def test_the_aggregate_counts() -> None:
    """ADR-37: "There is no need to track specific pull request's status - as long as the aggregate message and byte
    count is maintained, Consume() should be able to fill the buffer appropriately." """
    refill = Refill(10, 8, EXPIRES_MS)
    buffered = asked = 0
    for _ in range(100):
        asked += refill.request(buffered, 0)
        assert refill.pending(buffered) <= 10
        if refill.to_come:
            refill.came(1)
            buffered += 1
        if buffered > 3:
            buffered -= 2  # delivered
    assert asked > 60
    refill.came(100)  # more than was asked for
    assert refill.to_come == 0


def test_one_message_at_a_time_does_not_get_stuck() -> None:
    """ADR-37: "Clients should make sure that Consume works properly when max_messages is set to 1 (it's not getting
    stuck when using default threshold_messages)." """
    request = check_consume(1, None, 30.0, None, None, None)
    assert request.threshold == 1
    refill = Refill(request.limit, request.threshold, EXPIRES_MS)
    for _ in range(3):
        assert refill.request(0, 0) == 1
        refill.came(1)
        assert refill.request(1, 0) == 0


def test_the_defaults_of_consume() -> None:
    """ADR-37: "If no options is provided, clients should use a default value for max_messages and not set max_bytes."
    ADR-37: "expires - default 30s, minimum 1s"
    ADR-37: "idle_heartbeat - default 1/2 of expires capping at 30s, minimum 500ms, maximum 30s"
    ADR-37: "Heartbeat values are calculated as follows:"
    ADR-37: "threshold_messages - 50% of max_messages"
    ADR-37: "threshold_bytes - 50% of max_bytes"
    ADR-37: "max_messages - depends on a client, probably between 100 and 1000 messages"
    ADR-37: "max_bytes - not set, use max_messages if not provided"
    ADR-37: "If no option is provided, the default value for max_messages should be used, and max_bytes should not be
    set."
    ADR-37: "If max_messages is set by the user, the value should be set for max_messages and max_bytes should not be
    set."
    ADR-37: "For each constraint, a corresponding threshold can be set."
    ADR-37: "Default configuration values for Consume may vary between client implementations, depending on what values
    are most efficient using a specific programming language."
    """
    assert check_consume(None, None, 30.0, None, None, None) == ConsumeRequest(1_000, 500, False, 30.0, 15.0)
    assert check_consume(None, 1_001, 90.0, None, None, None) == ConsumeRequest(1_001, 501, True, 90.0, 30.0)
    assert check_consume(None, None, 1.0, None, None, None).idle_heartbeat_s == 0.5
    assert check_consume(9, None, 1.0, None, 9, None).threshold == 9


WRONG = {
    "max_bytes": {"max_messages": 1, "max_bytes": 1},
    "max_messages": {"max_messages": 0},
    "threshold_messages": {"max_messages": 5, "threshold_messages": 6},
    "threshold_bytes": {"max_bytes": 5, "threshold_bytes": 6},
    "expires_s": {"expires_s": 0.9},
    "idle_heartbeat_s": {"idle_heartbeat_s": 0.4},
}
MORE_WRONG = [
    ("max_messages", {"max_messages": -1}),
    ("max_bytes", {"max_bytes": 0}),
    ("threshold_messages", {"threshold_messages": 0}),
    ("threshold_messages", {"threshold_messages": 1_001}),
    ("threshold_messages", {"max_bytes": 5, "threshold_messages": 5}),
    ("threshold_bytes", {"max_messages": 5, "threshold_bytes": 5}),
    ("expires_s", {"expires_s": -1}),
    ("idle_heartbeat_s", {"idle_heartbeat_s": 15.1}),
    ("idle_heartbeat_s", {"expires_s": 90, "idle_heartbeat_s": 30.1}),
    ("idle_heartbeat_s", {"idle_heartbeat_s": 0}),
]


@pytest.mark.parametrize(("option", "given"), [*WRONG.items(), *MORE_WRONG])
def test_consume_refuses_what_cannot_be(option: str, given: dict[str, float]) -> None:
    """ADR-37: "User cannot set both constraints for a single Consume() execution."
    ADR-37: "The value of threshold cannot be higher than the corresponding constraint's value."
    ADR-37: "Note that max_messages and max_bytes are exclusive."
    ADR-37: "Clients should not allow depending on both constraints."
    ADR-37: "Users should be able to set either max_messages or max_bytes values, but not both"
    """
    names = ("max_messages", "max_bytes", "expires_s", "idle_heartbeat_s", "threshold_messages", "threshold_bytes")
    values = {**dict.fromkeys(names), "expires_s": 30.0, **given}
    with pytest.raises(InvalidOption, match=option):
        check_consume(**values)  # type: ignore[arg-type]
