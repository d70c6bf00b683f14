"""The client API: Marshal, Consumer, Message, and the background thread that drives their members.

How the files build on each other:

- context.py holds what all parts of a Marshal share: lock, clock, connections, workers.
- consumer_driver.py drives one member; loop.py is the thread that drives all of them and follows the logs.
- fetched_claims.py, delivery_queue.py and buffers.py deliver messages; planned_claims.py and ranges.py plan ranges.
- membership.py is what consumer.py (messages) and planner.py (ranges) share; marshal.py makes both.

No protocol decision is made here: the driver executes what `Member.tick` returns, and delivery_queue.py asks
`Member.may_deliver` before every delivery.
"""
