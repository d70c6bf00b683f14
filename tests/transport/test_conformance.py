"""The promises of the ports over memory and the embedded broker; tests/kafka has the same over Apache Kafka.

`RIGS_OF` decides which class runs over which rig. The table test at the end holds that nothing is left out but what the
embedded broker lacks by name.
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
        self.refuses_with_the_command_that_mends_it(rig.transport(), "absent")

    def test_embedded(self) -> None:
        rig = EmbeddedRig()
        try:
            self.refuses_with_the_command_that_mends_it(rig.transport(), "absent")
        finally:
            rig.close()


@pytest.mark.parametrize(
    ("setting", "value"), [("min.insync.replicas", "1"), ("unclean.leader.election.enable", "true")]
)
def test_three_brokers_must_be_safe_ones(setting: str, value: str) -> None:
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
