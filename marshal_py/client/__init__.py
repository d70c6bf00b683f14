"""The client API: Marshal, Consumer, Message, and the background thread that drives their members.

Rooms, each built on those before it:

- values: what users pass in and get back. connection: what all consumers of a Marshal share. event_loop: for asyncio.
- messages: a message and its answers. delivery: from fetched messages to deliveries. ranges: claims that others read.
- driver: drives one member, and the thread that drives all of them and follows the logs.
- membership, receiving, consuming: the calls of a consumer. process: handlers in parallel.

The files beside the rooms are the doors: consumer.py (messages) and planner.py (ranges), which marshal.py makes.

No protocol decision is made here: the driver executes what `Member.tick` returns, and delivery_queue.py asks
`Member.may_deliver` before every delivery.
"""
