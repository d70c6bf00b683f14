"""What the coordination topic must be so that no history is lost (PROTOCOL.md L1). Judges settings, asks nobody."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from marshal_py.errors import WrongTopicSetting

SAFE_BROKERS: Final = 3  # L1: from three brokers on, the coordination topic is replicated
SAFE_ISR: Final = 2
FOREVER: Final = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}


def check_sound(topic: str, found: Mapping[str, str], brokers: int, replicas: int, servers: str) -> None:
    """Raises WrongTopicSetting for the first setting that could lose history, with the command that mends it."""
    for error in wrong_settings(topic, found, brokers, replicas, servers):
        raise error


def wrong_settings(topic: str, found: Mapping[str, str], brokers: int, replicas: int,
                   servers: str) -> Iterator[WrongTopicSetting]:  # fmt: skip
    """Every setting that could lose history."""
    alter = f"kafka-configs.sh --bootstrap-server {servers} --alter --topic {topic}"
    for key, wanted in FOREVER.items():
        if key in found and found[key] != wanted:
            yield WrongTopicSetting(topic, key, found[key], wanted, f"{alter} --add-config {key}={wanted}")
    if brokers < SAFE_BROKERS:
        return
    if replicas < SAFE_BROKERS:
        yield WrongTopicSetting(topic, "replication factor", str(replicas), f"{SAFE_BROKERS} on this cluster",
                                f"kafka-reassign-partitions.sh --bootstrap-server {servers}, or delete the topic and "
                                f"let it be created again")  # fmt: skip
    if int(found.get("min.insync.replicas", SAFE_ISR)) < SAFE_ISR:
        yield WrongTopicSetting(topic, "min.insync.replicas", found["min.insync.replicas"], str(SAFE_ISR),
                                f"{alter} --add-config min.insync.replicas={SAFE_ISR}")  # fmt: skip
    if found.get("unclean.leader.election.enable", "false") != "false":
        yield WrongTopicSetting(topic, "unclean.leader.election.enable", "true", "false",
                                f"{alter} --add-config unclean.leader.election.enable=false")  # fmt: skip
