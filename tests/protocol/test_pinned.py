"""Policy `pinned`: one consumer has everything under a pin, the others stand by (PROTOCOL.md A11)."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from marshal_py.errors import InvalidOption
from marshal_py.protocol.member import group_settings
from marshal_py.protocol.member.member_state import MemberOptions
from marshal_py.protocol.member.waiting import why_idle
from marshal_py.protocol.wire.identity import NONE
from marshal_py.protocol.wire.records import (
    AT_LEAST_ONCE,
    AT_MOST_ONCE,
    ClaimingPartition,
    GroupConfig,
    ReleaseGroup,
    ReleasingPartition,
    StepDown,
)
from tests.support.virtual_cluster import INTERVAL_MS, Client, VirtualCluster

CONFIG = GroupConfig(NONE, policy="pinned", priority_groups=("jobs",))
TIMEOUT_MS = 4 * INTERVAL_MS
PARTITIONS = 12  # of the virtual cluster


def cluster_of(*names: str, timeout_ms: int = 0, **options: Any) -> tuple[VirtualCluster, list[Client]]:
    """Running consumers; the first one is pinned."""
    cluster = VirtualCluster()
    cluster.must(replace(CONFIG, priority_timeout_ms=timeout_ms))
    clients = []
    for name in names:
        clients.append(cluster.add(name, priority_group="jobs", **options))
        cluster.run(2 * INTERVAL_MS)
    assert owned(clients) == [PARTITIONS, *[0] * (len(names) - 1)]
    return cluster, clients


def owned(clients: list[Client]) -> list[int]:
    return [len(client.member.claims) for client in clients]


def pins(clients: list[Client]) -> list[int]:
    return [client.member.pin for client in clients]


def told(client: Client) -> list[str]:
    """Its pinned and unpinned advisories, in their order."""
    kinds = ("pinned", "unpinned")
    return [f"{one.kind} {one.text}".strip() for _, one in client.advisories if one.kind in kinds]


def under_the_pin(cluster: VirtualCluster) -> None:
    """Replays the log: every partition is claimed under the pin of the same session, and the pin is released last."""
    pinned, beneath = NONE, 0
    for verdict in cluster.verdicts:
        record = verdict.record
        if not verdict.accepted or not isinstance(record, ClaimingPartition | ReleasingPartition):
            continue
        if isinstance(record, ClaimingPartition) and not record.topic:
            assert beneath == 0, f"{verdict.offset}: partitions are owned without a pin"
            pinned = verdict.offset
        elif isinstance(record, ClaimingPartition):
            assert pinned != NONE, f"{verdict.offset}: claimed before the pin"
            beneath += 1
        elif record.epoch == pinned:
            assert beneath == 0, f"{verdict.offset}: released before what is beneath"
            pinned = NONE
        else:
            beneath -= 1


def test_one_has_everything_and_the_others_wait() -> None:
    """A11: the pin is claimed first; its epoch is with every claim beneath it, and so with every message.

    ADR-42: "Users want to have a single client perform all the work for a consumer" "the first message that will be
    delivered to this client, and all future ones, will include a Nats-Pin-Id: xyz header."
    """
    cluster, clients = cluster_of("one", "two", "three")
    first = clients[0].member
    assert {claim.pin for claim in first.claims.values()} == {first.pin} == {min(first.claims) - 1}
    assert [pin != NONE for pin in pins(clients)] == [True, False, False]
    assert [told(client) for client in clients] == [["pinned"], [], []]
    cluster.run(8 * INTERVAL_MS)
    assert owned(clients) == [PARTITIONS, 0, 0]
    under_the_pin(cluster)


def test_a_standby_says_who_has_everything() -> None:
    cluster, clients = cluster_of("a", "b", "c", timeout_ms=TIMEOUT_MS)
    ask(clients[:2], cluster, 4 * INTERVAL_MS)
    clients[2].member.asked = True
    cluster.run(INTERVAL_MS)
    says = (
        "its turn: it stands by for a, which owns all that it could own. The next in line takes over when a leaves or "
        "is unpinned, 6 s after a dies, and 12 s after a last asked for messages"
    )
    assert [why_idle(client.member) for client in clients] == ["", says, says]
    ask(clients[:2], cluster, TIMEOUT_MS + INTERVAL_MS)
    idle = "its user, who has asked for no message for 12 s: it is not in line"
    assert [why_idle(client.member) for client in clients] == ["", says, idle]


def test_an_admin_unpins() -> None:
    """A11: stop, wait for what is in flight, pick another one, store its id, deliver under that id.

    ADR-42: "Stop delivering messages for this group, wait for all in-flight messages to be completed, continue to
    serve heartbeats" "Pick the new pinned client" "Store the new pinned nuid" "Deliver the message to the new pinned
    client with the ID set" "Create an advisory that a new pinned client was picked" "can be called which will clear
    the ID and trigger a client switch as above." "We will publish advisories when a switch is performed and when a
    pin is lost." "one of "admin" or "timeout", could be an enum up to the implementor to decide"
    """
    cluster, clients = cluster_of("one", "two", "three", hand_over_timeout_ms=20 * INTERVAL_MS)
    before, claims = clients[0].member.pin, list(clients[0].member.claims.values())
    run = clients[0].deliver(claims[0], 0)
    cluster.must(StepDown(clients[0].session, NONE))
    cluster.run(2 * INTERVAL_MS)
    assert not any(clients[0].may(claim) for claim in claims), "delivery has stopped"
    assert pins(clients)[0] == before, "it waits for its handler"
    run.finish(0)
    clients[0].due_ms = cluster.now_ms
    cluster.run(INTERVAL_MS)
    assert owned(clients) == [0, PARTITIONS, 0]
    assert clients[1].member.pin > before
    assert [told(client) for client in clients] == [["pinned", "unpinned admin"], ["pinned"], []]
    cluster.must(StepDown(clients[1].session, NONE))
    cluster.run(INTERVAL_MS)
    assert owned(clients) == [0, 0, PARTITIONS], "who was unpinned comes last"
    under_the_pin(cluster)


def test_one_that_is_alone_gets_a_new_pin() -> None:
    """A11

    ADR-42: "can be called which will clear the ID and trigger a client switch as above."
    """
    cluster, clients = cluster_of("one")
    before = clients[0].member.pin
    cluster.must(StepDown(clients[0].session, NONE))
    cluster.run(INTERVAL_MS)
    assert clients[0].member.pin > before
    assert {claim.pin for claim in clients[0].member.claims.values()} == {clients[0].member.pin}
    assert told(clients[0]) == ["pinned", "unpinned admin", "pinned"]


def test_a_crash_and_a_leave() -> None:
    """A11: two intervals after the crash; at once after a leave.

    ADR-42: "they also want to have a stand-by client that can take over when the primary, aka pinned client, fails."
    "We will publish advisories when a switch is performed and when a pin is lost."
    """
    cluster, clients = cluster_of("one", "two", "three")
    cluster.kill(clients[0])
    cluster.run(4 * INTERVAL_MS)
    assert owned(clients)[1:] == [PARTITIONS, 0]
    clients[1].member.leave(clients[1].now, "", 0)
    cluster.run(INTERVAL_MS)
    assert owned(clients)[2] == PARTITIONS
    assert told(clients[1]) == ["pinned", "unpinned left"]


def test_the_only_consumer_of_a_group_is_pinned_again_when_it_is_restarted() -> None:
    """A11, A2: nothing in the group changes after its Join, and it must not need that to see the free pin."""
    cluster, clients = cluster_of("one")
    clients[0].member.leave(clients[0].now, "", 0)
    cluster.run(2 * INTERVAL_MS)
    clients.append(cluster.add("one again", priority_group="jobs"))
    cluster.run(INTERVAL_MS)
    assert owned(clients)[1] == PARTITIONS
    under_the_pin(cluster)


def test_a_pause_takes_the_pin_and_gives_one_back() -> None:
    """A11, T12"""
    cluster, clients = cluster_of("one", "two")
    token = cluster.must(ReleaseGroup(NONE, NONE, 60_000))
    cluster.run(2 * INTERVAL_MS)
    assert owned(clients) == [0, 0]
    assert pins(clients) == [NONE, NONE]
    cluster.must(ReleaseGroup(token, token, 0))
    cluster.run(2 * INTERVAL_MS)
    assert sorted(owned(clients)) == [0, PARTITIONS]
    under_the_pin(cluster)


def ask(clients: list[Client], cluster: VirtualCluster, ms: int) -> None:
    """Time passes, in which the users of these consumers ask for messages."""
    for _ in range(ms // 500):
        for client in clients:
            client.member.asked = True
        cluster.run(500)


def test_who_does_not_ask_for_messages_is_pinned_no_longer() -> None:
    """A11: after the timeout, or its new value; then the next one that asks; nobody, if nobody does.

    ADR-42: "When a pinned client has not done any pulls in the last 120 seconds the server will switch to another
    client" "If no pulls from the pinned client is received within PriorityTimeout the server will switch again using
    the same flow as above." "one of "admin" or "timeout", could be an enum up to the implementor to decide"
    """
    cluster, clients = cluster_of("one", "two", timeout_ms=TIMEOUT_MS)
    ask(clients, cluster, 2 * TIMEOUT_MS)
    assert owned(clients) == [PARTITIONS, 0]
    ask(clients[1:], cluster, TIMEOUT_MS + INTERVAL_MS)
    assert owned(clients) == [0, PARTITIONS]
    assert told(clients[0]) == ["pinned", "unpinned timeout"]
    ask([], cluster, TIMEOUT_MS + INTERVAL_MS)
    assert owned(clients) == [0, 0]
    ask(clients[:1], cluster, INTERVAL_MS)
    assert owned(clients) == [PARTITIONS, 0]
    longer = replace(CONFIG, observed=clients[0].member.group.config_offset, priority_timeout_ms=10 * TIMEOUT_MS)
    cluster.must(longer)
    ask([], cluster, 5 * TIMEOUT_MS)
    assert owned(clients) == [PARTITIONS, 0], "the new timeout counts at once"
    under_the_pin(cluster)


@pytest.mark.parametrize(
    "again_ms", [0, INTERVAL_MS // 2, 2 * INTERVAL_MS], ids=["with its ack", "just before", "before"]
)
def test_a_pin_that_timed_out_goes_to_the_next_one_even_if_its_owner_asks_again(again_ms: int) -> None:
    """A11: why the pin is lost is decided once, not again when the last handler is done.

    ADR-42: "When a pinned client has not done any pulls in the last 120 seconds the server will switch to another
    client"
    """
    cluster, clients = cluster_of("one", "two", timeout_ms=TIMEOUT_MS, hand_over_timeout_ms=40 * INTERVAL_MS)
    before, claims = clients[0].member.pin, list(clients[0].member.claims.values())
    run = clients[0].deliver(claims[0], 0)
    ask(clients, cluster, INTERVAL_MS)
    ask(clients[1:], cluster, 2 * TIMEOUT_MS)
    assert (pins(clients), owned(clients)) == ([before, NONE], [1, 0]), "it waits for its handler"
    ask(clients, cluster, again_ms)
    run.finish(0)
    clients[0].due_ms = cluster.now_ms
    ask(clients, cluster, 2 * INTERVAL_MS)
    assert owned(clients) == [0, PARTITIONS]
    assert [told(client) for client in clients] == [["pinned", "unpinned timeout"], ["pinned"]]
    claimed = [
        verdict.offset for verdict, record in cluster.records(ClaimingPartition) if record.session == clients[0].session
    ]
    assert max(claimed) < before + 2 * PARTITIONS, "it claimed nothing more"
    ask(clients, cluster, 4 * INTERVAL_MS)
    assert owned(clients) == [0, PARTITIONS]
    under_the_pin(cluster)


def test_a_late_copy_of_a_claim_is_released_and_delivers_nothing() -> None:
    """A11, T17: the pin belongs to another session by then.

    ADR-42: "Respond with a 4xx header to any pulls, including waiting ones, that have a different ID set."
    """
    cluster, clients = cluster_of("one", "two")
    cluster.must(StepDown(clients[0].session, NONE))
    cluster.run(2 * INTERVAL_MS)
    assert owned(clients) == [0, PARTITIONS]
    claimed = len(clients[0].claimed)
    for verdict, record in list(cluster.records(ClaimingPartition)):
        if verdict.accepted and record.session == clients[0].session and record.topic:
            cluster.replay(verdict.offset)
    cluster.run(INTERVAL_MS)
    assert (owned(clients), len(clients[0].claimed)) == ([0, PARTITIONS], claimed)


# --- settings

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"policy": "pinned"}, "exactly one"),
    ({"policy": "pinned", "priority_groups": ("a", "b")}, "exactly one"),
    ({"policy": "pinned", "priority_groups": ("a b",)}, "1 to 16"),
    ({"policy": "pinned", "priority_groups": ("a",), "mode": AT_MOST_ONCE}, "explicit acks"),
    ({"policy": "pinned", "priority_groups": ("a",), "priority_timeout_ms": 999}, "1 to 86400"),
    ({"policy": "prioritized", "priority_groups": ("a",), "priority_timeout_ms": 9_000}, "only the policy pinned"),
]


@pytest.mark.parametrize(("settings", "reason"), WRONG)
def test_invalid_settings_are_refused(settings: dict[str, Any], reason: str) -> None:
    """ADR-42: "PriorityGroups require at least one entry." "In the initial implementation we should limit
    PriorityGroups to one per consumer only and error should one be made with multiple groups."
    """
    named = {*settings, "priority_timeout_s"} if "priority_timeout_ms" in settings else settings
    with pytest.raises(InvalidOption, match=reason):
        group_settings.check(GroupConfig(NONE, **settings), named)


def test_the_timeout_alone_can_change() -> None:
    """ADR-42: "we cannot support updating a consumer from one with groups to one without and vice versa" "We also
    cannot switch between different policies." "Today only the PriorityTimeout setting supports being updated."
    """
    group_settings.check_change("billing", CONFIG, 0, replace(CONFIG, priority_timeout_ms=60_000))
    with pytest.raises(InvalidOption, match="has the priority_groups jobs for its whole life"):
        group_settings.check_change("billing", CONFIG, 0, replace(CONFIG, priority_groups=("other",)))
    for other in (GroupConfig(NONE), GroupConfig(NONE, policy="prioritized", priority_groups=("jobs",))):
        with pytest.raises(InvalidOption, match=r"for its whole life|exists with (no|the) policy"):
            group_settings.check_change("billing", CONFIG, 0, other)


def test_a_consumer_names_the_priority_group_and_acks() -> None:
    """ADR-42: "AckPolicy has to be explicit." "pulls not part of a valid group will result in an error" """

    def check(**options: Any) -> None:
        given = {"mode": AT_LEAST_ONCE, "priority_group": "jobs", **options}
        group_settings.check_consumer("billing", CONFIG, MemberOptions(client_id="c", **given))

    check()
    for options, reason in (
        ({"priority_group": ""}, "names the priority group jobs"),
        ({"priority_group": "other"}, "names the priority group jobs"),
        ({"mode": AT_MOST_ONCE}, "explicit acks"),
        ({"claims_max": 2}, "one consumer has everything"),
        ({"priority": 2}, "only prioritized obeys it"),
    ):
        with pytest.raises(InvalidOption, match=reason):
            check(**options)
