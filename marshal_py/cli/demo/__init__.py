"""The command `marshal demo`: processes share a topic, one is killed, one joins, and every message is counted.

scenario.py runs the schedule and process.py its child processes: worker.py consumes and producer.py writes the messages
of orders.py. Each child writes a journal (journal.py). totals.py adds the journals up, view.py shows them, judge.py
decides whether the promise was kept.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final, Literal

import msgspec
import typer

from marshal_py.cli import frame
from marshal_py.client.marshal import CONNECT_TIMEOUT_S
from marshal_py.transport.embedded import Broker
from marshal_py.transport.kafka import KafkaTransport
from marshal_py.transport.topic_checks import COORDINATION_PARTITIONS

EXAMPLE: Final = frame.example("marshal demo --seconds 12 --delivery at_most_once")
SECONDS_MIN: Final = 10.0  # a shorter run has the fourth consumer join before the killed one is evicted
SECONDS_MAX: Final = 100.0  # at-most-once mode writes 35 KB/s of grants to one log; the embedded broker keeps 5 MB
EMBEDDED_TOPIC: Final = "demo-orders"


@frame.reports_errors
def demo(
    seconds: Annotated[float, typer.Option(min=SECONDS_MIN, max=SECONDS_MAX, help="Approximate duration.")] = 30.0,
    delivery: Annotated[
        Literal["at_least_once", "at_most_once"], typer.Option(help="The delivery mode of the group.")
    ] = "at_least_once",
    bootstrap_servers: frame.Servers = None,
    command_config: frame.CommandConfig = None,
    coordination_topic: frame.CoordinationTopic = frame.DEFAULT_COORDINATION_TOPIC,
    as_json: frame.Json = False,
) -> None:
    """Watch consumers share twelve partitions while one is killed and one joins, and see whether a message was lost.

    Without --bootstrap-servers the demo runs its own broker inside this process. On a real cluster it creates a topic
    of its own, demo-orders-RANDOM, and leaves it there. Exit code 1 means that the promise was broken.
    """
    from marshal_py.cli.demo.judge import sentence
    from marshal_py.cli.demo.scenario import Plan, run_demo
    from marshal_py.cli.demo.view import make_view

    with _cluster(bootstrap_servers, command_config, coordination_topic) as (settings, topic, group):
        admin = KafkaTransport(settings, CONNECT_TIMEOUT_S).admin()
        plan = Plan(
            settings=settings,
            topic=topic,
            group=group,
            coordination_topic=coordination_topic,
            delivery=delivery,
            seconds=seconds,
        )
        with make_view(as_json) as view:
            result, totals = run_demo(plan, admin, view)
        admin.close()
    if topic != EMBEDDED_TOPIC:
        frame.say(f"topic {topic} stays on the cluster; delete it when you no longer need it")
    if totals.unsound:
        frame.say(f"{totals.unsound} messages came with a wrong checksum")
    if as_json:
        frame.print_json(msgspec.to_builtins(result))
    else:
        print(sentence(result, totals.unsound), flush=True)
    if not result.ok:
        raise typer.Exit(frame.FAILED)


@contextmanager
def _cluster(servers: str | None, config: Any, coordination_topic: str) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Settings, topic and group on the user's cluster, or on a broker that runs as long as the demo."""
    from marshal_py.cli.demo.scenario import PARTITIONS

    if servers is None and config is None:
        topics = {EMBEDDED_TOPIC: PARTITIONS, coordination_topic: COORDINATION_PARTITIONS}
        with Broker(topics=topics) as broker:
            frame.say(f"embedded broker on {broker.bootstrap_servers}, topic {EMBEDDED_TOPIC}")
            yield frame.settings_of(broker.bootstrap_servers, None), EMBEDDED_TOPIC, "demo"
        return
    settings = frame.settings_of(servers, config)
    mark = secrets.token_hex(4)
    topic = f"{EMBEDDED_TOPIC}-{mark}"
    admin = KafkaTransport(settings, CONNECT_TIMEOUT_S).admin()
    if "create_topic" not in admin.capabilities:
        raise frame.CommandFailed(
            "clients of an embedded broker cannot create topics: leave out --bootstrap-servers, and the demo runs "
            "a broker of its own"
        )
    admin.create_topic(topic, PARTITIONS)
    frame.say(f"cluster {settings['bootstrap.servers']}, topic {topic}")
    yield settings, topic, f"demo-{mark}"
