"""The command `marshal demo`: processes share a topic, one is killed, one joins, and every message is counted.

scenario.py runs the schedule, writes the orders and shows what happens. Each consumer is a process, whose work is in
worker.py. verdict.py adds up what they tell and decides whether the promise was kept.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from marshal_py.cli import output
from marshal_py.cli.demo.verdict import Judgement, sentence
from marshal_py.cli.demo.worker import Plan
from marshal_py.cli.documents import prints
from marshal_py.cli.options import CommonOptions, Force, command, settings_of
from marshal_py.transport.embedded import Broker
from marshal_py.transport.kafka import KafkaTransport
from marshal_py.transport.topic_checks import COORDINATION_PARTITIONS

EXAMPLE: Final = output.example("marshal demo --seconds 12 --delivery at_most_once")
SECONDS_MIN: Final = 10.0  # a shorter run has the fourth consumer join before the killed one is evicted
SECONDS_MAX: Final = 100.0  # at-most-once mode writes 35 KB/s of grants to one log; the embedded broker keeps 5 MB
EMBEDDED_TOPIC: Final = "demo-orders"


@command
@prints(Judgement)
def demo(
    options: CommonOptions,
    seconds: Annotated[float, typer.Option(min=SECONDS_MIN, max=SECONDS_MAX, help="Approximate duration.")] = 30.0,
    delivery: Annotated[
        Literal["at_least_once", "at_most_once"], typer.Option(help="The delivery mode of the group.")
    ] = "at_least_once",
    last_will: Annotated[
        bool, typer.Option("--last-will", help="Each consumer has a witness that ends its session if it is killed.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, help="Write its timeline there, as `marshal timeline` does."),
    ] = None,
    force: Force = False,
) -> None:
    """Watch consumers share twelve partitions while one is killed and one joins, and see whether a message was lost.

    Without --bootstrap-servers the demo runs its own broker inside this process. On a real cluster it creates a topic
    of its own, demo-orders-RANDOM, and leaves it there. Exit code 1 means that the promise was broken.
    """
    from marshal_py.cli.demo.scenario import DemoScenario, View

    if html is not None:
        output.check_free(html, force)
    with _cluster(options) as (settings, topic, group):
        admin = KafkaTransport(settings, options.timeout).admin()
        plan = Plan(
            settings=settings,
            topic=topic,
            group=group,
            coordination_topic=options.coordination_topic,
            delivery=delivery,
            seconds=seconds,
            last_will=last_will,
        )
        result = DemoScenario(plan, admin, View(output.console(stderr=options.as_json))).run()
        admin.close()
        if html is not None:
            write_timeline(plan, options.timeout, html)
    if topic != EMBEDDED_TOPIC:
        output.say(f"topic {topic} stays on the cluster; delete it when you no longer need it")
    if options.as_json:
        output.print_json(result)
    else:
        print(sentence(result), flush=True)
    if not result.ok:
        raise typer.Exit(output.FAILED)


def write_timeline(plan: Plan, timeout_s: float, file: Path) -> None:
    """Writes the page of who owned what in the demo."""
    from marshal_py.history.picture import page
    from marshal_py.log.observer import Observer
    from marshal_py.log.pictures import Period, picture_of

    with Observer(KafkaTransport(plan.settings, timeout_s), plan.coordination_topic, timeout_s) as observer:
        picture = picture_of(observer, plan.group, Period(0, int(time.time() * 1000)))
    if picture is not None:
        with output.opened(file, force=True) as opened:
            opened.write(page("marshal demo", [picture]).encode())
        output.say(f"timeline: {file}")


@contextmanager
def _cluster(options: CommonOptions) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yields settings, topic and group: on the user's cluster, or on a broker that runs as long as the demo."""
    from marshal_py.cli.demo.scenario import PARTITIONS

    if options.bootstrap_servers is None and options.command_config is None:
        topics = {EMBEDDED_TOPIC: PARTITIONS, options.coordination_topic: COORDINATION_PARTITIONS}
        with Broker(topics=topics) as broker:
            output.say(f"embedded broker on {broker.bootstrap_servers}, topic {EMBEDDED_TOPIC}")
            yield settings_of(broker.bootstrap_servers, None), EMBEDDED_TOPIC, "demo"
        return
    settings = options.settings()
    mark = secrets.token_hex(4)
    topic = f"{EMBEDDED_TOPIC}-{mark}"
    admin = KafkaTransport(settings, options.timeout).admin()
    if "create_topic" not in admin.capabilities:
        raise output.CommandFailed(
            "clients of an embedded broker cannot create topics: leave out --bootstrap-servers, and unset "
            "MARSHAL_BOOTSTRAP_SERVERS; the demo runs a broker of its own"
        )
    admin.topic_admin().create(topic, PARTITIONS, None, {}, False)
    output.say(f"cluster {settings['bootstrap.servers']}, topic {topic}")
    yield settings, topic, f"demo-{mark}"
