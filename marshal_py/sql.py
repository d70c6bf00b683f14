"""Each message's effect in a SQL database once: `Guard`, and `Inbox` for handlers in parallel. See docs/acks.md.

guard = marshal_py.sql.Guard()
with connection:                            # one transaction: the effect and the guard's row
    for message in guard.new(connection, batch):
        apply(connection, message)
batch.ack()
"""

from marshal_py.client.sql_guard import AsyncGuard, AsyncInbox, Guard, Inbox

__all__ = ["AsyncGuard", "AsyncInbox", "Guard", "Inbox"]
