"""Kafka consumers that coordinate through Kafka alone: no ZooKeeper, no database, no group coordinator.

Public names: those below, which programs call or catch; marshal_py.errors has every error, marshal_py.info what calls
return; marshal_py.aio, embedded, metrics, otel, spark, sql and testing are for those who need them.

Beside it, marshal_sim proves it: the same core under faults, and the oracle that judges it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from marshal_py.errors import (
    AccessDenied,
    AckNotConfirmed,
    AdminBusy,
    CallerError,
    ClaimLost,
    ClusterError,
    ClusterUnreachable,
    ConsumerClosed,
    CoordinationError,
    GroupDeleted,
    GroupMissing,
    InvalidOption,
    MarshalError,
    MessageNotFound,
    ModeMismatch,
    PartitionParked,
    PeerError,
    TopicMissing,
    TopicRecreated,
    WriteFenced,
)

if TYPE_CHECKING:
    from marshal_py.admin.group import Group
    from marshal_py.admin.marshal import Marshal, connect
    from marshal_py.client.consumer import Consumer
    from marshal_py.client.consuming import ConsumeContext
    from marshal_py.client.messages.message import Batch, Message, Part
    from marshal_py.client.process.process import Process
    from marshal_py.client.process.processing import Batches, Reject, Retry
    from marshal_py.client.signals import stop_on_signals
    from marshal_py.client.values.options import ConsumerOptions, GroupConfig
    from marshal_py.protocol.member.advisory import Advisory, AdvisoryKind
    from marshal_py.protocol.wire.identity import Token, TopicPartition
    from marshal_py.topics.keys import SubjectKey, subject_key
    from marshal_py.topics.request import GetRequest, StoredMessage
    from marshal_py.topics.topic import Topic

__version__ = "1.0.0rc1"

# Public name -> the file that defines it. It is imported when the name is first used: the command line and the workers
# of Spark import only what they use.
_FILES: Final = {
    "Advisory": "marshal_py.protocol.member.advisory",
    "AdvisoryKind": "marshal_py.protocol.member.advisory",
    "Batch": "marshal_py.client.messages.message",
    "Batches": "marshal_py.client.process.processing",
    "ConsumeContext": "marshal_py.client.consuming",
    "Consumer": "marshal_py.client.consumer",
    "ConsumerOptions": "marshal_py.client.values.options",
    "GetRequest": "marshal_py.topics.request",
    "Group": "marshal_py.admin.group",
    "GroupConfig": "marshal_py.client.values.options",
    "Marshal": "marshal_py.admin.marshal",
    "Message": "marshal_py.client.messages.message",
    "Part": "marshal_py.client.messages.message",
    "Process": "marshal_py.client.process.process",
    "Reject": "marshal_py.client.process.processing",
    "Retry": "marshal_py.client.process.processing",
    "StoredMessage": "marshal_py.topics.request",
    "SubjectKey": "marshal_py.topics.keys",
    "Token": "marshal_py.protocol.wire.identity",
    "Topic": "marshal_py.topics.topic",
    "TopicPartition": "marshal_py.protocol.wire.identity",
    "connect": "marshal_py.admin.marshal",
    "stop_on_signals": "marshal_py.client.signals",
    "subject_key": "marshal_py.topics.keys",
}

__all__ = [
    "AccessDenied", "AckNotConfirmed", "AdminBusy", "Advisory", "AdvisoryKind", "Batch", "Batches", "CallerError",
    "ClaimLost", "ClusterError", "ClusterUnreachable", "ConsumeContext", "Consumer", "ConsumerClosed",
    "ConsumerOptions", "CoordinationError", "GetRequest", "Group", "GroupConfig", "GroupDeleted", "GroupMissing",
    "InvalidOption", "Marshal", "MarshalError", "Message", "MessageNotFound", "ModeMismatch", "Part", "PartitionParked",
    "PeerError", "Process", "Reject", "Retry", "StoredMessage", "SubjectKey", "Token", "Topic", "TopicMissing",
    "TopicPartition", "TopicRecreated", "WriteFenced", "__version__", "connect", "stop_on_signals", "subject_key",
]  # fmt: skip

if not TYPE_CHECKING:  # otherwise a type checker would believe that every name is here

    def __getattr__(name: str) -> Any:
        if name not in _FILES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found = getattr(import_module(_FILES[name]), name)
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
