"""For tests of code that uses marshal_py: clusters in this process whose time a test moves, and messages made by hand.

`LocalCluster` is what the pytest fixture `marshal_broker` gives (plugin.py), and can be used without pytest. Nothing
inside the package imports this one.
"""

from marshal_py.testing.cluster import EmbeddedCluster, LocalCluster, MemoryCluster, local_cluster
from marshal_py.testing.messages import Answer, RecordedBatch, RecordedMessage, make_batch, make_message
from marshal_py.testing.replay import Delivery, Replay, replay

__all__ = [
    "Answer", "Delivery", "EmbeddedCluster", "LocalCluster", "MemoryCluster", "RecordedBatch", "RecordedMessage",
    "Replay", "local_cluster", "make_batch", "make_message", "replay",
]  # fmt: skip
