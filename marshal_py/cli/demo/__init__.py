"""`marshal demo`: real processes share a real topic over TCP; one is killed, one joins, and a judge counts.

The files: stage (the course), process (children), worker and producer (what they do), journal (what they write down),
tally and judge (what it means), view (how it looks), orders (the messages). This one is the command.
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
SECONDS_MIN: Final = 10.0  # shorter, and the killed consumer is not waited out before the fourth one joins
SECONDS_MAX: Final = 100.0  # at-most-once mode writes 35 KB/s of grants to one log; the embedded broker keeps 5 MB
EMBEDDED_TOPIC: Final = "demo-orders"


@frame.reports_errors
def demo(
    seconds: Annotated[float, typer.Option(min=SECONDS_MIN, max=SECONDS_MAX, help="About how long.")] = 30.0,
    delivery: Annotated[
        Literal["at_least_once", "at_most_once"], typer.Option(help="Which promise.")
    ] = "at_least_once",
    bootstrap_servers: frame.Servers = None,
    command_config: frame.CommandConfig = None,
    coordination_topic: frame.CoordinationTopic = frame.DEFAULT_COORDINATION_TOPIC,
    as_json: frame.Json = False,
) -> None:
    """Watch consumers share twelve partitions, one killed, one joining, and see what was lost.

    Without --bootstrap-servers it brings its own broker inside this process. On a real cluster it makes a topic of its
    own, demo-orders-RANDOM, and leaves it there. Exit code 1 only if a promise was broken.
    """
    from marshal_py.cli.demo.judge import sentence
    from marshal_py.cli.demo.scenario import Plan, play
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
            result, tally = play(plan, admin, view)
        admin.close()
    if topic != EMBEDDED_TOPIC:
        frame.say(f"topic {topic} stays on the cluster: delete it when you like")
    if tally.unsound:
        frame.say(f"{tally.unsound} messages came with a wrong checksum")
    if as_json:
        frame.print_json(msgspec.to_builtins(result))
    else:
        print(sentence(result, tally.unsound), flush=True)
    if not result.ok:
        raise typer.Exit(frame.FAILED)


@contextmanager
def _cluster(servers: str | None, config: Any, coordination_topic: str) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Settings, topic and group: of the user's cluster, or of a broker that lives as long as the demo."""
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
            "this is an embedded broker, where clients cannot create topics: leave out "
            "--bootstrap-servers, and the demo brings its own"
        )
    admin.create_topic(topic, PARTITIONS)
    frame.say(f"cluster {settings['bootstrap.servers']}, topic {topic}")
    yield settings, topic, f"demo-{mark}"
