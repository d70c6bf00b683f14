"""Who may administer, on Apache Kafka: keys, a pause without and with a signature, rotation, copies (keys.md, F11)."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from confluent_kafka import Producer

import marshal_py
from marshal_py.client.values import options
from marshal_py.errors import KeyNeeded
from marshal_py.log.observer import Judged, Observer
from marshal_py.protocol.wire import codec
from marshal_py.transport.kafka import KafkaTransport
from tests.support.kafka import Cluster, TopicFactory

DEADLINE_S = 60.0


def judged(cluster: Cluster, group: str) -> list[Judged]:
    with Observer(KafkaTransport(cluster.bootstrap, DEADLINE_S), "__marshal") as observer:
        return [one for one in observer.read(group) if one.verdict.group == group]


def signs(one: Judged) -> bool:
    value = one.record.value
    return value is not None and value[13 + value[11]] == codec.SIGNED


def test_only_holders_of_a_key_administer(kafka: Cluster, topic: TopicFactory, tmp_path: Path) -> None:
    """F11.1 to F11.4, beside a consumer that notices nothing."""
    group, name = f"g-{uuid.uuid4().hex[:8]}", topic(2)
    files = [tmp_path / "old.key", tmp_path / "new.key"]
    old, new = map(options.generate_key, files)
    servers = {"bootstrap.servers": kafka.bootstrap, "log_level": 0}
    with (
        marshal_py.connect(servers) as anybody,
        marshal_py.connect(servers, sign_with=files[0]) as operator,
        marshal_py.connect(servers, sign_with=files[1]) as successor,
        anybody.consumer(group, [name], heartbeat_interval_s=1.0) as consumer,
    ):
        anybody.update_group(group, marshal_py.GroupConfig(policy="greedy"))
        anybody.group(group).set_config(admin_keys=[old])
        with pytest.raises(KeyNeeded, match=f"{group}.*{old[:16]}.*none was given.*--sign-with"):
            anybody.group(group).pause(60)
        token = operator.group(group).pause(60).token
        operator.group(group).resume(token=token)
        operator.group(group).set_config(admin_keys=[new])
        with pytest.raises(KeyNeeded, match=f"{old[:16]} is none of them"):
            operator.group(group).pause(60)
        last = successor.group(group).pause(60)
        successor.group(group).resume(token=last.token)
        written = [one for one in judged(kafka, group) if one.record.offset >= token and signs(one)]
        assert len(written) >= 5
        producer = Producer({"bootstrap.servers": kafka.bootstrap, "acks": "all"})
        for one in written:  # whoever may write has copies of all that was ever signed
            producer.produce("__marshal", one.record.value, partition=one.record.log)
        assert producer.flush(DEADLINE_S) == 0
        copies = [one for one in judged(kafka, group) if one.record.offset > written[-1].record.offset and signs(one)]
        assert len(copies) == len(written)
        assert {one.verdict.reason for one in copies} == {"key", "observed"}
        assert successor.group(group).info().admin_keys == (new,)
        assert successor.group(group).info().pause is None
        assert consumer.info().closed is False
