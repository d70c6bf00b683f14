"""The conformance suite over memory and the embedded broker; tests/kafka runs it over Apache Kafka.

A class runs over each rig that has its capability. The tests at the end assert that only the embedded broker lacks any,
and which ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from marshal_py.transport.embedded import CAPABILITIES as EMBEDDED_CAPABILITIES
from marshal_py.transport.memory import MemoryAdmin
from marshal_py.transport.ports import ALL_CAPABILITIES
from tests.support import conformance
from tests.support.conformance import BY_CAPABILITY, EmbeddedRig, KafkaRig, MemoryRig, Rig

RIGS: dict[str, Callable[[], Rig]] = {"memory": MemoryRig, "embedded": EmbeddedRig}
LACKS = {"memory": MemoryRig.lacks, "embedded": EmbeddedRig.lacks}


def rigs_with(capability: str) -> list[str]:
    return [name for name, lacks in LACKS.items() if capability not in lacks]


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = RIGS[request.param]()
    yield rig
    rig.close()


def over(capability: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("rig", rigs_with(capability), indirect=True)


@over("")
class TestLog(conformance.LogPromises):
    pass


@over("")
class TestSource(conformance.SourcePromises):
    pass


@over("")
class TestAdmin(conformance.AdminPromises):
    pass


@pytest.mark.new_client
@over("truncate")
class TestTruncate(conformance.TruncatePromises):
    pass


@over("grow")
class TestGrow(conformance.GrowPromises):
    pass


@over("describe_config")
class TestDescribe(conformance.DescribePromises):
    pass


@over("create_topic")
class TestCreate(conformance.CreatePromises):
    pass


@over("long_log")
class TestLongLog(conformance.LongLogPromises):
    pass


@over("time_lookup")
class TestLookup(conformance.LookupPromises):
    pass


class TestCannotCreate(conformance.CannotCreatePromises):
    def test_memory_without_the_right(self) -> None:
        rig = MemoryRig()
        rig.broker.may_create = False
        self.refuses_with_the_command_that_fixes_it(rig.transport(), "absent")

    def test_embedded(self) -> None:
        rig = EmbeddedRig()
        try:
            self.refuses_with_the_command_that_fixes_it(rig.transport(), "absent")
        finally:
            rig.close()


@pytest.mark.parametrize(
    ("setting", "value"), [("min.insync.replicas", "1"), ("unclean.leader.election.enable", "true")]
)
def test_with_three_brokers_the_settings_must_be_safe(setting: str, value: str) -> None:
    """L1, over memory; tests/kafka asks three real brokers."""
    rig = MemoryRig()
    rig.broker.brokers = 3
    topic = rig.topic(1)
    rig.configure(topic, {setting: value})
    with pytest.raises(conformance.WrongTopicSetting) as raised:
        rig.transport().admin().prepare_coordination(topic, 1)
    assert (raised.value.setting, raised.value.value) == (setting, value)


def test_only_the_embedded_broker_lacks_something_and_only_by_name() -> None:
    assert MemoryRig.lacks == frozenset()
    assert MemoryAdmin.capabilities == ALL_CAPABILITIES
    assert KafkaRig.lacks == frozenset(), "Apache Kafka must pass everything"
    assert EmbeddedRig.lacks == {"grow", "time_lookup", "describe_config", "create_topic", "long_log"}
    assert ALL_CAPABILITIES - EmbeddedRig.lacks - {"truncate"} == EMBEDDED_CAPABILITIES


def test_every_capability_has_its_class() -> None:
    assert {suite.CAPABILITY for suite in BY_CAPABILITY} == ALL_CAPABILITIES
