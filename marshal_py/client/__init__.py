"""The fronts: Marshal, Consumer, Message, and the one background thread that drives their members.

No protocol decision is made in this room: loop.py executes what `Member.tick` returns, delivery_queue.py asks
`Member.may_deliver` before every delivery.
"""
