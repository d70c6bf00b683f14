"""Each message's effect in a SQL database exactly once. See `Guard`, `AsyncGuard` and docs/acks.md.

guard = marshal_py.sql.Guard()
with connection:                            # one transaction: the effect and the guard's row
    for message in guard.new(connection, batch):
        apply(connection, message)
batch.ack()
"""

from marshal_py.client.sql_guard import AsyncGuard, Guard

__all__ = ["AsyncGuard", "Guard"]
