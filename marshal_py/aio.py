"""marshal_py for asyncio: `connect`, and the classes that its verbs return.

The same verbs as in `marshal_py`, in the same order of parameters; those that wait are awaited. docs/consumer.md has a
guide, and says what is not awaited.
"""

from marshal_py.admin.async_marshal import AsyncGroup, AsyncMarshal, AsyncTopic, connect
from marshal_py.client.async_consumer import AsyncConsumer
from marshal_py.client.consuming import AsyncConsumeContext
from marshal_py.client.process.process import AsyncProcess

__all__ = [
    "AsyncConsumeContext", "AsyncConsumer", "AsyncGroup", "AsyncMarshal", "AsyncProcess", "AsyncTopic", "connect",
]  # fmt: skip
