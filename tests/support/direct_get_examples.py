"""The example requests of Direct Get (ADR-31) as `marshal get` takes them, and its example data; for tests on any
cluster.

JetStream counts messages from 1, Kafka from 0. Topic names of Kafka hold no `$`, keys do.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from marshal_py.transport.kafka import KafkaTransport
from tests.cli.shell import DEADLINE_S, Shell

T0_MS: Final = 1_659_745_767_587  # 2022-08-06 00:29:27.587 UTC, as in the seed
KEYS: Final = (
    ("$KV.mykv1.mykey1", "hello"),
    ("$KV.mykv1.mykey2", "goodbye"),
    ("$KV.USERS.1234.name", "Bob"),
    ("$KV.USERS.1234.surname", "Smith"),
    ("$KV.USERS.1234.address", "1 Main Street"),
    ("$KV.USERS.1234.address", "10 Oak Lane"),
)


class Example(NamedTuple):
    """A request of the seed, the arguments of `marshal get` after the topic, and the values of the answer."""

    request: str
    arguments: tuple[str, ...]
    values: tuple[str, ...]


BOB, SMITH, MAIN, OAK = "Bob", "Smith", "1 Main Street", "10 Oak Lane"
MINE, NEXT = "$KV.mykv1.mykey1", "$KV.USERS.1234.address"
ALL_OF_USER = ("--multi-last", "$KV.USERS.1234.>")
EXAMPLES: Final = (
    Example("{seq: number}", ("--offset", "1"), ("goodbye",)),
    Example("{last_by_subj: string}", ("--last", NEXT), (OAK,)),
    Example("{next_by_subj: string}", ("--next", NEXT), (MAIN,)),
    Example("{start_time: string}", ("--time", "2022-08-06T00:29:28Z"), ("goodbye",)),
    Example("{seq: number, next_by_subj: string}", ("--offset", "5", "--next", NEXT), (OAK,)),
    Example("{seq, batch, next_by_subj}", ("--offset", "0", "--batch", "9", "--next", NEXT), (MAIN, OAK)),
    Example(
        "{seq, batch, next_by_subj, max_bytes}",
        ("--offset", "0", "--batch", "9", "--next", NEXT, "--max-bytes", "70"),
        (MAIN,),
    ),
    Example('{"multi_last":["$KV.USERS.1234.>"]}', ALL_OF_USER, (BOB, SMITH, OAK)),
    Example(
        '{"multi_last":["$KV.USERS.1234.name", "$KV.USERS.1234.address"]}',
        ("--multi-last", "$KV.USERS.1234.name", "--multi-last", NEXT),
        (BOB, OAK),
    ),
    Example("with up_to_seq", (*ALL_OF_USER, "--up-to-offset", "0:4"), (BOB, SMITH, MAIN)),
    Example("with up_to_time", (*ALL_OF_USER, "--up-to-time", "2022-08-06T00:29:32Z"), (BOB, SMITH, MAIN)),
    Example("with batch", (*ALL_OF_USER, "--batch", "2"), (BOB, SMITH)),
    Example('{"last_by_subj":"$KV.mykv1.mykey1"}', ("--last", MINE), ("hello",)),
    Example(
        '{"seq":1, "next_by_subj":"$KV.mykv1.mykey2"}', ("--offset", "0", "--next", "$KV.mykv1.mykey2"), ("goodbye",)
    ),
    Example("$JS.API.DIRECT.GET.KV_mykv1.$KV.mykv1.mykey1", (MINE,), ("hello",)),
)


def load(shell: Shell, topic: str) -> None:
    """Writes the example data, one message per second, to an existing topic with a short name."""
    writer = KafkaTransport(shell.servers, DEADLINE_S).writer()
    for at, (key, value) in enumerate(KEYS):
        writer.write(topic, value.encode(), key.encode(), partition=0, timestamp_ms=T0_MS + 1000 * at)
    writer.flush(DEADLINE_S)
    writer.close()


def answers(shell: Shell, topic: str, example: Example) -> list[dict[str, Any]]:
    """Asks an example and returns the lines of the answer, after their values were checked."""
    result = shell.run("get", topic, *example.arguments, "--json")
    assert result.exit_code == 0, result.output
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert tuple(line["value"] for line in found if "value" in line) == example.values, example.request
    return found


def refuses_a_payload(shell: Shell, topic: str) -> None:
    """Asks the last example of the seed: the subject-appended form with a payload, which is a bad request."""
    result = shell.run("get", topic, "$KV.mykv1.mykey2", "--offset", "0", "--next", "$KV.mykv1.mykey2")
    assert (result.exit_code, result.stdout) == (2, "")
