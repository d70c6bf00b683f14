"""Kafka consumers that coordinate through Kafka alone: no ZooKeeper, no database, no group coordinator.

Packages; each may import from those above it (tests/test_architecture.py checks that):
  errors      every error, in one tree
  protocol    the pure core: records, fold, leases, delivery, and one member's decisions
  history     answers about the past, from verdicts
  transport   connections to a cluster: memory, Kafka, embedded broker
  client      the client API: connect, Marshal, Consumer, Message
  admin       operations on live groups
  simulator   the same core under faults, and the oracle that judges it
  spark, cli  pipelines, and the command line
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
