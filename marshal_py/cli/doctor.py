"""`marshal doctor`: is this cluster ready, and is the coordination topic sound? Looks, writes nothing.

Writing is not tried: every record of the topic belongs to a group, and a stranger's probe has no place in anybody's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple

from marshal_py.cli import frame
from marshal_py.cli.state import NOBODY
from marshal_py.client.observer import Observer
from marshal_py.errors import ClusterError, MarshalError
from marshal_py.transport.kafka import KafkaDoor
from marshal_py.transport.kafka_admin import KafkaAdmin
from marshal_py.transport.ports import CAPABILITIES
from marshal_py.transport.soundness import FOREVER, SAFE_BROKERS

EXAMPLE: Final = frame.example("marshal doctor --bootstrap-servers localhost:9092")
SETTINGS_OF_CLUSTERS: Final = ("replication factor", "min.insync.replicas", "unclean.leader.election.enable")
RECORDS_MANY: Final = 1_000_000  # folding them takes a joining consumer some seconds

Level = Literal["ok", "warn", "fail"]


class Check(NamedTuple):
    """One line. `advice` says what to do, "" if nothing is to be done."""

    name: str
    level: Level
    found: str
    advice: str = ""


@frame.reports_errors
def doctor(
    bootstrap_servers: frame.Servers = None,
    command_config: frame.CommandConfig = None,
    coordination_topic: frame.CoordinationTopic = frame.DEFAULT_COORDINATION_TOPIC,
    as_json: frame.Json = False,
) -> None:
    """Check the connection and the coordination topic. Exit code 1 if a check fails."""
    checks = []
    for check in _checks(bootstrap_servers, command_config, coordination_topic):
        checks.append(check)
        if not as_json:
            advice = f"  -> {check.advice}" if check.advice else ""
            print(f"{check.level:4}  {check.name}: {check.found}{advice}", flush=True)
    ok = all(check.level != "fail" for check in checks)
    if as_json:
        frame.print_json({"ok": ok, "checks": [check._asdict() for check in checks]})
    if not ok:
        failed = ", ".join(check.name for check in checks if check.level == "fail")
        raise frame.CommandFailed(f"failed: {failed}")


def _checks(servers: str | None, config: Path | None, topic: str) -> Iterator[Check]:
    settings = frame.settings_of(servers, config)
    address = str(settings["bootstrap.servers"])
    try:
        door = frame.open_door(servers, config)
        admin = door.admin()
        brokers = admin.brokers()
    except MarshalError as error:
        yield Check("cluster", "fail", str(error), "check the address, the network and the security settings")
        return
    yield Check("cluster", "ok", f"{address} answers")
    try:
        yield from _brokers(door, brokers)
        count = admin.partition_count(topic)
        if count is None:
            yield Check("coordination topic", "warn", f"{topic} does not exist yet",
                        "the first consumer creates it, or is told how")  # fmt: skip
        else:
            yield Check("coordination topic", "ok", f"{topic} has {count} partitions")
            yield from _settings(admin, topic, len(brokers))
            yield from _content(door, topic, count)
    except ClusterError as error:
        yield Check(type(error).__name__, "fail", str(error))
    finally:
        admin.close()


def _brokers(door: KafkaDoor, brokers: dict[int, str]) -> Iterator[Check]:
    names = ", ".join(f"{address} (id {number})" for number, address in sorted(brokers.items()))
    if door.embedded:
        lacking = ", ".join(sorted(CAPABILITIES - door.admin().capabilities))
        yield Check("broker", "warn", f"embedded broker, {names}; it lacks {lacking}",
                    "for demos and tests only: its records are gone when its process ends")  # fmt: skip
    elif len(brokers) < SAFE_BROKERS:
        yield Check("brokers", "warn", names, f"{SAFE_BROKERS} or more survive the loss of one; fewer do not")
    else:
        yield Check("brokers", "ok", names)


def _settings(admin: KafkaAdmin, topic: str, brokers: int) -> Iterator[Check]:
    if "describe_config" not in admin.capabilities:
        yield Check("settings", "warn", "the embedded broker cannot describe settings; the check is waived there")
        return
    wrong = {error.setting: error for error in admin.wrong_settings(topic)}
    values = admin.settings(topic)
    for name in (*FOREVER, *(SETTINGS_OF_CLUSTERS if brokers >= SAFE_BROKERS else ())):
        error = wrong.get(name)
        if error is not None:
            yield Check(name, "fail", f"{error.value}, it must be {error.wanted}", error.command)
        else:
            yield Check(name, "ok", values.get(name, "as it must be"))


def _content(door: KafkaDoor, topic: str, count: int) -> Iterator[Check]:
    with Observer(door, topic) as observer:
        if observer.root is None:
            yield Check("root", "warn", NOBODY)
            return
        root = observer.root
        yield Check("root", "ok", f"incarnation {root.incarnation.hex()}, {root.partitions} logs, "
                                  f"protocol {root.protocol}")  # fmt: skip
        if count > root.partitions:
            surplus = count - root.partitions
            yield Check("partitions", "ok", f"{surplus} beyond the root's {root.partitions} are not used")
        sizes = {log: bounds.end - bounds.first for log, bounds in observer.bounds(observer.logs_of(None)).items()}
        largest = max(sizes, key=lambda log: sizes[log])
        found = f"{sum(sizes.values())} records; the longest log is {largest} with {sizes[largest]}"
        if sizes[largest] > RECORDS_MANY:
            yield Check("size", "warn", found, "a joining consumer reads its group's log from the beginning")
        else:
            yield Check("size", "ok", found)
        observer.fold()
        sessions = sum(len(group.sessions) for _, group in observer.groups())
        yield Check("content", "ok", f"every log folds; {len(observer.groups())} groups, {sessions} live sessions")
        yield from _odd_records(observer)


def _odd_records(observer: Observer) -> Iterator[Check]:
    """What nobody of ours writes."""
    for reason in ("garbage", "misrouted", "malformed", "opaque"):
        number = sum(world.counters.get(reason, 0) for world in observer.worlds.values())
        if number:
            yield Check("content", "warn", f"{number} records are {reason} and were ignored",
                        "something else writes to this topic, or a newer library does")  # fmt: skip


