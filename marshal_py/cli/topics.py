"""`marshal topics ls / create / update / rm / purge`: the topics of a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Annotated, Final

import typer
from msgspec import UNSET, Struct, UnsetType, structs

from marshal_py.admin.group import group_names
from marshal_py.admin.views.overview import unfinished
from marshal_py.cli import output
from marshal_py.cli.changes import Yes, ask
from marshal_py.cli.documents import prints
from marshal_py.cli.options import (
    CommonOptions,
    TableOptions,
    TopicName,
    check_topic_name,
    command,
    iso_time,
    number_or_none,
)
from marshal_py.errors import CoordinationTopicMissing
from marshal_py.topics import changes
from marshal_py.topics.changes import Purged, info_of
from marshal_py.topics.topic import Topic
from marshal_py.transport.ports import ClusterAdmin, Replicas

LS_EXAMPLE: Final = output.example("marshal topics ls orders")
CREATE_EXAMPLE: Final = output.example("marshal topics create orders --partitions 12 --config retention.ms=86400000")
UPDATE_EXAMPLE: Final = output.example("marshal topics update orders --partitions 24 --config retention.ms=")
RM_EXAMPLE: Final = output.example("marshal topics rm orders --dry-run")
PURGE_EXAMPLE: Final = output.example("marshal topics purge orders --keep 1000 --dry-run")


class NamedTopic(Struct, frozen=True):
    """A topic, and how many partitions it has."""

    topic: str
    partitions: int


class PartitionPlace(Struct, frozen=True):
    """A partition: its first and its end offset, and the brokers that have it, by number. `isr`: those in sync."""

    partition: int
    first: int
    end: int
    leader: int | None
    replicas: tuple[int, ...]
    isr: tuple[int, ...]


class TopicDetails(Struct, frozen=True):
    """A topic. `topic_id`: Kafka's, "" where the cluster has none. `settings`: its configuration."""

    name: str
    topic_id: str
    partitions: list[PartitionPlace]
    settings: dict[str, str]


class TopicChange(Struct, frozen=True):
    """What was done to a topic. Of a dry run `would`: what would change; `groups`: who consumes it."""

    topic: str
    dry_run: bool
    outcome: str
    would: dict[str, str] | UnsetType = UNSET
    groups: list[str] | UnsetType = UNSET


class PurgedPartition(Struct, frozen=True):
    """The first offset `before` and `after` the purge, and the `end`."""

    partition: int
    before: int
    after: int
    end: int


class TopicPurge(Struct, frozen=True):
    """What a purge did, or would do. Of a dry run `unfinished`: how many of the offsets are at or after the positions
    of a group, by group."""

    topic: str
    dry_run: bool
    partitions: list[PurgedPartition]
    unfinished: dict[str, int] | UnsetType = UNSET


app: Final = typer.Typer(help="Topics: create, show, change, delete.", no_args_is_help=True, rich_markup_mode=None)
Config = Annotated[
    list[str] | None, typer.Option("--config", metavar="NAME=VALUE", help="A setting of the topic; repeatable.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done; Kafka checks it.")]


@app.command("ls", epilog=LS_EXAMPLE)
@command
@prints(list[NamedTopic], TopicDetails)
def ls(
    options: TableOptions,
    topic: Annotated[
        str | None,
        typer.Argument(
            metavar="TOPIC", callback=check_topic_name, help="This one in full; the names of all if left out."
        ),
    ] = None,
) -> None:
    """List the topics, or show one: partitions with their first and end offsets, leaders and replicas, and settings.

    Kafka's own topics, which begin with two underscores, are left out of the list, and so are those that this client
    may not see.
    """
    transport = options.transport()
    with closing(transport.admin()) as admin:
        if topic is None:
            counts = sorted(admin.describe_cluster().partition_counts.items())
            topics = [NamedTopic(name, count) for name, count in counts if not name.startswith("__")]
            options.show(topics, topics, NamedTopic.__struct_fields__, NamedTopic.__struct_fields__, structs.astuple)
            return
        with closing(Topic(transport, topic)) as source:
            found, brokers = source.info(), admin.replicas(topic)
    unknown = Replicas(-1, (), ())  # the broker that was asked has not heard of a new partition yet
    places = {number: brokers.get(number, unknown) for number in found.partitions}
    partitions = [
        PartitionPlace(number, *bounds, number_or_none(places[number].leader), *places[number][1:])
        for number, bounds in found.partitions.items()
    ]
    document = TopicDetails(found.name, found.topic_id, partitions, found.settings)
    columns = ("partition", "first", "end", "offsets", "leader", "replicas", "in sync")
    if not options.show(document, partitions, PartitionPlace.__struct_fields__, columns, _cells):
        return
    print(f"topic {topic}: {len(found.partitions)} partitions, {found.offsets} offsets, id {found.topic_id or '-'}")
    for name, value in sorted(found.settings.items()):
        print(f"  {name}={value}")


def _cells(one: PartitionPlace) -> list[object]:
    brokers = (",".join(map(str, each)) for each in (one.replicas, one.isr))
    return [one.partition, one.first, one.end, one.end - one.first, one.leader, *brokers]


@app.command("create", epilog=CREATE_EXAMPLE)
@command
@prints(TopicChange)
def create(
    options: CommonOptions,
    topic: TopicName,
    partitions: Annotated[int, typer.Option(min=1, help="How many partitions.")] = 1,
    replication_factor: Annotated[
        int | None, typer.Option(min=1, help="How many replicas of each.", show_default="the cluster's")
    ] = None,
    config: Config = None,
    dry_run: DryRun = False,
) -> None:
    """Create a topic. `--config NAME=` is an empty value, which Kafka takes or refuses."""
    with _admin(options, topic) as admin:
        changes.create(admin, topic, partitions, replication_factor, _settings(config), dry_run)
    _done(options, topic, dry_run, "created")


@app.command("update", epilog=UPDATE_EXAMPLE)
@command
@prints(TopicChange)
def update(
    options: CommonOptions,
    topic: TopicName,
    partitions: Annotated[int | None, typer.Option(min=1, help="How many there are afterwards; more than now.")] = None,
    config: Config = None,
    dry_run: DryRun = False,
) -> None:
    """Make a topic larger, or change its settings. `--config NAME=` brings the cluster's default back."""
    with _admin(options, topic) as admin:
        settings = {name: value or None for name, value in _settings(config).items()}
        before = info_of(admin, topic)
        changes.update(admin, topic, partitions, settings, dry_run)
    will = {name: f"{before.settings.get(name, '-')} -> {value or 'the default'}" for name, value in settings.items()}
    if partitions is not None:
        will["partitions"] = f"{len(before.partitions)} -> {partitions}"
    _done(options, topic, dry_run, "changed", will, _groups(options, topic) if dry_run else ())


@app.command("rm", epilog=RM_EXAMPLE)
@command
@prints(TopicChange)
def rm(options: CommonOptions, topic: TopicName, dry_run: DryRun = False, yes: Yes = False) -> None:
    """Delete a topic and everything in it, for good."""
    with _admin(options, topic) as admin:
        found = info_of(admin, topic)
        groups = () if yes and not dry_run else _groups(options, topic)
        will = {"partitions": str(len(found.partitions)), "offsets": str(found.offsets)}
        if not dry_run:
            for line in _consumed_by(groups):
                output.say(line)
            ask(f"Delete topic {topic!r} with {will['partitions']} partitions and {will['offsets']} offsets?", yes)
            changes.delete(admin, topic)
    _done(options, topic, dry_run, "deleted", will, groups)


@contextmanager
def _admin(options: CommonOptions, topic: str) -> Iterator[ClusterAdmin]:
    changes.check_name(topic, options.coordination_topic)
    admin = options.transport().admin()
    try:
        yield admin
    finally:
        admin.close()


def _settings(given: list[str] | None) -> dict[str, str]:
    """Returns the values by name, from texts like `retention.ms=60000`. Any other text ends in exit code 2."""
    found = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"--config {text!r}: expected NAME=VALUE")
        found[name] = value
    return found


def _groups(options: CommonOptions, topic: str) -> tuple[str, ...]:
    """Returns the names of the groups that have consumed the topic."""
    try:
        with options.observer() as observer:
            return group_names(observer, topic)
    except CoordinationTopicMissing:
        return ()  # no consumer has ever run here


def _consumed_by(groups: Sequence[str]) -> list[str]:
    return [f"groups that consume it: {', '.join(groups)}"] if groups else []


def _done(
    options: CommonOptions,
    topic: str,
    dry_run: bool,
    what: str,
    will: Mapping[str, str] | None = None,
    groups: Sequence[str] = (),
) -> None:
    """Prints what was done, or in a dry run what would be: `will` by name, and the `groups` that it would touch."""
    if not dry_run:
        options.print_result(TopicChange(topic, False, what), f"topic {topic!r} is {what}")
        return
    lines = [f"topic {topic!r} would be {what}: nothing was done"]
    lines += [f"  {name}: {value}" for name, value in (will or {}).items()]
    options.print_result(
        TopicChange(topic, True, "dry_run", dict(will or {}), [*groups]), "\n".join([*lines, *_consumed_by(groups)])
    )


@app.command("purge", epilog=PURGE_EXAMPLE)
@command
@prints(TopicPurge)
def purge(
    options: CommonOptions,
    topic: TopicName,
    before_offset: Annotated[int | None, typer.Option(min=0, help="Messages below it; with --partition.")] = None,
    before_time: Annotated[
        str | None, typer.Option(metavar="TIME", callback=iso_time, help="Messages that are older.")
    ] = None,
    keep: Annotated[int | None, typer.Option(min=0, help="All but the last so many of each partition.")] = None,
    partition: Annotated[int | None, typer.Option(min=0, help="This partition alone.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be deleted.")] = False,
    yes: Yes = False,
) -> None:
    """Delete the beginning of a topic's partitions, for good. Consumers that have not read it lose it."""
    source = Topic(options.transport(), topic, coordination_topic=options.coordination_topic)
    target = {"before_offset": before_offset, "before_time": before_time, "keep": keep, "partition": partition}
    try:
        planned = source.purge(**target, dry_run=True)  # type: ignore[arg-type]  # typer has checked the kinds
        going = sum(each.after - each.before for each in planned.values())
        left = {} if yes and not dry_run else _unfinished(options, topic, planned)
        losers = [f"group {name!r} has not finished {count} of them" for name, count in left.items()]
        if not dry_run:
            for line in losers:
                output.say(line)
            ask(f"Delete {going} offsets of {topic!r} for good?", yes)
        # Up to where was asked about, although more may have been written meanwhile.
        found = planned if dry_run else source.purge(before_offset={n: each.after for n, each in planned.items()})
    finally:
        source.close()
    rows = [PurgedPartition(number, *each) for number, each in found.items()]
    would, going = "would be" if dry_run else "are", sum(each.after - each.before for each in found.values())
    lines = [f"{topic}:{row.partition} begins at {row.after} (was {row.before})" for row in rows]
    lines += [f"{going} offsets {would} deleted", *(losers if dry_run else ())]
    options.print_result(TopicPurge(topic, dry_run, rows, left if dry_run else UNSET), "\n".join(lines))


def _unfinished(options: CommonOptions, topic: str, planned: Mapping[int, Purged]) -> dict[str, int]:
    """Returns how many offsets of what a purge deletes are at or after the positions of a group, by group."""
    going = {number: (each.before, each.after) for number, each in planned.items()}
    try:
        with options.observer() as observer:
            observer.fold()
            found = {group.name: unfinished(group, topic, going) for _, group in observer.groups()}
    except CoordinationTopicMissing:  # no consumer has ever run here
        found = {}
    return {name: count for name, count in found.items() if count}
