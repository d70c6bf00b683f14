"""What calls return that tells about a state, and the pages of `Topic.get_page`: names for annotations.

No program needs them to call something. What tells about a state is a frozen Struct: its fields have names alone, so a
release can add some.
"""

from marshal_py.admin.group import Moved, Paused
from marshal_py.admin.marshal import MarshalInfo
from marshal_py.admin.views.group_info import (
    GroupInfo,
    MemberInfo,
    MemberState,
    PauseInfo,
    PinInfo,
    PositionInfo,
    PriorityGroupState,
    SettingsOrigin,
)
from marshal_py.client.process.worker_processes import PlainMessage
from marshal_py.client.values.info import ClaimInfo, ConsumerInfo, LaneInfo, ProcessStats
from marshal_py.topics.changes import TopicInfo
from marshal_py.topics.request import EndOfBatch, StoredBatch
from marshal_py.transport.ports import BrokerInfo

__all__ = [
    "BrokerInfo", "ClaimInfo", "ConsumerInfo", "EndOfBatch", "GroupInfo", "LaneInfo", "MarshalInfo", "MemberInfo",
    "MemberState", "Moved", "PauseInfo", "Paused", "PinInfo", "PlainMessage", "PositionInfo", "PriorityGroupState",
    "ProcessStats", "SettingsOrigin", "StoredBatch", "TopicInfo",
]  # fmt: skip
