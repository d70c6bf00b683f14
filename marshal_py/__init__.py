"""Kafka consumers that coordinate through Kafka alone: no ZooKeeper, no database, no group coordinator.

Rooms, each may use those before it (tests/test_architecture.py proves it):
  errors      every error, one tree
  protocol    the heart: records, fold, leases, delivery, one consumer's mind; pure
  history     readers of verdicts
  transport   doors into a cluster: memory, Kafka, embedded broker
  client      fronts: connect, Marshal, Consumer, Message
  admin       operations on live groups
  simulator   the same heart under faults, and the oracle that judges it
  spark, cli  pipelines and the command line
"""

from marshal_py.admin.group import Group, group
from marshal_py.client.consumer import Consumer
from marshal_py.client.info import ClaimInfo, ConsumerInfo
from marshal_py.client.marshal import Marshal, connect
from marshal_py.client.message import Batch, Message
from marshal_py.client.options import ConsumerOptions
from marshal_py.client.signals import stop_on_signals
from marshal_py.errors import CallerError, ClusterError, MarshalError, PeerError
from marshal_py.protocol.advisory import Advisory
from marshal_py.protocol.identity import Token, TopicPartition

__version__ = "0.1.0"

__all__ = [
    "Advisory",
    "Batch",
    "CallerError",
    "ClaimInfo",
    "ClusterError",
    "Consumer",
    "ConsumerInfo",
    "ConsumerOptions",
    "Group",
    "Marshal",
    "MarshalError",
    "Message",
    "PeerError",
    "Token",
    "TopicPartition",
    "__version__",
    "connect",
    "group",
    "stop_on_signals",
]
